"""Finds the KV pages of a prompt's beginning among those computed before. Holds no pages of its own: PageAllocator counts them.

Must not decide who is admitted or evicted for whom, and never trusts a hash. Plain Python: never imports jax.

Full pages of tokens form a tree under one root a namespace; an entry is found by a hash chained from its parent's, then
accepted only if its parent is the very entry reached so far and its tokens are equal, so that a hit is exact by induction.

    root(namespace) -> [t0 .. tZ-1] page 7 -> [tZ .. t2Z-1] page 3 -> ...
                                           -> [other tokens] page 9

An entry whose page was evicted stays, without a page, while anything hangs below it, and takes the next page computed
for the same tokens.
"""

import abc
from collections.abc import Callable, Hashable
from typing import NamedTuple

from jaxinfer.request import Request
from jaxinfer.scheduler.pages import PageAllocator

Namespace = Callable[[Request], Hashable]
"""What must be equal, beside the tokens, for two requests to share pages (tenant salt, Qwen v1's NTK alpha, ...)."""
HashPage = Callable[[int, tuple[int, ...]], int]
"""(hash of the pages before, tokens of the page) -> hash."""


def salt_namespace(request: Request) -> Hashable:
    """Shares between equal salts: enough where model and KV dtype are the engine's and positions are encoded alike."""
    return request.cache_salt


def hash_page(parent: int, tokens: tuple[int, ...]) -> int:
    """The default chained hash. It need not resist attack: a collision costs a miss, never a wrong page."""
    return hash((parent, tokens))


class PrefixHit(NamedTuple):
    """Pages that hold the first num_tokens tokens of a request."""

    pages: list[int]
    num_tokens: int


class PrefixCache(abc.ABC):
    """What the scheduler asks of a prefix cache."""

    @abc.abstractmethod
    def match(self, request: Request) -> PrefixHit:
        """The longest cached beginning of the request's known tokens, in whole pages strictly below its last known token.

        So the last token is always computed (its logits are needed) and computing starts on a page of the request's own:
        a shared page is never written. The caller must share() the pages before it allocates any.
        """

    @abc.abstractmethod
    def insert(self, request: Request) -> None:
        """Offers the request's pages that are full of known tokens, computed or dispatched.

        A page may be shared as soon as the step that fills it has been dispatched: the device runs steps in order, so
        a later step that reads it finds it filled. Calling this twice, or late, is harmless.
        """

    @abc.abstractmethod
    def release(self, request: Request) -> None:
        """The request is about to give up its pages; what was inserted stays."""

    @abc.abstractmethod
    def discard(self, request: Request) -> None:
        """What was computed for the request's tokens is not to be trusted: none of it is offered any more.

        Holds for pages that it has given up, and for those that it took from others, too.
        """

    @abc.abstractmethod
    def check_invariants(self) -> None:
        """Asserts that entries and pages agree."""


class NullPrefixCache(PrefixCache):
    """No prefix caching: never a hit, nothing kept."""

    def match(self, request: Request) -> PrefixHit:
        return PrefixHit([], 0)

    def insert(self, request: Request) -> None:
        pass

    def release(self, request: Request) -> None:
        pass

    def discard(self, request: Request) -> None:
        pass

    def check_invariants(self) -> None:
        pass


class _Entry:
    """One full page of tokens after those of its parents."""

    __slots__ = ("hash", "namespace", "num_users", "page", "parent", "tokens")

    def __init__(self, *, hash: int, namespace: Hashable, parent: "_Entry | None", tokens: tuple[int, ...]) -> None:
        self.hash = hash
        self.namespace = namespace
        self.parent = parent          # None: root
        self.tokens = tokens
        self.page: int | None = None  # None: root, or evicted
        self.num_users = 0            # child entries, and running requests whose chain ends here


