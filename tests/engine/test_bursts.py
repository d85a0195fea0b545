"""Bursts (num_scheduler_steps): the same tokens with fewer looks of the host; stops, aborts and new requests in the midst of one."""

import pytest

import jaxinfer
from jaxinfer.request import FinishReason
from tests.engine.test_engine import GREEDY, ids, prompts_of

FIXED = {"deterministic": True, "max_num_seqs": 4}
BURST = {**FIXED, "num_scheduler_steps": 4}


def run(llm, prompts, params):
    """(outputs, calls of the engine's step, times that next() was asked)."""
    scheduler, calls = llm.engine.scheduler, llm.engine.num_step_calls
    asked, plan_next = 0, scheduler.next

    def count():
        nonlocal asked
        asked += 1
        return plan_next()

    scheduler.next = count
    try:
        outputs = llm.generate(prompts, params)
    finally:
        scheduler.next = plan_next
    scheduler.check_invariants()
    return outputs, llm.engine.num_step_calls - calls, asked


@pytest.mark.parametrize("settings", [{}, {"async_scheduling": False}], ids=["asynchronous", "synchronous"])
def test_outputs_are_those_of_single_steps_and_decisions_are_fewer(make_llm, settings):
    """Greedy and sampled rows of different lengths, over the edges of pages, some with rules, which are no part of any burst."""
    prompts = prompts_of([3, 90, 33, 16], seed=31)
    plain = [jaxinfer.SamplingParams(max_tokens=n, ignore_eos=True, temperature=t, top_p=0.9, seed=7)
             for n, t in ((40, 0), (40, 1.0), (33, 0.7), (1, 0))]
    ruled = [jaxinfer.SamplingParams(max_tokens=20, ignore_eos=True, temperature=0, repetition_penalty=1.3, min_tokens=3), *plain[1:]]
    for params, at_most in ((plain, 20), (ruled, 36)):
        want, _, many = run(make_llm(**FIXED), prompts, params)
        got, _, few = run(make_llm(**BURST, **settings), prompts, params)
        assert ids(got) == ids(want) and few <= at_most < many
        assert [o.outputs[0].finish_reason for o in got] == [FinishReason.LENGTH] * 4


def test_nothing_is_emitted_past_a_stop(make_llm):
    prompts = prompts_of([9, 12], seed=32)
    free = ids(make_llm(**FIXED).generate(prompts, jaxinfer.SamplingParams(max_tokens=24, **GREEDY)))
    for at in range(1, 12):  # wherever in a burst it falls
        stop = free[0][at]
        params = [jaxinfer.SamplingParams(max_tokens=24, stop_token_ids=[stop], **GREEDY), jaxinfer.SamplingParams(max_tokens=24, **GREEDY)]
        stopped, other = make_llm(**BURST).generate(prompts, params)
        assert stopped.outputs[0].token_ids == free[0][:free[0].index(stop) + 1] and stopped.outputs[0].finish_reason is FinishReason.STOP
        assert other.outputs[0].token_ids == free[1]
    # What was computed past the stop is not offered to others.
    again = make_llm(**BURST).generate(prompts, jaxinfer.SamplingParams(max_tokens=24, **GREEDY))
    assert ids(again) == free
    assert make_llm(**BURST).engine.pages.num_free == make_llm(**BURST).engine.pages.capacity


def test_streams_yield_within_a_burst_and_closing_one_leaves_others_alone(make_llm):
    llm = make_llm(**BURST)
    prompts = prompts_of([20, 25], seed=33)
    params = jaxinfer.SamplingParams(max_tokens=30, **GREEDY)
    want = ids(make_llm(**FIXED).generate(prompts, params))
    first, second = llm.stream(prompts[0], params), llm.stream(prompts[1], params)
    lengths = [len(next(first).outputs[0].token_ids) for _ in range(3)]
    assert lengths == sorted(set(lengths)) and lengths[-1] < 30
    got = [next(second) for _ in range(2)][-1].outputs[0].token_ids
    first.close()  # its tokens in flight are dropped
    for out in second:
        assert out.outputs[0].token_ids[:len(got)] == got
        got = out.outputs[0].token_ids
    assert got == want[1] and not llm.engine.scheduler.has_unfinished
    assert ids(llm.generate(prompts, params)) == want
    assert llm.engine.pages.num_free == llm.engine.pages.capacity


def test_a_request_that_waits_ends_the_bursts(make_llm):
    """Five prompts in four slots: while the fifth waits, every step is decided anew, so that it comes in as soon as one ends."""
    prompts = prompts_of([9] * 5, seed=34)
    params = [jaxinfer.SamplingParams(max_tokens=n, **GREEDY) for n in (6, 30, 30, 30, 30)]
    got, _, asked = run(make_llm(**BURST), prompts, params)
    want = make_llm(**FIXED).generate(prompts, params)
    assert ids(got) == ids(want) and 10 < asked < 25


def test_a_pool_too_small_for_a_burst_falls_back_to_single_steps(make_llm):
    prompts = prompts_of([60, 70, 80, 90], seed=35)
    params = jaxinfer.SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0, seed=1)
    got, *_ = run(make_llm(**BURST, num_pages=25), prompts, params)
    assert ids(got) == ids(make_llm(**FIXED).generate(prompts, params)) and sum(o.metrics.num_preemptions for o in got) > 0
