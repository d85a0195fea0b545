"""Structured output: what ends by its grammar follows it, whatever else is asked for and whoever runs beside it."""

import json
import re
import sys

import numpy as np
import pytest

import jaxinfer
from jaxinfer import SamplingParams, StructuredOutputsParams
from jaxinfer.engine import structured
from jaxinfer.engine.structured import Grammar, GrammarCompiler
from jaxinfer.errors import RequestError
from jaxinfer.request import FinishReason
from jaxinfer.tokenizer import Tokenizer
from tests.engine.conftest import V
from tests.tokenizer.test_tiktoken import write
from tests.tokenizer.tiny import KINDS, wrap

PROMPT = {"prompt_token_ids": [5, 6, 7]}
END = 0
TIGHT = {"whitespace_pattern": " ?"}
THOUSANDS = ["the fox", "é\"\n\\x", "日本🦊", *(f"{i}" * 9 for i in range(100, 3000))]
TYPES = {"integer": int, "string": str, "boolean": bool, "array": list, "object": dict}


def random_schema(rng, depth=2):
    """A schema of a few kinds, with bounds that keep what a random model writes short."""
    kind = rng.choice(["integer", "string", "boolean", "enum", "array", "object", "anyOf"][:4 if depth == 0 else 7])
    if kind == "integer":
        return {"type": "integer", "minimum": int(rng.integers(-50, 0)), "maximum": int(rng.integers(0, 500))}
    if kind == "string":
        return {"type": "string", "pattern": "^[a-c日]{1,3}$"} if rng.random() < 0.5 else {"type": "string", "maxLength": 4}
    if kind == "enum":
        return {"enum": ["the", "quick \"fox\"", 3, None, "日本"][:int(rng.integers(1, 6))]}
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth - 1), "minItems": int(rng.integers(0, 2)), "maxItems": 2}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1), {"type": "boolean"}]}
    names = ["a", "é", "the fox"][:int(rng.integers(1, 4))]
    if kind == "object":
        return {"type": "object", "properties": {n: random_schema(rng, depth - 1) for n in names}, "required": names[:2],
                "additionalProperties": False}
    return {"type": "boolean"}


