"""In which order waiting requests are admitted: one function a policy, and the queue that keeps the order.

Decides nothing else: who is admitted when, and who gives way, is the scheduler's. Plain Python: never imports jax.
"""

import heapq
from collections.abc import Callable, Iterator

from jaxinfer.errors import ConfigError
from jaxinfer.request import Request

PolicyKey = Callable[[Request, float], tuple[float, ...]]
"""(request, seconds on the monotonic clock) -> sort key; the smallest is admitted first.

Taken when the request enters the queue, new or preempted, and kept while it waits. Ties go to the request added first.
"""


def fcfs(request: Request, now: float) -> tuple[float, ...]:
    """First come, first served. A preempted request keeps its arrival time, so it goes ahead of all later ones."""
    return (request.arrival_time,)


POLICIES: dict[str, PolicyKey] = {"fcfs": fcfs}


def find_policy(name: str) -> PolicyKey:
    """The policy of that name.

    Raises:
      ConfigError: no such policy.
    """
    if name not in POLICIES:
        raise ConfigError(f"scheduling_policy = {name!r}: must be one of {', '.join(sorted(POLICIES))}.")
    return POLICIES[name]


class WaitingQueue:
    """Waiting requests in a policy's order. Adding and taking cost O(log n), withdrawing O(1) on average."""

    def __init__(self, key: PolicyKey) -> None:
        self._key = key
        self._heap: list[tuple[tuple[float, ...], int, Request]] = []
        self._waiting: dict[str, Request] = {}  # entries of the heap that are not here were withdrawn

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """The requests in order; for people and tests, it sorts."""
        return (request for _, _, request in sorted(self._heap, key=lambda item: item[:2]) if self._is_waiting(request))

    def find(self, request_id: str) -> Request | None:
        """The waiting request of that id."""
        return self._waiting.get(request_id)

    def push(self, request: Request, *, order: int, now: float) -> None:
        """Adds a request; `order` is its number of arrival, which breaks ties."""
        assert request.request_id not in self._waiting, f"request {request.request_id!r} waits already"
        self._waiting[request.request_id] = request
        heapq.heappush(self._heap, (self._key(request, now), order, request))

    def peek(self) -> Request | None:
        """The request to admit next, left in the queue."""
        while self._heap:
            request = self._heap[0][2]
            if self._is_waiting(request):
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Request:
        """Takes the request that peek() shows."""
        request = self.peek()
        assert request is not None, "the queue is empty"
        heapq.heappop(self._heap)
        del self._waiting[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        """Withdraws a request from wherever it stands."""
        del self._waiting[request.request_id]
        if len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [item for item in self._heap if self._is_waiting(item[2])]
            heapq.heapify(self._heap)

    def _is_waiting(self, request: Request) -> bool:
        return self._waiting.get(request.request_id) is request
