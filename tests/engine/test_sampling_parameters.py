"""Penalties, rules and log-probabilities through the engine: asynchronous steps, chunks, cached prefixes, preemption, reused slots."""

import dataclasses
import json

import numpy as np
import pytest

import jaxinfer
from jaxinfer.engine.compiled import jit_logits
from jaxinfer.engine.load import random_model
from jaxinfer.errors import ConfigError, RequestError
from jaxinfer.jsonl import Entry, result
from jaxinfer.models.shapes import SHAPES
from jaxinfer.request import FinishReason
from jaxinfer.sampling.rules import bad_word_ids
from jaxinfer.tokenizer import Tokenizer
from tests.engine.conftest import SMALL
from tests.tokenizer.tiny import byte_level, wrap

V, LENGTH = 352, 160
END = 0
WORDS = [" the", "fox", "e", "th", "日本", "qu"]


@pytest.fixture(scope="module")
def model():
    return random_model(dataclasses.replace(SHAPES["tiny"], vocab_size=V), dtype="float32", seed=1)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(wrap(byte_level(), eos_token="<|endoftext|>"))


@pytest.fixture(scope="module")
def make(model, tokenizer):
    made = {}

    def make(**settings):
        key = tuple(sorted(settings.items()))
        if key not in made:
            base = {k: v for k, v in SMALL.items() if not (settings.get("deterministic") and k.endswith("_buckets"))}
            made[key] = jaxinfer.LLM.from_model(model, tokenizer=tokenizer, **{**base, "max_model_len": LENGTH, "num_pages": 400, **settings})
        return made[key]

    return make


@pytest.fixture(scope="module")
def forced(model):
    """Teacher forcing at one shape: token ids -> logits [n, V] as float64."""
    run = jit_logits(model)

    def logits(ids):
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, :len(ids)] = ids
        return np.asarray(run(padded, np.array([len(ids)], np.int32)))[0, :len(ids)].astype(np.float64)

    return logits


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def prompts_of(rng, n, longest=100):
    return [{"prompt_token_ids": rng.integers(3, 330, int(k)).tolist()} for k in rng.integers(1, longest, n)]


def random_params(rng, **fixed):
    few = rng.choice(np.arange(3, 330), 6, replace=False).tolist()

    def on(share):
        return rng.random() < share

    return jaxinfer.SamplingParams(**{
        "max_tokens": int(rng.integers(8, 40)), "seed": int(rng.integers(1 << 32)), "temperature": float(rng.choice([0, 0.7, 1.5])),
        "top_k": int(rng.choice([0, 1, 20, 1000])), "top_p": float(rng.choice([1.0, 0.9, 1e-6])), "min_p": float(rng.choice([0, 0.1])),
        "repetition_penalty": float(rng.choice([1.0, 1.0, 1.5])), "presence_penalty": float(rng.choice([0, 0, 1.5])),
        "frequency_penalty": float(rng.choice([0, 0, 0.5, -0.5])), "min_tokens": int(rng.choice([0, 0, 5])), "ignore_eos": bool(on(0.5)),
        "logit_bias": {int(t): float(rng.normal()) for t in few} if on(0.3) else None, "bad_words": WORDS if on(0.3) else None,
        "allowed_token_ids": rng.choice(330, 150, replace=False).tolist() if on(0.2) else None, "stop_token_ids": few[:1] if on(0.3) else None,
        "logprobs": int(rng.choice([0, 3, 20])) if on(0.3) else None, "prompt_logprobs": 2 if on(0.2) else None,
        "n": int(rng.choice([1, 1, 1, 3])), **fixed})


