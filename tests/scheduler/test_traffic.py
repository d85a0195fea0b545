"""Random traffic through a simulated engine: whatever comes, every request gets its own tokens and every page returns."""

import dataclasses
import functools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.request import FinishReason, Request
from jaxinfer.scheduler.policies import POLICIES
from jaxinfer.scheduler.prefix_cache import HashedPrefixCache, NullPrefixCache
from tests.scheduler.simulator import Setup, Simulator, check_output, make_request

CACHES = {
    "none": lambda pages: NullPrefixCache(),
    "hashed": HashedPrefixCache,
    "copies": functools.partial(HashedPrefixCache, enable_page_copies=True),
    "copies, five hashes": lambda pages: HashedPrefixCache(
        pages, hash_page=lambda parent, tokens: (parent + sum(tokens)) % 5, enable_page_copies=True),
    "five hashes": lambda pages: HashedPrefixCache(pages, hash_page=lambda parent, tokens: (parent + sum(tokens)) % 5),
    "hash of depth": lambda pages: HashedPrefixCache(pages, hash_page=lambda parent, tokens: parent + 1),
    "hash of page": lambda pages: HashedPrefixCache(pages, hash_page=lambda parent, tokens: hash(tokens)),
}


@dataclasses.dataclass
class Arrival:
    step: int
    request: Request
    abort_step: int | None
    deadline: float | None = None
    """In steps."""


@st.composite
def setups(draw) -> Setup:
    max_num_seqs = draw(st.integers(1, 6))
    return Setup(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 30)),
                 capacity=draw(st.integers(2, 14)), page_size=draw(st.sampled_from([1, 2, 4, 8])),
                 max_prefill_rows=draw(st.none() | st.integers(1, 3)), policy=draw(st.sampled_from(sorted(POLICIES))),
                 depth=draw(st.integers(0, 2)), burst=draw(st.sampled_from([1, 1, 2, 5])),
                 length_buckets=draw(st.sampled_from([(), (), (4,), (2, 8, 16)])),
                 long_prefill_share=draw(st.sampled_from([0.1, 0.5, 1.0])), grace_tokens=draw(st.sampled_from([0, 4, 64])),
                 cost_aware=draw(st.booleans()), num_host_pages=draw(st.sampled_from([0, 2, 6, 40])),
                 tokens_per_page=draw(st.sampled_from([0.0, 0.4, 1.5, 100.0])))


@st.composite
def traffic(draw, setup: Setup) -> list[Arrival]:
    """Requests whose prompts share beginnings, sized to fit the pool."""
    families = [[(7 * family + 3 * i + 1) % 50 for i in range(80)] for family in range(2)]
    arrivals, step = [], 0
    for index in range(draw(st.integers(1, 10))):
        step += draw(st.sampled_from([0, 0, 0, 1, 2, 9]))
        total = draw(st.integers(2, setup.max_model_len))
        num_prompt = draw(st.integers(1, total - 1))
        num_shared = draw(st.integers(0, num_prompt))
        tail = draw(st.lists(st.integers(1, 3), min_size=num_prompt - num_shared, max_size=num_prompt - num_shared))
        prompt = (draw(st.sampled_from(families)) * 2)[:num_shared] + tail
        request = make_request(f"r{index}", prompt, total - num_prompt, salt=draw(st.sampled_from(["", "", "tenant"])), arrival=step,
                               priority=draw(st.integers(-1, 2)))
        abort = draw(st.none() | st.none() | st.none() | st.integers(0, 30))
        deadline = draw(st.sampled_from([None, None, None, 0, 1, 5, 20]))
        arrivals.append(Arrival(step, request, None if abort is None else step + abort, None if deadline is None else step + deadline))
    return arrivals


