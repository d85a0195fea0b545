"""Fills a step with rows: one token for each request that decodes, chunks of prompts, and the pages for both.

Admits nobody; whom it takes pages from is RunningSet's choice. Plain Python: never imports jax.
"""

from collections.abc import Callable, Sequence

from jaxinfer.request import Request, RequestStatus
from jaxinfer.scheduler.buckets import LengthBuckets
from jaxinfer.scheduler.pages import PageAllocator, PageShortage
from jaxinfer.scheduler.plan import Draft, ScheduledRow
from jaxinfer.scheduler.running import RunningSet


class StepFiller:
    """Gives running requests their rows.

    Args:
      running: the requests, by rank.
      pages: the pool.
      buckets: sort prefills by what they have left.
      max_prefill_rows: prefill chunks in a plan at most.
      long_prefill_share: see Scheduler.
      preempt: sends a running request back to the queue.
    """

    def __init__(self, *, running: RunningSet, pages: PageAllocator, buckets: LengthBuckets, max_prefill_rows: int,
                 long_prefill_share: float, preempt: Callable[[Request], None]) -> None:
        self._running = running
        self._pages = pages
        self._buckets = buckets
        self._max_prefill_rows = max_prefill_rows
        self._long_prefill_share = long_prefill_share
        self._preempt = preempt

    def decodes(self, draft: Draft) -> None:
        """One token for each running request that has one left to compute."""
        page_size = self._pages.page_size
        for request in list(self._running.requests.values()):
            start, num_in_flight = request.num_computed_tokens, request.num_in_flight
            end = request.num_tokens + num_in_flight
            if end - start != 1 or end >= request.max_total_len or request.status is not RequestStatus.RUNNING:
                continue  # in prefill, or its last token is in flight, or just preempted
            if num_in_flight and request.waits_for_tokens:
                continue  # others go on
            if start == len(request.pages) * page_size and self._grow(request, end, draft) < end:
                continue  # no page for it; those admitted before go on
            token_ids = () if num_in_flight else ((request.output_token_ids or request.prompt_token_ids)[-1],)
            draft.decodes.append(self._schedule(request, token_ids, 1, samples=True, draft=draft))

    def decodes_again(self, rows: Sequence[ScheduledRow], draft: Draft) -> bool:
        """The next token of each of these rows, just scheduled; nothing, and False, where one has none or free pages do not suffice."""
        page_size = self._pages.page_size
        needing = []
        for row in rows:
            if row.kv_len + 1 >= row.request.max_total_len:
                return False
            if row.kv_len == len(row.request.pages) * page_size:
                needing.append(row.request)
        if len(needing) > self._pages.num_free:
            return False
        for request in needing:
            updates = self._running.extend(request, 1)
            assert not isinstance(updates, PageShortage), "free pages were counted"
            draft.updates += updates
        draft.decodes = [self._schedule(row.request, (), 1, samples=True, draft=draft) for row in rows]
        return True

    def prefills(self, draft: Draft, prefills: list[Request]) -> None:
        """The next chunks: those with the least left first, by bucket, but the first in rank has its share of the step.

        So a long prompt neither starves nor is starved: it gets long_prefill_share at least, and all that is left.
        """
        if not prefills:
            return
        bucket, oldest = self._buckets.of, prefills[0]
        order = sorted(prefills, key=lambda r: bucket(r.num_tokens - r.num_computed_tokens))
        held = 0
        if order[0] is not oldest:
            held = min(oldest.num_tokens - oldest.num_computed_tokens, max(1, int(draft.budget * self._long_prefill_share)))
            order.remove(oldest)
        for request in order:
            if draft.budget <= held or len(draft.prefills) + (held > 0) >= self._max_prefill_rows:
                break
            self._schedule_chunk(request, draft, draft.budget - held)
        if held:
            self._schedule_chunk(oldest, draft, draft.budget)

    def _schedule_chunk(self, request: Request, draft: Draft, budget: int) -> None:
        """A prefill chunk as large as budget and pages allow."""
        if request.status is not RequestStatus.RUNNING:
            return  # preempted for another chunk's sake
        assert request.num_in_flight == 0, "a request samples only at the end of its known tokens"
        start = request.num_computed_tokens
        stop = self._grow(request, min(request.num_tokens, start + budget), draft)
        if stop > start:
            tokens, samples = tuple(request.token_ids(start, stop)), stop == request.num_tokens
            draft.prefills.append(self._schedule(request, tokens, stop - start, samples=samples, draft=draft))

    def _schedule(self, request: Request, token_ids: tuple[int, ...], num_tokens: int, *, samples: bool, draft: Draft) -> ScheduledRow:
        """A row of the request's next num_tokens tokens; the request advances as if they were computed."""
        start = request.num_computed_tokens
        request.num_computed_tokens = start + num_tokens
        request.num_in_flight += samples
        draft.budget -= num_tokens
        draft.kept.add(request.request_id)
        assert request.slot is not None, request.request_id
        return ScheduledRow(request, request.slot, start, num_tokens, token_ids, not token_ids, samples)  # by place: in half the time

    def _grow(self, request: Request, stop: int, draft: Draft) -> int:
        """Gives a running request pages for the positions below `stop`; returns how far they reach, `stop` at most.

        When the pool is short, requests behind it in rank that have no part in this plan yet are preempted (RunningSet.victim).
        """
        missing = self._pages.num_pages_for(stop) - len(request.pages)
        while missing > 0:
            updates = self._running.extend(request, missing)
            if not isinstance(updates, PageShortage):
                draft.updates += updates
                break
            victim = self._running.victim(draft.kept, after=request)
            if victim is not None:
                self._preempt(victim)
            else:
                missing = updates.free
        return min(stop, len(request.pages) * self._pages.page_size)