def adjusted(logits, params, words, prompt, output, num_valid):
    """What greedy sampling looks at, from the raw logits of one position, as vLLM states it."""
    x = logits.copy()
    x[num_valid:] = -np.inf
    if params.allowed_token_ids is not None:
        x[np.setdiff1d(np.arange(V), params.allowed_token_ids)] = -np.inf
    for *start, last in words:
        if output[len(output) - len(start):] == start:
            x[last] = -np.inf
    if len(output) < params.min_tokens:
        x[[END, *params.stop_token_ids]] = -np.inf
    for token, bias in params.biases.items():
        x[token] += bias
    seen, counts = np.isin(np.arange(V), prompt + output), np.bincount(output, minlength=V)
    x = np.where(seen, np.where(x > 0, x / params.repetition_penalty, x * params.repetition_penalty), x)
    return x - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


def test_greedy_follows_the_oracle_step_by_step(make, forced, tokenizer):
    """Every token is the argmax of adjusted teacher-forced logits: counted once each, prompt and output apart, in reused slots."""
    rng = np.random.default_rng(0)
    prompts = prompts_of(rng, 40)
    params = [random_params(rng, temperature=0, n=1, repetition_penalty=float(rng.choice([1.0, 1.2, 2.0])), stop_token_ids=(i,))
              for i in range(3, 43)]
    words = bad_word_ids(WORDS, lambda text: tokenizer.encode(text, add_special_tokens=False))
    assert max(map(len, words)) > 2 and min(map(len, words)) == 1
    llm = make()
    num_checked = 0
    for outputs in (llm.generate(prompts, params), llm.generate(prompts, params)):  # the second time from the prefix cache
        for out, p in zip(outputs, params, strict=True):
            prompt, ids = list(out.prompt_token_ids), list(out.outputs[0].token_ids)
            raw = forced(prompt + ids)[len(prompt) - 1:-1]
            for i, token in enumerate(ids):
                x = adjusted(raw[i], p, words if p.bad_words else (), prompt, ids[:i], tokenizer.num_tokens)
                best = np.sort(x)[-2:]
                assert x[token] > best[1] - 1e-4
                num_checked += best[1] - best[0] > 1e-4
    assert num_checked > 1000 and sum(o.num_cached_tokens for o in outputs) > 500


@pytest.mark.parametrize("other", [{"num_pages": 12}, {"async_scheduling": False}], ids=["preempted", "synchronous"])
def test_penalised_output_is_the_same_when_preempted_or_synchronous(make, other):
    rng = np.random.default_rng(1)
    prompts = prompts_of(rng, 12, 60)
    params = [random_params(rng, max_tokens=60, min_tokens=50, repetition_penalty=1.3, frequency_penalty=0.3, presence_penalty=0.5,
                            bad_words=WORDS, prompt_logprobs=3, logprobs=2, n=1) for _ in prompts]
    want = make(deterministic=True).generate(prompts, params)
    got = make(deterministic=True, **other).generate(prompts, params)
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in want]
    assert [o.outputs[0].logprobs for o in got] == [o.outputs[0].logprobs for o in want]
    assert [o.prompt_logprobs for o in got] == [o.prompt_logprobs for o in want]
    if "num_pages" in other:
        assert sum(o.metrics.num_preemptions for o in got) > 3


def check_logprobs(entry, token, want, num, tokenizer):
    order = np.argsort(-want, kind="stable")
    assert next(iter(entry)) == token and len(entry) == num + (token not in order[:num])
    for other, logprob in entry.items():
        assert abs(logprob.logprob - want[other]) < 2e-4 and abs(want[order[logprob.rank - 1]] - want[other]) < 2e-4
        assert logprob.decoded_token == tokenizer.decode([other], skip_special_tokens=False)


