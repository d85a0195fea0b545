"""The running requests and what they hold: a slot each, and pages. Keeps the books; decides nothing. Never imports jax.

A slot is a row of the device's page table. When it passes to another request, that request's entries are written over the old
ones only as far as it reads; kv_lens bounds every read, so what lies beyond is never looked at.
"""

from collections import Counter

from jaxinfer.request import Request, RequestStatus
from jaxinfer.scheduler.host_pages import HostPages
from jaxinfer.scheduler.pages import PageAllocator, PageEntry, PageShortage
from jaxinfer.scheduler.plan import PageCopy, PageLoad, PageUpdate
from jaxinfer.scheduler.policies import Policy
from jaxinfer.scheduler.prefix_cache import PrefixCache, PrefixHit


class RunningSet:
    """Running requests by rank: in order of admission, or of the policy's keys where it lets requests interrupt others.

    Args:
      max_num_seqs: slots; numbered from 0.
      pages: the pool that the requests' pages come from.
      prefix_cache: told when a request gives up its pages.
      host_pages: say what giving way costs where pages can be moved.
      policy: which requests give way first.
      grace_tokens: tokens for which a request admitted again is spared, while there are others.
      cost_aware: of those that may give way, the one that loses least; False: the last one.
    """

    def __init__(self, *, max_num_seqs: int, pages: PageAllocator, prefix_cache: PrefixCache, host_pages: HostPages, policy: Policy,
                 grace_tokens: int, cost_aware: bool) -> None:
        self.requests: dict[str, Request] = {}
        """By request id, the first in rank first. Changed by start() and release() only."""
        self._policy = policy
        self._grace_tokens = grace_tokens
        self._cost_aware = cost_aware
        self._spared_until: dict[str, int] = {}  # known tokens at which a request admitted again may give way like others
        self._max_num_seqs = max_num_seqs
        self._pages = pages
        self._prefix_cache = prefix_cache
        self._host_pages = host_pages
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def in_prefill(self) -> list[Request]:
        """Running requests that have several tokens left to compute, by rank."""
        return [r for r in self.requests.values() if r.num_tokens + r.num_in_flight - r.num_computed_tokens > 1]

    def start(self, request: Request, hit: PrefixHit) -> tuple[list[PageUpdate], list[PageCopy], list[PageLoad]]:
        """Gives a waiting request a slot, the pages that the prefix cache has for it, and new ones for a copy or for what the host has;
        these must be free."""
        assert request.status is RequestStatus.WAITING and request.slot is None and not request.pages, request.request_id
        self._pages.share(hit.pages)
        slot = self._free_slots.pop()
        request.status, request.slot = RequestStatus.RUNNING, slot
        request.pages, request.num_computed_tokens = list(hit.pages), hit.num_tokens
        self.requests[request.request_id] = request
        if self._policy.interrupts:
            self.requests = dict(sorted(self.requests.items(), key=lambda item: self._policy.key(item[1], 0.0)))
        if request.num_preemptions:
            self._spared_until[request.request_id] = request.num_tokens + self._grace_tokens
        assert hit.copy_from is None or not hit.host_pages, "a hit goes on in one way"
        granted = self._pages.allocate(len(hit.host_pages) + (hit.copy_from is not None))
        assert isinstance(granted, list), "room for the copy, or for what the host has, was not checked"
        request.pages += granted
        copies = [(hit.copy_from, page) for page in granted if page != hit.copy_from] if hit.copy_from is not None else []
        loads = list(zip(hit.host_pages, granted, strict=True)) if hit.host_pages else []
        return [(slot, entry, page) for entry, page in enumerate(request.pages)], copies, loads

    def extend(self, request: Request, num_pages: int) -> list[PageUpdate] | PageShortage:
        """Adds num_pages pages to a running request, or says what is free and changes nothing."""
        granted = self._pages.allocate(num_pages)
        if isinstance(granted, PageShortage):
            return granted
        assert request.slot is not None, request.request_id
        first = len(request.pages)
        request.pages += granted
        return [(request.slot, first + i, page) for i, page in enumerate(granted)]

    def release(self, request: Request, status: RequestStatus) -> None:
        """Takes slot and pages from a running request, which then stands at `status`."""
        assert request.slot is not None, request.request_id
        del self.requests[request.request_id]
        self._spared_until.pop(request.request_id, None)
        self._prefix_cache.release(request)
        self._pages.release(request.pages)
        self._free_slots.append(request.slot)
        request.status, request.slot, request.pages = status, None, []

    def victim(self, kept: set[str], *, after: Request) -> Request | None:
        """Who gives way to `after`: of those behind it in rank whose id is not in `kept`, the first by sacrifice()."""
        behind = []
        for request in reversed(self.requests.values()):
            if request is after:
                break
            if request.request_id not in kept:
                behind.append(request)
        return min(behind, key=self.sacrifice, default=None) if self._cost_aware else next(iter(behind), None)

    def outranked(self, request: Request) -> list[Request]:
        """The running requests that a waiting one may interrupt, those that give way first first."""
        key = self._policy.key(request, 0.0)
        behind = [r for r in reversed(self.requests.values()) if r.priority > request.priority and self._policy.key(r, 0.0) > key]
        return sorted(behind, key=self.sacrifice)

    def sacrifice(self, request: Request) -> tuple[int, bool, bool, float]:
        """Sort key of those who may give way: class, whether anything is gained, whether it just came back, what it costs: the tokens
        lost, or the move of its pages to the host and back where that is cheaper."""
        num_exclusive = self._pages.num_exclusive(request.pages)
        price = self._host_pages.price(len(request.pages), self._num_lost(request, num_exclusive))
        spared = request.num_tokens + request.num_in_flight < self._spared_until.get(request.request_id, 0)
        return -request.priority if self._policy.uses_priority else 0, num_exclusive == 0, spared, price

    def num_lost(self, request: Request) -> int:
        """Tokens that a running request loses with its pages, unless they are moved.

        They are those in pages that nobody else holds: the pool is empty, so these pages are what others will write.
        """
        return self._num_lost(request, self._pages.num_exclusive(request.pages))

    def _num_lost(self, request: Request, num_exclusive: int) -> int:
        return request.num_computed_tokens - (len(request.pages) - num_exclusive) * self._pages.page_size

    def page_entries(self, request: Request) -> list[PageEntry]:
        """A request's page table."""
        size = self._pages.page_size
        return [self._pages.entry(page, min(size, request.num_computed_tokens - i * size)) for i, page in enumerate(request.pages)]

    def check_invariants(self) -> None:
        """Asserts that slots, pages and counts agree: no page owned twice or leaked, none too few or too many."""
        slots = sorted([*self._free_slots, *(r.slot for r in self.requests.values() if r.slot is not None)])
        assert slots == list(range(self._max_num_seqs)), f"slots in use and free ones are {slots}"
        owners = Counter(page for request in self.requests.values() for page in request.pages)
        for page in range(self._pages.num_pages):
            assert self._pages.owners(page) == owners[page], f"page {page} counts {self._pages.owners(page)} owners, has {owners[page]}"
        assert self._spared_until.keys() <= self.requests.keys(), "a request that does not run is spared"
        for request in self.requests.values():
            assert request.status is RequestStatus.RUNNING and len(set(request.pages)) == len(request.pages), request
            assert len(request.pages) == self._pages.num_pages_for(request.num_computed_tokens), request
            assert request.num_computed_tokens < request.num_tokens + request.num_in_flight <= request.max_total_len, request
        self._pages.check_invariants()

    def dump(self) -> str:
        """Requests with their page tables (page:filled:status), then the pool, for a person."""
        lines: list[str] = []
        filled: dict[int, int] = {}
        for request in self.requests.values():
            entries = self.page_entries(request)
            filled |= {entry.page: entry.filled for entry in entries}
            lines.append(f"running {request.request_id!r}: slot {request.slot}, {request.num_tokens} tokens known + "
                         f"{request.num_in_flight} in flight, {request.num_computed_tokens} computed, at most {request.max_total_len}")
            lines.append("  pages " + " ".join(f"{e.page}:{e.filled}:{e.status}" for e in entries))
        return "\n".join([*lines, self._pages.dump(filled)])
