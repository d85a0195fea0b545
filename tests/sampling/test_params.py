"""Every sampling setting out of range is refused with its name, its value and the range."""

import dataclasses

import pytest

from jaxinfer.cli import field_help
from jaxinfer.errors import RequestError
from jaxinfer.sampling.params import MAX_LOGIT_BIAS, MAX_N, MAX_TEMPERATURE, SamplingParams, StructuredOutputsParams


@pytest.mark.parametrize(("name", "value", "limit"), [
    ("n", 0, "[1, 1024]"), ("n", 1.5, "[1, 1024]"), ("n", 1025, "[1, 1024]"), ("temperature", -0.1, "[0, 10000]"),
    ("temperature", float("nan"), "[0, 10000]"), ("temperature", float("inf"), "[0, 10000]"), ("temperature", 10**400, "[0, 10000]"),
    ("top_k", -2, ">= 1"), ("top_k", 1.5, ">= 1"), ("top_p", 0, "(0, 1]"),
    ("top_p", 1.01, "(0, 1]"), ("min_p", -0.1, "[0, 1]"), ("min_p", 2, "[0, 1]"), ("seed", -1, "[0, "), ("seed", 2**32, "[0, "),
    ("max_tokens", 0, ">= 1"), ("max_tokens", True, ">= 1"), ("stop", "", "non-empty"), ("stop", ["a", ""], "non-empty"),
    ("top_k", 2**31, ">= 1"), ("min_tokens", -1, ">= 0"), ("min_tokens", 17, "at most max_tokens = 16"), ("min_tokens", 1.0, "integer"),
    ("repetition_penalty", 0, "[0.001, 1000]"), ("repetition_penalty", 1e-38, "[0.001, 1000]"),
    ("repetition_penalty", 1e38, "[0.001, 1000]"), ("presence_penalty", 2.1, "[-2, 2]"),
    ("frequency_penalty", -2.1, "[-2, 2]"), ("frequency_penalty", float("nan"), "[-2, 2]"), ("logprobs", -1, ">= 0"),
    ("logprobs", True, "integer"), ("prompt_logprobs", 1.5, "integer"), ("allowed_token_ids", [], "at least one"),
    ("allowed_token_ids", [-1], ">= 0"), ("allowed_token_ids", "12", ">= 0"), ("bad_words", [" "], "more than spaces"),
    ("bad_words", [3], "texts"), ("logit_bias", {-1: 2}, ">= 0"), ("logit_bias", {1: float("nan")}, "[-10000, 10000]"),
    ("logit_bias", {1: float("inf")}, "[-10000, 10000]"), ("logit_bias", {1: 1e39}, "[-10000, 10000]"),
    ("logit_bias", {1: 10**400}, "[-10000, 10000]"), ("logit_bias", {"x": 1}, "ID:NUMBER"), ("logit_bias", {1: "x"}, "ID:NUMBER"),
    ("logit_bias", {1: True}, "ID:NUMBER"), ("logit_bias", {1.5: 1}, "ID:NUMBER"), ("logit_bias", ["1"], "ID:NUMBER"),
    ("logit_bias", ["1:2", "1:3"], "each id once"), ("logit_bias", "1:2", "ID:NUMBER"), ("logit_bias", 5, "ID:NUMBER"),
    ("logit_bias", {t: 1 for t in range(301)}, "at most 300"),
    ("structured_outputs", {"regx": "a"}, "a mapping with json, regex, choice"), ("structured_outputs", "a", "a StructuredOutputsParams"),
    ("structured_outputs", {}, "has nothing: must have exactly one of json, regex, choice, grammar, json_object"),
    ("structured_outputs", {"regex": "a", "json": {}}, "has json and regex"), ("structured_outputs", {"regex": ""}, ".regex = ''"),
    ("structured_outputs", {"choice": []}, ".choice = []: must be a list of non-empty texts"),
    ("structured_outputs", {"choice": "ab"}, ".choice"), ("structured_outputs", {"json": 5}, ".json = 5: must be a JSON schema"),
    ("structured_outputs", {"json": {"a": {1, 2}}}, ".json is no JSON"),
    ("structured_outputs", {"grammar": 3}, "non-empty text"), ("structured_outputs", {"json_object": "yes"}, "True or False"),
    ("structured_outputs", {"choice": ["a" * 70000] * 2}, ".choice has 140000 characters: must have at most 131072"),
    ("structured_outputs", {"json": "{}", "whitespace_pattern": "a" * 131071}, ".json has 131073 characters: must have at most 131072"),
    ("logits_processors", {"a": 1}, "a mapping from a processor's name"), ("logits_processors", {"a": {"b": float("inf")}}, "finite number"),
    ("logits_processors", {"a": {"b": 10**400}}, "in [-3.4e+38, 3.4e+38]"), ("logits_processors", {"a": {"b": -1e39}}, "finite number"),
    ("logits_processors", ["a"], "a mapping from a processor's name"), ("logits_processors", {"a": {"b": True}}, "finite number"),
    ("stop_token_ids", [-1], ">= 0"), ("stop_token_ids", 5, "a list"), ("stop", 5, "a list"), ("stop_token_ids", "5", ">= 0"),
])
def test_refuses(name, value, limit):
    with pytest.raises(RequestError) as error:
        SamplingParams(**{name: value})
    assert f"SamplingParams.{name}" in str(error.value) and limit in str(error.value)


