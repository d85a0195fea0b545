"""The scheduler's decisions, one at a time, on the simulated engine."""

import subprocess
import sys

import pytest

from jaxinfer.errors import ConfigError, RequestError
from jaxinfer.request import FinishReason, Request, RequestStatus
from jaxinfer.scheduler import HashedPrefixCache, HostPages, NullPrefixCache, PageAllocator, SchedulePlan, Scheduler
from jaxinfer.scheduler.policies import POLICIES
from jaxinfer.scheduler.running import RunningSet
from tests.scheduler.simulator import Setup, Simulator, check_output, make_request


def simulator(*, max_num_seqs: int = 4, budget: int = 16, capacity: int = 32, page_size: int = 4, depth: int = 0,
              max_prefill_rows: int | None = None, cached: bool = True) -> Simulator:
    setup = Setup(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, capacity=capacity, page_size=page_size, depth=depth,
                  max_prefill_rows=max_prefill_rows)
    return Simulator(setup, HashedPrefixCache if cached else lambda pages: NullPrefixCache())


def long_lived(name: str, num_prompt: int, max_tokens: int, *, first: int, arrival: float = 0.0) -> Request:
    """A request that does not meet the stop token, with a prompt that starts as no other's of another `first`."""
    for seed in range(1000):
        request = make_request(name, [first, *(1 + (seed + i) % 49 for i in range(num_prompt - 1))], max_tokens, arrival=arrival)
        probe = Simulator(Setup(max_num_seqs=1, max_num_batched_tokens=64, capacity=64, page_size=4))
        probe.add(request)
        if 0 not in probe.references[name][0][num_prompt:]:
            return make_request(name, list(request.prompt_token_ids), max_tokens, arrival=arrival)
    raise AssertionError("no such prompt")


def shape(plan: SchedulePlan | None) -> list[tuple[str, int, int, bool]]:
    """(id, start, num_tokens, samples) of each row."""
    assert plan is not None
    return [(row.request.request_id, row.start, row.num_tokens, row.samples) for row in plan.rows]


def test_decodes_come_first_then_chunks_then_admissions_within_the_budget() -> None:
    sim = simulator(budget=10)
    for name, length, first in (("a", 4, 1), ("b", 15, 2), ("c", 3, 3)):
        sim.add(long_lived(name, length, 5, first=first))
    assert shape(sim.step()) == [("a", 0, 4, True), ("b", 0, 6, False)]
    assert shape(sim.step()) == [("a", 4, 1, True), ("b", 6, 9, True)]
    plan = sim.step()
    assert shape(plan) == [("a", 5, 1, True), ("b", 15, 1, True), ("c", 0, 3, True)]
    assert plan is not None and (plan.num_tokens, plan.num_prefill_tokens, plan.is_decode_only) == (5, 3, False)
    plan = sim.step()
    assert plan is not None and plan.is_decode_only and plan.num_prefill_tokens == 0
    sim.run_to_end()


def test_max_prefill_rows_bounds_the_chunks_of_a_step() -> None:
    sim = simulator(max_prefill_rows=1)
    for index in range(3):
        sim.add(long_lived(f"r{index}", 3, 4, first=index + 1))
    assert [len(plan.rows) for plan in (sim.step(), sim.step(), sim.step()) if plan] == [1, 2, 3]
    sim.run_to_end()


def test_a_step_ahead_takes_its_input_from_the_device_and_stops_at_the_limit() -> None:
    sim = simulator(depth=3)
    request = long_lived("a", 3, 3, first=1)
    sim.add(request)
    plans = [sim.step() for _ in range(3)]
    assert [shape(plan) for plan in plans] == [[("a", 0, 3, True)], [("a", 3, 1, True)], [("a", 4, 1, True)]]
    rows = [plan.rows[0] for plan in plans if plan]
    assert [(row.from_device, len(row.token_ids), row.kv_len) for row in rows] == [(False, 3, 3), (True, 0, 4), (True, 0, 5)]
    assert request.num_in_flight == 3 and request.output_token_ids == []
    assert sim.scheduler.next() is None  # a fourth token would pass max_tokens
    sim.run_to_end()
    check_output(request)


def test_input_is_sent_by_the_host_when_nothing_is_in_flight() -> None:
    sim = simulator(depth=0)
    sim.add(long_lived("a", 3, 4, first=1))
    sim.step()
    plan = sim.step()
    assert plan is not None and not plan.rows[0].from_device and plan.rows[0].token_ids == (plan.rows[0].request.output_token_ids[0],)


