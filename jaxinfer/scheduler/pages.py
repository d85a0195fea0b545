"""The pool of KV-cache pages: how many sequences own each, and which unowned ones still hold content worth keeping.

Knows page numbers only: no requests, no tokens, no device arrays. Plain Python: never imports jax.

A page's life:

    FREE --allocate--> OWNED <--share/release--> SHARED
     ^                   |
     |            last release: FREE, or CACHED if the prefix cache vouches for the content (retain)
     +---allocate/drop-- CACHED --share--> OWNED

The device runs steps in the order in which they are dispatched, so a page released now may be handed out for the very next
step: whatever still reads or writes it was dispatched before.
"""

import dataclasses
import enum
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from jaxinfer.errors import ConfigError

NULL_PAGE = 0
"""Padding points here; it is never handed out."""


class PageStatus(enum.StrEnum):
    """What a page is to the pool."""

    FREE = "free"        # no owner, content meaningless
    OWNED = "owned"      # one owner
    SHARED = "shared"    # several owners; full, and never written again
    CACHED = "cached"    # no owner, content valid for the prefix cache; evicted, oldest use first, when pages are needed


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageShortage:
    """What allocate() answers when the pool cannot give as many pages as asked: an ordinary event, not an error."""

    requested: int
    free: int
    """Pages that could have been given, evictable ones included."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageEntry:
    """One page-table entry as a person sees it."""

    page: int
    filled: int
    """Tokens written, or about to be by a dispatched step."""
    status: PageStatus
    owners: int


class PageAllocator:
    """Hands out pages 1 .. num_pages-1 and counts their owners.

    Args:
      num_pages: pages in the pool, the null page included; >= 2.
      page_size: tokens in a page; >= 1.

    Raises:
      ConfigError: a value lies outside its range.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ConfigError(f"num_pages = {num_pages}: must be >= 2, since page 0 is the null page and holds no sequence; raise it.")
        if page_size < 1:
            raise ConfigError(f"page_size = {page_size}: must be >= 1; raise it.")
        self.num_pages = num_pages
        self.page_size = page_size
        self._owners = [0] * num_pages
        self._retained = bytearray(num_pages)  # 1: the prefix cache vouches for the content
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))  # a stack: the page released last is handed out first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._on_evict: Callable[[int], None] | None = None

    @property
    def capacity(self) -> int:
        """Pages that sequences can own: all but the null page."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that allocate() can give now: free ones and evictable ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Unowned pages that the prefix cache can still use."""
        return len(self._cached)

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that hold num_tokens tokens."""
        return -(-num_tokens // self.page_size)

    def owners(self, page: int) -> int:
        """How many sequences own the page."""
        return self._owners[page]

    def status(self, page: int) -> PageStatus:
        assert NULL_PAGE < page < self.num_pages, f"page {page} is not one of 1 .. {self.num_pages - 1}"
        if self._owners[page]:
            return PageStatus.OWNED if self._owners[page] == 1 else PageStatus.SHARED
        return PageStatus.CACHED if self._retained[page] else PageStatus.FREE

    def entry(self, page: int, filled: int) -> PageEntry:
        """The page as a page-table entry that holds `filled` tokens."""
        return PageEntry(page=page, filled=filled, status=self.status(page), owners=self._owners[page])

    def num_exclusive(self, pages: Sequence[int]) -> int:
        """How many of these pages have one owner: what their owner's leaving would set free."""
        owners = self._owners
        return sum(owners[page] == 1 for page in pages)

    # Owners.

    def allocate(self, n: int) -> list[int] | PageShortage:
        """n pages with one owner each, or PageShortage and no change; cached pages are evicted, oldest use first, as needed."""
        if n > self.num_free:
            return PageShortage(requested=n, free=self.num_free)
        pages = []
        for _ in range(n):
            page = self._free.pop() if self._free else self._evict()
            self._owners[page] = 1
            pages.append(page)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Adds an owner to each page; the pages are owned already, or cached."""
        for page in pages:
            if self._owners[page] == 0:
                assert self._retained[page], f"page {page} is free: its content is not valid, so it cannot be shared"
                del self._cached[page]
            self._owners[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Takes one owner from each page, given in sequence order.

        Later pages count as used longer ago, since a prefix is of no use without the pages before it.
        """
        for page in reversed(pages):
            assert self._owners[page] > 0, f"page {page} has no owner to release it"
            self._owners[page] -= 1
            if self._owners[page] == 0:
                if self._retained[page]:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    # The prefix cache's side.

    def on_evict(self, callback: Callable[[int], None]) -> None:
        """The prefix cache's callback, called with each page that loses its cached content to an allocation."""
        assert self._on_evict is None, "a pool serves one prefix cache"
        self._on_evict = callback

    def retain(self, page: int) -> None:
        """The prefix cache vouches for an owned page's content: without owners it will be CACHED rather than FREE."""
        assert self._owners[page] > 0 and not self._retained[page], f"page {page}: only an owned page can be retained, and once"
        self._retained[page] = 1

    def drop(self, page: int) -> None:
        """The prefix cache no longer vouches for the page. Owners keep it."""
        assert self._retained[page], f"page {page} was not retained"
        self._retained[page] = 0
        if self._owners[page] == 0:
            del self._cached[page]
            self._free.append(page)

    def evict_all(self) -> None:
        """Makes every cached page free: nothing that was computed before is found again, but for what sequences own."""
        while self._cached:
            self._free.append(self._evict())

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        self._retained[page] = 0
        assert self._on_evict is not None, "only a prefix cache retains pages"
        self._on_evict(page)
        return page

    # For tests and people.

    def check_invariants(self) -> None:
        """Asserts that every page is in exactly one state and is counted there."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is on the free list twice"
        assert self._owners[NULL_PAGE] == 0 and not self._retained[NULL_PAGE] and NULL_PAGE not in free, "the null page was handed out"
        for page in range(1, self.num_pages):
            status = self.status(page)
            assert self._owners[page] >= 0, f"page {page} has {self._owners[page]} owners"
            assert (page in free) == (status is PageStatus.FREE), f"page {page} is {status} and free list says {page in free}"
            assert (page in self._cached) == (status is PageStatus.CACHED), f"page {page} is {status} and LRU says {page in self._cached}"

    def free_pages(self) -> tuple[int, ...]:
        """Pages that nobody owns and that hold nothing worth keeping."""
        return tuple(self._free)

    def cached_pages(self) -> tuple[int, ...]:
        """Unowned pages that the prefix cache can still use, the one used longest ago first."""
        return tuple(self._cached)

    def retained_pages(self) -> set[int]:
        """Pages that the prefix cache vouches for, owned or not."""
        return {page for page in range(self.num_pages) if self._retained[page]}

    def dump(self, filled: Mapping[int, int] | None = None) -> str:
        """A table of the pages in use for a person; `filled` gives the tokens in pages that are not full."""
        used = [page for page in range(1, self.num_pages) if self.status(page) is not PageStatus.FREE]
        lines = [f"{self.capacity} pages of {self.page_size} tokens: {len(used) - self.num_cached} owned, {self.num_cached} cached, "
                 f"{len(self._free)} free", "  page  filled  status  owners"]
        for page in used:
            entry = self.entry(page, (filled or {}).get(page, self.page_size))
            lines.append(f"{entry.page:6d}  {entry.filled:6d}  {entry.status:6s}  {entry.owners:6d}")
        return "\n".join(lines)
