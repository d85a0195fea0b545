"""Who is admitted when, and the refusal of what no amount of waiting would serve. Plain Python: never imports jax."""

from collections import Counter
from collections.abc import Callable, Sequence

from jaxinfer.errors import RequestError
from jaxinfer.request import Request
from jaxinfer.scheduler.buckets import LengthBuckets
from jaxinfer.scheduler.host_pages import HostPages
from jaxinfer.scheduler.pages import PageAllocator
from jaxinfer.scheduler.plan import Draft
from jaxinfer.scheduler.prefix_cache import PrefixCache, PrefixHit
from jaxinfer.scheduler.running import RunningSet
from jaxinfer.scheduler.waiting import WaitingQueue

MAX_OVERTAKES = 32
"""Requests of other length buckets that may be admitted before one that finds no pages; then all wait for it."""


def refuse_what_never_fits(request: Request, *, max_model_len: int, pages: PageAllocator) -> None:
    """Checks a request against the limits of the engine.

    Raises:
      RequestError: empty prompt, no room for output, longer than max_model_len, or more pages than the pool has.
    """
    num_prompt, total = len(request.prompt_token_ids), request.max_total_len
    name = f"request {request.request_id!r}"
    if num_prompt == 0:
        raise RequestError(f"{name}: the prompt is empty; give at least one token.")
    if total > max_model_len:
        raise RequestError(f"{name}: prompt and output may take {total} tokens, max_model_len is {max_model_len}; shorten the prompt, "
                           "lower max_tokens or raise max_model_len.")
    if num_prompt >= total:
        raise RequestError(f"{name}: the prompt has {num_prompt} tokens and prompt plus output may have {total}, which leaves no room "
                           "for output; shorten the prompt or raise max_model_len.")
    num_needed = pages.num_pages_for(total - 1)  # the last token's K/V is never computed
    if num_needed > pages.capacity:
        raise RequestError(
            f"{name}: {num_prompt} prompt and {total - num_prompt} output tokens need {num_needed} pages of {pages.page_size} tokens "
            f"({total - 1} / {pages.page_size}, rounded up; the last token is not stored), and the pool has {pages.capacity}; shorten "
            "the prompt, lower max_tokens or give the KV cache more memory.")


class _PrefillLoad:
    """What a step has to prefill, by the bucket of what each request has left: of a long prompt with a long hit, not much.

    Args:
      buckets: with their caps.
      budget: tokens that the step can take.
      prefills: requests in prefill already.
    """

    def __init__(self, buckets: LengthBuckets, budget: int, prefills: Sequence[Request]) -> None:
        self._buckets = buckets
        self._budget = budget
        self._num_tokens, self._num_rows = [0] * len(buckets), [0] * len(buckets)
        self.takes = set(range(len(buckets)))
        """Buckets that another request may be started in; the caller may take some out."""
        for request in prefills:
            self.add(request)

    def add(self, request: Request) -> None:
        """Counts a request in prefill."""
        num_left = request.num_tokens - request.num_computed_tokens
        bucket = self._buckets.of(num_left)
        self._num_tokens[bucket] += num_left
        self._num_rows[bucket] += 1
        if self._num_tokens[bucket] >= self._budget or self._num_rows[bucket] >= self._buckets.caps[bucket]:
            self.takes.discard(bucket)