def test_the_token_after_a_stop_is_dropped() -> None:
    sim = simulator(depth=1)
    request = long_lived("a", 3, 9, first=1)
    sim.add(request)
    first, second = sim.scheduler.next(), sim.scheduler.next()
    assert first is not None and second is not None
    sim.scheduler.apply(first, [17], [FinishReason.STOP])
    assert request.is_finished and sim.pages.num_free == 32
    sim.scheduler.apply(second, [18], [None])
    assert request.output_token_ids == [17] and request.num_in_flight == 0
    assert (request.first_token_time, request.finish_time) == (sim.clock.now, sim.clock.now)


def test_plans_are_applied_once_and_in_order() -> None:
    sim = simulator()
    sim.add(long_lived("a", 3, 9, first=1))
    first, second = sim.scheduler.next(), sim.scheduler.next()
    assert first is not None and second is not None
    with pytest.raises(AssertionError, match="order of next"):
        sim.scheduler.apply(second, [1], [None])
    sim.scheduler.apply(first, [1], [None])
    with pytest.raises(AssertionError, match="order of next"):
        sim.scheduler.apply(first, [1], [None])


def test_a_full_request_must_be_finished() -> None:
    sim = simulator()
    sim.add(make_request("a", [1, 2], 1))
    plan = sim.scheduler.next()
    assert plan is not None
    with pytest.raises(AssertionError, match="was not finished"):
        sim.scheduler.apply(plan, [1], [None])


# Pages and preemption.

@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("cached", [True, False])
def test_the_latest_is_preempted_and_computes_the_same_tokens_again(cached: bool, depth: int) -> None:
    sim = simulator(capacity=8, max_num_seqs=2, depth=depth, cached=cached)
    old, new = long_lived("old", 8, 22, first=1, arrival=1), long_lived("new", 6, 12, first=2, arrival=2)
    sim.add(old)
    sim.add(new)
    preempted: list[str] = []
    while sim.scheduler.has_unfinished or sim.in_flight:
        plan = sim.step()
        preempted += plan.preempted if plan else ()
    assert set(preempted) == {"new"} and old.num_preemptions == 0 and new.num_preemptions == len(preempted)
    assert sim.scheduler.stats().num_preemptions == len(preempted)
    check_output(old)
    check_output(new)


def test_a_preempted_request_waits_for_its_tokens_in_flight_and_finds_its_pages_again() -> None:
    sim = simulator(capacity=9, max_num_seqs=2, budget=32)
    old, new = long_lived("old", 12, 20, first=1, arrival=1), long_lived("new", 12, 9, first=2, arrival=2)
    sim.add(old)
    sim.add(new)
    plans: list[SchedulePlan] = []
    while not plans or "new" not in plans[-1].preempted:  # nothing is applied meanwhile
        plan = sim.scheduler.next()
        assert plan is not None
        plans.append(plan)
    assert new.status is RequestStatus.WAITING and new.num_in_flight == 5 and new.slot is None  # positions 12 .. 16
    *read, last = plans
    for plan in read[:-1]:
        sim.scheduler.apply(plan, [9] * len(plan.rows), [None] * len(plan.rows))
    assert new.num_in_flight == 0 and new.output_token_ids == [9] * 5  # a preempted request takes its tokens
    sim.scheduler.apply(read[-1], [9], [FinishReason.STOP])
    resumed = sim.scheduler.next()
    assert shape(resumed) == [("new", 12, 5, True)] and new.num_cached_tokens == 0
    assert sim.scheduler.stats().num_recomputed_tokens == 5
    sim.scheduler.apply(last, [9], [None])  # dropped: old has finished
    assert len(old.output_token_ids) == len(read)


@pytest.mark.parametrize("num_in_flight", [0, 1])
def test_nobody_is_admitted_before_a_preempted_request_that_waits_for_tokens(num_in_flight: int) -> None:
    sim = simulator()
    request = long_lived("a", 4, 4, first=1)
    sim.add(request)
    sim.add(long_lived("b", 4, 4, first=2))
    request.num_in_flight = num_in_flight
    plan = sim.scheduler.next()
    assert (plan is None) == (num_in_flight == 1)


def test_the_latest_waits_rather_than_take_pages_from_those_before_it() -> None:
    sim = simulator(capacity=7, max_num_seqs=2, budget=32, cached=False)
    old, new = long_lived("old", 9, 7, first=1), long_lived("new", 8, 9, first=2)
    sim.add(old)
    sim.add(new)
    rows = []
    while sim.scheduler.has_unfinished:
        rows.append([name for name, *_ in shape(sim.step())])
    assert rows == [["old", "new"]] * 5 + [["old"]] * 2 + [["new"]] * 4
    assert new.num_preemptions == old.num_preemptions == 0
    check_output(new)


