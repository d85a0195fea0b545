"""The step loop: plan -> pack -> run -> apply. Owns scheduler, executables and texts; knows no prompt strings and no files.

The equality contract. A request (seed included) on engines of equal settings, weights and kernels gets:

    deterministic=True   the same bits, of tokens and log-probabilities, whether it runs alone or beside any neighbours, is prefilled
                         whole or in chunks, cold or from the prefix cache (shared, copied and loaded pages alike), was preempted (and
                         computed again or swapped) or not, with or without async_scheduling, in single steps or in bursts
                         (num_scheduler_steps)
    otherwise            the same tokens up to the first place where the margin between the two likeliest is within the noise of the
                         dtype; beyond it the two are equally right answers

The first rests on one bucket for every step (resolve.py): equal shapes, hence equal kernels and equal orders of summation for every
row, wherever it stands. It costs the padding of that bucket in each decode step. On a GPU it also needs kernels whose result for one
row depends neither on the others nor on where its chunks end, and autotuned choices that stay (compilation_cache_dir keeps them): so
it is a promise for the CPU, where tests/engine/test_equality.py holds it to the bit, and on a GPU as far as
`python -m bench.memory --parts=preemption` finds outputs_equal there. Neither mode promises anything across dtypes, page sizes,
numbers of devices, versions of jax, or devices of different kinds.
"""

import collections
import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence

import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.engine import hardware
from jaxinfer.engine.compiled import CompiledSteps
from jaxinfer.engine.dump import StepDumper
from jaxinfer.engine.guard import Guard
from jaxinfer.engine.load import LoadedModel
from jaxinfer.engine.logprobs import HostLogprobs
from jaxinfer.engine.metrics import EngineMetrics, decode_read_bytes
from jaxinfer.engine.output import OutputProcessor
from jaxinfer.engine.pack import SlotWords, pack, pack_again, pick_layout
from jaxinfer.engine.placement import Placement, device_nbytes, place
from jaxinfer.engine.prompt_scores import Scored, score_calls
from jaxinfer.engine.resolve import ResolvedConfig, resolve
from jaxinfer.engine.saved_prefixes import SavedPrefixes
from jaxinfer.engine.slots import SlotWriter
from jaxinfer.engine.structured import GrammarCompiler
from jaxinfer.engine.swap import SwappedPages
from jaxinfer.engine.weights import Weights
from jaxinfer.errors import ConfigError, EngineError, JaxInferError, RequestError
from jaxinfer.layers.rotary import RopeConfig, prompt_class
from jaxinfer.request import FinishReason, Request
from jaxinfer.scheduler.host_pages import HostPages
from jaxinfer.scheduler.pages import PageAllocator
from jaxinfer.scheduler.plan import SchedulePlan
from jaxinfer.scheduler.prefix_cache import HashedPrefixCache, NullPrefixCache, PrefixCache
from jaxinfer.scheduler.scheduler import Scheduler
from jaxinfer.sharding import outside_meshes
from jaxinfer.state import StepOutput
from jaxinfer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """One call of an executable: one step, or all the steps of a burst."""

    plans: Sequence[SchedulePlan]
    output: StepOutput
    """With a leading axis of as many entries where there are several plans."""
    scored: Sequence[Scored] = ()
    """Of a single step."""


