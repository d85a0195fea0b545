"""What the scheduler asks of a prefix cache, and the cache that has nothing. Plain Python: never imports jax."""

import abc
from collections.abc import Sequence
from typing import NamedTuple

from jaxinfer.request import Request


class PrefixHit(NamedTuple):
    """Where the first num_tokens tokens of a request are."""

    pages: list[int]
    """Full pages, to be shared."""
    num_tokens: int
    """Those in the page to be copied included, or those on the host."""
    copy_from: int | None = None
    """The page whose beginning is the request's next one; never to be shared."""
    host_pages: Sequence[int] = ()
    """Host pages that hold what follows `pages` (HostPages.beyond; a prefix cache has none). Not together with copy_from."""


class PrefixCache(abc.ABC):
    """What the scheduler asks of a prefix cache."""

    @abc.abstractmethod
    def match(self, request: Request) -> PrefixHit:
        """The longest cached beginning of the request's known tokens, strictly below its last known token.

        So the last token is always computed (its logits are needed), and it starts on a page of the request's own, new or
        a copy: a shared page is never written. The caller must share() the pages before it allocates any. The page to copy
        may be handed out as soon as that: its content is read before the step writes anything.
        """

    @abc.abstractmethod
    def awaited(self, request: Request, prefills: Sequence[Request]) -> Request | None:
        """The one of these requests in prefill that is about to compute what makes match() a page longer, at least; None: none is.

        Worth a wait, since it takes the tokens' work and pages once instead of twice.
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

    def awaited(self, request: Request, prefills: Sequence[Request]) -> Request | None:
        return None

    def insert(self, request: Request) -> None:
        pass

    def release(self, request: Request) -> None:
        pass

    def discard(self, request: Request) -> None:
        pass

    def check_invariants(self) -> None:
        pass
