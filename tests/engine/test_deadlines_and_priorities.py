"""priority and deadline_s from the facades to the scheduler: who goes first, what an expired request leaves, what is refused."""

import asyncio
import contextlib
import dataclasses
import time

import pytest

import jaxinfer
from jaxinfer.engine.requests import check_priority
from jaxinfer.errors import RequestError
from jaxinfer.request import FinishReason
from jaxinfer.scheduler import policies

PARAMS = jaxinfer.SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
PROMPT = {"prompt_token_ids": [1, 2, 3]}


@pytest.fixture
def llm(make_llm):
    return make_llm(deterministic=True, max_num_seqs=4)


@pytest.fixture
def clock(llm, monkeypatch):
    """The scheduler's clock, which a test may put forward."""
    class Clock:
        ahead = 0.0

    monkeypatch.setattr(llm.engine.scheduler, "_clock", lambda: time.monotonic() + Clock.ahead)
    return Clock


def is_idle(llm):
    llm.engine.scheduler.check_invariants()
    return not llm.engine.has_work and not llm.engine.outputs._live and llm.engine.pages.num_free == llm.engine.pages.num_pages - 1


def test_an_expired_request_keeps_its_output_and_disturbs_nobody(llm, clock):
    (want,) = llm.generate(PROMPT, PARAMS)
    stream = llm.stream(PROMPT, PARAMS, deadline_s=1000.0)
    neighbour = llm.stream(PROMPT, PARAMS)
    for _ in range(5):
        so_far, _ = next(stream), next(neighbour)
    clock.ahead = 2000.0
    last = list(stream)[-1]
    completion = last.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.ABORT, "deadline") and last.error is None
    assert len(so_far.outputs[0].token_ids) <= len(completion.token_ids) < 40
    assert completion.token_ids == want.outputs[0].token_ids[:len(completion.token_ids)] and last.metrics.latency_s >= 1000.0
    assert list(neighbour)[-1].outputs[0].token_ids == want.outputs[0].token_ids
    assert is_idle(llm)


def test_deadlines_in_a_list_and_of_a_request_that_never_ran(llm, clock):
    before = llm.metrics()["num_expired"]
    prompts, params = [PROMPT] * 6, [PARAMS] * 5 + [dataclasses.replace(PARAMS, n=2)]

    def forward(index, output):
        clock.ahead = 2000.0

    outputs = llm.generate(prompts, [dataclasses.replace(PARAMS, max_tokens=2), *params[1:]],
                           deadline_s=[None, None, None, 1500, None, 1500.0], on_output=forward)
    reasons = [[(c.finish_reason, c.stop_reason) for c in o.outputs] for o in outputs]
    expired = (FinishReason.ABORT, "deadline")
    assert reasons == [[(FinishReason.LENGTH, None)]] * 3 + [[expired], [(FinishReason.LENGTH, None)], [expired, expired]]
    assert outputs[5].outputs[0].token_ids == () and outputs[5].metrics.ttft_s is None  # four slots: it was still waiting
    assert llm.metrics()["num_expired"] == before + 3 and is_idle(llm)


def test_a_deadline_ends_an_async_request(llm, clock):
    async def run():
        async with jaxinfer.AsyncLLM.from_llm(llm) as served:
            async def collect(**options):
                return [delta async for delta in served.generate(PROMPT, dataclasses.replace(PARAMS, max_tokens=300), **options)]

            neighbour = asyncio.create_task(collect())
            task = asyncio.create_task(collect(deadline_s=1000))
            while llm.engine.scheduler.num_running < 2:
                await asyncio.sleep(0.002)
            clock.ahead = 2000.0
            return await task, await neighbour

    deltas, neighbour = asyncio.run(run())
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.ABORT, "deadline")
    ids, others = ([t for d in got for t in d.token_ids] for got in (deltas, neighbour))
    assert len(others) == 300 and ids == others[:len(ids)] and is_idle(llm)


def test_smaller_priorities_go_first_and_may_interrupt(make_llm):
    llm = make_llm(max_num_seqs=1, deterministic=True, scheduling_policy="preemptive")
    order = []
    params = dataclasses.replace(PARAMS, max_tokens=3)
    outputs = llm.generate([PROMPT] * 4, params, priority=[3, -5, 4, 0], on_output=lambda index, output: order.append(index))
    assert order == [1, 3, 0, 2] and len({o.outputs[0].token_ids for o in outputs}) == 1
    assert len(llm.generate([PROMPT] * 2, params, priority=7)) == 2
    stream = llm.stream(PROMPT, PARAMS, priority=5)
    next(stream)
    llm.generate(PROMPT, params, priority=1)
    assert list(stream)[-1].metrics.num_preemptions == 1


@pytest.mark.parametrize(("options", "message"), [
    ({"priority": 1}, "priority = 1: it has no effect under scheduling_policy = 'fcfs'.*'preemptive'"),
    ({"priority": "high"}, "priority = 'high': must be an integer in"), ({"priority": True}, "priority = True"),
    ({"priority": 10**5000}, "an integer of 16610 bits"), ({"priority": [2**31]}, "priority = 2147483648"),
    ({"priority": [0, 0]}, "priority has 2 entries for 1 prompts"), ({"deadline_s": [1.0, None]}, "deadline_s has 2 entries"),
    ({"deadline_s": 0}, r"deadline_s = 0: must be a number of seconds in \(0, 1e\+09\]"), ({"deadline_s": float("nan")}, "deadline_s = nan"),
    ({"deadline_s": float("inf")}, "leave it out"), ({"deadline_s": "1"}, "deadline_s = '1'"), ({"deadline_s": b"1"}, "deadline_s = b'1'"),
    ({"priority": b"\0"}, "priority = b'"), ({"deadline_s": [False]}, "deadline_s = False"),
])
def test_bad_values_are_refused(llm, options, message):
    with pytest.raises(RequestError, match=message):
        llm.generate([PROMPT], PARAMS, **options)
    if not any(isinstance(v, list) for v in options.values()):
        with pytest.raises(RequestError, match=message):
            next(llm.stream(PROMPT, PARAMS, **options))
        (out,) = llm.generate([PROMPT], PARAMS, on_error="return", **options)
        assert out.error and is_idle(llm)


def test_every_policy_that_uses_priority_takes_it(llm, monkeypatch):
    monkeypatch.setattr(policies, "POLICIES", dict(policies.POLICIES))
    policies.register_policy("loudest", lambda request, now: (request.priority,), uses_priority=True)
    for name, policy in policies.POLICIES.items():
        resolved = dataclasses.replace(llm.engine.resolved, engine=dataclasses.replace(llm.config, scheduling_policy=name))
        with contextlib.nullcontext() if policy.uses_priority else pytest.raises(RequestError, match=f"no effect under .*'{name}'"):
            check_priority(3, resolved)