class Admission:
    """Starts waiting requests: in the policy's order, by length bucket, where slots and pages allow.

    A request needs room for all its known tokens. One that was preempted needs room for some tokens more, lest it loses its
    pages again at once; by itself it always fits.

    Args:
      waiting: the queue.
      running: where requests go.
      pages: the pool.
      prefix_cache: what requests may find there.
      host_pages: what preempted requests may find there.
      buckets: how many of which length may be in prefill at once.
      grace_tokens: tokens for which a preempted request must find room beyond those it has.
      preempt: sends a running request back to the queue.
    """

    def __init__(self, *, waiting: WaitingQueue, running: RunningSet, pages: PageAllocator, prefix_cache: PrefixCache,
                 host_pages: HostPages, buckets: LengthBuckets, grace_tokens: int, preempt: Callable[[Request], None]) -> None:
        self._waiting = waiting
        self._running = running
        self._pages = pages
        self._prefix_cache = prefix_cache
        self._host_pages = host_pages
        self._buckets = buckets
        self._grace_tokens = grace_tokens
        self._preempt = preempt
        self._needs: dict[str, int] = {}  # pages that those who found no room need
        self._overtakes: Counter[str] = Counter()  # how often those were overtaken
        self._set_aside: dict[str, list[Request]] = {}  # id of a request in prefill -> those that wait for what it computes
        self.num_prompt_tokens = self.num_cached_tokens = self.num_recomputed_tokens = self.num_swapped_tokens = 0
        """See SchedulerStats."""

    def admit(self, draft: Draft, prefills: list[Request]) -> None:
        """Starts waiting requests in the policy's order while slots and pages allow and there is work for the step in none.

        Nobody overtakes the first of a bucket. Requests of other buckets may, where the first's bucket has all that the step
        can take or that its cap allows; and a few of them where it finds no pages. One that begins like another in prefill is set
        aside until that one has computed what they share (so the n completions of a prompt compute it once).
        """
        self._bring_back(prefills)
        if not len(self._waiting) or not self._running.has_free_slot or draft.budget == 0:
            return
        load = _PrefillLoad(self._buckets, draft.budget, prefills)
        roomless: list[Request] = []
        num_reserved = self._num_reserved(prefills)
        while self._running.has_free_slot:
            request = self._waiting.first(load.takes)
            if request is None or request.num_in_flight > 0:  # preempted, and its last tokens are not known yet
                return
            bucket = self._waiting.bucket(request)
            awaited = self._prefix_cache.awaited(request, prefills)
            if awaited is not None:
                self._waiting.set_aside(request)
                self._set_aside.setdefault(awaited.request_id, []).append(request)
                continue
            hit = self._find_room(request, num_reserved=num_reserved)
            if hit is None:
                if not self._overtakes[request.request_id] < MAX_OVERTAKES:
                    return
                roomless.append(request)
                load.takes.remove(bucket)
            elif self._buckets.of(request.num_tokens - hit.num_tokens) not in load.takes:
                load.takes.remove(bucket)  # the step has no place for what the hit leaves
            else:
                self._overtakes.update(r.request_id for r in roomless)
                self._start(request, hit, draft)
                prefills.append(request)
                num_reserved += max(1, self._num_missing(request))
                load.add(request)

    def _bring_back(self, prefills: Sequence[Request]) -> None:
        """Those whose wait for another's prefill is over, by its end or by the other's, may be admitted again."""
        if self._set_aside:
            for request_id in self._set_aside.keys() - {r.request_id for r in prefills}:
                for request in self._set_aside.pop(request_id):
                    self._waiting.bring_back(request)

    def interrupt(self, draft: Draft) -> None:
        """Starts the first waiting requests while they outrank a running one; those outranked give way where that makes room."""
        while (request := self._waiting.first(range(len(self._buckets)))) is not None and request.num_in_flight == 0:
            outranked = [r for r in self._running.outranked(request) if r.request_id not in draft.kept]
            if not outranked:
                return
            num_reserved = self._num_reserved(self._running.in_prefill())
            hit = self._find_room(request, num_reserved=num_reserved)
            if hit is None and not self._would_make_room(outranked, request, num_reserved):
                return
            if hit is None or not self._running.has_free_slot:
                self._preempt(outranked[0])
            else:
                self._start(request, hit, draft)

    def _would_make_room(self, outranked: list[Request], request: Request, num_reserved: int) -> bool:
        """Whether the request finds room once all these have given way; pages of theirs that it would share count as needed then."""
        held = Counter(page for r in outranked for page in r.pages)
        num_freed = sum(num == self._pages.owners(page) for page, num in held.items())
        num_released = sum(max(1, self._num_missing(r)) for r in outranked)  # of the reserve
        num_kept = sum(self._pages.owners(page) > held[page] for page in self._prefix_cache.match(request).pages)
        return self._pages.num_free - num_reserved + num_freed + num_released >= self._num_wanted(request) - num_kept

    def _num_missing(self, request: Request) -> int:
        return self._pages.num_pages_for(request.num_tokens) - len(request.pages)

    def _num_reserved(self, prefills: list[Request]) -> int:
        """Free pages that running requests will need: for their known tokens, and one each at least."""
        return len(self._running) + sum(max(0, self._num_missing(r) - 1) for r in prefills)

    def _start(self, request: Request, hit: PrefixHit, draft: Draft) -> None:
        self._waiting.remove(request)
        self.forget(request)
        updates, copies, loads = self._running.start(request, hit)
        self._host_pages.leave(request)
        draft.updates += updates
        draft.copies += copies
        draft.loads += loads
        draft.kept.add(request.request_id)
        if request.num_preemptions == 0:
            request.num_cached_tokens = hit.num_tokens
            self.num_prompt_tokens += len(request.prompt_token_ids)
            self.num_cached_tokens += hit.num_tokens
        elif hit.host_pages:
            self.num_swapped_tokens += hit.num_tokens - len(hit.pages) * self._pages.page_size
        else:
            self.num_recomputed_tokens += request.num_tokens - hit.num_tokens

    def _find_room(self, request: Request, *, num_reserved: int) -> PrefixHit | None:
        """What prefix cache and host have for a waiting request, if the pool can hold its tokens beside num_reserved pages."""
        room = self._pages.num_free - num_reserved
        needs = self._needs.get(request.request_id)
        if needs is not None and room < needs:
            return None  # not worth another search
        hit = self._host_pages.beyond(self._prefix_cache.match(request), request)
        num_owned = sum(1 for page in hit.pages if self._pages.owners(page))
        num_needed = self._num_wanted(request) - num_owned
        if room < num_needed:
            self._needs[request.request_id] = num_needed
            return None
        return hit

    def _num_wanted(self, request: Request) -> int:
        """Pages for all its known tokens, and for some more where it lost them before."""
        num_more = min(self._grace_tokens, request.max_total_len - 1 - request.num_tokens) if request.num_preemptions else 0
        return self._pages.num_pages_for(request.num_tokens + num_more)

    def forget(self, request: Request) -> None:
        """The request waits no longer."""
        self._needs.pop(request.request_id, None)
        self._overtakes.pop(request.request_id, None)

    def check_invariants(self) -> None:
        """Asserts that only waiting requests are remembered."""
        for request_id in (*self._needs, *self._overtakes):
            assert self._waiting.find(request_id) is not None, f"request {request_id!r} is remembered and waits no longer"
