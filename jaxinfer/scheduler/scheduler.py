"""Decides what each step computes: admission, chunked prefill, pages on demand, preemption.

Knows requests, slots and page numbers; no arrays, no padding, no model. Plain Python: never imports jax or numpy.

Asynchronous stepping needs no special case, only arithmetic. Tokens of a request, known or in flight:

    0 ... prompt ... output seen by the host | in flight |
                                             ^ num_tokens ^ num_tokens + num_in_flight
    num_computed_tokens: positions below it are in the pages, or will be once the dispatched steps are done

A request decodes when exactly one token is left to compute; its input is on the device alone when that token is in flight.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

from jaxinfer.errors import ConfigError, RequestError
from jaxinfer.request import FinishReason, Request, RequestStatus
from jaxinfer.scheduler.admission import refuse_what_never_fits
from jaxinfer.scheduler.pages import PageAllocator, PageEntry, PageShortage
from jaxinfer.scheduler.plan import Draft, ScheduledRow, SchedulePlan, SchedulerStats
from jaxinfer.scheduler.policies import WaitingQueue, find_policy
from jaxinfer.scheduler.prefix_cache import PrefixCache, PrefixHit
from jaxinfer.scheduler.running import RunningSet

__all__ = ["SchedulePlan", "ScheduledRow", "Scheduler", "SchedulerStats"]


class Scheduler:
    """Turns requests into plans, and sampled tokens into the requests' progress.

    Running requests come first, oldest admission first: one token for each that decodes, then chunks of those still in
    prefill, then admissions in the policy's order, all within the token budget. Pages are taken when a row needs them;
    when none is left, requests admitted later give theirs up (latest first), never those admitted earlier: the latest
    waits instead. So the oldest always goes on, and any single request fits by itself: every request ends.

    Args:
      max_num_seqs: requests that run together at most; slots are 0 .. max_num_seqs-1.
      max_num_batched_tokens: tokens in one plan at most; >= max_num_seqs.
      max_model_len: prompt plus output tokens of a request at most.
      pages: the pool.
      prefix_cache: a cache on the same pool, or NullPrefixCache.
      policy: name in POLICIES.
      max_prefill_rows: prefill chunks in one plan at most; None: no limit of its own.
      clock: seconds, monotonic.

    Raises:
      ConfigError: a value lies outside its range, or an unknown policy.
    """

    def __init__(self, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, pages: PageAllocator,
                 prefix_cache: PrefixCache, policy: str = "fcfs", max_prefill_rows: int | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        for name, value in (("max_num_seqs", max_num_seqs), ("max_model_len", max_model_len), ("max_prefill_rows", max_prefill_rows)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} = {value}: must be >= 1.")
        if max_num_batched_tokens < max_num_seqs:
            raise ConfigError(f"max_num_batched_tokens = {max_num_batched_tokens} is less than max_num_seqs = {max_num_seqs}, so that "
                              "not every running sequence could decode in a step: raise the first or lower the second.")
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._max_prefill_rows = max_num_seqs if max_prefill_rows is None else max_prefill_rows
        self._pages = pages
        self._prefix_cache = prefix_cache
        self._clock = clock
        self._waiting = WaitingQueue(find_policy(policy))
        self._running = RunningSet(max_num_seqs=max_num_seqs, pages=pages, prefix_cache=prefix_cache)
        self._orders: dict[str, int] = {}  # numbers of arrival of unfinished requests
        self._dispatched: deque[SchedulePlan] = deque()  # given by next() and not yet applied
        self._preempted: list[str] = []  # since the last plan
        self._blocked: tuple[Request, int] | None = None  # who found no room, and the pages it needs
        self._num_arrived = self._num_preemptions = 0
        self._num_prompt_tokens = self._num_cached_tokens = self._num_recomputed_tokens = 0

    # Requests in and out.

    def add(self, request: Request) -> None:
        """Queues a new request.

        Raises:
          RequestError: it can never be served (empty prompt, no room for output, more than the model's length or the pool's
            pages), or its id is in use.
        """
        if request.request_id in self._orders:
            raise RequestError(f"request {request.request_id!r}: this id belongs to a request that is being served; choose another "
                               "or wait for its end.")
        refuse_what_never_fits(request, max_model_len=self._max_model_len, pages=self._pages)
        assert request.status is RequestStatus.WAITING and request.num_computed_tokens == 0, "only a new request can be added"
        self._orders[request.request_id] = self._num_arrived
        self._num_arrived += 1
        self._enqueue(request)

    def abort(self, request_id: str) -> bool:
        """Withdraws a request; its tokens still in flight will be dropped. False if it has finished or is unknown."""
        request = self._running.requests.get(request_id) or self._waiting.find(request_id)
        if request is not None:
            self.finish(request, FinishReason.ABORT)
        return request is not None

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends an unfinished request now; its pages and slot may serve the next step."""
        assert request.request_id in self._orders and request.status is not RequestStatus.FINISHED, request.request_id
        if reason is FinishReason.ERROR:
            self._prefix_cache.discard(request)  # NaN must not reach others
        if request.status is RequestStatus.RUNNING:
            if reason is not FinishReason.ERROR:
                self._prefix_cache.insert(request)
            self._running.release(request, RequestStatus.FINISHED)
        else:
            self._waiting.remove(request)
            request.status = RequestStatus.FINISHED
        del self._orders[request.request_id]
        request.finish_reason = reason
        request.finish_time = self._clock()

    # The step.

    def next(self) -> SchedulePlan | None:
        """The next step, to be dispatched before next() is called again, or None if nothing can be scheduled now.

        May be called before earlier plans are applied. After None with plans unapplied, apply the oldest and try again;
        with none unapplied, None means that there is no unfinished request.
        """
        draft = Draft(budget=self._max_num_batched_tokens)
        self._schedule_decodes(draft)
        self._schedule_prefills(draft)
        self._admit(draft)
        if not draft.scheduled:
            return None
        # Only now, with the plan complete: a row must not read pages that another row of the same step fills.
        for row in draft.prefills:
            self._prefix_cache.insert(row.request)
        plan = SchedulePlan(
            rows=(*draft.decodes, *draft.prefills), page_updates=tuple(draft.updates),
            num_tokens=self._max_num_batched_tokens - draft.budget,
            num_prefill_tokens=sum(row.num_tokens for row in draft.prefills), preempted=tuple(self._preempted))
        self._preempted.clear()
        self._dispatched.append(plan)
        return plan

    def apply(self, plan: SchedulePlan, tokens: Sequence[int], finish: Sequence[FinishReason | None]) -> None:
        """Takes what a step sampled. Every plan is applied once, in order, also when none of its rows samples.

        A row's token is dropped where the request has finished meanwhile (aborted, or stopped one step before), or
        finishes here with ERROR. A preempted request takes its token too: what it computes again will include it.

        Args:
          plan: the oldest plan not yet applied.
          tokens: one a row; looked at only where the row samples.
          finish: one a row; why the request ends with this token, or None. Must be given once max_total_len is reached.
        """
        assert self._dispatched and self._dispatched[0] is plan, "plans must be applied once, in the order of next()"
        assert len(tokens) == len(finish) == len(plan.rows), (len(tokens), len(finish), len(plan.rows))
        self._dispatched.popleft()
        page_size, now = self._pages.page_size, self._clock()
        for row, token, reason in zip(plan.rows, tokens, finish, strict=True):
            request = row.request
            if row.samples:
                request.num_in_flight -= 1
            if request.status is RequestStatus.FINISHED:
                continue
            if row.samples and reason is not FinishReason.ERROR:
                request.output_token_ids.append(token)
                if request.first_token_time is None:
                    request.first_token_time = now
            if reason is not None:
                self.finish(request, reason)
                continue
            num_tokens = request.num_tokens
            assert num_tokens < request.max_total_len, f"request {request.request_id!r} is full and was not finished"
            if min(num_tokens, request.num_computed_tokens) % page_size == 0 and request.status is RequestStatus.RUNNING:
                self._prefix_cache.insert(request)

    def _schedule_decodes(self, draft: Draft) -> None:
        """One token for each running request that has one left to compute."""
        page_size = self._pages.page_size
        for request in list(self._running.requests.values()):
            start, num_in_flight = request.num_computed_tokens, request.num_in_flight
            end = request.num_tokens + num_in_flight
            if end - start != 1 or end >= request.max_total_len or request.status is not RequestStatus.RUNNING:
                continue  # in prefill, or its last token is in flight, or just preempted
            if start == len(request.pages) * page_size and self._grow(request, end, draft) < end:
                continue  # no page for it; those admitted before go on
            token_ids = () if num_in_flight else ((request.output_token_ids or request.prompt_token_ids)[-1],)
            draft.decodes.append(self._schedule(request, token_ids, 1, samples=True, draft=draft))

    def _schedule_prefills(self, draft: Draft) -> None:
        """The next chunk of each running request that has several tokens left to compute."""
        if len(draft.decodes) == len(self._running):
            return
        for request in list(self._running.requests.values()):
            left = request.num_tokens + request.num_in_flight - request.num_computed_tokens
            if left > 1 and request.status is RequestStatus.RUNNING and self._has_prefill_room(draft):
                self._schedule_chunk(request, draft)

    def _has_prefill_room(self, draft: Draft) -> bool:
        return draft.budget > 0 and len(draft.prefills) < self._max_prefill_rows

    def _schedule_chunk(self, request: Request, draft: Draft) -> None:
        """A prefill chunk as large as budget and pages allow."""
        assert request.num_in_flight == 0, "a request samples only at the end of its known tokens"
        start = request.num_computed_tokens
        stop = self._grow(request, min(request.num_tokens, start + draft.budget), draft)
        if stop > start:
            tokens, samples = tuple(request.token_ids(start, stop)), stop == request.num_tokens
            draft.prefills.append(self._schedule(request, tokens, stop - start, samples=samples, draft=draft))

    def _schedule(self, request: Request, token_ids: tuple[int, ...], num_tokens: int, *, samples: bool, draft: Draft) -> ScheduledRow:
        """A row of the request's next num_tokens tokens; the request advances as if they were computed."""
        start = request.num_computed_tokens
        request.num_computed_tokens = start + num_tokens
        request.num_in_flight += samples
        draft.budget -= num_tokens
        draft.scheduled.add(request.request_id)
        assert request.slot is not None, request.request_id
        return ScheduledRow(request=request, slot=request.slot, start=start, num_tokens=num_tokens, token_ids=token_ids,
                            from_device=not token_ids, samples=samples)

    # Admission.

    def _admit(self, draft: Draft) -> None:
        """Waiting requests in the policy's order, while slots, budget and pages allow. Nobody overtakes the first."""
        while self._running.has_free_slot and self._has_prefill_room(draft):
            request = self._waiting.peek()
            if request is None or request.num_in_flight > 0:  # preempted, and its last tokens are not known yet
                return
            hit = self._find_room(request)
            if hit is None:
                return
            self._waiting.pop()
            draft.updates += self._running.start(request, hit)
            self._count_admission(request, hit)
            self._schedule_chunk(request, draft)

    def _find_room(self, request: Request) -> PrefixHit | None:
        """What the prefix cache has for the request, if the pool can hold all its known tokens now.

        One page for each running request stays in reserve, lest its next tokens preempt the newcomer at once.
        """
        num_free = self._pages.num_free - len(self._running)
        if self._blocked is not None and self._blocked[0] is request and num_free < self._blocked[1]:
            return None  # not worth another search
        hit = self._prefix_cache.match(request)
        num_owned = sum(1 for page in hit.pages if self._pages.owners(page))
        num_needed = self._pages.num_pages_for(request.num_tokens) - num_owned
        self._blocked = (request, num_needed) if num_free < num_needed else None
        return None if self._blocked else hit

    def _count_admission(self, request: Request, hit: PrefixHit) -> None:
        if request.num_preemptions == 0:
            request.num_cached_tokens = hit.num_tokens
            self._num_prompt_tokens += len(request.prompt_token_ids)
            self._num_cached_tokens += hit.num_tokens
        else:
            self._num_recomputed_tokens += request.num_tokens - hit.num_tokens

    def _enqueue(self, request: Request) -> None:
        self._waiting.push(request, order=self._orders[request.request_id], now=self._clock())

    # Pages.

    def _grow(self, request: Request, stop: int, draft: Draft) -> int:
        """Gives a running request pages for the positions below `stop`; returns how far they reach, `stop` at most.

        When the pool is short, requests admitted later that have no row in this plan are preempted, latest first.
        """
        missing = self._pages.num_pages_for(stop) - len(request.pages)
        while missing > 0:
            updates = self._running.extend(request, missing)
            if not isinstance(updates, PageShortage):
                draft.updates += updates
                break
            victim = self._running.latest_except(draft.scheduled, after=request)
            if victim is not None:
                self._preempt(victim)
            else:
                missing = updates.free
        return min(stop, len(request.pages) * self._pages.page_size)

    def _preempt(self, request: Request) -> None:
        """Back to the queue without pages. Its steps in flight still count; admitted again, it computes all it knows."""
        self._prefix_cache.insert(request)
        self._running.release(request, RequestStatus.WAITING)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._preempted.append(request.request_id)
        self._enqueue(request)

    # For tests and people.

    @property
    def has_unfinished(self) -> bool:
        return bool(self._orders)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_waiting=self.num_waiting, num_running=self.num_running, num_free_pages=self._pages.num_free,
            num_cached_pages=self._pages.num_cached, num_preemptions=self._num_preemptions, num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens, num_recomputed_tokens=self._num_recomputed_tokens)

    def page_entries(self, request: Request) -> list[PageEntry]:
        """A running request's page table: page, filled length, status and owners of each entry."""
        return self._running.page_entries(request)

    def check_invariants(self) -> None:
        """Asserts that queues, slots, pages and cache agree: nothing lost, owned twice or leaked."""
        for request in self._waiting:
            assert request.status is RequestStatus.WAITING and not request.pages and request.slot is None, request
        assert self._orders.keys() == self._running.requests.keys() | {r.request_id for r in self._waiting}, "a request is lost"
        self._running.check_invariants()
        self._prefix_cache.check_invariants()

    def dump(self) -> str:
        """The present state for a person: requests, their page tables, the pool."""
        waiting = [f"waiting {request.request_id!r}: {request.num_tokens} tokens known + {request.num_in_flight} in flight, preempted "
                   f"{request.num_preemptions} times" for request in self._waiting]
        return "\n".join([f"{self.num_running} running, {self.num_waiting} waiting, {len(self._dispatched)} plans in flight, "
                          f"{self._num_preemptions} preemptions", *waiting, self._running.dump()])
