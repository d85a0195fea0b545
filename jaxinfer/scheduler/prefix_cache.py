"""Finds the KV pages of a prompt's beginning among those computed before. Holds no pages of its own: PageAllocator counts them.

Must not decide who is admitted or evicted for whom, and never trusts a hash. Plain Python: never imports jax.

Full pages of tokens form a tree under one root a namespace; an entry is found by a hash chained from its parent's, then
accepted only if its parent is the very entry reached so far and its tokens are equal, so that a hit is exact by induction.

    root(namespace) -> [t0 .. tZ-1] page 7 -> [tZ .. t2Z-1] page 3 -> ...
                                           -> [other tokens] page 9

An entry whose page was evicted stays, without a page, while anything hangs below it, and takes the next page computed
for the same tokens.

With page copies, a hit may go on into a page that only begins alike. That page is never shared: its owner writes on. The
newcomer gets a copy, of which it computes the rest anew; so a prompt that was there before costs its last token alone. For
this the tree also has leaves of less than a page: the known tokens of a running request's last page, or of a finished one's.
"""

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from jaxinfer.request import Request
from jaxinfer.scheduler import cache_state
from jaxinfer.scheduler.pages import PageAllocator
from jaxinfer.scheduler.prefix_contract import NullPrefixCache, PrefixCache, PrefixHit

__all__ = ["HashedPrefixCache", "NullPrefixCache", "PrefixCache", "PrefixHit"]

_MAX_SIBLINGS = 64  # entries compared for a beginning, latest first

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


class _Entry:
    """One page of tokens after those of its parents; less than a page only in a leaf."""

    __slots__ = ("children", "hash", "namespace", "num_users", "page", "parent", "tokens")

    def __init__(self, *, hash: int, namespace: Hashable, parent: "_Entry | None", tokens: tuple[int, ...]) -> None:
        self.hash = hash
        self.namespace = namespace
        self.parent = parent          # None: root
        self.tokens = tokens
        self.page: int | None = None  # None: root, or evicted
        self.num_users = 0            # child entries, and running requests whose chain ends here
        self.children: dict[_Entry, None] = {}