def test_logprobs_equal_teacher_forcing(make, forced, tokenizer):
    """Alone and batched, in chunks (prompts beyond 32 tokens), beside requests that want none, with settings that must not matter."""
    rng = np.random.default_rng(2)
    prompts = [*prompts_of(rng, 8), {"prompt_token_ids": [5, 6]}, {"prompt_token_ids": [7]}, {"prompt_token_ids": list(range(3, 36))}]
    params = [random_params(rng, logprobs=int(k), prompt_logprobs=int(k) if i != 3 else None, n=1 + i % 2)
              for i, k in enumerate(rng.choice([0, 1, 5, 20], len(prompts)))]
    llm = make()
    plain = [({"prompt_token_ids": [9]}, jaxinfer.SamplingParams(max_tokens=20))] * 3
    outputs = llm.generate([*prompts, *(p for p, _ in plain)], [*params, *(p for _, p in plain)])
    assert all(o.prompt_logprobs is None and o.outputs[0].logprobs is None and o.outputs[0].cumulative_logprob is None
               for o in outputs[len(prompts):])
    for out, p in zip([*outputs[:len(prompts)], *llm.generate(prompts[0], params[0])], [*params, params[0]], strict=True):
        prompt = list(out.prompt_token_ids)
        for completion in out.outputs:
            want = log_softmax(forced([*prompt, *completion.token_ids])[:, :tokenizer.num_tokens])
            assert len(completion.logprobs) == len(completion.token_ids)
            for i, (entry, token) in enumerate(zip(completion.logprobs, completion.token_ids, strict=True)):
                check_logprobs(entry, token, want[len(prompt) - 1 + i], p.logprobs, tokenizer)
            total = sum(entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True))
            assert completion.cumulative_logprob == pytest.approx(total)
        if p.prompt_logprobs is None:
            assert out.prompt_logprobs is None
            continue
        assert len(out.prompt_logprobs) == len(prompt) and out.prompt_logprobs[0] is None
        for i in range(1, len(prompt)):
            check_logprobs(out.prompt_logprobs[i], prompt[i], want[i - 1], p.prompt_logprobs, tokenizer)


def test_a_scored_prompt_is_computed_whole_and_leaves_the_prefix_cache_alone(make):
    llm = make()
    (prompt,) = prompts_of(np.random.default_rng(3), 1, 100)
    prompt = {"prompt_token_ids": (prompt["prompt_token_ids"] * 90)[:90]}
    plain, scored = jaxinfer.SamplingParams(max_tokens=2), jaxinfer.SamplingParams(max_tokens=2, prompt_logprobs=0)
    assert llm.generate(prompt, plain)[0].num_cached_tokens == 0
    first, second = (llm.generate(prompt, scored)[0] for _ in range(2))
    assert first.num_cached_tokens == second.num_cached_tokens == 0 and first.prompt_logprobs == second.prompt_logprobs
    assert llm.generate(prompt, plain)[0].num_cached_tokens == 89


def test_the_whole_matrix_of_parameters_compiles_nothing(make):
    llm = make()
    rng = np.random.default_rng(4)
    prompts, params = prompts_of(rng, 120, 120), [random_params(rng) for _ in range(120)]
    before = llm.metrics()["num_compiles_after_warmup"]  # of the whole process: other engines of these tests
    outputs = llm.generate(prompts, params)
    assert llm.metrics()["num_compiles_after_warmup"] == before
    for out, p in zip(outputs, params, strict=True):
        assert out.error is None and len(out.outputs) == p.n
        for c in out.outputs:
            assert p.min_tokens <= len(c.token_ids) <= p.max_tokens and all(t < llm.tokenizer.num_tokens for t in c.token_ids)
            assert p.allowed_token_ids is None or set(c.token_ids) <= set(p.allowed_token_ids)
            assert (len(c.token_ids) == p.max_tokens) or c.finish_reason is FinishReason.STOP
            assert p.logprobs is None or all(p.logprobs <= len(entry) <= p.logprobs + 1 for entry in c.logprobs)
    llm.engine.scheduler.check_invariants()


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_bars_end_tokens_and_stop_ids(make, ignore_eos):
    """A bias makes the end token and a stop id all but certain; they come as soon as they may, and not before."""
    base = {"temperature": 0, "max_tokens": 12, "ignore_eos": ignore_eos, "stop_token_ids": [40]}
    prompt = {"prompt_token_ids": [50, 60, 70]}
    for token in (END, 40):
        stops = not (ignore_eos and token == END)
        for least in (0, 1, 5):
            params = jaxinfer.SamplingParams(**base, min_tokens=least, logit_bias={token: 90.0})
            ids = make().generate(prompt, params)[0].outputs[0].token_ids
            assert ids.index(token) == least and len(ids) == (least + 1 if stops else 12)