class Engine:
    """Runs requests to their end, a step at a time. One thread at a time: a second one is refused with EngineError."""

    @outside_meshes()
    def __init__(self, model: LoadedModel, tokenizer: Tokenizer | None, config: EngineConfig) -> None:
        model, placement = place(model)
        self.tokenizer = tokenizer
        self.resolved = resolve_for(model, placement, tokenizer, config)
        self.steps = CompiledSteps(model, self.resolved, placement)
        self._swapped = SwappedPages(self.resolved.num_host_pages, self.steps)
        self.pages = PageAllocator(self.resolved.num_pages, self.resolved.page_size)
        self.prefix_cache: PrefixCache = NullPrefixCache()
        if config.enable_prefix_caching:
            self.prefix_cache = HashedPrefixCache(self.pages, namespace=cache_namespace(model.config.rope), enable_page_copies=True)
        self.host_pages = HostPages(self.resolved.num_host_pages)
        self.scheduler = Scheduler(
            max_num_seqs=self.resolved.max_num_seqs, max_num_batched_tokens=self.resolved.max_num_batched_tokens,
            max_model_len=self.resolved.max_model_len, pages=self.pages, policy=config.scheduling_policy,
            length_buckets=config.length_buckets, length_bucket_caps=config.length_bucket_caps,
            long_prefill_share=config.long_prefill_share, preemption_grace_tokens=config.preemption_grace_tokens,
            prefix_cache=self.prefix_cache, host_pages=self.host_pages)
        self.outputs = OutputProcessor(tokenizer)
        self._guard = Guard(outside_meshes)
        self._ended: collections.deque[Request] = collections.deque()
        self.num_step_calls = 0
        """Calls of step(), whoever made them."""
        self.metrics = EngineMetrics(
            decode_read_bytes=decode_read_bytes(model.params, model.config),
            kv_token_bytes=self.resolved.memory.page_bytes // self.resolved.page_size,
            read_bytes_per_s=self.resolved.hardware.read_bytes_per_s)
        self._in_flight: collections.deque[list[Launch]] = collections.deque()  # steps that were planned together: one, or a burst
        self._depth = 1 if config.async_scheduling and not config.enforce_eager else 0
        self.saved_prefixes = SavedPrefixes(self.prefix_cache, self.pages, self.steps)
        self.weights = Weights(model, self.steps, self.pages)
        self.warm_up = self.steps.warm_up()
        if self.resolved.num_host_pages:
            self.host_pages.tokens_per_page = self._swapped.tokens_per_page()
        self._slot_words = SlotWords(self.resolved.max_num_seqs)
        self._slots = SlotWriter(self.steps, vocab_size=model.config.vocab_size)
        self.dumps = StepDumper(self.resolved, [p.name for p in self.steps.processors.processors])
        self.grammars = GrammarCompiler(tokenizer, vocab_size=model.config.vocab_size, num_valid_tokens=self.resolved.num_valid_tokens)
        logger.info("%s", self.describe())

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
          RequestError: it is empty, holds an id outside the vocabulary, or can never fit.
          EngineError: an earlier step failed, another thread is inside the engine, or it is asleep.
        """
        with self._guard.using(RequestError, EngineError):
            self.weights.check_awake()
            check_prompt(request.prompt_token_ids, self.resolved)
            if not self.scheduler.has_unfinished:
                self.metrics.pause()
            self.scheduler.add(request, deadline=None if request.deadline_s is None else request.arrival_time + request.deadline_s)
            self.outputs.start(request)

    @property
    def model(self) -> LoadedModel:
        """The model with the weights of now; none of them while asleep."""
        return self.weights.model

    @contextlib.contextmanager
    def while_idle(self, purpose: str) -> Iterator[Weights]:
        """Lends the weights out while nothing runs.

        Raises:
          EngineError: requests are unfinished, an earlier step failed, or another thread is inside the engine.
        """
        with self._guard.using(JaxInferError):
            self._forget_ended()
            if self.scheduler.has_unfinished:
                stats = self.scheduler.stats()
                raise EngineError(f"{purpose}: {stats.num_running} requests are running and {stats.num_waiting} waiting. Let them end or "
                                  "withdraw them first (close their streams, abort them); update_weights(..., wait=True) lets them end.")
            while self._in_flight:  # what was dispatched before the last one ended
                self._step()
            self._swapped.forget()
            yield self.weights

    def abort(self, request: Request) -> None:
        """Withdraws a request where it stands; its text stays until end()."""
        with self._guard.using():
            self.scheduler.abort(request.request_id)

    def end(self, request: Request) -> None:
        """Forgets a request, and withdraws it where it still runs. Never refused: during a step it takes effect right after it."""
        self._ended.append(request)
        with self._guard.if_free() as free:
            if free:
                self._forget_ended()

    def _forget_ended(self) -> None:
        while self._ended:
            request = self._ended.popleft()
            if not self._guard.is_broken:
                self.scheduler.abort(request.request_id)
            self.outputs.end(request)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_unfinished or bool(self._in_flight)

    def step(self) -> list[Request]:
        """Dispatches the next step, then takes in the oldest one whose turn it is.

        Returns the requests that got a token, and those whose deadline has come.

        Raises:
          EngineError: an earlier step failed, or another thread is inside the engine.
        """
        with self._guard.using():
            self.num_step_calls += 1
            self._forget_ended()
            progressed = self._step()
            expired = self.scheduler.pop_expired()
            for request in expired:
                self.outputs.expire(request)
            self._forget_ended()
            return progressed + expired

    def _step(self) -> list[Request]:
        if self.dumps.is_armed and self._in_flight:  # a step to be kept must be the only one
            return self._apply_oldest()
        if not self.scheduler.has_unfinished:  # what was dispatched before the last one ended
            self.metrics.pause()
        start = time.perf_counter()
        plan = self.scheduler.next()
        if plan is not None:
            self._in_flight.append(list(self._dispatch(plan)))
        self.metrics.host_seconds += time.perf_counter() - start
        if self._in_flight and (plan is None or self.dumps.is_armed or len(self._in_flight) > self._depth):
            return self._apply_oldest()
        return []

    def _apply_oldest(self) -> list[Request]:
        launches = self._in_flight.popleft()
        progressed = [request for launch in launches for request in self._take_in(launch)]
        self._swapped.land(launches[0].plans[0])
        self.metrics.record([plan for launch in launches for plan in launch.plans], len(progressed))
        return list(dict.fromkeys(progressed))

    def _dispatch(self, plan: SchedulePlan) -> Iterator[Launch]:
        """Dispatches a step, and where it starts a burst (num_scheduler_steps) those after it.

        A burst of full length whose rows are all greedy is one launch, a loop on the device: ids stay there in any case, so that its
        later steps need no word from the host but lengths and pages that are known beforehand. On an H200 a launch takes 1.2 to 3.5 ms
        of the host, which int4 at batch 1 waits for (the device had work for 2.3 ms of 3.6 without loops); a loop of 8 takes 1.4 ms once,
        copies nothing of the KV pool, and its steps run no slower than bare launches (1.07 ms for 1.14, 10 layers of shape Q in int4).
        A shorter burst (a row nears its end, or pages run short), one with sampled rows, in large buckets or in deterministic mode is
        the bucket's own executable launched again: that saves the decision and the packing of each step alone, and costs no compile.
        Either way rows go on being separate steps for scheduler and texts, which drop what follows a stop or an abort.
        """
        self.dumps.expect(plan)
        layout = pick_layout(self.resolved.layouts, plan)
        updates = plan.page_updates
        if len(updates) > layout.num_updates:
            self.steps.write_page_table(list(updates[layout.num_updates:]))
            updates = updates[:layout.num_updates]
        self._swapped.save(plan)
        if plan.page_copies:
            self.steps.copy_pages(plan.page_copies)
        self._swapped.load(plan)
        self._slots.write(plan)
        params = [row.request.params for row in plan.rows]
        samples, num_more = any(not p.is_greedy for p in params), self.resolved.num_scheduler_steps - 1
        plans, buffers = [plan], [pack(plan, layout, updates, self._slot_words)]
        if num_more and not self.dumps.is_armed and not plan.num_prefill_tokens and all(p.is_plain for p in params):
            for following in itertools.islice(self.scheduler.again(plan), num_more):
                plans.append(following)
                buffers.append(pack_again(buffers[-1], following, layout))
        if len(plans) == 1 + num_more and not samples and self.steps.runs_bursts(layout):
            yield Launch(plans=plans, output=self.steps.run_burst(layout, np.stack(buffers)))
            return
        output = self.steps.run(layout, buffers[0], samples=samples, wants_logprobs=any(p.logprobs is not None for p in params),
                                before_sampling=lambda: self._slots.write_masks(plan))
        yield Launch(plans=[plan], output=output, scored=[
            Scored(call=call, logprobs=self.steps.score_prompt(call.rows, call.targets)) for call in score_calls(plan)])
        for following, buffer in zip(plans[1:], buffers[1:], strict=True):
            yield Launch(plans=[following], output=self.steps.run(layout, buffer, samples=samples, wants_logprobs=False))

    def _take_in(self, launch: Launch) -> Iterator[Request]:
        """Waits for a launch's tokens, which come in one copy for all its steps, and hands them on a step at a time."""
        tokens, finite = (np.asarray(x).reshape(len(launch.plans), -1).tolist() for x in (launch.output.tokens, launch.output.finite))
        for i, plan in enumerate(launch.plans):
            yield from self._apply(plan, launch, tokens[i], finite[i])

    def _apply(self, plan: SchedulePlan, launch: Launch, tokens: Sequence[int], finite: Sequence[bool]) -> list[Request]:
        """Hands a step's tokens to texts and scheduler."""
        with self.steps.aside():
            self.dumps.take(plan, self.steps.state, tokens, finite)
        logprobs = HostLogprobs(launch.output.logprobs) if launch.output.logprobs is not None else None
        start = time.perf_counter()
        for s in launch.scored:
            self.outputs.push_prompt(s.call.request, s.call.start, s.call.num_tokens, HostLogprobs(s.logprobs))
        finish: list[FinishReason | None] = []
        progressed: list[Request] = []
        for b, (row, token, ok) in enumerate(zip(plan.rows, tokens, finite, strict=False)):
            reason = None
            if row.samples and not row.request.is_finished:
                reason = self.outputs.push(row.request, token, finite=ok, logprobs=(logprobs, b) if logprobs is not None else None)
                progressed.append(row.request)
            finish.append(reason)
        self.scheduler.apply(plan, tokens[:len(plan.rows)], finish)
        self.metrics.host_seconds += time.perf_counter() - start
        return progressed

    def describe(self) -> str:
        """The start-up block: what was resolved, the memory plan and the buckets."""
        r, m = self.resolved, self.resolved.memory
        buckets = " ".join(f"{x.num_tokens}" if x.decode_only else f"{x.num_tokens}x{x.num_rows}" for x in r.layouts)
        bursts = "" if r.num_scheduler_steps == 1 else f"bursts of {r.num_scheduler_steps} steps, looped on the device for buckets " + (
            " ".join(f"{x.num_rows}" for x in r.burst_layouts) or "none") + "; "
        swaps = "" if not r.num_host_pages else (f"{r.num_host_pages} pages on the host, where preempted requests go if a page saves "
                                                 f"{self.host_pages.tokens_per_page:.1f} tokens; ")
        num = r.engine.tensor_parallel_size
        shared = f"{num} x {r.hardware.name}; on each: " if num > 1 else f"{r.hardware.name}; "
        return (f"{r.model.architecture} {r.dtype} on {shared}weights {m.weight_bytes / 1e9:.2f} GB, KV pool "
                f"{m.kv_bytes / 1e9:.2f} GB = {r.num_pages} pages of {r.page_size}; {r.max_num_seqs} sequences of up to {r.max_model_len} "
                f"tokens, {r.max_num_batched_tokens} tokens a step; buckets (decode rows; tokens x rows): {buckets}; "
                f"{bursts}{swaps}{self.warm_up.num_executables} executables in {self.warm_up.seconds:.1f} s")


