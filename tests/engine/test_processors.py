"""Logit processors through the engine, and CASES 23: the first request of each kind of sampling compiles nothing."""

import dataclasses

import jax
import numpy as np
import pytest

import jaxinfer
from jaxinfer import SamplingParams
from jaxinfer.engine.compiled import jit_logits
from jaxinfer.errors import RequestError
from jaxinfer.request import FinishReason
from jaxinfer.sampling import processors
from tests.engine.conftest import LENGTH

PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8]}, {"prompt_token_ids": list(range(40, 75))}, {"prompt_token_ids": [9]}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}}, "required": ["a"]}

MATRIX = {
    "greedy": {"temperature": 0}, "temperature": {"temperature": 0.7}, "top_k": {"top_k": 5}, "top_p": {"top_p": 0.5}, "min_p": {"min_p": 0.2},
    "seed": {"seed": 3}, "n": {"n": 2}, "min_tokens": {"min_tokens": 3}, "repetition_penalty": {"repetition_penalty": 1.2},
    "presence_penalty": {"presence_penalty": 1}, "frequency_penalty": {"frequency_penalty": 1}, "logit_bias": {"logit_bias": {9: 3.0}},
    "allowed_token_ids": {"allowed_token_ids": [5, 6, 7]}, "bad_words": {"bad_words": ["the fox", "x"]}, "stop": {"stop": "ab"},
    "stop_token_ids": {"stop_token_ids": [44]}, "ignore_eos": {"ignore_eos": True}, "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2}, "include_stop_str_in_output": {"stop": "a", "include_stop_str_in_output": True},
    "skip_special_tokens": {"skip_special_tokens": False}, "max_tokens": {"max_tokens": 40},
    "json": {"structured_outputs": {"json": SCHEMA}}, "json_object": {"structured_outputs": {"json_object": True}},
    "regex": {"structured_outputs": {"regex": "[ab]{4,9}"}}, "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "grammar": {"structured_outputs": {"grammar": 'start: "a" | "bc"'}}, "logits_processors": {"logits_processors": {"ban_unlikely": {}}},
    "two processors": {"logits_processors": {"ban_unlikely": {"most": 2}, "entropy_temperature": {"limit": 2}}},
    "all": {"structured_outputs": {"regex": "[a-d]{4,9}"}, "logits_processors": {"ban_unlikely": {"most": 5}}, "logprobs": 2, "top_p": 0.9,
            "frequency_penalty": 0.1, "bad_words": ["abc"], "logit_bias": {70: 1.0}, "min_tokens": 2, "prompt_logprobs": 1, "n": 2},
}


def test_the_matrix_holds_every_parameter():
    asked = {name for settings in MATRIX.values() for name in settings}
    assert asked == {f for f in SamplingParams.__dataclass_fields__}


def test_a_first_request_of_any_kind_compiles_nothing(guided):
    """Nothing that this process compiled earlier may hide a compile: jax's caches are emptied, and every kind is asked for first."""
    jax.clear_caches()
    compiles = []
    for name, settings in MATRIX.items():
        before = guided.metrics()["num_compiles_after_warmup"]
        outputs = guided.generate(PROMPTS, SamplingParams(**{"max_tokens": 12, **settings}))
        compiles += [name] * (guided.metrics()["num_compiles_after_warmup"] - before)
        assert all(o.error is None for o in outputs), name
    assert not compiles
    jax.numpy.arange(7) * 3  # what a stray operation would do
    assert guided.metrics()["num_compiles_after_warmup"] > before
    before = guided.metrics()["num_compiles_after_warmup"]
    mixed = [SamplingParams(**{"max_tokens": 12, **settings}) for settings in MATRIX.values()]
    outputs = guided.generate([PROMPTS[i % 3] for i in range(len(mixed))], mixed)
    assert guided.metrics()["num_compiles_after_warmup"] == before and all(o.error is None for o in outputs)
    guided.engine.scheduler.check_invariants()


@pytest.fixture(scope="module")
def forced(byte_model):
    run = jit_logits(byte_model)

    def logits(ids):
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, :len(ids)] = ids
        return np.asarray(run(padded, np.array([len(ids)], np.int32)))[0, :len(ids)].astype(np.float64)

    return logits


def test_a_ban_below_a_threshold_and_above_a_count(guided, forced):
    """Every token is likely enough where the model's own logits say so, and none comes more often than it may; neighbours are free."""
    free = SamplingParams(temperature=2.0, max_tokens=30, seed=1, ignore_eos=True)
    asked = dataclasses.replace(free, logits_processors={"ban_unlikely": {"share": 0.7, "most": 2}})
    outputs = guided.generate([*PROMPTS, *PROMPTS], [asked] * 3 + [free] * 3)

    def shares(out):
        ids, n = [*out.prompt_token_ids, *out.outputs[0].token_ids], len(out.prompt_token_ids)
        x = forced(ids)[n - 1:-1, :guided.tokenizer.num_tokens]
        return np.exp(x[np.arange(len(x)), ids[n:]] - x.max(axis=1))

    for out in outputs[:3]:
        assert (shares(out) > 0.7 - 1e-3).all() and np.bincount(out.outputs[0].token_ids).max() <= 2
    assert all((shares(out) < 0.5).any() for out in outputs[3:])
    assert [o.outputs for o in guided.generate(PROMPTS, free)] == [o.outputs for o in outputs[3:]]


def test_temperature_by_entropy(guided):
    """Above the limit rows are as good as greedy; below it they are as without the processor."""
    def tokens(**settings):
        return [o.outputs[0].token_ids for o in guided.generate(PROMPTS, SamplingParams(max_tokens=20, seed=4, ignore_eos=True, **settings))]

    assert tokens(logits_processors={"entropy_temperature": {"limit": 0.0, "cold": 1e-6}}) == tokens(temperature=0)
    assert tokens(logits_processors={"entropy_temperature": {"limit": 100.0}}) == tokens() != tokens(temperature=0)


def test_counts_survive_preemption(make_guided):
    params = SamplingParams(max_tokens=60, ignore_eos=True, seed=2, temperature=1.0, logits_processors={"ban_unlikely": {"most": 1}})
    prompts = [{"prompt_token_ids": [20 + i]} for i in range(5)]
    want = make_guided(deterministic=True).generate(prompts, params)
    got = make_guided(deterministic=True, num_pages=14).generate(prompts, params)
    assert [o.outputs for o in got] == [o.outputs for o in want] and sum(o.metrics.num_preemptions for o in got) > 0
    assert all(len(set(o.outputs[0].token_ids)) == 60 for o in got)


def test_a_processor_registered_later_belongs_to_later_engines(guided, monkeypatch):
    monkeypatch.setattr(processors, "_REGISTERED", dict(processors._REGISTERED))
    jaxinfer.register_logits_processor("late", lambda logits, params, context: logits)
    with pytest.raises(RequestError, match=r"'late' is not one of this engine's \(ban_unlikely, broken, entropy_temperature\)"):
        guided.generate(PROMPTS[0], SamplingParams(logits_processors={"late": {}}))
    processors.registered_processors().check({"late": {}})


def test_a_processor_that_gives_nan_ends_its_own_request(guided):
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    broken, fine = guided.generate(PROMPTS[:2], [dataclasses.replace(params, logits_processors={"broken": {}}), params])
    assert broken.outputs[0].finish_reason is FinishReason.ERROR and "a logits processor gave NaN or infinity" in broken.error
    assert fine.error is None and len(fine.outputs[0].token_ids) == 3
