"""Random traffic through a simulated engine: whatever comes, every request gets its own tokens and every page returns."""

import dataclasses
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
    "five hashes": lambda pages: HashedPrefixCache(pages, hash_page=lambda parent, tokens: (parent + sum(tokens)) % 5),
    "hash of depth": lambda pages: HashedPrefixCache(pages, hash_page=lambda parent, tokens: parent + 1),
    "hash of page": lambda pages: HashedPrefixCache(pages, hash_page=lambda parent, tokens: hash(tokens)),
}


@dataclasses.dataclass
class Arrival:
    step: int
    request: Request
    abort_step: int | None


@st.composite
def setups(draw) -> Setup:
    max_num_seqs = draw(st.integers(1, 6))
    return Setup(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 30)),
                 capacity=draw(st.integers(2, 14)), page_size=draw(st.sampled_from([1, 2, 4, 8])),
                 max_prefill_rows=draw(st.none() | st.integers(1, 3)), policy=draw(st.sampled_from(sorted(POLICIES))),
                 depth=draw(st.integers(0, 2)))


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
        request = make_request(f"r{index}", prompt, total - num_prompt, salt=draw(st.sampled_from(["", "", "tenant"])), arrival=index)
        abort = draw(st.none() | st.none() | st.none() | st.integers(0, 30))
        arrivals.append(Arrival(step, request, None if abort is None else step + abort))
    return arrivals


def drive(simulator: Simulator, arrivals: list[Arrival]) -> None:
    """Feeds requests and aborts at their steps, then checks what every request got."""
    pending = list(arrivals)
    while pending or simulator.scheduler.has_unfinished or simulator.in_flight:
        while pending and pending[0].step <= simulator.num_steps:
            simulator.add(pending.pop(0).request)
        for arrival in arrivals:
            if arrival.abort_step is not None and arrival.abort_step == simulator.num_steps and arrival not in pending:
                assert simulator.scheduler.abort(arrival.request.request_id) == (arrival.request.finish_reason is FinishReason.ABORT)
                simulator.scheduler.check_invariants()
        simulator.step()
        assert simulator.num_steps < 5000, "no end:\n" + simulator.scheduler.dump()
    simulator.run_to_end()
    for arrival in arrivals:
        check_output(arrival.request)


@given(st.data())
@settings(max_examples=250)
def test_every_request_gets_its_tokens_and_every_page_returns(data: st.DataObject) -> None:
    setup = data.draw(setups())
    simulator = Simulator(setup, CACHES[data.draw(st.sampled_from(sorted(CACHES)))])
    arrivals = data.draw(traffic(setup))
    drive(simulator, arrivals)
    if setup.policy == "fcfs":
        served = [request.arrival_time for request in simulator.first_rows]
        assert served == sorted(served), "somebody was overtaken"


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_long_traffic_on_a_short_pool(policy: str, depth: int) -> None:
    rng = random.Random(depth)
    setup = Setup(max_num_seqs=8, max_num_batched_tokens=24, capacity=18, page_size=4, depth=depth, policy=policy)
    simulator = Simulator(setup)
    system = [rng.randrange(1, 50) for _ in range(24)]
    arrivals, step = [], 0
    for index in range(300):
        step += rng.choice([0, 1, 2, 5, 10])
        prompt = system[:rng.choice([0, 10, 24])] + [rng.randrange(1, 50) for _ in range(rng.randrange(1, 20))]
        abort = step + rng.randrange(40) if rng.random() < 0.1 else None
        arrivals.append(Arrival(step, make_request(f"r{index}", prompt, rng.randrange(1, 24), arrival=index), abort))
    drive(simulator, arrivals)
    stats = simulator.scheduler.stats()
    assert stats.num_preemptions > 20 and stats.num_cached_tokens > 1000, stats  # the traffic did press on the pool
    assert simulator.num_steps > 1000
