"""The page pool: states, owners, eviction order, failure as a value."""

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from hypothesis.strategies import data, integers

from jaxinfer.errors import ConfigError
from jaxinfer.scheduler.pages import NULL_PAGE, PageAllocator, PageShortage, PageStatus


def test_allocates_every_page_but_the_null_page() -> None:
    pages = PageAllocator(5, 16)
    assert pages.allocate(4) == [1, 2, 3, 4]
    assert pages.allocate(1) == PageShortage(requested=1, free=0)
    assert pages.allocate(0) == []
    with pytest.raises(AssertionError, match="page 0"):
        pages.status(NULL_PAGE)


def test_a_shortage_changes_nothing() -> None:
    pages = PageAllocator(4, 16)
    assert pages.allocate(4) == PageShortage(requested=4, free=3)
    assert pages.num_free == 3
    pages.check_invariants()


def test_a_page_returns_with_its_last_owner() -> None:
    pages = PageAllocator(4, 16)
    owned = pages.allocate(2)
    pages.share(owned[:1])
    assert [pages.status(p) for p in (1, 2, 3)] == [PageStatus.SHARED, PageStatus.OWNED, PageStatus.FREE]
    pages.release(owned)
    assert [pages.status(p) for p in (1, 2)] == [PageStatus.OWNED, PageStatus.FREE] and pages.num_free == 2
    pages.release(owned[:1])
    assert pages.num_free == 3
    with pytest.raises(AssertionError, match="no owner"):
        pages.release([1])
    with pytest.raises(AssertionError, match="content is not valid"):
        pages.share([1])


def test_cached_pages_are_free_but_evicted_last_and_in_order_of_use() -> None:
    pages, evicted = PageAllocator(6, 16), []
    pages.on_evict(evicted.append)
    first, second = pages.allocate(2), pages.allocate(2)
    for page in first + second:
        pages.retain(page)
    pages.release(second)
    pages.release(first)
    assert pages.num_free == 5 and pages.num_cached == 4 and pages.status(1) is PageStatus.CACHED
    assert pages.allocate(1) == [5] and evicted == []  # the free page first
    assert pages.allocate(1) == [second[1]] and evicted == [second[1]]  # then the tail of what was released first
    pages.share(first[1:])  # in use again, so not evictable
    assert pages.allocate(2) == [second[0], first[0]] and evicted == [second[1], second[0], first[0]]
    assert pages.allocate(1) == PageShortage(requested=1, free=0)
    pages.check_invariants()


def test_dropped_pages_are_free_at_once_or_with_their_owner() -> None:
    pages = PageAllocator(3, 16)
    pages.allocate(2)
    pages.retain(1)
    pages.retain(2)
    pages.release([1])
    pages.drop(1)
    pages.drop(2)
    assert pages.status(1) is PageStatus.FREE and pages.status(2) is PageStatus.OWNED
    pages.release([2])
    assert pages.num_cached == 0 and pages.num_free == 2


def test_dump_shows_page_filled_status_and_owners() -> None:
    pages = PageAllocator(6, 16)
    pages.allocate(3)
    pages.share([2])
    pages.retain(1)
    pages.release([1])
    lines = pages.dump({3: 5}).splitlines()
    assert lines[0] == "5 pages of 16 tokens: 2 owned, 1 cached, 2 free"
    assert [line.split() for line in lines[2:]] == [["1", "16", "cached", "0"], ["2", "16", "shared", "2"], ["3", "5", "owned", "1"]]


@pytest.mark.parametrize(("num_pages", "page_size", "named"), [(1, 16, "num_pages = 1"), (2, 0, "page_size = 0")])
def test_impossible_pools_are_refused(num_pages: int, page_size: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        PageAllocator(num_pages, page_size)


class PoolMachine(RuleBasedStateMachine):
    """Any order of calls keeps the books straight."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(8, 4)
        self.pages.on_evict(self._evict)
        self.owners: list[int] = []  # one item an owner
        self.retained: set[int] = set()

    def _evict(self, page: int) -> None:
        assert page in self.retained and page not in self.owners
        self.retained.remove(page)

    @rule(n=integers(0, 8))
    def allocate(self, n: int) -> None:
        expected_free = 7 - len(set(self.owners))
        got = self.pages.allocate(n)
        if n > expected_free:
            assert got == PageShortage(requested=n, free=expected_free)
        else:
            assert isinstance(got, list) and len(set(got)) == n and not set(got) & set(self.owners) and NULL_PAGE not in got
            assert not set(got) & self.retained
            self.owners += got

    @rule(data=data())
    def share(self, data) -> None:
        valid = sorted(set(self.owners) | self.retained)
        if valid:
            page = valid[data.draw(integers(0, len(valid) - 1))]
            self.pages.share([page])
            self.owners.append(page)

    @rule(data=data())
    def release(self, data) -> None:
        if self.owners:
            self.pages.release([self.owners.pop(data.draw(integers(0, len(self.owners) - 1)))])

    @rule(data=data())
    def retain_or_drop(self, data) -> None:
        candidates = sorted(set(self.owners) | self.retained)
        if candidates:
            page = candidates[data.draw(integers(0, len(candidates) - 1))]
            if page in self.retained:
                self.pages.drop(page)
                self.retained.remove(page)
            else:
                self.pages.retain(page)
                self.retained.add(page)

    @rule()
    def evict_all(self) -> None:
        self.pages.evict_all()
        assert self.retained <= set(self.owners) and self.pages.num_cached == 0

    @invariant()
    def books_agree(self) -> None:
        self.pages.check_invariants()
        assert [self.pages.owners(page) for page in range(8)] == [self.owners.count(page) for page in range(8)]
        assert self.pages.retained_pages() == self.retained


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