def test_rules_that_leave_nothing_at_some_step_end_the_request_with_an_error(make):
    (x,) = make().tokenizer.encode("x", add_special_tokens=False)
    params = jaxinfer.SamplingParams(allowed_token_ids=[x], bad_words=["xxx"], temperature=0)
    (out,) = make().generate({"prompt_token_ids": [x] * 20}, params)
    assert out.outputs[0].token_ids == (x, x) and out.outputs[0].finish_reason is FinishReason.ERROR
    assert "left no token to sample" in out.error


def test_result_lines_hold_logprobs_where_asked_for(make):
    prompt = {"prompt_token_ids": [9, 350, 11]}  # 350 is padding of the vocabulary: its probability is 0, and JSON has no infinity
    for params in (jaxinfer.SamplingParams(max_tokens=2), jaxinfer.SamplingParams(max_tokens=2, logprobs=2, prompt_logprobs=1)):
        (out,) = make().generate(prompt, params)
        line = json.loads(json.dumps(result(Entry(name="line 1", prompt=prompt, params=params, tags={"line": 1}), out), allow_nan=False))
        (completion,) = line["outputs"]
        assert completion["token_ids"] == list(out.outputs[0].token_ids)
        assert ("prompt_logprobs" in line) == ("logprobs" in completion) == ("cumulative_logprob" in completion) == bool(params.logprobs)
    assert line["prompt_logprobs"][0] is None and line["prompt_logprobs"][1]["350"]["logprob"] is None
    (want, *_), first = out.outputs[0].logprobs[0].values(), next(iter(completion["logprobs"][0].values()))
    assert first == {"logprob": want.logprob, "rank": want.rank, "decoded_token": want.decoded_token}


def test_logprobs_while_streaming(make):
    prompt, params = {"prompt_token_ids": list(range(20, 60))}, jaxinfer.SamplingParams(max_tokens=6, logprobs=1, prompt_logprobs=1, seed=1)
    for out in make().stream(prompt, params):
        completion = out.outputs[0]
        assert len(completion.logprobs) == len(completion.token_ids) and None not in out.prompt_logprobs[1:]
    assert out.finished and out.outputs[0].logprobs == make().generate(prompt, params)[0].outputs[0].logprobs


@pytest.mark.parametrize(("params", "message"), [
    ({"logprobs": 21}, "at most max_logprobs = 20"), ({"prompt_logprobs": 21}, "a larger max_logprobs"),
    ({"logit_bias": {351: 1.0}}, "logit_bias holds 351"), ({"bad_words": ["quick brown foxes jump over it"]}, "must be 1 to 8"),
    ({"allowed_token_ids": [END], "min_tokens": 1}, "no token that does not end"),
])
def test_what_the_engine_cannot_do_is_refused(make, params, message):
    with pytest.raises(RequestError) as error:
        make().generate({"prompt_token_ids": [5]}, jaxinfer.SamplingParams(**params))
    assert message in str(error.value)


def test_texts_need_a_tokenizer_and_max_logprobs_a_range(make_llm, tiny_model):
    with pytest.raises(RequestError, match="bad_words.*need a tokenizer.*logit_bias"):
        make_llm().generate({"prompt_token_ids": [5]}, jaxinfer.SamplingParams(bad_words=["x"]))
    with pytest.raises(ConfigError, match=r"max_logprobs = 0: must be an integer in \[1, 128\]"):
        jaxinfer.LLM.from_model(tiny_model, **{**SMALL, "max_logprobs": 0})
    (out,) = make_llm().generate({"prompt_token_ids": [5]}, jaxinfer.SamplingParams(logprobs=1, max_tokens=2))
    assert all(p.decoded_token is None for entry in out.outputs[0].logprobs for p in entry.values())
