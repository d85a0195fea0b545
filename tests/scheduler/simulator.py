"""A pretend engine for the scheduler's tests: a model whose every token depends on all tokens before, and a device of pages.

The K/V of a position is a hash of the namespace and all tokens up to it, as a real layer's is a function of them. Each row checks
every position that it reads, so a page that is stale, foreign, shared too early or overwritten shows at the row that reads it; a page
that comes back from the host is checked as it comes.
"""

import dataclasses
import itertools
import zlib
from collections import deque
from collections.abc import Callable

from jaxinfer.request import FinishReason, Request
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.scheduler.host_pages import HostPages
from jaxinfer.scheduler.pages import PageAllocator
from jaxinfer.scheduler.plan import ScheduledRow, SchedulePlan
from jaxinfer.scheduler.prefix_cache import HashedPrefixCache, PrefixCache
from jaxinfer.scheduler.scheduler import Scheduler

VOCAB = 50
STOP_TOKEN = 0


def make_request(request_id: str, prompt: list[int], max_tokens: int, *, salt: str = "", arrival: float = 0.0,
                 priority: int = 0) -> Request:
    return Request(request_id=request_id, prompt_token_ids=tuple(prompt), params=SamplingParams(max_tokens=max_tokens),
                   max_total_len=len(prompt) + max_tokens, stop_token_ids=frozenset({STOP_TOKEN}), seed=0, cache_salt=salt,
                   arrival_time=arrival, priority=priority)


def reference(request: Request) -> tuple[list[int], list[int]]:
    """(tokens up to the end of the request, K/V content of each position), as the model alone makes them."""
    content = zlib.crc32(request.cache_salt.encode())
    tokens, contents = list(request.prompt_token_ids), []
    for position in range(request.max_total_len):
        if position == len(tokens):
            tokens.append((contents[-1] >> 5) % VOCAB)
        content = hash((content, tokens[position]))
        contents.append(content)
    return tokens, contents


def expected_output(request: Request) -> list[int]:
    """The output tokens up to the stop token or the length limit."""
    output = reference(request)[0][len(request.prompt_token_ids):]
    return output[:output.index(STOP_TOKEN) + 1] if STOP_TOKEN in output else output


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclasses.dataclass(kw_only=True)
class Setup:
    """Limits of a simulated engine."""

    max_num_seqs: int
    max_num_batched_tokens: int
    capacity: int
    page_size: int
    max_prefill_rows: int | None = None
    policy: str = "fcfs"
    length_buckets: tuple[int, ...] = ()
    long_prefill_share: float = 0.5
    grace_tokens: int = 64
    cost_aware: bool = True
    depth: int = 0
    """Bursts dispatched ahead of the oldest unread one."""
    burst: int = 1
    """Steps of a burst at most."""
    num_host_pages: int = 0
    tokens_per_page: float = 0.0
    """What moving a page out and back costs."""

    @property
    def max_model_len(self) -> int:
        return self.capacity * self.page_size + 1