def test_normal_forms():
    params = SamplingParams(stop="x", top_k=-1, stop_token_ids=[3])
    assert params.stop == ("x",) and params.top_k == 0 and params.stop_token_ids == (3,)
    assert SamplingParams().stop == ()
    for biases in ({3: 1, 5: -2.5}, {"3": 1, "5": -2.5}, ["3:1", "5:-2.5"]):
        assert SamplingParams(logit_bias=biases).logit_bias == {3: 1.0, 5: -2.5}
    assert SamplingParams(bad_words="x").bad_words == ("x",) and SamplingParams(allowed_token_ids=[2]).allowed_token_ids == (2,)


@pytest.mark.parametrize("settings", [
    {"repetition_penalty": 1.1}, {"presence_penalty": 1}, {"frequency_penalty": -1}, {"logit_bias": {1: 1}}, {"min_tokens": 1},
    {"bad_words": ["a"]}, {"allowed_token_ids": [1]}, {"logprobs": 0},
])
def test_plain_means_that_nothing_but_the_distribution_matters(settings):
    assert SamplingParams(temperature=0.5, top_k=3, seed=1, stop="x", prompt_logprobs=1).is_plain
    params = dataclasses.replace(SamplingParams(), **settings)
    assert not params.is_plain and params.penalises == ("penalty" in next(iter(settings)))
    assert dataclasses.replace(params) == params


def test_the_limits_themselves_are_accepted_and_stated():
    SamplingParams(n=MAX_N, temperature=MAX_TEMPERATURE, repetition_penalty=1e-3, logit_bias={0: -MAX_LOGIT_BIAS, 1: MAX_LOGIT_BIAS})
    assert SamplingParams(repetition_penalty=1e3, temperature=1e-50, top_p=1e-50, min_p=1e-50).top_p == 1e-50
    helps = field_help(SamplingParams)
    for name, limit in (("n", "[1, 1024]"), ("temperature", "10000"), ("repetition_penalty", "[0.001, 1000]"),
                        ("logit_bias", "[-10000, 10000]")):
        assert limit in helps[name]
    for name, value in (("temperature", 10**5000), ("logit_bias", {1: 10**5000}), ("n", 10**5000)):  # repr() of these is an error
        with pytest.raises(RequestError, match=f"SamplingParams.{name} = a number of thousands of digits"):
            SamplingParams(**{name: value})


def test_structured_outputs_and_processors_in_their_forms():
    guide = StructuredOutputsParams(json={"type": "string", "enum": ["é"]})
    assert guide.json == '{"type": "string", "enum": ["é"]}'
    params = SamplingParams(structured_outputs={"json": guide.json}, temperature=0)
    assert params.guide == guide and params.has_rules and not params.is_greedy and not params.is_plain and not params.is_counted
    again = dataclasses.replace(params, temperature=1)
    assert again.guide == guide and hash(guide) == hash(again.guide)
    assert StructuredOutputsParams(choice=["a"], json_object=False).choice == ("a",)
    params = SamplingParams(logits_processors={"a": {"b": 1}}, temperature=0)
    assert params.has_rules and params.is_counted and not params.is_greedy and not params.penalises
    assert SamplingParams(logits_processors={}).logits_processors is None and SamplingParams(logits_processors={}).is_plain
