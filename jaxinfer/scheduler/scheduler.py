"""Decides what each step computes: admission, chunked prefill, pages on demand, preemption by recompute or by swap.

Knows requests, slots and page numbers; no arrays, no padding, no model. Plain Python: never imports jax or numpy.

Asynchronous stepping needs no special case, only arithmetic. Tokens of a request, known or in flight:

    0 ... prompt ... output seen by the host | in flight |
                                             ^ num_tokens ^ num_tokens + num_in_flight
    num_computed_tokens: positions below it are in the pages, or will be once the dispatched steps are done

A request decodes when exactly one token is left to compute; its input is on the device alone when that token is in flight.
"""

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from jaxinfer.errors import ConfigError, RequestError
from jaxinfer.request import FinishReason, Request, RequestStatus
from jaxinfer.scheduler.admission import Admission, refuse_what_never_fits
from jaxinfer.scheduler.buckets import LengthBuckets
from jaxinfer.scheduler.filling import StepFiller
from jaxinfer.scheduler.host_pages import HostPages
from jaxinfer.scheduler.pages import PageAllocator, PageEntry
from jaxinfer.scheduler.plan import Draft, ScheduledRow, SchedulePlan, SchedulerStats
from jaxinfer.scheduler.policies import find_policy
from jaxinfer.scheduler.prefix_cache import PrefixCache
from jaxinfer.scheduler.running import RunningSet
from jaxinfer.scheduler.waiting import WaitingQueue

__all__ = ["SchedulePlan", "ScheduledRow", "Scheduler", "SchedulerStats"]