class Simulator:
    """Runs a scheduler's plans on a pretend device, checking every plan and every K/V read."""

    def __init__(self, setup: Setup, make_cache: Callable[[PageAllocator], PrefixCache] = HashedPrefixCache) -> None:
        self.setup = setup
        self.pages = PageAllocator(setup.capacity + 1, setup.page_size)
        self.cache = make_cache(self.pages)
        self.clock = Clock()
        self.host_pages = HostPages(setup.num_host_pages, tokens_per_page=setup.tokens_per_page)
        self.scheduler = Scheduler(
            max_num_seqs=setup.max_num_seqs, max_num_batched_tokens=setup.max_num_batched_tokens, max_model_len=setup.max_model_len,
            pages=self.pages, prefix_cache=self.cache, host_pages=self.host_pages, policy=setup.policy,
            max_prefill_rows=setup.max_prefill_rows, clock=self.clock, length_buckets=setup.length_buckets,
            long_prefill_share=setup.long_prefill_share, preemption_grace_tokens=setup.grace_tokens, cost_aware_preemption=setup.cost_aware)
        self.table = [[-1] * setup.capacity for _ in range(setup.max_num_seqs)]
        self.kv: dict[tuple[int, int], int] = {}
        """(page, offset) -> content."""
        self.host_kv: dict[tuple[int, int], int] = {}
        self.last_tokens = [-1] * setup.max_num_seqs
        self.in_flight: deque[list[tuple[SchedulePlan, list[int]]]] = deque()
        self.requests: list[Request] = []
        self.references: dict[str, tuple[list[int], list[int]]] = {}
        self.first_rows: dict[Request, int] = {}
        """Requests in the order of their first rows, and the step of each."""
        self.num_steps = 0
        self.errors: dict[str, int] = {}
        """Requests whose next token is non-finite once they have so many."""
        self.check_every = 1
        """Invariants are checked in one step of so many."""

    def add(self, request: Request, *, deadline: float | None = None) -> None:
        self.requests.append(request)
        self.references[request.request_id] = reference(request)
        self.scheduler.add(request, deadline=deadline)

    def step(self) -> SchedulePlan | None:
        """next(), run, and apply() of what is due."""
        self.clock.now += 1
        self.num_steps += 1
        plan = self.scheduler.next()
        self._check_invariants()
        if plan is not None:
            self.in_flight.append([])
            for each in itertools.chain([plan], itertools.islice(self.scheduler.again(plan), self.setup.burst - 1)):
                self._check_invariants()
                self._check(each)
                assert each is plan or [row.request for row in each.rows] == [row.request for row in plan.rows]
                self.in_flight[-1].append((each, self._run(each)))
        assert plan is not None or self.in_flight or not self.scheduler.has_unfinished, "stuck:\n" + self.scheduler.dump()
        if self.in_flight and (plan is None or len(self.in_flight) > self.setup.depth):
            for done in self.in_flight.popleft():
                self._apply(*done)
                self._check_invariants()
        return plan

    def _check_invariants(self) -> None:
        if self.num_steps % self.check_every == 0:
            self.scheduler.check_invariants()

    def run_to_end(self, max_steps: int = 10_000) -> None:
        while self.scheduler.has_unfinished or self.in_flight:
            assert self.num_steps < max_steps, "too many steps:\n" + self.scheduler.dump()
            self.step()
        assert self.pages.num_free == self.pages.capacity and self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.host_pages.num_free == self.host_pages.num_pages

    def _check(self, plan: SchedulePlan) -> None:
        """The plan's own promises."""
        setup = self.setup
        assert 0 < plan.num_tokens == sum(row.num_tokens for row in plan.rows) <= setup.max_num_batched_tokens
        assert len({row.request.request_id for row in plan.rows}) == len({row.slot for row in plan.rows}) == len(plan.rows)
        assert len({update[:2] for update in plan.page_updates}) == len(plan.page_updates)
        assert len({to for _, to in plan.page_copies}) == len(plan.page_copies) and all(page != to for page, to in plan.page_copies)
        assert len({host_page for _, host_page in plan.page_saves}) == len(plan.page_saves)
        assert len(set(plan.page_saves)) == len(plan.page_saves) and 0 not in {page for page, _ in plan.page_saves}
        loaded = {page for _, page in plan.page_loads}
        assert len(loaded) == len(plan.page_loads) == len({host_page for host_page, _ in plan.page_loads})
        assert not loaded & {to for _, to in plan.page_copies}, "copied over and loaded"
        num_prefills = 0
        for row in plan.rows:
            assert row.num_tokens == 1 if row.from_device else row.num_tokens == len(row.token_ids) > 0
            assert row.kv_len < row.request.max_total_len, "computes a token that nothing follows"
            assert row.samples == (row.kv_len >= row.request.num_tokens)
            assert num_prefills == 0 or not row.from_device, "a decode row after a prefill chunk"
            num_prefills += row.num_tokens > 1
            self.first_rows.setdefault(row.request, self.num_steps)
        assert num_prefills <= (setup.max_prefill_rows or setup.max_num_seqs)
        assert plan.is_decode_only == all(row.num_tokens == 1 for row in plan.rows)

    def _run(self, plan: SchedulePlan) -> list[int]:
        for slot, entry, page in plan.page_updates:
            self.table[slot][entry] = page
        self._move_pages(plan)
        written: dict[tuple[int, int], int] = {}
        tokens = [self._run_row(row, written) for row in plan.rows]
        self.kv |= written
        for row, token in zip(plan.rows, tokens, strict=True):
            if row.samples:
                self.last_tokens[row.slot] = token
        return tokens

    def _move_pages(self, plan: SchedulePlan) -> None:
        """Saves, copies and loads, in this order; a load must bring what its request has computed, to the last token."""
        places = range(self.setup.page_size)
        for page, host_page in plan.page_saves:
            self.host_kv |= {(host_page, i): self.kv.get((page, i), -1) for i in places}
        self.kv |= {(to, i): self.kv[page, i] for page, to in plan.page_copies for i in places if (page, i) in self.kv}
        self.kv |= {(page, i): self.host_kv[host_page, i] for host_page, page in plan.page_loads for i in places}
        starts = {row.request.request_id: row.start for row in plan.rows}
        owners = {page: (request, index) for request in self.requests for index, page in enumerate(request.pages)} if plan.page_loads else {}
        for _, page in plan.page_loads:
            request, index = owners[page]
            num_there = starts.get(request.request_id, request.num_computed_tokens)
            wanted = self.references[request.request_id][1][index * len(places):min((index + 1) * len(places), num_there)]
            assert self.pages.owners(page) == 1 and wanted, f"page {page} is loaded for nobody"
            assert [self.kv[page, i] for i in range(len(wanted))] == wanted, f"page {page}: the host has something else"

    def _run_row(self, row: ScheduledRow, written: dict[tuple[int, int], int]) -> int:
        tokens, contents = self.references[row.request.request_id]
        size = self.setup.page_size

        def place(position: int) -> tuple[int, int]:
            return self.table[row.slot][position // size], position % size

        for position in range(row.start):
            assert self.kv.get(place(position)) == contents[position], f"{row}: position {position} holds something else"
        token_ids = [self.last_tokens[row.slot]] if row.from_device else list(row.token_ids)
        assert token_ids == tokens[row.start:row.kv_len], f"{row}: wrong input tokens"
        for position in range(row.start, row.kv_len):
            assert place(position) not in written, f"{row}: another row writes the same place"
            assert self.pages.owners(place(position)[0]) == 1, f"{row}: writes into a page that is not its own"
            written[place(position)] = contents[position]
        return (contents[row.kv_len - 1] >> 5) % VOCAB if row.samples else -1

    def _apply(self, plan: SchedulePlan, tokens: list[int]) -> None:
        finish = [self._reason(row, token) for row, token in zip(plan.rows, tokens, strict=True)]
        self.scheduler.apply(plan, tokens, finish)

    def _reason(self, row: ScheduledRow, token: int) -> FinishReason | None:
        request = row.request
        if not row.samples or request.is_finished:
            return None
        if len(request.output_token_ids) == self.errors.get(request.request_id):
            return FinishReason.ERROR
        if token == STOP_TOKEN:
            return FinishReason.STOP
        return FinishReason.LENGTH if request.num_tokens + 1 == request.max_total_len else None


def check_output(request: Request) -> None:
    """A finished request has exactly the model's tokens; one that was aborted or met an error a beginning of them."""
    expected = expected_output(request)
    assert request.is_finished and request.num_in_flight == 0 and request.slot is None and not request.pages
    if request.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
        assert request.output_token_ids == expected[:len(request.output_token_ids)]
    else:
        assert request.output_token_ids == expected, (request.output_token_ids, expected)
        assert request.finish_reason is (FinishReason.STOP if expected[-1] == STOP_TOKEN else FinishReason.LENGTH)
        assert request.first_token_time is not None and request.finish_time is not None
