"""Policies and the queue that keeps their order."""

import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.request import Request
from jaxinfer.scheduler import policies
from jaxinfer.scheduler.policies import POLICIES, PRIORITY_AGING_S, Policy, fcfs, find_policy, register_policy
from jaxinfer.scheduler.waiting import WaitingQueue
from tests.scheduler.simulator import Setup, Simulator, check_output, make_request


def take(queue: WaitingQueue) -> Request:
    request = queue.first()
    assert request is not None
    queue.remove(request)
    return request


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"scheduling_policy = 'lifo': must be one of .*fcfs"):
        find_policy("lifo")


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_gives_a_key(name: str) -> None:
    key = find_policy(name).key(make_request("a", [1], 1), 0.0)
    assert isinstance(key, tuple) and all(isinstance(part, int | float) for part in key)


def test_fcfs_follows_arrival_and_breaks_ties_by_order() -> None:
    queue = WaitingQueue(POLICIES["fcfs"])
    for order, (name, arrival) in enumerate([("late", 3.0), ("tie 1", 1.0), ("tie 2", 1.0), ("first", 0.5)]):
        queue.push(make_request(name, [1], 1, arrival=arrival), order=order, now=9.0)
    assert [request.request_id for request in queue] == ["first", "tie 1", "tie 2", "late"] and len(queue) == 4
    assert [take(queue).request_id for _ in range(4)] == ["first", "tie 1", "tie 2", "late"]
    assert queue.first() is None and len(queue) == 0


def test_withdrawn_requests_are_skipped_and_do_not_pile_up() -> None:
    queue = WaitingQueue(POLICIES["fcfs"])
    requests = [make_request(f"r{i}", [1], 1, arrival=i) for i in range(1000)]
    for order, request in enumerate(requests):
        queue.push(request, order=order, now=0.0)
    for request in requests[:500] + requests[501:]:
        queue.remove(request)
    assert queue.first() is requests[500] and len(queue) == 1 and list(queue) == [requests[500]]
    assert len(queue._heaps[0]) < 100
    assert queue.find("r500") is requests[500] and queue.find("r3") is None


# What each policy promises.

class Load:
    """A simulated engine with a stream of requests that its policy prefers to one victim."""

    def __init__(self, policy: str, *, capacity: int = 16, max_num_seqs: int = 2) -> None:
        self.sim = Simulator(Setup(max_num_seqs=max_num_seqs, max_num_batched_tokens=16, capacity=capacity, page_size=4, policy=policy))
        self.num_added = 0

    def add(self, prompt: list[int], max_tokens: int, *, priority: int = 0) -> Request:
        request = make_request(f"r{self.num_added}", prompt, max_tokens, arrival=self.sim.clock.now, priority=priority)
        self.num_added += 1
        self.sim.add(request)
        return request


SECONDS_AHEAD = {  # by how many seconds the preferred stream below is ahead of the victim
    "fcfs": 0.0, "priority": 3 * PRIORITY_AGING_S, "preemptive": 3 * PRIORITY_AGING_S,
    "shortest_prompt": 23.0, "longest_cached_prefix": 20.0}


def run_behind_preferred(policy: str, num_behind: int) -> tuple[list[Request], int]:
    """The victims, and the step at which all had ended, of a load that the policy prefers to them, more than can be served."""
    load = Load(policy)
    preferred = [5] * 21 if policy == "longest_cached_prefix" else [5]
    load.add(preferred, 4)
    victims = []
    for step in range(400):
        if step == 5:
            victims = [load.add([9 + i] + [7] * 23, 10, priority=3) for i in range(1 + num_behind)]
        load.add(preferred, 3)
        load.sim.step()
        if victims and all(r.is_finished for r in victims):
            load.sim.run_to_end()
            for request in victims:
                check_output(request)
            return victims, step
    return victims, 400


@pytest.mark.parametrize("num_behind", [0, 3])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_nobody_starves_however_many_preferred_requests_come(policy: str, num_behind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "AGING_TOKENS_PER_S", 1.0)  # a step is a second here
    monkeypatch.setitem(POLICIES, "longest_cached_prefix", Policy(key=fcfs, cached_token_s=1.0))
    victims, step = run_behind_preferred(policy, num_behind)
    # The queue as the victims came, those that came while they aged, and the victims' own time, at two steps a request at least.
    assert step <= 5 + 3 * (5 + SECONDS_AHEAD[policy]) + 40 * len(victims), [r.num_preemptions for r in victims]


def test_that_load_does_starve_those_whose_waiting_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "POLICIES", dict(POLICIES))
    register_policy("classes", lambda request, now: (request.priority, request.arrival_time), uses_priority=True, interrupts=True)
    victims, step = run_behind_preferred("classes", 0)
    assert step == 400 and not victims[0].is_finished


@pytest.mark.parametrize("policy", ["priority", "preemptive"])
def test_smaller_priorities_come_first_and_waiting_makes_up_for_a_class(policy: str) -> None:
    queue = WaitingQueue(POLICIES[policy])
    for order, (name, number, arrival) in enumerate([("low", 2, 0.0), ("high", 0, 5.0), ("mid", 1, 5.0), ("late high", 0, 21.0)]):
        queue.push(make_request(name, [1], 1, arrival=arrival, priority=number), order=order, now=arrival)
    assert PRIORITY_AGING_S == 10 and [request.request_id for request in queue] == ["high", "mid", "low", "late high"]