def test_victims_are_the_latest_without_a_row() -> None:
    pages = PageAllocator(9, 4)
    running = RunningSet(max_num_seqs=3, pages=pages, prefix_cache=NullPrefixCache(), host_pages=HostPages(0), policy=POLICIES["fcfs"],
                         grace_tokens=0, cost_aware=False)
    a, b, c = (make_request(name, [1] * 4, 4) for name in "abc")
    for request in (a, b, c):
        running.start(request, NullPrefixCache().match(request))
    assert running.victim(set(), after=a) is c and running.victim({"c"}, after=a) is b
    assert running.victim({"b", "c"}, after=a) is None and running.victim(set(), after=c) is None


def test_admission_needs_room_for_the_whole_prompt_and_a_page_for_each_running_request() -> None:
    sim = simulator(capacity=6, max_num_seqs=3, budget=8)
    sim.add(long_lived("a", 8, 3, first=1, arrival=1))
    sim.step()
    sim.add(long_lived("b", 12, 2, first=2, arrival=2))  # 3 pages; 3 are free when "a" has its next, one of them reserved
    sim.add(long_lived("c", 2, 2, first=3, arrival=3))   # would fit, but does not overtake
    assert shape(sim.step()) == [("a", 8, 1, True)] and sim.scheduler.num_waiting == 2
    sim.run_to_end()
    assert [request.request_id for request in sim.first_rows] == ["a", "b", "c"]


def test_cached_pages_without_owner_count_as_room_only_once() -> None:
    sim = simulator(capacity=6, max_num_seqs=2, budget=24)
    first = long_lived("first", 16, 2, first=1, arrival=1)
    sim.add(first)
    sim.run_to_end()
    sim.add(long_lived("other", 9, 3, first=2, arrival=2))  # 3 of 6 pages, evicting one of first's four
    sim.step()
    sim.add(make_request("again", list(first.prompt_token_ids), 2, arrival=3))  # 4 pages, of which the pool has 3 cached
    assert [name for name, *_ in shape(sim.step())] == ["other"] and sim.scheduler.num_running == 1
    sim.run_to_end()


def test_a_reused_slot_rewrites_only_what_is_read() -> None:
    sim = simulator(max_num_seqs=1)
    sim.add(long_lived("long", 14, 1, first=1))
    plan = sim.step()
    assert plan is not None and [update[:2] for update in plan.page_updates] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    sim.add(long_lived("short", 5, 5, first=2))
    updates = []
    while sim.scheduler.has_unfinished:
        plan = sim.step()
        updates.append([update[:2] for update in plan.page_updates] if plan else [])
    assert updates == [[(0, 0), (0, 1)], [], [], [], [(0, 2)]]


# Prefix sharing.

def test_a_page_is_shared_from_the_step_after_the_one_that_fills_it() -> None:
    sim = simulator(depth=1, budget=64)
    prompt = list(long_lived("a", 10, 6, first=1).prompt_token_ids)
    for name in ("a", "b"):
        sim.add(make_request(name, prompt, 6))
    plan = sim.step()
    assert shape(plan) == [("a", 0, 10, True)]  # not within one step
    sim.add(make_request("c", prompt, 6))
    plan = sim.step()  # before anything was applied
    assert shape(plan)[-2:] == [("b", 8, 2, True), ("c", 8, 2, True)]
    assert [entry.owners for entry in sim.scheduler.page_entries(plan.rows[-1].request)] == [3, 3, 1]
    assert plan.rows[-1].request.num_cached_tokens == 8
    sim.run_to_end()


def test_a_whole_prompt_hit_computes_its_last_page_anew() -> None:
    sim = simulator()
    prompt = list(long_lived("a", 8, 3, first=1).prompt_token_ids)
    sim.add(make_request("a", prompt, 3))
    sim.run_to_end()
    sim.add(make_request("b", prompt, 3))
    assert shape(sim.step()) == [("b", 4, 4, True)]
    sim.run_to_end()


def test_many_requests_of_one_prefix_hold_its_pages_once() -> None:
    sim = simulator(max_num_seqs=33, budget=256, capacity=200)
    prefix = [1 + i % 7 for i in range(100)]
    for index in range(33):
        sim.add(make_request(f"r{index}", [*prefix, 20 + index % 29, index % 3 + 1], 12, arrival=index))
    most = 0
    while sim.scheduler.has_unfinished:
        sim.step()
        most = max(most, sim.pages.capacity - sim.pages.num_free)
    assert most <= 25 + 33 * 4  # without sharing: 33 * 26 at least
    stats = sim.scheduler.stats()
    assert stats.num_prompt_tokens == 33 * 102 and stats.num_cached_tokens == 32 * 100 and stats.num_preemptions == 0


# Ends of requests.

