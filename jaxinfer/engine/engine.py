"""The step loop: plan -> pack -> run -> apply. Owns scheduler, executables and texts; knows no prompt strings and no files."""

import collections
import logging
import time
from collections.abc import Hashable, Sequence

import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.engine import hardware
from jaxinfer.engine.compiled import CompiledSteps
from jaxinfer.engine.guard import Guard
from jaxinfer.engine.load import LoadedModel
from jaxinfer.engine.logprobs import HostLogprobs
from jaxinfer.engine.metrics import EngineMetrics, decode_read_bytes
from jaxinfer.engine.output import OutputProcessor
from jaxinfer.engine.pack import pack, pick_layout
from jaxinfer.engine.prompt_scores import Scored, score_calls
from jaxinfer.engine.resolve import ResolvedConfig, resolve
from jaxinfer.engine.slots import SlotWriter
from jaxinfer.errors import RequestError
from jaxinfer.layers.rotary import prompt_class
from jaxinfer.request import FinishReason, Request
from jaxinfer.scheduler.pages import PageAllocator
from jaxinfer.scheduler.plan import SchedulePlan
from jaxinfer.scheduler.prefix_cache import HashedPrefixCache, NullPrefixCache
from jaxinfer.scheduler.scheduler import Scheduler
from jaxinfer.state import StepOutput
from jaxinfer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Engine:
    """Runs requests to their end, a step at a time. One thread at a time: a second one is refused with EngineError."""

    def __init__(self, model: LoadedModel, tokenizer: Tokenizer | None, config: EngineConfig) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.resolved = resolve_for(model, tokenizer, config)
        self.pages = PageAllocator(self.resolved.num_pages, self.resolved.page_size)
        self.scheduler = Scheduler(
            max_num_seqs=self.resolved.max_num_seqs, max_num_batched_tokens=self.resolved.max_num_batched_tokens,
            max_model_len=self.resolved.max_model_len, pages=self.pages, policy=config.scheduling_policy,
            length_buckets=config.length_buckets, length_bucket_caps=config.length_bucket_caps,
            long_prefill_share=config.long_prefill_share, preemption_grace_tokens=config.preemption_grace_tokens,
            prefix_cache=HashedPrefixCache(self.pages, namespace=self._cache_namespace) if config.enable_prefix_caching else NullPrefixCache())
        self.outputs = OutputProcessor(tokenizer)
        self._guard = Guard()
        self._ended: collections.deque[Request] = collections.deque()
        self.num_step_calls = 0
        """Calls of step(), whoever made them."""
        self.metrics = EngineMetrics(
            decode_read_bytes=decode_read_bytes(model.params, model.config),
            kv_token_bytes=self.resolved.memory.page_bytes // self.resolved.page_size,
            read_bytes_per_s=self.resolved.hardware.read_bytes_per_s)
        self._in_flight: collections.deque[tuple[SchedulePlan, StepOutput, list[Scored]]] = collections.deque()
        self._depth = 1 if config.async_scheduling and not config.enforce_eager else 0
        self.steps = CompiledSteps(model, self.resolved)
        self.warm_up = self.steps.warm_up()
        self._slots = SlotWriter(self.steps, vocab_size=model.config.vocab_size)
        logger.info("%s", self.describe())

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
          RequestError: it is empty, holds an id outside the vocabulary, or can never fit.
          EngineError: an earlier step failed, or another thread is inside the engine.
        """
        with self._guard.using(RequestError):
            check_prompt(request.prompt_token_ids, self.resolved)
            self.scheduler.add(request)
            self.outputs.start(request)

    def _cache_namespace(self, request: Request) -> Hashable:
        """What two requests must have alike, beside tokens, to share pages: their salt, and what rotary makes of the prompt's length."""
        return request.cache_salt, prompt_class(self.model.config.rope, len(request.prompt_token_ids))

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
        """Dispatches the next step, then takes in the oldest one whose turn it is. Returns the requests that got a token.

        Raises:
          EngineError: an earlier step failed, or another thread is inside the engine.
        """
        with self._guard.using():
            self.num_step_calls += 1
            self._forget_ended()
            progressed = self._step()
            self._forget_ended()
            return progressed

    def _step(self) -> list[Request]:
        start = time.perf_counter()
        plan = self.scheduler.next()
        if plan is not None:
            self._in_flight.append((plan, *self._dispatch(plan)))
        self.metrics.host_seconds += time.perf_counter() - start
        if self._in_flight and (plan is None or len(self._in_flight) > self._depth):
            return self._apply(*self._in_flight.popleft())
        if plan is None:
            self.metrics.pause()
        return []

    def _dispatch(self, plan: SchedulePlan) -> tuple[StepOutput, list[Scored]]:
        layout = pick_layout(self.resolved.layouts, plan)
        updates = plan.page_updates
        if len(updates) > layout.num_updates:
            self.steps.write_page_table(list(updates[layout.num_updates:]))
            updates = updates[:layout.num_updates]
        self._slots.write(plan)
        params = [row.request.params for row in plan.rows]
        output = self.steps.run(layout, pack(plan, layout, updates), samples=any(not p.is_greedy for p in params),
                                wants_logprobs=any(p.logprobs is not None for p in params))
        return output, [Scored(call=call, logprobs=self.steps.score_prompt(call.rows, call.targets)) for call in score_calls(plan)]

    def _apply(self, plan: SchedulePlan, output: StepOutput, scored: Sequence[Scored]) -> list[Request]:
        """Waits for a step's tokens and hands them to texts and scheduler."""
        tokens: Sequence[int] = np.asarray(output.tokens).tolist()
        finite: Sequence[bool] = np.asarray(output.finite).tolist()
        logprobs = HostLogprobs(output.logprobs) if output.logprobs is not None else None
        start = time.perf_counter()
        for s in scored:
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
        self.metrics.record(plan, len(progressed))
        self.metrics.host_seconds += time.perf_counter() - start
        return progressed

    def describe(self) -> str:
        """The start-up block: what was resolved, the memory plan and the buckets."""
        r, m = self.resolved, self.resolved.memory
        buckets = " ".join(f"{x.num_tokens}" if x.decode_only else f"{x.num_tokens}x{x.num_rows}" for x in r.layouts)
        return (f"{r.model.architecture} {r.dtype} on {r.hardware.name}; weights {m.weight_bytes / 1e9:.2f} GB, KV pool "
                f"{m.kv_bytes / 1e9:.2f} GB = {r.num_pages} pages of {r.page_size}; {r.max_num_seqs} sequences of up to {r.max_model_len} "
                f"tokens, {r.max_num_batched_tokens} tokens a step; buckets (decode rows; tokens x rows): {buckets}; "
                f"{self.warm_up.num_executables} executables in {self.warm_up.seconds:.1f} s")


def resolve_for(model: LoadedModel, tokenizer: Tokenizer | None, config: EngineConfig) -> ResolvedConfig:
    """The resolved configuration of a loaded model on the attached device."""
    weights = sum(x.nbytes for x in model.params.values())
    dtype = str(model.params["embedding.weight"].dtype)
    vocab = model.config.vocab_size
    return resolve(config, model.config, hardware.attached(), checkpoint_dtype=dtype, weight_bytes=weights,
                   num_valid_tokens=min(vocab, tokenizer.num_tokens) if tokenizer is not None else vocab)


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