def follows(value, schema):
    """Whether a JSON value is one of the schema's, for the keywords above."""
    if "anyOf" in schema:
        return any(follows(value, s) for s in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    if not isinstance(value, TYPES[schema["type"]]) or (schema["type"] == "integer" and isinstance(value, bool)):
        return False
    if schema["type"] == "integer":
        return schema["minimum"] <= value <= schema["maximum"]
    if schema["type"] == "string":
        return len(value) <= schema.get("maxLength", 3) and re.search(schema.get("pattern", ""), value) is not None
    if schema["type"] == "array":
        return schema["minItems"] <= len(value) <= 2 and all(follows(v, schema["items"]) for v in value)
    if schema["type"] == "object":
        return set(schema["required"]) <= value.keys() <= schema["properties"].keys() and all(
            follows(v, schema["properties"][k]) for k, v in value.items())
    return True


def json_params(schema, seed, **settings):
    return SamplingParams(max_tokens=150, seed=seed, structured_outputs=StructuredOutputsParams(json=schema, **TIGHT), **settings)


def test_every_json_that_ends_by_its_grammar_parses_and_follows_its_schema(guided):
    rng = np.random.default_rng(0)
    schemas = [random_schema(rng) for _ in range(32)]
    params = [json_params(s if i % 2 else json.dumps(s), i, temperature=float(rng.choice([0, 1.0, 2.0])), logprobs=i % 3 or None)
              for i, s in enumerate(schemas)]
    ended = 0
    for out, schema in zip(guided.generate([PROMPT] * 32, params), schemas, strict=True):
        (completion,) = out.outputs
        assert out.error is None and max(completion.token_ids) < guided.engine.resolved.num_valid_tokens
        if completion.finish_reason is FinishReason.STOP:
            assert follows(json.loads(completion.text), schema), (completion.text, schema)
            ended += 1
    assert ended >= 28


@pytest.mark.parametrize(("asked", "form"), [
    ({"regex": r"[0-9]{3}-(ab|日本)+"}, r"\d{3}-(ab|日本)+"), ({"choice": THOUSANDS}, r'the fox|é"\n\\x|日本🦊|(\d{3,4})\1{8}'),
    ({"grammar": 'start: "a" (x | "c")\nx: "b" /[0-9]/'}, r"a(b\d|c)"), ({"grammar": 'root ::= "yes" | "no" [0-9]'}, r"yes|no\d"),
    ({"json_object": True, "disable_any_whitespace": True}, r"\{\}|\{\S.*"),
])
def test_other_forms(guided, asked, form):
    params = [SamplingParams(max_tokens=60, temperature=1.5, seed=i, structured_outputs=asked) for i in range(4)]
    texts = [o.outputs[0] for o in guided.generate([PROMPT] * 4, params)]
    assert all(re.fullmatch(form, c.text, re.DOTALL) for c in texts if c.finish_reason is FinishReason.STOP), texts
    assert any(c.finish_reason is FinishReason.STOP for c in texts) or "json_object" in asked


def test_end_tokens_only_where_the_grammar_ends(guided):
    """A bias makes the end token all but certain: it comes as soon as it may; without it the text goes on as far as it can."""
    base = {"temperature": 0, "max_tokens": 30, "logit_bias": {END: 500.0}, "structured_outputs": {"regex": "x{3,9}"}}
    for extra, text, stop_reason in (({}, "xxx", END), ({"ignore_eos": True}, "x" * 9, None), ({"min_tokens": 5}, "xxxxx", END),
                                     ({"min_tokens": 20}, "x" * 9, None), ({"stop": "xx"}, "", "xx"), ({"max_tokens": 2}, "xx", None)):
        (completion,) = guided.generate(PROMPT, SamplingParams(**{**base, **extra}))[0].outputs
        assert (completion.text, completion.stop_reason) == (text, stop_reason), extra
        assert completion.finish_reason is (FinishReason.LENGTH if "max_tokens" in extra else FinishReason.STOP)


def test_other_rules_hold_beside_a_grammar(guided):
    def ids(text):
        return guided.tokenizer.encode(text, add_special_tokens=False)

    choice = {"structured_outputs": {"choice": ["abc", "abd", "x"]}, "temperature": 0, "max_tokens": 9}
    assert guided.generate(PROMPT, SamplingParams(**choice, bad_words=["c", "x"]))[0].outputs[0].text == "abd"
    assert guided.generate(PROMPT, SamplingParams(**choice, allowed_token_ids=[*ids("x"), END]))[0].outputs[0].text == "x"
    (out,) = guided.generate(PROMPT, SamplingParams(**choice, logprobs=2, n=3))
    assert all(len(c.logprobs) == len(c.token_ids) and c.text in choice["structured_outputs"]["choice"] for c in out.outputs)
    (out,) = guided.generate(PROMPT, SamplingParams(**choice, bad_words=["a", "x"]))
    assert out.outputs[0].finish_reason is FinishReason.ERROR and "structured_outputs" in out.error
    (out,) = guided.generate(PROMPT, json_params({"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3}, 0, n=4,
                                                 repetition_penalty=1.5, frequency_penalty=0.5, temperature=1.5))
    assert len({c.token_ids for c in out.outputs}) > 1 and all(len(json.loads(c.text)) == 3 for c in out.outputs)


@pytest.mark.parametrize("asked", [{"choice": ["<|endoftext|>"]}, {"regex": r"<\|endoftext\|>"}])
def test_what_a_special_token_is_called_is_spelled_by_others(guided, asked):
    (out,) = guided.generate(PROMPT, SamplingParams(structured_outputs=asked, max_tokens=20, skip_special_tokens=False))
    assert out.outputs[0].text == "<|endoftext|>" and END not in out.outputs[0].token_ids


def test_a_choice_may_hold_any_character(guided):
    text = "".join(map(chr, [*range(1, 0x180), 0x2028, 0xfeff, 0x10ffff]))
    (out,) = guided.generate({"prompt_token_ids": [5]}, SamplingParams(structured_outputs={"choice": ["\x7f\\\x7f"]}, max_tokens=9))
    assert out.outputs[0].text == "\x7f\\\x7f"
    GrammarCompiler(guided.tokenizer, vocab_size=V, num_valid_tokens=V).grammar(
        SamplingParams(structured_outputs={"choice": [text]}), (), (), ())


def test_rows_under_a_grammar_wait_and_others_go_on(guided, monkeypatch):
    """A guided row's tokens are all known when it is scheduled; a plain one's input stays on the device, and it has a row in every step."""
    plans, next_plan = [], guided.engine.scheduler.next
    monkeypatch.setattr(guided.engine.scheduler, "next", lambda: plans.append(next_plan()) or plans[-1])
    plain = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    outputs = guided.generate([PROMPT, PROMPT], [json_params(random_schema(np.random.default_rng(3)), 1), plain])
    rows = [{r.request.grammar is not None: r for r in plan.rows} for plan in plans if plan is not None]
    assert not any(r[True].from_device for r in rows if True in r)
    decodes = [r[False] for r in rows if False in r][1:]
    assert len(decodes) == 39 and all(r.from_device for r in decodes)
    assert outputs[1].outputs[0].token_ids == guided.generate(PROMPT, plain)[0].outputs[0].token_ids


def test_the_text_is_the_same_after_a_preemption(make_guided):
    """The grammar goes on where the tokens that the host has read leave it; what is computed again does not advance it."""
    rng = np.random.default_rng(5)
    schema = {"type": "array", "items": {"enum": ["the quick", "fox", 12345]}, "minItems": 7, "maxItems": 9}
    prompts = [{"prompt_token_ids": rng.integers(3, 330, int(n)).tolist()} for n in rng.integers(1, 30, 5)]
    params = [json_params(schema, i, temperature=1.0, frequency_penalty=0.2) for i in range(5)]
    want = make_guided(deterministic=True).generate(prompts, params)
    got = make_guided(deterministic=True, num_pages=14).generate(prompts, params)
    assert sum(o.metrics.num_preemptions for o in got) > 1
    assert [o.outputs[0] for o in got] == [o.outputs[0] for o in want]
    assert all(c.finish_reason is FinishReason.LENGTH or 7 <= len(json.loads(c.text)) <= 9 for o in got for c in o.outputs)


@pytest.mark.parametrize("kind", [*KINDS, "tiktoken"])
def test_every_kind_of_tokenizer(kind, tmp_path):
    """A random walk through the masks gives text that follows the grammar, and no padded or special id."""
    tokenizer = Tokenizer.from_dir(write(tmp_path / "m")) if kind == "tiktoken" else Tokenizer(wrap(KINDS[kind]()), name=kind)
    vocab_size = tokenizer.num_tokens + 40
    compiler = GrammarCompiler(tokenizer, vocab_size=vocab_size, num_valid_tokens=tokenizer.num_tokens)
    asked = {"choice": ["fox", "é"]} if kind == "metaspace" else {"json": {"type": "object", "properties": {
        "a": {"enum": ["日本 the", "é"]}, "b": {"type": "integer", "maximum": 99, "minimum": -9}}, "required": ["a", "b"],
        "additionalProperties": False}, **TIGHT}
    start = compiler.grammar(SamplingParams(structured_outputs=asked), (), (), ())
    rng = np.random.default_rng(0)
    for _ in range(6):
        grammar, ids, ended = start.copy(), [], False
        while not ended:
            (mask,) = Grammar.masks([(grammar, False)])
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            assert allowed.size and allowed.max() < tokenizer.num_tokens and not tokenizer.special_token_ids & set(allowed.tolist())
            ids.append(int(rng.choice(allowed)))
            ended = grammar.accept(ids[-1])
        text = tokenizer.decode(ids)
        assert grammar.error is None and (text in asked["choice"] if "choice" in asked else {"a", "b"} == json.loads(text).keys()), text


@pytest.mark.parametrize(("asked", "message"), [
    ({"json": {"type": "objekt"}}, "structured_outputs.json cannot be used: Invalid type: objekt"),
    ({"json": {"type": "array", "uniqueItems": True}}, "Unimplemented keys"), ({"json": "{"}, "structured_outputs.json cannot be used"),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable schema"),
    ({"regex": "(?=a)b"}, "structured_outputs.regex cannot be used.*look-around"), ({"grammar": "start: nope"}, "structured_outputs.grammar"),
    ({"json": {"allOf": [{"anyOf": [{"required": [f"x{i}{j}"]} for j in range(6)]} for i in range(6)]}}, "schema too large"),
])
def test_what_cannot_be_compiled_is_refused_at_admission(guided, asked, message):
    with pytest.raises(RequestError, match=message):
        guided.generate(PROMPT, SamplingParams(structured_outputs=asked))


def test_what_is_missing_is_named(monkeypatch):
    choice = SamplingParams(structured_outputs={"choice": ["x"]})
    with pytest.raises(RequestError, match="needs a tokenizer.*allowed_token_ids"):
        GrammarCompiler(None, vocab_size=V, num_valid_tokens=V).grammar(choice, (), (), ())
    spelled = Tokenizer(wrap(KINDS["byte_level"]()))
    monkeypatch.setattr(Tokenizer, "decoder_types", frozenset({"WordPiece"}))
    with pytest.raises(RequestError, match="decodes by WordPiece, which is not implemented"):
        structured.token_bytes(spelled)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"pip install 'jaxinfer\[guided\]'"):
        GrammarCompiler(spelled, vocab_size=V, num_valid_tokens=V).grammar(choice, (), (), ())


def test_a_grammar_that_grows_too_costly_ends_its_own_request(guided, monkeypatch):
    monkeypatch.setitem(structured.LIMITS, "step_max_items", 2)
    asked = SamplingParams(structured_outputs={"json": {"type": "array", "items": {"type": "integer"}, "minItems": 2}}, max_tokens=20)
    broken, fine = guided.generate([PROMPT, PROMPT], [asked, SamplingParams(max_tokens=4)])
    assert broken.outputs[0].finish_reason is FinishReason.ERROR and "the grammar stopped the text" in broken.error
    assert fine.error is None and len(fine.outputs[0].token_ids) == 4


def test_grammars_are_kept_up_to_a_number(byte_tokenizer, monkeypatch):
    monkeypatch.setattr(structured, "MAX_KEPT", 2)
    compiler = GrammarCompiler(byte_tokenizer, vocab_size=V, num_valid_tokens=byte_tokenizer.num_tokens)
    for choice in ("a", "b", "a", "c"):
        compiler.grammar(SamplingParams(structured_outputs={"choice": [choice]}), (), (), ())
    assert [guide.choice for guide in compiler._kept] == [("a",), ("c",)]
    assert jaxinfer.StructuredOutputsParams is StructuredOutputsParams