@pytest.mark.parametrize("when", ["waiting", "running", "in flight", "preempted"])
def test_abort(when: str) -> None:
    sim = simulator(depth=1, capacity=8, max_num_seqs=2)
    request = long_lived("a", 8, 12, first=1, arrival=2)
    if when == "preempted":
        sim.add(long_lived("old", 8, 20, first=2, arrival=1))
    sim.add(request)
    for _ in range({"waiting": 0, "running": 3, "in flight": 1}.get(when, 0)):
        sim.step()
    while when == "preempted" and request.num_preemptions == 0:
        assert sim.step() is not None, "was never preempted"
    assert sim.scheduler.abort("a") and not sim.scheduler.abort("a") and not sim.scheduler.abort("unknown")
    assert request.finish_reason is FinishReason.ABORT and request.finish_time is not None
    sim.scheduler.check_invariants()
    sim.run_to_end()
    check_output(request)


def test_an_error_drops_the_token_and_keeps_the_pages_from_others() -> None:
    sim = simulator()
    sim.add(make_request("bad", [1] * 9, 4))
    plan = sim.scheduler.next()
    assert plan is not None and sim.pages.retained_pages()
    bad = plan.rows[0].request
    sim.scheduler.apply(plan, [3], [FinishReason.ERROR])
    assert bad.finish_reason is FinishReason.ERROR and bad.output_token_ids == [] and not sim.pages.retained_pages()
    sim.add(make_request("good", [1] * 9, 4))
    assert shape(sim.step()) == [("good", 0, 9, True)]


def test_an_error_keeps_the_page_that_its_own_step_filled_from_others() -> None:
    sim = simulator()
    sim.add(long_lived("bad", 3, 4, first=1))
    sim.step()
    plan = sim.scheduler.next()
    assert plan is not None and plan.rows[0].kv_len == 4
    sim.scheduler.apply(plan, [3], [FinishReason.ERROR])
    assert not sim.pages.retained_pages() and sim.pages.num_free == sim.pages.capacity


def test_an_id_can_be_used_again_after_its_end_only() -> None:
    sim = simulator()
    sim.add(make_request("a", [1, 2], 2))
    with pytest.raises(RequestError, match="'a'.*is being served"):
        sim.add(make_request("a", [1, 2], 2))
    sim.run_to_end()
    sim.add(make_request("a", [1, 2], 2))
    sim.run_to_end()


@pytest.mark.parametrize(("num_prompt", "max_tokens", "message"), [
    (0, 3, "prompt is empty"),
    (64, 1, "may take 65 tokens, max_model_len is 64"),
    (60, 9, r"may take 69 tokens, max_model_len is 64"),
    (20, 22, r"20 prompt and 22 output tokens need 11 pages of 4 tokens \(41 / 4, rounded up.*the pool has 10; .*lower max_tokens"),
])
def test_what_never_fits_is_refused_with_the_arithmetic(num_prompt: int, max_tokens: int, message: str) -> None:
    pages = PageAllocator(11, 4)
    scheduler = Scheduler(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=64, pages=pages, prefix_cache=NullPrefixCache())
    with pytest.raises(RequestError, match=message):
        scheduler.add(make_request("a", [1] * num_prompt, max_tokens))
    assert not scheduler.has_unfinished
    truncated = make_request("c", [1] * 9, 3)
    truncated.max_total_len = 9
    with pytest.raises(RequestError, match="the prompt has 9 tokens and prompt plus output may have 9, which leaves no room for output"):
        scheduler.add(truncated)
    scheduler.add(make_request("b", [1] * 20, 21))  # 41 tokens, of which the last is not stored: 10 pages


@pytest.mark.parametrize(("settings", "message"), [
    ({"max_num_seqs": 0}, "max_num_seqs = 0: must be >= 1"),
    ({"max_prefill_rows": 0}, "max_prefill_rows = 0"),
    ({"max_num_batched_tokens": 3}, "max_num_batched_tokens = 3 is less than max_num_seqs = 4"),
    ({"policy": "lifo"}, "scheduling_policy = 'lifo'"),
])
def test_impossible_limits_are_refused(settings: dict, message: str) -> None:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 64} | settings
    with pytest.raises(ConfigError, match=message):
        Scheduler(**limits, pages=PageAllocator(11, 4), prefix_cache=NullPrefixCache())


# For people.

def test_dump_and_counters_show_the_state() -> None:
    sim = simulator(max_num_seqs=1)
    request = long_lived("a", 6, 4, first=1)
    sim.add(request)
    sim.add(long_lived("b", 3, 4, first=2))
    sim.step()
    text = sim.scheduler.dump()
    assert text.startswith("1 running, 1 waiting, 0 plans in flight, 0 preemptions\nwaiting 'b': 3 tokens known + 0 in flight")
    assert "running 'a': slot 0, 7 tokens known + 0 in flight, 6 computed, at most 10\n  pages 1:4:owned 2:2:owned" in text
    stats = sim.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_pages, stats.num_prompt_tokens) == (1, 1, 30, 6)


def test_the_scheduler_imports_neither_jax_nor_numpy() -> None:
    code = "import sys, jaxinfer.scheduler; print([m for m in ('jax', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
