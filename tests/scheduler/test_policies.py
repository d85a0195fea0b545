"""Policies and the queue that keeps their order."""

import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.scheduler.policies import POLICIES, WaitingQueue, fcfs, find_policy
from tests.scheduler.simulator import make_request


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"scheduling_policy = 'lifo': must be one of .*fcfs"):
        find_policy("lifo")


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_gives_a_key(name: str) -> None:
    key = find_policy(name)(make_request("a", [1], 1), 0.0)
    assert isinstance(key, tuple) and all(isinstance(part, int | float) for part in key)


def test_fcfs_follows_arrival_and_breaks_ties_by_order() -> None:
    queue = WaitingQueue(fcfs)
    for order, (name, arrival) in enumerate([("late", 3.0), ("tie 1", 1.0), ("tie 2", 1.0), ("first", 0.5)]):
        queue.push(make_request(name, [1], 1, arrival=arrival), order=order, now=9.0)
    assert [request.request_id for request in queue] == ["first", "tie 1", "tie 2", "late"] and len(queue) == 4
    assert [queue.pop().request_id for _ in range(4)] == ["first", "tie 1", "tie 2", "late"]
    assert queue.peek() is None and len(queue) == 0


def test_withdrawn_requests_are_skipped_and_do_not_pile_up() -> None:
    queue = WaitingQueue(fcfs)
    requests = [make_request(f"r{i}", [1], 1, arrival=i) for i in range(1000)]
    for order, request in enumerate(requests):
        queue.push(request, order=order, now=0.0)
    for request in requests[:500] + requests[501:]:
        queue.remove(request)
    assert queue.peek() is requests[500] and len(queue) == 1 and list(queue) == [requests[500]]
    assert len(queue._heap) < 100
    assert queue.find("r500") is requests[500] and queue.find("r3") is None
