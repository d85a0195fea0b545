"""Preempted requests whose pages wait in host memory: when they go there, that they come back as they were, and that none is lost."""

import functools
import random

import pytest

from jaxinfer.request import FinishReason, Request, RequestStatus
from jaxinfer.scheduler import HashedPrefixCache, HostPages, NullPrefixCache, PageAllocator, SchedulePlan, SchedulerStats
from jaxinfer.scheduler.policies import POLICIES
from jaxinfer.scheduler.prefix_cache import PrefixHit
from jaxinfer.scheduler.running import RunningSet
from tests.scheduler.simulator import Setup, Simulator, check_output, expected_output, make_request
from tests.scheduler.test_preemption import lasting, start

CACHES = {"none": lambda pages: NullPrefixCache(), "hashed": HashedPrefixCache,
          "copies": functools.partial(HashedPrefixCache, enable_page_copies=True)}


def simulator(*, capacity: int, num_host_pages: int = 100, tokens_per_page: float = 0.5, cache: str = "none", max_num_seqs: int = 2,
              budget: int = 32, **settings: object) -> Simulator:
    setup = Setup(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, capacity=capacity, page_size=4, num_host_pages=num_host_pages,
                  tokens_per_page=tokens_per_page, **settings)  # type: ignore[arg-type]
    return Simulator(setup, CACHES[cache])


def run(sim: Simulator, requests: list[Request]) -> tuple[list[SchedulePlan], SchedulerStats]:
    """All plans, and the counters at the end; every request gets its tokens."""
    for request in requests:
        sim.add(request)
    plans = []
    while sim.scheduler.has_unfinished or sim.in_flight:
        plan = sim.step()
        plans += [plan] if plan is not None else []
    sim.run_to_end()
    for request in requests:
        check_output(request)
    return plans, sim.scheduler.stats()


def until_preempted(sim: Simulator, name: str) -> SchedulePlan:
    """The plan for whose sake the request gave way."""
    for _ in range(500):
        plan = sim.step()
        if plan is not None and name in plan.preempted:
            return plan
    raise AssertionError(f"{name} never gave way")


def two() -> list[Request]:
    """Requests that grow to 30 pages each."""
    return [lasting("a", 4, 116), lasting("b", 5, 115)]


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("cache", CACHES)
def test_what_was_computed_comes_back_and_nothing_is_computed_twice(cache: str, depth: int) -> None:
    requests = two()
    plans, stats = run(simulator(capacity=45, cache=cache, depth=depth), requests)
    (saving,), (loading,) = [p for p in plans if p.page_saves], [p for p in plans if p.page_loads]
    assert saving.preempted == ("b",) and len(saving.page_saves) > 20 and stats.num_preemptions == 1
    assert {host_page for host_page, _ in loading.page_loads} <= {host_page for _, host_page in saving.page_saves}
    (row,) = [row for row in loading.rows if row.request is requests[1]]
    assert row.num_tokens == 1 and 0 < stats.num_swapped_tokens <= row.start
    assert stats.num_recomputed_tokens == stats.num_host_pages == 0
    assert sum(plan.num_tokens for plan in plans) == sum(r.num_tokens - 1 for r in requests)


@pytest.mark.parametrize("settings", [{"num_host_pages": 0}, {"num_host_pages": 3}, {"tokens_per_page": 4.0}, {"tokens_per_page": 1e9}])
def test_without_room_or_gain_it_is_computed_again(settings: dict) -> None:
    plans, stats = run(simulator(capacity=45, **settings), two())
    assert stats.num_preemptions == 1 and stats.num_recomputed_tokens > 50 and stats.num_swapped_tokens == 0
    assert not any(plan.page_saves or plan.page_loads for plan in plans)


