"""The prefix cache's tree saved as plain data and loaded into another pool."""

import json
from typing import Any

import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.scheduler import HashedPrefixCache, PageAllocator
from tests.scheduler.simulator import make_request
from tests.scheduler.test_prefix_cache import compute, let_go

Z = 4
OLD, NEW, RUNNING = list(range(13)), [*range(8), *range(30, 36)], list(range(40, 46))


def filled_cache(*, copies: bool) -> tuple[PageAllocator, HashedPrefixCache]:
    pages = PageAllocator(20, Z)
    cache = HashedPrefixCache(pages, namespace=lambda request: (request.cache_salt, None), enable_page_copies=copies)
    for prompt, name, salt in ((OLD, "old", ""), (NEW, "new", ""), (NEW, "tenant", "t")):
        let_go(pages, cache, compute(pages, cache, prompt, name, salt))
    compute(pages, cache, RUNNING, "running")
    return pages, cache


def loaded(state: dict[str, Any], num_pages: int, *, copies: bool) -> tuple[HashedPrefixCache, PageAllocator, dict[int, int]]:
    pages = PageAllocator(num_pages, Z)
    cache = HashedPrefixCache(pages, namespace=lambda request: (request.cache_salt, None), enable_page_copies=copies)
    moved = cache.load_state(json.loads(json.dumps(state)))
    cache.check_invariants()
    pages.check_invariants()
    assert pages.num_free == pages.capacity and len(moved) == pages.num_cached
    return cache, pages, moved


@pytest.mark.parametrize("copies", [False, True])
def test_everything_that_could_be_found_is_found_again(copies: bool) -> None:
    _, cache = filled_cache(copies=copies)
    again, _, moved = loaded(cache.dump_state(), 64, copies=copies)
    for prompt, salt in ((OLD, ""), (NEW, ""), (NEW, "t"), (RUNNING, ""), (OLD, "t"), (OLD[:6], "")):
        request = make_request("x", [*prompt, 99], 4, salt=salt)
        before, after = cache.match(request), again.match(request)
        assert after.num_tokens == before.num_tokens and after.pages == [moved[page] for page in before.pages]
        assert before.copy_from is None or moved[before.copy_from] == after.copy_from
    assert again.dump_state()["page_size"] == Z and loaded(again.dump_state(), 64, copies=copies)[2].keys() == set(moved.values())


def test_a_smaller_pool_takes_what_was_used_last() -> None:
    _, cache = filled_cache(copies=False)
    cache, pages, _ = loaded(cache.dump_state(), 6, copies=False)
    found = [cache.match(make_request("x", [*prompt, 99], 4, salt=salt)).num_tokens
             for prompt, salt in ((RUNNING, ""), (NEW, "t"), (NEW, ""), (OLD, ""))]
    assert found == [4, 12, 4, 4] and pages.num_cached == 5
    assert isinstance(pages.allocate(1), list)  # the first of NEW and OLD was used longest ago
    assert cache.match(make_request("x", [*OLD, 99], 4)).num_tokens == 0


def test_pages_that_hang_below_a_missing_one_are_not_saved() -> None:
    pages, cache = filled_cache(copies=False)
    cache.discard(make_request("x", OLD[:4], 4))
    state = cache.dump_state()
    assert sorted(len(set(entry["tokens"]) & set(range(13))) for entry in state["entries"]) == [0, 0, 4, 4]
    assert [entry["parent"] for entry in state["entries"]].count(None) == 2


def test_beginnings_of_pages_are_left_out_where_copies_are_off() -> None:
    _, cache = filled_cache(copies=True)
    state = cache.dump_state()
    assert {len(entry["tokens"]) for entry in state["entries"]} == {1, 2, 4}
    again, _, _ = loaded(state, 64, copies=False)
    assert {len(entry["tokens"]) for entry in again.dump_state()["entries"]} == {4}


@pytest.mark.parametrize(("change", "message"), [
    ({"version": 2}, "state of version 2: this jaxinfer reads version 1"),
    ({"page_size": 16}, "pages of 16 tokens: this engine's have 4"),
    ({"entries": [{"page": 3, "parent": 0, "namespace": None, "tokens": [1] * 4}]}, r"entry 0 \(page 3, parent 0, 4 tokens\) cannot be"),
    ({"entries": [{"page": 3, "parent": None, "namespace": None, "tokens": [1] * 5}]}, "5 tokens.*damaged; start without it"),
    ({"entries": [{"page": 3, "parent": None, "namespace": None, "tokens": [i] * 4} for i in range(2)]}, r"entry 1 \(page 3"),
])
def test_a_state_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    _, cache = filled_cache(copies=False)
    with pytest.raises(ConfigError, match=message):
        loaded(cache.dump_state() | change, 64, copies=False)