def test_short_prompts_come_first() -> None:
    queue = WaitingQueue(POLICIES["shortest_prompt"])
    for order, (name, length, arrival) in enumerate([("long", 1024, 0.0), ("short", 8, 1.0), ("late short", 8, 4.5)]):
        queue.push(make_request(name, [1] * length, 1, arrival=arrival), order=order, now=arrival)
    assert [request.request_id for request in queue] == ["short", "long", "late short"]


def test_those_with_a_cached_prefix_come_first_within_the_lookahead() -> None:
    cached = {"r3": 200, "r5": 600, "r20": 9000}
    queue = WaitingQueue(POLICIES["longest_cached_prefix"], num_cached=lambda request: cached.get(request.request_id, 0))
    for i in range(30):
        queue.push(make_request(f"r{i}", [1], 1, arrival=i / 4), order=i, now=i / 4)
    assert [take(queue).request_id for _ in range(6)] == ["r5", "r3", "r0", "r1", "r2", "r20"]  # r20 comes into sight with the fifth
    request = queue.first()
    assert request is not None and request.request_id == "r4" and len(queue) == 24


def test_a_request_withdrawn_and_queued_again_stands_in_the_queue_once() -> None:
    queue = WaitingQueue(POLICIES["fcfs"])
    first, second = make_request("first", [1], 1, arrival=1), make_request("second", [1], 1, arrival=2)
    for order, request in enumerate((first, second)):
        queue.push(request, order=order, now=0.0)
    queue.remove(second)
    queue.push(second, order=1, now=0.0)
    assert [take(queue), take(queue)] == [first, second] and queue.first() is None


def test_queues_are_apart_and_the_first_of_several_is_found() -> None:
    queue = WaitingQueue(POLICIES["fcfs"], num_buckets=3)
    for order, (name, arrival, bucket) in enumerate([("a", 3.0, 0), ("b", 1.0, 2), ("c", 2.0, 0)]):
        queue.push(make_request(name, [1], 1, arrival=arrival), order=order, now=0.0, bucket=bucket)
    names = [request.request_id if request else None for request in (queue.first({0, 1}), queue.first({0, 2}), queue.first({1}))]
    assert names == ["c", "b", None] and [request.request_id for request in queue] == ["b", "c", "a"]


def test_a_policy_of_ones_own_is_used_and_its_name_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "POLICIES", dict(POLICIES))
    register_policy("most tokens first", lambda request, now: (-len(request.prompt_token_ids),))
    with pytest.raises(ConfigError, match=r"scheduling policy 'fcfs' exists already: choose another name than fcfs, "):
        register_policy("fcfs", lambda request, now: (0.0,))
    load = Load("most tokens first", max_num_seqs=1)
    for length in (3, 9, 5):
        load.add([length] * length, 2)
    load.sim.run_to_end()
    assert [len(request.prompt_token_ids) for request in load.sim.first_rows] == [9, 5, 3]


# Interruptions.

@pytest.mark.parametrize("lacking", ["slots", "pages"])
def test_a_higher_class_interrupts_a_lower_one_at_once(lacking: str) -> None:
    load = Load("preemptive", **({"max_num_seqs": 2} if lacking == "slots" else {"capacity": 8, "max_num_seqs": 4}))
    low = [load.add([1 + i] * 8, 9, priority=2) for i in range(2)]
    for _ in range(3):
        load.sim.step()
    assert load.sim.scheduler.num_running == 2
    high = load.add([8] * 16, 6, priority=0)
    plan = load.sim.step()
    assert plan is not None and plan.preempted and high in [row.request for row in plan.rows]
    assert sum(r.num_preemptions for r in low) == len(plan.preempted)
    load.sim.run_to_end()
    for request in (*low, high):
        check_output(request)


@pytest.mark.parametrize(("policy", "number", "age"), [("preemptive", 2, 0.0), ("preemptive", 1, 25.0), ("priority", 0, 0.0)])
def test_nobody_is_interrupted_by_an_equal_or_by_one_it_has_outlived_nor_without_that_policy(policy: str, number: int, age: float) -> None:
    load = Load(policy)
    low = [load.add([1 + i] * 8, 9, priority=2) for i in range(2)]
    load.sim.step()
    load.sim.clock.now += age
    load.add([8] * 16, 6, priority=number)
    load.sim.run_to_end()
    assert all(r.num_preemptions == 0 for r in low)


def test_nobody_is_interrupted_where_it_would_not_make_room() -> None:
    load = Load("preemptive", capacity=8, max_num_seqs=3)
    first = load.add([1] * 16, 9, priority=0)
    low = load.add([2] * 4, 9, priority=2)
    load.sim.step()
    load.sim.step()
    assert load.sim.scheduler.num_running == 2
    load.add([3] * 20, 4, priority=1)  # 5 pages: low's and the free ones are not enough
    load.sim.step()
    assert low.num_preemptions == first.num_preemptions == 0
    load.sim.run_to_end()


def test_an_interrupting_request_comes_before_chunks_of_those_it_outranks() -> None:
    load = Load("preemptive", capacity=40, max_num_seqs=4)
    long = load.add([1] * 60, 2, priority=1)
    load.sim.step()
    high = load.add([2] * 20, 2, priority=0)
    plan = load.sim.step()
    assert plan is not None and [(row.request, row.num_tokens) for row in plan.rows] == [(high, 16)]
    plan = load.sim.step()
    assert plan is not None and [(row.request, row.num_tokens) for row in plan.rows] == [(high, 4), (long, 12)]
    load.sim.run_to_end()
