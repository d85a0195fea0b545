"""The prefix cache: exact hits, whatever the hash; what is kept, forgotten and found again."""

import pytest

from jaxinfer.request import Request
from jaxinfer.scheduler.pages import PageAllocator
from jaxinfer.scheduler.prefix_cache import HashedPrefixCache, NullPrefixCache, hash_page
from tests.scheduler.simulator import make_request

Z = 4
HASHES = {
    "default": hash_page,
    "constant": lambda parent, tokens: 7,
    "depth": lambda parent, tokens: parent + 1,      # collides on the tokens
    "page": lambda parent, tokens: hash(tokens),     # collides on what came before
}


def compute(pages: PageAllocator, cache: HashedPrefixCache, prompt: list[int], name: str, salt: str = "") -> Request:
    """A request whose prompt has been computed in pages of its own."""
    request = make_request(name, prompt, 8, salt=salt)
    request.pages = pages.allocate(pages.num_pages_for(len(prompt)))
    request.num_computed_tokens = len(prompt)
    cache.insert(request)
    cache.check_invariants()
    return request


def let_go(pages: PageAllocator, cache: HashedPrefixCache, request: Request) -> None:
    cache.release(request)
    pages.release(request.pages)
    request.pages = []
    cache.check_invariants()
    pages.check_invariants()


@pytest.fixture
def pages() -> PageAllocator:
    return PageAllocator(12, Z)


@pytest.mark.parametrize(("length", "num_pages"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (11, 2), (30, 2)])
def test_a_hit_is_whole_pages_strictly_below_the_last_token(pages: PageAllocator, length: int, num_pages: int) -> None:
    cache = HashedPrefixCache(pages)
    prompt = list(range(11))
    first = compute(pages, cache, prompt, "a")
    hit = cache.match(make_request("b", (prompt + [99] * 30)[:length], 8))
    assert hit.pages == first.pages[:num_pages] and hit.num_tokens == num_pages * Z


def test_a_hit_ends_where_the_tokens_differ_or_the_page_is_missing(pages: PageAllocator) -> None:
    cache = HashedPrefixCache(pages)
    compute(pages, cache, list(range(12)), "a")
    assert cache.match(make_request("b", [*range(7), 99, *range(8, 13)], 8)).num_tokens == 4
    assert cache.match(make_request("c", [99, *range(1, 13)], 8)).num_tokens == 0
    assert cache.match(make_request("d", list(range(4, 13)), 8)).num_tokens == 0  # the same pages elsewhere are other content


def test_namespaces_do_not_share(pages: PageAllocator) -> None:
    cache = HashedPrefixCache(pages)
    compute(pages, cache, list(range(9)), "a", salt="tenant 1")
    assert cache.match(make_request("b", list(range(9)), 8, salt="tenant 2")).num_tokens == 0
    assert cache.match(make_request("c", list(range(9)), 8, salt="tenant 1")).num_tokens == 8
    by_length = HashedPrefixCache(PageAllocator(8, Z), namespace=lambda request: len(request.prompt_token_ids) > 8)
    assert by_length.match(make_request("d", list(range(9)), 8)).num_tokens == 0


@pytest.mark.parametrize("name", sorted(HASHES))
def test_a_hit_is_exact_whatever_the_hash(name: str) -> None:
    pages = PageAllocator(40, Z)
    cache = HashedPrefixCache(pages, hash_page=HASHES[name])
    prompts = [[1] * 9, [2] * 9, [2] * 4 + [1] * 5, [1] * 4 + [2] * 5, [1, 2] * 4 + [3], [2, 1] * 4 + [3]]
    owners = [(prompt, salt, compute(pages, cache, prompt, f"{i}{salt}", salt)) for i, prompt in enumerate(prompts) for salt in ("", "t")]
    content = {page: (salt, tuple(prompt[:(i + 1) * Z])) for prompt, salt, owner in owners for i, page in enumerate(owner.pages)}
    num_found = 0
    for prompt in prompts:
        for salt in ("", "t"):
            hit = cache.match(make_request("x", prompt, 8, salt=salt))
            assert [content[page] for page in hit.pages] == [(salt, tuple(prompt[:(i + 1) * Z])) for i in range(len(hit.pages))]
            num_found += len(hit.pages)
    assert num_found == 24 if name == "default" else num_found >= 1  # a collision costs hits, never correctness


