"""Who gives way when pages run out, and that nobody does so in vain or for ever."""

import random

import pytest

from jaxinfer.request import Request
from jaxinfer.scheduler import HashedPrefixCache, NullPrefixCache, PageAllocator
from jaxinfer.scheduler.host_pages import HostPages
from jaxinfer.scheduler.policies import POLICIES
from jaxinfer.scheduler.prefix_cache import PrefixHit
from jaxinfer.scheduler.running import RunningSet
from tests.scheduler.simulator import Setup, Simulator, check_output, expected_output, make_request


def running_set(pages: PageAllocator, *, policy: str = "fcfs", grace_tokens: int = 0) -> RunningSet:
    return RunningSet(max_num_seqs=6, pages=pages, prefix_cache=NullPrefixCache(), host_pages=HostPages(0), policy=POLICIES[policy],
                      grace_tokens=grace_tokens, cost_aware=True)


def start(running: RunningSet, name: str, num_tokens: int, *, shared: list[int] | None = None, priority: int = 0) -> Request:
    request = make_request(name, [1] * num_tokens, 50, priority=priority)
    running.start(request, PrefixHit(shared or [], 4 * len(shared or [])))
    running.extend(request, -(-num_tokens // 4) - len(shared or []))
    request.num_computed_tokens = num_tokens
    return request


def test_the_one_that_loses_least_gives_way() -> None:
    running = running_set(PageAllocator(40, 4))
    first = start(running, "first", 4)
    long = start(running, "long", 30)
    start(running, "short", 9)
    sharing = start(running, "sharing", 34, shared=long.pages[:7])  # so long loses 2 tokens, this one 6
    nothing = start(running, "nothing to give", 1, shared=first.pages[:1])
    assert running.victim(set(), after=first) is long and running.victim({"long"}, after=first) is sharing
    assert running.victim({"sharing", "long"}, after=first).request_id == "short"  # type: ignore[union-attr]
    assert running.victim({"sharing", "short", "long"}, after=first) is nothing


def test_lower_classes_give_way_first_where_the_policy_looks_at_them() -> None:
    for policy, expected in (("fcfs", "cheap"), ("priority", "low")):
        running = running_set(PageAllocator(40, 4), policy=policy)
        first = start(running, "first", 4)
        start(running, "low", 30, priority=2)
        start(running, "cheap", 9, priority=1)
        assert running.victim(set(), after=first).request_id == expected  # type: ignore[union-attr]


def test_one_that_just_came_back_is_spared_while_others_can_give_way() -> None:
    running = running_set(PageAllocator(40, 4), grace_tokens=5)
    first = start(running, "first", 4)
    again = make_request("again", [1] * 8, 50)
    again.num_preemptions = 1
    running.start(again, PrefixHit([], 0))
    running.extend(again, 2)
    again.num_computed_tokens = 8
    long = start(running, "long", 30)
    assert running.victim(set(), after=first) is long and running.victim({"long"}, after=first) is again
    again.output_token_ids += [1] * 5
    assert running.victim(set(), after=first) is again


def lasting(name: str, num_prompt: int, num_output: int) -> Request:
    """A request that does not meet the stop token."""
    for seed in range(10_000):
        request = make_request(name, [1 + seed % 49, 1 + seed // 49 % 49, *([num_prompt % 50] * (num_prompt - 2))], num_output)
        if len(expected_output(request)) == num_output:
            return request
    raise AssertionError("no such prompt")


def pressed(capacity: int, requests: list[Request], grace_tokens: int) -> Simulator:
    """The requests at once, without prefix cache, in a pool of so many pages; run to the end and checked."""
    sim = Simulator(Setup(max_num_seqs=len(requests), max_num_batched_tokens=64, capacity=capacity, page_size=4,
                          grace_tokens=grace_tokens), lambda pages: NullPrefixCache())
    sim.check_every = 10
    for request in requests:
        sim.add(request)
    sim.run_to_end()
    for request in requests:
        check_output(request)
    return sim


@pytest.mark.parametrize("grace_tokens", [0, 64])
def test_two_long_decodes_in_a_nearly_full_pool_do_not_thrash(grace_tokens: int) -> None:
    stats = pressed(45, [lasting("a", 4, 116), lasting("b", 5, 115)], grace_tokens).scheduler.stats()
    assert stats.num_preemptions == 1 and stats.num_recomputed_tokens < 100


def test_room_for_more_than_its_own_tokens_keeps_a_request_from_losing_its_pages_again() -> None:
    def figures(grace_tokens: int, seed: int) -> tuple[int, int]:
        rng = random.Random(seed)
        requests = [lasting(f"r{i}", rng.randrange(4, 30), rng.randrange(30, 90)) for i in range(12)]
        needed = sum(-(-r.max_total_len // 4) for r in requests)
        stats = pressed(needed * 3 // 10, requests, grace_tokens).scheduler.stats()
        return stats.num_preemptions, stats.num_recomputed_tokens

    without, with_grace = ([sum(f) for f in zip(*(figures(grace, seed) for seed in range(4)), strict=True)] for grace in (0, 64))
    assert with_grace[0] < 0.9 * without[0] and with_grace[1] < 0.85 * without[1], (with_grace, without)


@pytest.mark.parametrize("cost_aware", [True, False])
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_burst_in_half_of_its_pages_gives_the_undisturbed_outputs(policy: str, cached: bool, cost_aware: bool) -> None:
    rng = random.Random(7)
    lengths = [(rng.randrange(4, 30), rng.randrange(10, 40)) for _ in range(16)]
    needed = sum(-(-(prompt + output) // 4) for prompt, output in lengths)
    sim = Simulator(Setup(max_num_seqs=16, max_num_batched_tokens=64, capacity=needed // 2, page_size=4, policy=policy, depth=1,
                          grace_tokens=8, cost_aware=cost_aware), HashedPrefixCache if cached else lambda pages: NullPrefixCache())
    requests = [make_request(f"r{i}", [rng.randrange(1, 50) for _ in range(prompt)], output, priority=i % 3)
                for i, (prompt, output) in enumerate(lengths)]
    for request in requests:
        sim.add(request)
    sim.run_to_end()
    for request in requests:
        check_output(request)
