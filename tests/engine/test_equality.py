"""The equality contract (EngineConfig.deterministic): one request's tokens and bits, in whatever way it is served."""

import dataclasses

import numpy as np
import pytest

import jaxinfer
from tests.engine.test_engine import ids, prompts_of

FIXED = {"deterministic": True, "max_num_seqs": 4}
PROMPTS = prompts_of([3, 60, 33, 64, 90, 1], seed=41)  # a step takes 32 tokens
NOISE = 1e-4  # in a logit of the tiny model in float32, over row counts and chunk lengths
PARAMS = [jaxinfer.SamplingParams(max_tokens=50, ignore_eos=True, temperature=t, seed=i, top_p=0.9, logprobs=2)
          for i, t in enumerate([0, 1.0, 0, 0.7, 1.3, 0])]
GREEDY = [dataclasses.replace(p, temperature=0, top_p=1.0) for p in PARAMS]


def alone(llm, params):
    return [llm.generate(prompt, p)[0] for prompt, p in zip(PROMPTS, params, strict=True)]


def batched(llm, params):
    return llm.generate(PROMPTS, params)


def cached(llm, params):
    llm.generate(PROMPTS, params)
    outputs = llm.generate(PROMPTS, params)
    assert all(o.num_cached_tokens == len(o.prompt_token_ids) - 1 for o in outputs)
    return outputs


def chunked(llm, params):
    """Each beside three neighbours, which leave it parts of steps."""
    others = prompts_of([2, 2, 25], seed=42)
    free = jaxinfer.SamplingParams(max_tokens=40, ignore_eos=True, seed=9)
    outputs, lengths = [], []
    for prompt, p in zip(PROMPTS, params, strict=True):
        plans, plan_next = [], llm.engine.scheduler.next
        llm.engine.scheduler.next = lambda: plans.append(plan_next()) or plans[-1]  # noqa: B023  used in this turn only
        outputs.append(llm.generate([*others, prompt], [free] * 3 + [p])[-1])
        llm.engine.scheduler.next = plan_next
        length = len(prompt["prompt_token_ids"])
        lengths.append([row.num_tokens for plan in plans if plan is not None for row in plan.rows
                        if list(row.request.prompt_token_ids) == prompt["prompt_token_ids"] and row.start < length])
    assert sum(len(chunks) > -(-sum(chunks) // 32) for chunks in lengths) >= 3, lengths  # more chunks than alone
    return outputs


def preempted(llm, params):
    outputs = llm.generate(PROMPTS, params)
    assert sum(o.metrics.num_preemptions for o in outputs) > 0
    return outputs


NO_CACHE = {"enable_prefix_caching": False}
WAYS = {
    "batched": (batched, NO_CACHE), "chunked": (chunked, NO_CACHE), "cached": (cached, {}), "preempted": (preempted, {"num_pages": 25}),
    "preempted without cache": (preempted, {"num_pages": 25, **NO_CACHE}), "synchronous": (batched, {"async_scheduling": False}),
}


def margin(model, output, position):
    """Of the likeliest token over the next, at one position of a greedy output."""
    tokens = np.array([[*output.prompt_token_ids, *output.outputs[0].token_ids[:position]]], np.int32)
    best = np.sort(np.asarray(model.logits(tokens))[0, -1])[-2:]
    return best[1] - best[0]


@pytest.mark.parametrize("way", WAYS)
def test_bits_are_equal_where_deterministic(make_llm, way):
    """Tokens, greedy and sampled, and the log-probabilities of them and of the likeliest, to the bit."""
    serve, settings = WAYS[way]
    want = alone(make_llm(**FIXED, **NO_CACHE), PARAMS)
    got = serve(make_llm(**FIXED, **settings), PARAMS)
    assert ids(got) == ids(want)
    assert [o.outputs[0].logprobs for o in got] == [o.outputs[0].logprobs for o in want]


def test_bits_are_equal_in_bursts(make_llm):
    plain = [dataclasses.replace(p, logprobs=None) for p in PARAMS]
    assert ids(batched(make_llm(**FIXED, num_scheduler_steps=4), plain)) == ids(alone(make_llm(**FIXED, **NO_CACHE), plain))


def test_tokens_are_equal_up_to_a_margin_within_noise_in_loops_on_the_device(make_llm, tiny_model):
    plain = [dataclasses.replace(p, logprobs=None) for p in GREEDY]
    want, got = alone(make_llm(**NO_CACHE), plain), batched(make_llm(num_scheduler_steps=4), plain)
    firsts = [next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None) for a, b in zip(ids(want), ids(got), strict=True)]
    assert firsts.count(None) >= len(PROMPTS) - 1
    assert all(margin(tiny_model, one, at) < NOISE for one, at in zip(want, firsts, strict=True) if at is not None)


@pytest.mark.parametrize("way", ["batched", "chunked", "cached", "preempted"])
def test_tokens_are_equal_up_to_a_margin_within_noise_otherwise(make_llm, tiny_model, way):
    serve, settings = WAYS[way]
    want = alone(make_llm(**NO_CACHE), GREEDY)
    got = serve(make_llm(**settings), GREEDY)
    num_equal = 0
    for one, other in zip(want, got, strict=True):
        a, b = one.outputs[0].token_ids, other.outputs[0].token_ids
        differs = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        num_equal += differs is None
        if differs is None:
            logprobs = [[next(iter(entry.values())).logprob for entry in o.outputs[0].logprobs] for o in (one, other)]
            np.testing.assert_allclose(*logprobs, atol=NOISE)
        else:
            assert margin(tiny_model, one, differs) < NOISE, (way, differs)
    assert num_equal >= len(PROMPTS) - 1