def test_equal_content_is_kept_once_and_the_copy_returns_to_the_pool(pages: PageAllocator) -> None:
    cache = HashedPrefixCache(pages)
    first, second = (compute(pages, cache, list(range(9)), name) for name in "ab")
    assert cache.match(make_request("c", list(range(9)), 8)).pages == first.pages[:2]
    let_go(pages, cache, second)
    let_go(pages, cache, first)
    assert pages.num_cached == 2 and pages.num_free == 11


def test_only_known_and_computed_tokens_are_offered(pages: PageAllocator) -> None:
    cache = HashedPrefixCache(pages)
    request = make_request("a", list(range(6)), 8)
    request.pages, request.num_computed_tokens = pages.allocate(2), 3
    cache.insert(request)
    assert pages.retained_pages() == set()
    request.num_computed_tokens, request.num_in_flight = 8, 3  # positions 6 and 7 are computed, but of tokens not yet known
    cache.insert(request)
    assert pages.retained_pages() == {request.pages[0]}
    request.output_token_ids += [50, 51]
    cache.insert(request)
    assert pages.retained_pages() == set(request.pages)
    assert cache.match(make_request("b", [*range(6), 50, 51, 52], 8)).pages == request.pages


def test_least_recently_used_pages_are_evicted_and_can_come_back(pages: PageAllocator) -> None:
    cache = HashedPrefixCache(pages)
    old, new = compute(pages, cache, list(range(13)), "old"), compute(pages, cache, list(range(20, 33)), "new")
    let_go(pages, cache, old)
    let_go(pages, cache, new)
    taken = pages.allocate(pages.num_free - 4)  # leaves room for old's first page and new's three
    cache.check_invariants()
    assert isinstance(taken, list)
    assert cache.match(make_request("a", list(range(13)), 8)).num_tokens == 4
    assert cache.match(make_request("b", list(range(20, 33)), 8)).num_tokens == 12
    pages.release(taken)
    compute(pages, cache, list(range(13)), "again")
    assert cache.match(make_request("a", list(range(13)), 8)).num_tokens == 12


def test_pages_below_an_evicted_one_are_found_again_once_it_is_computed_anew(pages: PageAllocator) -> None:
    cache = HashedPrefixCache(pages)
    first = compute(pages, cache, list(range(5)), "a")
    second = compute(pages, cache, list(range(9)), "b")  # its first page is a copy, its second hangs below a's first
    let_go(pages, cache, first)
    assert isinstance(taken := pages.allocate(pages.num_free), list)  # evicts a's page; b still runs
    cache.check_invariants()
    assert cache.match(make_request("c", list(range(9)), 8)).num_tokens == 0
    pages.release(taken)
    third = compute(pages, cache, list(range(5)), "d")
    assert cache.match(make_request("c", list(range(9)), 8)).pages == [third.pages[0], second.pages[1]]


def test_everything_is_forgotten_with_the_last_page(pages: PageAllocator) -> None:
    cache = HashedPrefixCache(pages)
    for index in range(20):
        let_go(pages, cache, compute(pages, cache, [index] * 12, f"r{index}", salt=str(index)))
    pages.allocate(pages.num_free)
    assert not (cache._entries or cache._roots or cache._chains or cache._entry_of_page)


@pytest.mark.parametrize("released", [False, True])
def test_discard_takes_back_all_that_was_computed_for_the_tokens(pages: PageAllocator, released: bool) -> None:
    cache = HashedPrefixCache(pages)
    bad = compute(pages, cache, list(range(12)), "bad")
    other = compute(pages, cache, list(range(20, 29)), "other")
    if released:
        let_go(pages, cache, bad)
    cache.discard(bad)
    cache.check_invariants()
    pages.check_invariants()
    assert cache.match(make_request("a", list(range(13)), 8)).num_tokens == 0
    assert cache.match(make_request("b", list(range(20, 29)), 8)).pages == other.pages[:2]


def test_the_null_cache_keeps_nothing(pages: PageAllocator) -> None:
    cache = NullPrefixCache()
    request = make_request("a", list(range(9)), 8)
    request.pages, request.num_computed_tokens = pages.allocate(3), 9
    cache.insert(request)
    assert cache.match(make_request("b", list(range(9)), 8)) == ([], 0, None, ())
    cache.discard(request)
    cache.release(request)
    cache.check_invariants()
    assert pages.retained_pages() == set()