def test_what_the_prefix_cache_has_kept_is_shared_and_only_the_rest_is_loaded() -> None:
    sim = simulator(capacity=45, cache="hashed")
    requests = two()
    for request in requests:
        sim.add(request)
    saving = until_preempted(sim, "b")
    num_tokens = sim.host_pages.num_tokens(requests[1])
    assert len(saving.page_saves) == -(-num_tokens // 4) == sim.scheduler.stats().num_host_pages
    sim.scheduler.abort("a")  # before it has written over all of b's pages
    loading = sim.step()
    assert loading is not None and loading.rows[0].start == num_tokens
    num_shared = len(saving.page_saves) - len(loading.page_loads)
    assert num_shared > 10 and requests[1].pages[:num_shared] == [page for page, _ in saving.page_saves][:num_shared]
    assert [host_page for host_page, _ in loading.page_loads] == [host_page for _, host_page in saving.page_saves][num_shared:]
    assert sim.scheduler.stats().num_swapped_tokens == num_tokens - 4 * num_shared and sim.host_pages.num_free == 100
    sim.run_to_end()
    check_output(requests[1])


def test_a_hit_that_reaches_as_far_makes_the_host_pages_superfluous() -> None:
    host, request = HostPages(10, tokens_per_page=1.0), make_request("a", [1] * 30, 8)
    request.pages, request.num_computed_tokens = [4, 5, 6, 7, 8], 18
    host.save(request, 18)
    assert host.end_plan() == ((4, 0), (5, 1), (6, 2), (7, 3), (8, 4)) and host.num_free == 5 and host.end_plan() == ()
    assert host.beyond(PrefixHit([], 0), request) == PrefixHit([], 18, None, [0, 1, 2, 3, 4])
    assert host.beyond(PrefixHit([4, 5, 6], 12), request) == PrefixHit([4, 5, 6], 18, None, [3, 4])
    assert host.beyond(PrefixHit([4, 5, 6], 14, 9), request) == PrefixHit([4, 5, 6], 18, None, [3, 4])
    for hit in (PrefixHit([4, 5, 6], 16, 9), PrefixHit([4, 5, 6, 7, 8], 20), PrefixHit([4, 5, 6, 7], 18, 9)):
        assert host.beyond(hit, request) == hit  # a page for two tokens, or for none, is not worth the move
    host.leave(request)
    assert host.num_free == 5  # a save of the same plan must not come before the load
    host.end_plan()
    assert host.num_free == 10


def test_the_victim_is_the_one_that_costs_least_either_way() -> None:
    """To be computed again, one that shares most of its pages; to be moved, one that has few."""
    for tokens_per_page, num_host_pages, expected in ((1e9, 20, "sharing"), (1.0, 0, "sharing"), (1.0, 2, "sharing"), (1.0, 20, "own"),
                                                      (1.0, 3, "own"), (3.0, 20, "sharing")):
        pages = PageAllocator(60, 4)
        running = RunningSet(max_num_seqs=6, pages=pages, prefix_cache=NullPrefixCache(), policy=POLICIES["fcfs"], grace_tokens=0,
                             host_pages=HostPages(num_host_pages, tokens_per_page=tokens_per_page), cost_aware=True)
        first = start(running, "first", 20)
        start(running, "own", 12)
        start(running, "sharing", 24, shared=first.pages[:4])
        assert running.victim(set(), after=first).request_id == expected, tokens_per_page  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["abort", "deadline", "stop"])
def test_one_that_ends_while_it_is_swapped_frees_its_host_pages(how: str) -> None:
    sim = simulator(capacity=45, depth=0)
    a, b = two()
    sim.add(a)
    sim.add(b, deadline=500.0 if how == "deadline" else None)
    if how == "stop":  # with a token that was in flight when it gave way
        plans = [plan for plan in (sim.scheduler.next() for _ in range(200)) if plan is not None]
        assert b.status is RequestStatus.WAITING and b.num_in_flight > 0 and sim.host_pages.num_free < 100
        for plan in plans:
            sim.scheduler.apply(plan, [7] * len(plan.rows), [FinishReason.STOP if row.samples else None for row in plan.rows])
            sim.scheduler.check_invariants()
    else:
        until_preempted(sim, "b")
        assert sim.host_pages.num_free < 100
        if how == "abort":
            assert sim.scheduler.abort("b")
        else:
            sim.clock.now = 500.0
            sim.step()
            assert sim.scheduler.pop_expired() == [b]
        sim.scheduler.check_invariants()
    assert b.is_finished and sim.host_pages.num_free == 100
    sim.run_to_end()
    assert sim.scheduler.stats().num_swapped_tokens == 0


def test_a_save_of_a_request_that_ended_before_the_plan_came_is_dropped() -> None:
    host, requests = HostPages(4, tokens_per_page=0.0), [make_request(name, [1] * 10, 8) for name in "ab"]
    for request, first in zip(requests, (1, 11), strict=True):
        request.pages, request.num_computed_tokens = [first, first + 1, first + 2], 9
    host.save(requests[0], 9)
    host.forget(requests[0])
    host.check_invariants(requests)
    assert host.num_free == 4 and host.end_plan() == ()
    host.save(requests[0], 9)
    host.forget(requests[0])
    host.save(requests[1], 9)
    assert sorted(page for page, _ in host.end_plan()) == [11, 12, 13] and host.num_free == 1
    host.check_invariants(requests)