class HashedPrefixCache(PrefixCache):
    """A tree of full pages, found by chained hashes, verified token by token.

    Two contents that collide are not both kept: the first stays, the second counts as not cacheable.

    Args:
      pages: the pool; this object registers itself for its evictions.
      namespace: what separates requests beside their tokens.
      hash_page: the chained hash.
    """

    def __init__(self, pages: PageAllocator, *, namespace: Namespace = salt_namespace, hash_page: HashPage = hash_page) -> None:
        self._pages = pages
        self._namespace = namespace
        self._hash_page = hash_page
        self._roots: dict[Hashable, _Entry] = {}
        self._entries: dict[int, _Entry] = {}          # by hash, roots excluded
        self._entry_of_page: dict[int, _Entry] = {}
        self._chains: dict[str, tuple[_Entry, int]] = {}  # request id -> last entry inserted, pages inserted
        pages.on_evict(self._evicted)

    def match(self, request: Request) -> PrefixHit:
        entry = self._roots.get(self._namespace(request))
        found: list[int] = []
        if entry is None:
            return PrefixHit(found, 0)
        size = self._pages.page_size
        for index in range((request.num_tokens - 1) // size):
            entry = self._find(entry, _page_tokens(request, index, size))
            if entry is None or entry.page is None:
                break
            found.append(entry.page)
        return PrefixHit(found, len(found) * size)

    def insert(self, request: Request) -> None:
        size = self._pages.page_size
        num_full = min(request.num_computed_tokens, request.num_tokens) // size
        chain = self._chains.get(request.request_id)
        if num_full <= (chain[1] if chain else 0):
            return
        first, done = chain or (self._root(self._namespace(request)), 0)
        entry = first
        entry.num_users += 1  # hold the chain's end while it moves
        while done < num_full:
            child = self._find_or_add(entry, _page_tokens(request, done, size))
            if child is None:
                break
            if child.page is None:
                child.page = request.pages[done]
                self._entry_of_page[child.page] = child
                self._pages.retain(child.page)
            child.num_users += 1
            self._let_go(entry)
            entry, done = child, done + 1
        if chain:
            self._let_go(first)
        self._chains[request.request_id] = (entry, done)

    def release(self, request: Request) -> None:
        chain = self._chains.pop(request.request_id, None)
        if chain:
            self._let_go(chain[0])

    def discard(self, request: Request) -> None:
        entry = self._roots.get(self._namespace(request))
        size = self._pages.page_size
        path: list[_Entry] = []
        for index in range(request.num_tokens // size):
            entry = self._find(entry, _page_tokens(request, index, size)) if entry is not None else None
            if entry is None:
                break
            path.append(entry)
        for entry in path:
            if entry.page is not None:
                self._pages.drop(entry.page)
                self._evicted(entry.page)

    def check_invariants(self) -> None:
        assert set(self._entry_of_page) == self._pages.retained_pages(), "the pool and the prefix cache disagree on cached pages"
        users = dict.fromkeys(map(id, [*self._entries.values(), *self._roots.values()]), 0)
        for above in [*(e.parent for e in self._entries.values()), *(e for e, _ in self._chains.values())]:
            assert above is not None and id(above) in users, "an entry hangs below one that is gone"
            users[id(above)] += 1
        for key, entry in self._entries.items():
            assert entry.hash == key and len(entry.tokens) == self._pages.page_size, "an entry is filed under another hash"
            assert entry.page is None or self._entry_of_page[entry.page] is entry, f"page {entry.page} belongs to another entry"
        for entry in [*self._entries.values(), *self._roots.values()]:
            assert entry.num_users == users[id(entry)], f"an entry counts {entry.num_users} users and has {users[id(entry)]}"
            assert entry.page is not None or entry.num_users > 0, "an entry without page and users was kept"

    def _root(self, namespace: Hashable) -> _Entry:
        if namespace not in self._roots:
            self._roots[namespace] = _Entry(hash=hash(namespace), namespace=namespace, parent=None, tokens=())
        return self._roots[namespace]

    def _find(self, parent: _Entry, tokens: tuple[int, ...]) -> _Entry | None:
        entry = self._entries.get(self._hash_page(parent.hash, tokens))
        return entry if entry is not None and entry.parent is parent and entry.tokens == tokens else None

    def _find_or_add(self, parent: _Entry, tokens: tuple[int, ...]) -> _Entry | None:
        """The entry of these tokens below parent; None if another content holds its hash."""
        key = self._hash_page(parent.hash, tokens)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(hash=key, namespace=parent.namespace, parent=parent, tokens=tokens)
            parent.num_users += 1
            return entry
        return entry if entry.parent is parent and entry.tokens == tokens else None

    def _evicted(self, page: int) -> None:
        entry = self._entry_of_page.pop(page)
        entry.page = None
        self._prune(entry)

    def _let_go(self, entry: _Entry) -> None:
        entry.num_users -= 1
        self._prune(entry)

    def _prune(self, entry: _Entry) -> None:
        """Removes the entry, and then its parents, where neither a page nor a user is left."""
        while entry.page is None and entry.num_users == 0:
            if entry.parent is None:
                del self._roots[entry.namespace]
                return
            del self._entries[entry.hash]
            entry = entry.parent
            entry.num_users -= 1


def _page_tokens(request: Request, index: int, size: int) -> tuple[int, ...]:
    """Known tokens of page `index`, which is full."""
    stop = (index + 1) * size
    if stop <= len(request.prompt_token_ids):
        return request.prompt_token_ids[index * size:stop]
    return tuple(request.token_ids(index * size, stop))