class HashedPrefixCache(PrefixCache):
    """A tree of full pages, found by chained hashes, verified token by token.

    Two contents that collide are not both kept: the first stays, the second counts as not cacheable.

    Args:
      pages: the pool; this object registers itself for its evictions.
      namespace: what separates requests beside their tokens.
      hash_page: the chained hash.
      enable_page_copies: hits may end within a page; the engine must then do each plan's page_copies.
    """

    def __init__(self, pages: PageAllocator, *, namespace: Namespace = salt_namespace, hash_page: HashPage = hash_page,
                 enable_page_copies: bool = False) -> None:
        self._pages = pages
        self._namespace = namespace
        self._hash_page = hash_page
        self._enable_page_copies = enable_page_copies
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
            child = self._find(entry, _page_tokens(request, index, size))
            if child is None or child.page is None:
                break
            found.append(child.page)
            entry = child
        num_tokens = len(found) * size
        if self._enable_page_copies:
            page, num_alike = self._best_beginning(entry, request, num_tokens)
            return PrefixHit(found, num_tokens + num_alike, page)
        return PrefixHit(found, num_tokens)

    def _best_beginning(self, parent: _Entry, request: Request, start: int) -> tuple[int | None, int]:
        """The page below parent that begins with most of the tokens from start on, short of the last known, and how many."""
        size = self._pages.page_size
        wanted = request.token_ids(start, min(start + size, request.num_tokens - 1))
        best: tuple[int | None, int] = (None, 0)
        for child in itertools.islice(reversed(parent.children), _MAX_SIBLINGS):
            if child.page is not None:
                num_alike = _num_alike(child.tokens, wanted)
                if num_alike > best[1]:
                    best = child.page, num_alike
        return best if best[1] == len(wanted) or best[1] >= size // 8 else (None, 0)  # a copy is not worth a few tokens

    def awaited(self, request: Request, prefills: Sequence[Request]) -> Request | None:
        size, prompt = self._pages.page_size, request.prompt_token_ids
        if len(prompt) <= size:
            return None
        first, last = prompt[0], prompt[size - 1]
        alike = [other for other in prefills if len(other.prompt_token_ids) >= size and other.prompt_token_ids[0] == first
                 and other.prompt_token_ids[size - 1] == last]
        if not alike:
            return None
        wanted = prompt[:self.match(request).num_tokens + size]
        namespace = self._namespace(request)
        if len(wanted) >= request.num_tokens:
            return None  # the last token is computed in any case
        return next((other for other in alike if other.prompt_token_ids[:len(wanted)] == wanted and self._namespace(other) == namespace), None)

    def insert(self, request: Request) -> None:
        size = self._pages.page_size
        num_full = min(request.num_computed_tokens, request.num_tokens) // size
        chain = self._chains.get(request.request_id)
        if num_full > (chain[1] if chain else 0):
            self._insert_full(request, num_full)
        if self._enable_page_copies:
            self._insert_rest(request, num_full)

    def _insert_full(self, request: Request, num_full: int) -> None:
        size = self._pages.page_size
        chain = self._chains.get(request.request_id)
        first, done = chain or (self._root(self._namespace(request)), 0)
        entry = first
        entry.num_users += 1  # hold the chain's end while it moves
        while done < num_full:
            child = self._find_or_add(entry, _page_tokens(request, done, size))
            if child is None:
                break
            child.num_users += 1
            if child.page is None:
                self._place(child, request.pages[done])
            elif self._entry_of_page.get(request.pages[done]) not in (None, child):
                self._pages.drop(request.pages[done])  # what began in this copy is of no use beside the whole page
                self._evicted(request.pages[done])
            self._let_go(entry)
            entry, done = child, done + 1
        if chain:
            self._let_go(first)
        self._chains[request.request_id] = (entry, done)

    def _insert_rest(self, request: Request, num_full: int) -> None:
        """Offers the beginning of the page after the full ones, in place of what of it was offered before."""
        size = self._pages.page_size
        parent, done = self._chains.get(request.request_id) or (self._root(self._namespace(request)), 0)
        known = min(request.num_computed_tokens, request.num_tokens)
        if done == num_full and known > num_full * size:
            child = self._find_or_add(parent, tuple(request.token_ids(num_full * size, known)))
            if child is not None and child.page is None:
                self._place(child, request.pages[num_full])
        self._prune(parent)

    def _place(self, entry: _Entry, page: int) -> None:
        """The entry's tokens are in an owned page. What began in that page before gives way."""
        former = self._entry_of_page.get(page)
        if former is None:
            self._pages.retain(page)
        else:
            former.page = None
        entry.page = page
        self._entry_of_page[page] = entry
        if former is not None:
            self._prune(former)

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
        end = path[-1] if path else self._roots.get(self._namespace(request))
        if end is not None:
            known = request.token_ids(len(path) * size, request.num_tokens)
            path += [child for child in end.children if list(child.tokens) == known[:len(child.tokens)]]
        for entry in path:
            if entry.page is not None:
                self._pages.drop(entry.page)
                self._evicted(entry.page)

    def dump_state(self, is_kept: Callable[[Any], bool] = lambda namespace: True) -> dict[str, Any]:
        """What is cached, as plain data: {"version", "page_size", "entries": [{"page", "parent", "namespace", "tokens"}]}.

        Entries stand parents first, otherwise the one used last first; "parent" is an entry's index. Only what a request could
        find is there, and of that only what is in namespaces that `is_kept` accepts. The content of "page" is the engine's to
        save. Namespaces stay as the namespace function makes them: for JSON they must be strings, numbers, None or tuples of these.
        """
        found = [(entry.page, entry.parent.page if entry.parent else None, entry.namespace, entry.tokens)
                 for entry in self._by_use() if entry.page is not None and is_kept(entry.namespace)]
        return cache_state.dump(found, page_size=self._pages.page_size)

    def load_state(self, state: Mapping[str, Any]) -> dict[int, int]:
        """Takes in what dump_state() gave, JSON's lists for tuples allowed, as far as free pages go, the most recently used first.

        Returns:
          {page as dumped: page here}: the contents that the engine must restore before the next step.

        Raises:
          ConfigError: of another version or page size, or not of dump_state().
        """
        assert not self._entries, "a state is loaded into an empty cache"
        records = cache_state.parse(state, page_size=self._pages.page_size)
        found = {record.number: record for record in records if self._enable_page_copies or len(record.tokens) == self._pages.page_size}
        placed: dict[int, _Entry] = {}
        for record in list(found.values())[:len(self._pages.free_pages())]:
            parent = placed.get(record.parent) if record.parent is not None else self._root(record.namespace)
            entry = self._find_or_add(parent, record.tokens) if parent is not None else None
            if entry is None or entry.page is not None:
                continue
            granted = self._pages.allocate(1)
            assert isinstance(granted, list), "fewer entries than free pages are taken"
            self._place(entry, granted[0])
            placed[record.number] = entry
        moved = {found[number].page: entry.page for number, entry in placed.items() if entry.page is not None}
        self._pages.release(list(moved.values()))
        for root in list(self._roots.values()):
            self._prune(root)
        return moved

    def _by_use(self) -> list[_Entry]:
        """Entries that can be found, parents first, otherwise the one used last first."""
        used = {page: rank for rank, page in enumerate(self._pages.cached_pages())}  # owned ones count as used last of all
        ranked = sorted(self._entry_of_page.values(), key=lambda e: used.get(e.page or 0, len(used)), reverse=True)
        listed: dict[_Entry, None] = {}
        for entry in ranked:
            chain = []
            above: _Entry | None = entry
            while above is not None and above.parent is not None and above not in listed:
                chain.append(above)
                above = above.parent
            if all(e.page is not None for e in chain):
                listed |= dict.fromkeys(reversed(chain))
        return list(listed)

    def check_invariants(self) -> None:
        assert set(self._entry_of_page) == self._pages.retained_pages(), "the pool and the prefix cache disagree on cached pages"
        users = dict.fromkeys(map(id, [*self._entries.values(), *self._roots.values()]), 0)
        for above in [*(e.parent for e in self._entries.values()), *(e for e, _ in self._chains.values())]:
            assert above is not None and id(above) in users, "an entry hangs below one that is gone"
            users[id(above)] += 1
        for key, entry in self._entries.items():
            assert entry.hash == key and entry.parent is not None and entry in entry.parent.children, "an entry is filed elsewhere"
            assert 0 < len(entry.tokens) <= self._pages.page_size, "an entry has no page of tokens"
            assert len(entry.tokens) == self._pages.page_size or not entry.children, "something hangs below a page that is not full"
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
            parent.children[entry] = None
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
            del entry.parent.children[entry]
            entry = entry.parent
            entry.num_users -= 1


def _page_tokens(request: Request, index: int, size: int) -> tuple[int, ...]:
    """Known tokens of page `index`, which is full."""
    stop = (index + 1) * size
    if stop <= len(request.prompt_token_ids):
        return request.prompt_token_ids[index * size:stop]
    return tuple(request.token_ids(index * size, stop))


def _num_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
