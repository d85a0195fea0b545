"""The waiting requests: one queue a length bucket, each in the policy's order. Admits nobody itself. Never imports jax."""

import heapq
import itertools
from collections.abc import Callable, Collection, Iterator

from jaxinfer.request import Request
from jaxinfer.scheduler.policies import Policy

_LOOKAHEAD = 16  # requests of a bucket that compete by what the prefix cache has for them
_TRUSTED_FOR = 16  # times that the winner is asked for before they compete again, where none is taken

_Item = tuple[tuple[float, ...], int, int, Request]  # key, order of arrival, number of the push, request


class WaitingQueue:
    """Waiting requests in order. Adding and taking cost O(log n), withdrawing O(1) on average.

    Args:
      policy: gives the order.
      num_buckets: queues.
      num_cached: tokens that the prefix cache has for a request; asked only under policies that look at them.
    """

    def __init__(self, policy: Policy, *, num_buckets: int = 1, num_cached: Callable[[Request], int] = lambda request: 0) -> None:
        self._policy = policy
        self._num_cached = num_cached
        self._heaps: list[list[_Item]] = [[] for _ in range(num_buckets)]
        self._waiting: dict[str, tuple[_Item, int]] = {}  # id -> (item, bucket); items of the heaps that are not here were withdrawn
        self._pushes = itertools.count()
        self._aside: dict[str, _Item] = {}  # in no heap until they are brought back
        self._winners: dict[int, tuple[_Item, int]] = {}  # bucket -> (winner by cached tokens, how often it may yet be asked for)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """The requests in the order of their keys; for people and tests, it sorts."""
        return (item[-1] for item in sorted(item for item, _ in self._waiting.values()))

    def find(self, request_id: str) -> Request | None:
        """The waiting request of that id."""
        entry = self._waiting.get(request_id)
        return None if entry is None else entry[0][-1]

    def bucket(self, request: Request) -> int:
        """The bucket that a waiting request was put into."""
        return self._waiting[request.request_id][1]

    def push(self, request: Request, *, order: int, now: float, bucket: int = 0) -> None:
        """Adds a request; `order` is its number of arrival, which breaks ties."""
        assert request.request_id not in self._waiting, f"request {request.request_id!r} waits already"
        item = (self._policy.key(request, now), order, next(self._pushes), request)
        self._waiting[request.request_id] = item, bucket
        heapq.heappush(self._heaps[bucket], item)

    def first(self, buckets: Collection[int] = (0,)) -> Request | None:
        """The request to admit next among those of some buckets, left in the queue."""
        heads = [head for head in map(self._head, buckets) if head is not None]
        return min(heads)[-1] if heads else None

    def remove(self, request: Request) -> None:
        """Takes a request from wherever it stands."""
        item, bucket = self._waiting.pop(request.request_id)
        heap = self._heaps[bucket]
        self._winners.pop(bucket, None)
        self._aside.pop(request.request_id, None)
        if heap and heap[0] is item:
            heapq.heappop(heap)
        elif len(heap) > 2 * len(self._waiting) + 64:
            self._heaps[bucket] = [item for item in heap if self._is_waiting(item)]
            heapq.heapify(self._heaps[bucket])

    def set_aside(self, request: Request) -> None:
        """Hides a waiting request from first() until bring_back(); it keeps its place."""
        (key, order, _, _), bucket = self._waiting[request.request_id]
        item = key, order, next(self._pushes), request  # so that the one in the heap counts as withdrawn
        self._waiting[request.request_id] = item, bucket
        self._aside[request.request_id] = item
        self._winners.pop(bucket, None)

    def bring_back(self, request: Request) -> None:
        """Ends set_aside(); of no effect on one that waits no longer, or never was aside."""
        item = self._aside.pop(request.request_id, None)
        if item is not None:
            bucket = self.bucket(request)
            heapq.heappush(self._heaps[bucket], item)
            self._winners.pop(bucket, None)

    def _head(self, bucket: int) -> _Item | None:
        heap = self._heaps[bucket]
        while heap and not self._is_waiting(heap[0]):
            heapq.heappop(heap)
        if not heap:
            return None
        if self._policy.cached_token_s == 0:
            return heap[0]
        winner, times = self._winners.get(bucket) or (self._best_cached(heap), _TRUSTED_FOR)
        self._winners[bucket] = winner, times - 1
        if times == 1:
            del self._winners[bucket]
        return winner

    def _best_cached(self, heap: list[_Item]) -> _Item:
        """Of the first few, the one that comes first when its cached tokens are taken into account."""
        def advanced(item: _Item) -> _Item:
            (seconds, *rest), order, number, request = item
            return (seconds - self._policy.cached_token_s * self._num_cached(request), *rest), order, number, request

        return min(map(advanced, heapq.nsmallest(_LOOKAHEAD, filter(self._is_waiting, heap))))

    def _is_waiting(self, item: _Item) -> bool:
        entry = self._waiting.get(item[-1].request_id)
        return entry is not None and entry[0] is item