class Scheduler:
    """Turns requests into plans, and sampled tokens into the requests' progress.

    Running requests come first, by rank (oldest admission first): one token for each that decodes. Then requests are
    admitted in the policy's order, and what is left of the token budget goes to chunks of those in prefill. Pages are taken
    when a row needs them; when none is left, requests behind in rank give theirs up, never those before: the last waits
    instead. So the first always goes on, and any single request fits by itself: every request ends.

    Args:
      max_num_seqs: requests that run together at most; slots are 0 .. max_num_seqs-1.
      max_num_batched_tokens: tokens in one plan at most; >= max_num_seqs.
      max_model_len: prompt plus output tokens of a request at most.
      pages: the pool.
      prefix_cache: a cache on the same pool, or NullPrefixCache.
      host_pages: where what preempted requests have computed may be kept, if moving it is cheaper; None: it is computed again.
      policy: name in POLICIES.
      max_prefill_rows: prefill chunks in one plan at most; None: no limit of its own.
      length_buckets: edges of buckets by length that queue apart (LengthBuckets); None or (): all in one queue.
      length_bucket_caps: requests of each bucket in prefill at once; None: enough to fill a step.
      long_prefill_share: part of a step's prefill tokens that the oldest prefill may have while shorter ones want some; in (0, 1].
      preemption_grace_tokens: tokens for which a preempted request must find room beyond its own before it is admitted again, and
        for which it is then spared while others can give way; >= 0.
      cost_aware_preemption: who gives way loses the fewest tokens; False: it is the last in rank.
      clock: seconds, monotonic.

    Raises:
      ConfigError: a value lies outside its range, or an unknown policy.
    """

    def __init__(self, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, pages: PageAllocator,
                 prefix_cache: PrefixCache, host_pages: HostPages | None = None, policy: str = "fcfs", max_prefill_rows: int | None = None,
                 length_buckets: Sequence[int] | None = None, length_bucket_caps: Sequence[int] | None = None,
                 long_prefill_share: float = 0.5, preemption_grace_tokens: int = 64, cost_aware_preemption: bool = True,
                 clock: Callable[[], float] = time.monotonic) -> None:
        for name, value in (("max_num_seqs", max_num_seqs), ("max_model_len", max_model_len), ("max_prefill_rows", max_prefill_rows)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} = {value}: must be >= 1.")
        if not 0 < long_prefill_share <= 1:
            raise ConfigError(f"long_prefill_share = {long_prefill_share}: must be in (0, 1].")
        if preemption_grace_tokens < 0:
            raise ConfigError(f"preemption_grace_tokens = {preemption_grace_tokens}: must be >= 0.")
        if max_num_batched_tokens < max_num_seqs:
            raise ConfigError(f"max_num_batched_tokens = {max_num_batched_tokens} is less than max_num_seqs = {max_num_seqs}, so that "
                              "not every running sequence could decode in a step: raise the first or lower the second.")
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        rows = max_num_seqs if max_prefill_rows is None else max_prefill_rows
        self._pages = pages
        self._prefix_cache = prefix_cache
        self._host_pages = HostPages(0) if host_pages is None else host_pages
        self._clock = clock
        policy_row = find_policy(policy)
        self._interrupts = policy_row.interrupts
        self._buckets = LengthBuckets(length_buckets or (), length_bucket_caps, max_num_batched_tokens=max_num_batched_tokens,
                                      max_rows=rows)
        self._waiting = WaitingQueue(policy_row, num_buckets=len(self._buckets),
                                     num_cached=lambda request: prefix_cache.match(request).num_tokens)
        self._running = RunningSet(max_num_seqs=max_num_seqs, pages=pages, prefix_cache=prefix_cache, host_pages=self._host_pages,
                                   policy=policy_row, grace_tokens=preemption_grace_tokens, cost_aware=cost_aware_preemption)
        self._admission = Admission(waiting=self._waiting, running=self._running, pages=pages, prefix_cache=prefix_cache,
                                    host_pages=self._host_pages, buckets=self._buckets, grace_tokens=preemption_grace_tokens,
                                    preempt=self._preempt)
        self._filler = StepFiller(running=self._running, pages=pages, buckets=self._buckets, max_prefill_rows=rows,
                                  long_prefill_share=long_prefill_share, preempt=self._preempt)
        self._orders: dict[str, int] = {}  # numbers of arrival of unfinished requests
        self._dispatched: deque[SchedulePlan] = deque()  # given by next() and not yet applied
        self._preempted: list[str] = []  # since the last plan
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap; ended requests stay in it until their time
        self._expired: list[Request] = []  # since pop_expired()
        self._num_arrived = self._num_preemptions = self._num_expired = 0

    # Requests in and out.

    def add(self, request: Request, *, deadline: float | None = None) -> None:
        """Queues a new request.

        Args:
          request: a new one.
          deadline: seconds on the scheduler's clock at which it ends with ABORT, wherever it stands; None: never.

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
        if deadline is not None:
            heapq.heappush(self._deadlines, (deadline, self._num_arrived, request))

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
            self._admission.forget(request)
            self._host_pages.forget(request)
            request.status = RequestStatus.FINISHED
        del self._orders[request.request_id]
        request.finish_reason = reason
        request.finish_time = self._clock()

    def pop_expired(self) -> list[Request]:
        """The requests that ended at their deadline since this was last called; no apply() will show them."""
        expired, self._expired = self._expired, []
        return expired

    def _expire(self) -> None:
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[-1]
            if not request.is_finished:
                self.finish(request, FinishReason.ABORT)
                self._expired.append(request)
                self._num_expired += 1

    # The step.

    def next(self) -> SchedulePlan | None:
        """The next step, to be dispatched before next() is called again, or None if nothing can be scheduled now.

        May be called before earlier plans are applied. After None with plans unapplied, apply the oldest and try again;
        with none unapplied, None means that there is no unfinished request.
        """
        draft = Draft(budget=self._max_num_batched_tokens)
        if self._deadlines:
            self._expire()
        if self._interrupts:
            self._admission.interrupt(draft)
        self._filler.decodes(draft)
        prefills = self._running.in_prefill() if len(draft.decodes) < len(self._running) else []
        self._admission.admit(draft, prefills)
        self._filler.prefills(draft, prefills)
        if not draft.decodes and not draft.prefills:
            assert not draft.updates, "a request was started and got no row, though nobody else has one"
            return None
        # Only now, with the plan complete: a row must not read pages that another row of the same step fills.
        for row in draft.prefills:
            self._prefix_cache.insert(row.request)
        plan = SchedulePlan(
            rows=(*draft.decodes, *draft.prefills), page_updates=tuple(draft.updates),
            num_tokens=self._max_num_batched_tokens - draft.budget,
            num_prefill_tokens=sum(row.num_tokens for row in draft.prefills), preempted=tuple(self._preempted),
            page_copies=tuple(draft.copies), page_saves=self._host_pages.end_plan(), page_loads=tuple(draft.loads))
        self._preempted.clear()
        self._dispatched.append(plan)
        return plan

    def again(self, plan: SchedulePlan) -> Iterator[SchedulePlan]:
        """The steps after `plan`, the last one given: the next token of each of its rows. At the end next() must decide anew.

        A step costs a fraction of next(), for it looks at no queue and no clock. There is one while nobody waits, every running
        request is a row of `plan` that decodes and has another token to come, and free pages suffice: nobody gives way.
        """
        assert self._dispatched and self._dispatched[-1] is plan, "only the last plan can be repeated"
        if len(self._waiting) or plan.num_prefill_tokens or len(plan.rows) != len(self._running):
            return
        draft = Draft(budget=0)
        while self._filler.decodes_again(plan.rows, draft):
            plan = SchedulePlan(rows=tuple(draft.decodes), page_updates=tuple(draft.updates), num_tokens=len(draft.decodes),
                                num_prefill_tokens=0, preempted=())
            draft.updates.clear()
            self._dispatched.append(plan)
            yield plan

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

    def _enqueue(self, request: Request) -> None:
        num_left = request.num_tokens - self._host_pages.num_tokens(request)  # less than none while tokens are in flight
        self._waiting.push(request, order=self._orders[request.request_id], now=self._clock(), bucket=self._buckets.of(num_left))

    def _preempt(self, request: Request) -> None:
        """Back to the queue without pages. Its steps in flight still count; admitted again, it computes all that neither the prefix cache
        nor the host has kept."""
        self._host_pages.save(request, self._running.num_lost(request))
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
            num_cached_pages=self._pages.num_cached, num_preemptions=self._num_preemptions, num_prompt_tokens=self._admission.num_prompt_tokens,
            num_cached_tokens=self._admission.num_cached_tokens,
            num_recomputed_tokens=self._admission.num_recomputed_tokens, num_swapped_tokens=self._admission.num_swapped_tokens,
            num_host_pages=self._host_pages.num_pages - self._host_pages.num_free,
            num_expired=self._num_expired)

    def page_entries(self, request: Request) -> list[PageEntry]:
        """A running request's page table: page, filled length, status and owners of each entry."""
        return self._running.page_entries(request)

    def check_invariants(self) -> None:
        """Asserts that queues, slots, pages and cache agree: nothing lost, owned twice or leaked."""
        for request in self._waiting:
            assert request.status is RequestStatus.WAITING and not request.pages and request.slot is None, request
        assert self._orders.keys() == self._running.requests.keys() | {r.request_id for r in self._waiting}, "a request is lost"
        self._admission.check_invariants()
        self._running.check_invariants()
        self._host_pages.check_invariants(list(self._waiting))
        self._prefix_cache.check_invariants()

    def dump(self) -> str:
        """The present state for a person: requests, their page tables, the pool."""
        waiting = [f"waiting {request.request_id!r}: {request.num_tokens} tokens known + {request.num_in_flight} in flight, preempted "
                   f"{request.num_preemptions} times, {self._host_pages.num_tokens(request)} tokens on the host" for request in self._waiting]
        return "\n".join([f"{self.num_running} running, {self.num_waiting} waiting, {len(self._dispatched)} plans in flight, "
                          f"{self._num_preemptions} preemptions", *waiting, self._running.dump()])