def drive(simulator: Simulator, arrivals: list[Arrival]) -> None:
    """Feeds requests and aborts at their steps, then checks what every request got."""
    pending = list(arrivals)
    while pending or simulator.scheduler.has_unfinished or simulator.in_flight:
        while pending and pending[0].step <= simulator.num_steps:
            simulator.add(pending[0].request, deadline=pending.pop(0).deadline)
        for arrival in arrivals:
            if arrival.abort_step is not None and arrival.abort_step == simulator.num_steps and arrival not in pending:
                ended = arrival.request.is_finished
                assert simulator.scheduler.abort(arrival.request.request_id) != ended and arrival.request.is_finished
                simulator.scheduler.check_invariants()
        simulator.step()
        assert simulator.num_steps < 5000, "no end:\n" + simulator.scheduler.dump()
    simulator.run_to_end()
    expired = {request.request_id for request in simulator.scheduler.pop_expired()}
    for arrival in arrivals:
        check_output(arrival.request)
        if arrival.request.request_id in expired:
            assert arrival.deadline is not None and arrival.request.finish_reason is FinishReason.ABORT
        if arrival.deadline is not None:
            assert arrival.request.finish_time is not None and arrival.request.finish_time <= max(arrival.deadline, arrival.step) + 1
    assert len(expired) == simulator.scheduler.stats().num_expired


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_every_request_gets_its_tokens_and_every_page_returns(data: st.DataObject) -> None:
    setup = data.draw(setups())
    cache = data.draw(st.sampled_from(sorted(CACHES)))
    simulator = Simulator(setup, CACHES[cache])
    arrivals = data.draw(traffic(setup))
    simulator.errors = data.draw(st.dictionaries(st.sampled_from([arrival.request.request_id for arrival in arrivals]), st.integers(0, 3)))
    drive(simulator, arrivals)
    if setup.policy == "fcfs" and not setup.length_buckets and cache == "none":  # else some wait for a prefix that another computes
        served = [request.arrival_time for request in simulator.first_rows]
        assert served == sorted(served), "somebody was overtaken"


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_ten_thousand_steps_on_a_short_pool(policy: str) -> None:
    """One engine after the other, with and without buckets, copies and steps ahead, until 10 000 steps are done."""
    rng, num_steps, totals = random.Random(policy), 0, [0, 0, 0, 0]
    system = [rng.randrange(1, 50) for _ in range(26)]
    while num_steps < 10_000:
        setup = Setup(max_num_seqs=6, max_num_batched_tokens=24, capacity=18, page_size=4, depth=rng.choice([0, 1, 3]), policy=policy,
                      burst=rng.choice([1, 4]), length_buckets=rng.choice([(), (4, 16)]), grace_tokens=rng.choice([0, 8]),
                      cost_aware=rng.random() < 0.8, num_host_pages=rng.choice([0, 9, 60]), tokens_per_page=rng.choice([0.0, 1.0]))
        simulator = Simulator(setup, functools.partial(HashedPrefixCache, enable_page_copies=rng.random() < 0.5))
        simulator.check_every = 2
        arrivals, step = [], 0
        for index in range(300):
            step += rng.choice([0, 1, 2, 5, 10])
            prompt = system[:rng.choice([0, 10, 24, 26])] + [rng.randrange(1, 50) for _ in range(rng.randrange(1, 20))]
            request = make_request(f"r{index}", prompt[:rng.choice([10, 26, 99])], rng.randrange(1, 24), arrival=step,
                                   priority=rng.randrange(3))
            abort = step + rng.randrange(40) if rng.random() < 0.1 else None
            arrivals.append(Arrival(step, request, abort, step + rng.randrange(60) if rng.random() < 0.1 else None))
        drive(simulator, arrivals)
        stats = simulator.scheduler.stats()
        num_steps += simulator.num_steps
        totals = [a + b for a, b in zip(totals, (stats.num_preemptions, stats.num_cached_tokens, stats.num_expired,
                                                     stats.num_swapped_tokens), strict=True)]
    assert totals[0] > 200 and totals[1] > 10_000 and totals[2] > 20 and totals[3] > 200, totals  # the traffic did press on the pool