def resolve_for(model: LoadedModel, placement: Placement, tokenizer: Tokenizer | None, config: EngineConfig) -> ResolvedConfig:
    """The resolved configuration of a loaded model on the devices where it lies.

    Raises:
      ConfigError: tensor_parallel_size asks for another number of devices.
    """
    if config.tensor_parallel_size not in (1, placement.size):
        raise ConfigError(f"tensor_parallel_size = {config.tensor_parallel_size}: the weights lie on {placement.size} "
                          f"device{'s' * (placement.size > 1)}, which is what an engine over live weights takes: leave the setting out.")
    config = dataclasses.replace(config, tensor_parallel_size=placement.size)
    weights = sum(map(device_nbytes, model.params.values()))
    dtype = str(model.params["final_norm.weight"].dtype)
    vocab = model.config.vocab_size
    device = hardware.attached(placement.devices[0])
    if device.platform == "cpu":  # its devices share the RAM
        device = dataclasses.replace(device, memory_bytes=device.memory_bytes // placement.size)
    return resolve(config, model.config, device, checkpoint_dtype=dtype, weight_bytes=weights,
                   num_valid_tokens=min(vocab, tokenizer.num_tokens) if tokenizer is not None else vocab)


def cache_namespace(rope: RopeConfig) -> Callable[[Request], Hashable]:
    """What two requests must have alike, beside tokens, to share pages: their salt, and what rotary makes of the prompt's length.

    Last, the id of one that shares with nobody, whose pages are of no use to another engine: None for all others.
    """
    def namespace(request: Request) -> Hashable:
        own = request.request_id if request.scores_prompt else None
        return request.cache_salt, prompt_class(rope, len(request.prompt_token_ids)), own

    return namespace


def check_prompt(token_ids: Sequence[int], resolved: ResolvedConfig) -> None:
    """Refuses a prompt that can never be served.

    Raises:
      RequestError: no token, a token outside the vocabulary, or no room for a single output token.
    """
    if not token_ids:
        raise RequestError("the prompt has 0 tokens: it needs at least 1. Give some text, or a beginning-of-text token id.")
    worst = max(token_ids) if min(token_ids) >= 0 else min(token_ids)
    if not 0 <= worst < resolved.model.vocab_size:
        raise RequestError(f"prompt token id {worst} lies outside the vocabulary [0, {resolved.model.vocab_size}): was it made by another "
                           "model's tokenizer?")
    if len(token_ids) >= resolved.max_model_len:
        raise RequestError(f"the prompt has {len(token_ids)} tokens and max_model_len is {resolved.max_model_len}, which leaves no room for "
                           f"output: shorten it to at most {resolved.max_model_len - 1} tokens or raise max_model_len (the model allows "
                           f"{resolved.model.max_position_embeddings}).")