def test_a_long_prefill_gives_way_twice_and_each_time_goes_on_where_it_was() -> None:
    sim = simulator(capacity=36, max_num_seqs=3, grace_tokens=0, budget=4)
    long = lasting("long", 90, 40)
    plans, stats = run(sim, [lasting("a", 4, 90), lasting("b", 10, 40), long])
    rows = [row for plan in plans for row in plan.rows if row.request is long]
    there = [max(row.kv_len for plan in plans[:i] for row in plan.rows if row.request is long)
             for i, plan in enumerate(plans) if "long" in plan.preempted]
    assert len(there) == 2 and 0 < there[0] < there[1] < 90
    assert [row.start for row in rows] == [0, *(row.kv_len for row in rows[:-1])] and stats.num_recomputed_tokens == 0
    assert stats.num_swapped_tokens == sum(there)


@pytest.mark.parametrize("cache", CACHES)
def test_completions_of_one_prompt(cache: str) -> None:
    """Each gives way alone, with the pages that it shares."""
    prompt = list(lasting("x", 20, 40).prompt_token_ids)
    for num_host_pages in (200, 20):
        sim = simulator(capacity=30, cache=cache, max_num_seqs=6, num_host_pages=num_host_pages, depth=1, tokens_per_page=0.1)
        alike = (make_request(f"r{i}", [*prompt, i], 40) for i in range(1, 50))  # each as if it had sampled another token
        _, stats = run(sim, [r for r in alike if len(expected_output(r)) == 40][:6])
        assert stats.num_preemptions > 0 and stats.num_swapped_tokens > 0


@pytest.mark.parametrize("depth", [0, 2])
def test_one_that_is_interrupted_goes_on_where_it_was(depth: int) -> None:
    sim = simulator(capacity=60, max_num_seqs=1, depth=depth, policy="preemptive", burst=2)
    low = make_request("low", list(lasting("x", 20, 60).prompt_token_ids), 60, priority=5)
    sim.add(low)
    for _ in range(8):
        sim.step()
    urgent = [make_request(f"u{i}", [3, 1 + i], 6, priority=-1, arrival=sim.clock.now) for i in range(2)]
    plans, stats = run(sim, urgent)
    check_output(low)
    assert low.num_preemptions == 1 and stats.num_swapped_tokens > 0 and stats.num_recomputed_tokens == 0
    assert sum(len(plan.page_saves) for plan in plans) == sum(len(plan.page_loads) for plan in plans) > 5


def test_a_plan_that_brings_one_back_saves_another_elsewhere() -> None:
    """Its saves come first, so the host pages that it loads are not for them."""
    sim = simulator(capacity=15, max_num_seqs=4, budget=20, policy="preemptive", length_buckets=(2, 8, 16), grace_tokens=4, depth=1,
                    num_host_pages=9, tokens_per_page=0.0)
    requests = []
    for i, (arrival, num_prompt, num_output, priority) in enumerate([(1, 17, 5, 20), (1, 24, 13, -2), (1, 2, 14, 5), (2, 41, 4, -20),
                                                                     (3, 27, 2, 4)]):
        request = lasting(f"r{i}", num_prompt, num_output)
        request.arrival_time, request.priority = arrival, priority
        requests.append(request)
    plans = []
    while len(plans) < 200 and (requests or sim.scheduler.has_unfinished):
        while requests and requests[0].arrival_time <= sim.num_steps:
            sim.add(requests.pop(0))
        plans.append(sim.step())
    (both,) = [plan for plan in plans if plan is not None and plan.page_loads and plan.page_saves]
    assert not {host_page for host_page, _ in both.page_loads} & {host_page for _, host_page in both.page_saves}
    sim.run_to_end()
    for request in sim.requests:
        check_output(request)


@pytest.mark.parametrize("num_host_pages", [4, 40, 1000])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_burst_in_half_of_its_pages_gives_the_undisturbed_outputs(policy: str, cache: str, num_host_pages: int) -> None:
    rng = random.Random(7)
    requests = [lasting(f"r{i}", rng.randrange(4, 30), rng.randrange(20, 50)) for i in range(12)]
    for i, request in enumerate(requests):
        request.priority = i % 3
    sim = simulator(capacity=sum(-(-r.max_total_len // 4) for r in requests) // 2, cache=cache, max_num_seqs=12, policy=policy, depth=1,
                    grace_tokens=8, num_host_pages=num_host_pages, length_buckets=(4, 16))
    _, stats = run(sim, requests)
    assert stats.num_preemptions > 0 and (stats.num_recomputed_tokens > 0 if num_host_pages == 4 else stats.num_swapped_tokens > 0)
    if num_host_pages == 1000 and cache == "none":
        assert stats.num_recomputed_tokens == 0
