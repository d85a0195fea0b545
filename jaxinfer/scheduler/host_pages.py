"""Pages of host memory, and which preempted requests' tokens they hold: those tokens are moved back instead of computed again.

Knows numbers only: the engine moves what the plans say (engine/swap.py). Plain Python: never imports jax.

A host page's life:

    FREE --save--> HELD by a request that waits --leave--> LEAVING: the plan under construction may load it --end_plan--> FREE
     ^               |
     +----forget-----+

A page that a plan loads is handed out again from the next plan on only, since the engine does all saves of a plan before its loads.
"""

import math
from typing import NamedTuple

from jaxinfer.request import Request
from jaxinfer.scheduler.plan import PageSave
from jaxinfer.scheduler.prefix_contract import PrefixHit


class _Saved(NamedTuple):
    """What the host has of a request's beginning."""

    num_tokens: int
    pages: list[int]
    """In order, as Request.pages."""


class HostPages:
    """Hands out host pages 0 .. num_pages-1 and decides when moving a request's pages is cheaper than computing their tokens.

    Args:
      num_pages: 0: nothing is ever moved.
      tokens_per_page: prefill tokens that can be computed in the time that one page takes out and back; the engine measures it.
    """

    def __init__(self, num_pages: int, *, tokens_per_page: float = math.inf) -> None:
        self.num_pages = num_pages
        self.tokens_per_page = tokens_per_page
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the page given back last is handed out first
        self._saved: dict[str, _Saved] = {}    # by request id
        self._saves: dict[int, int] = {}       # host page -> page, since the last plan
        self._leaving: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def price(self, num_pages: int, num_lost: int) -> float:
        """What giving up num_pages pages costs, num_lost tokens of which would be computed again: tokens' worth of time, the cheaper way."""
        return num_pages * self.tokens_per_page if self._is_worth(num_pages, num_lost) and num_pages <= self.num_free else num_lost

    def _is_worth(self, num_pages: int, num_tokens: int) -> bool:
        return num_pages * self.tokens_per_page < num_tokens

    def save(self, request: Request, num_lost: int) -> None:
        """Keeps what a running request has computed, if that is cheaper than num_lost tokens and there is room for all of it."""
        num_pages = len(request.pages)
        if num_pages > self.num_free or not self._is_worth(num_pages, num_lost):
            return
        assert request.request_id not in self._saved, f"request {request.request_id!r} runs and has host pages"
        pages = [self._free.pop() for _ in request.pages]
        self._saved[request.request_id] = _Saved(request.num_computed_tokens, pages)
        self._saves |= zip(pages, request.pages, strict=True)

    def num_tokens(self, request: Request) -> int:
        """Tokens of a waiting request that the host has."""
        saved = self._saved.get(request.request_id)
        return 0 if saved is None else saved.num_tokens

    def beyond(self, hit: PrefixHit, request: Request) -> PrefixHit:
        """The hit, prolonged by what the host has of the request's tokens after its full pages, where that is worth the move."""
        saved = self._saved.get(request.request_id)
        if saved is None:
            return hit
        pages = saved.pages[len(hit.pages):]
        if not self._is_worth(len(pages), saved.num_tokens - hit.num_tokens):
            return hit
        return PrefixHit(hit.pages, saved.num_tokens, host_pages=pages)

    def leave(self, request: Request) -> None:
        """The request is started by the plan under construction, which may load its host pages."""
        saved = self._saved.pop(request.request_id, None)
        if saved is not None:
            self._leaving += saved.pages

    def forget(self, request: Request) -> None:
        """The request has ended, between two plans; what is still to be saved of it is saved no more."""
        saved = self._saved.pop(request.request_id, None)
        if saved is not None:
            self._free += saved.pages
            for page in saved.pages:
                self._saves.pop(page, None)

    def end_plan(self) -> tuple[PageSave, ...]:
        """The saves since the plan before, for the plan that is complete now."""
        saves = tuple((page, host_page) for host_page, page in self._saves.items())
        self._saves.clear()
        self._free += self._leaving
        self._leaving.clear()
        return saves

    def check_invariants(self, waiting: list[Request]) -> None:
        """Asserts, between two plans, that every host page is free or held once, by a request of `waiting` that it fits."""
        held = [page for saved in self._saved.values() for page in saved.pages]
        assert sorted([*self._free, *held, *self._leaving]) == list(range(self.num_pages)), "a host page is lost or held twice"
        assert self._saves.keys() <= {*held, *self._leaving}, "a save for nobody"
        requests = {request.request_id: request for request in waiting}
        for request_id, saved in self._saved.items():
            assert request_id in requests, f"request {request_id!r} has host pages and does not wait"
            request = requests[request_id]
            assert 0 < saved.num_tokens < request.num_tokens + request.num_in_flight, request
