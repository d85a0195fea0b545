"""From prompts to requests and from requests to outputs: what the facades of an engine share. Steps no engine, owns no thread."""

import dataclasses
import itertools
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxinfer.engine.engine import Engine, check_prompt
from jaxinfer.engine.load import first_non_finite
from jaxinfer.engine.requests import make_requests, read_token_ids
from jaxinfer.errors import JaxInferError, RequestError
from jaxinfer.request import CompletionOutput, FinishReason, Request, RequestMetrics, RequestOutput
from jaxinfer.sampling.params import SamplingParams

type Prompt = str | Mapping[str, Any]
type Messages = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """One prompt under way: its text, where it has one, and its n requests."""

    request_id: str
    """What the caller knows it by; the engine knows its requests by ids of their own."""
    text: str | None
    requests: list[Request]

    @property
    def is_finished(self) -> bool:
        return all(r.is_finished for r in self.requests)


class Groups:
    """Makes the groups of one engine, queues them and reads what became of them.

    `make` may be called by any thread, one at a time; the rest by the thread that uses the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tokenizer = engine.tokenizer
        own = self._tokenizer.end_token_ids if self._tokenizer is not None else frozenset()
        self._end_token_ids = frozenset(engine.model.manifest.get("end_token_ids", ())) | own
        self._numbers = itertools.count()
        self._ttft_s: list[float] = []

    def make(self, prompt: Prompt, params: SamplingParams, *, request_id: str | None = None, priority: Any = 0,
             deadline_s: Any = None) -> Group:
        """One prompt's requests, checked but not yet queued.

        Args:
          prompt: a text, or a mapping with one of "prompt", "prompt_token_ids", "messages".
          params: what is asked for.
          request_id: the caller's name for it; default a number.
          priority: smaller is more urgent.
          deadline_s: seconds from arrival until it ends wherever it stands; None: never.

        Raises:
          RequestError: what this engine cannot do.
        """
        resolved = self._engine.resolved
        text, token_ids = self._encode(prompt)
        check_prompt(token_ids, resolved)
        number = next(self._numbers)
        seed = params.seed if params.seed is not None else (resolved.engine.seed * 1_000_003 + number) % 2**32
        requests = make_requests(f"{number}" if request_id is None else f"{number}:{request_id}", token_ids, params, seed=seed,
                                 end_token_ids=self._end_token_ids, resolved=resolved, tokenizer=self._tokenizer,
                                 processors=self._engine.steps.processors, grammars=self._engine.grammars, priority=priority,
                                 deadline_s=deadline_s)
        return Group(request_id=f"{number}" if request_id is None else request_id, text=text, requests=requests)

    def _encode(self, prompt: Prompt) -> tuple[str | None, tuple[int, ...]]:
        """(text, token ids) of a prompt in any of its forms."""
        if isinstance(prompt, Mapping):
            keys = set(prompt) & {"prompt", "prompt_token_ids", "messages"}
            if len(keys) != 1:
                raise RequestError(f"a prompt mapping with keys {sorted(map(str, prompt))}: it needs exactly one of 'prompt', "
                                   "'prompt_token_ids' or 'messages'.")
            if "prompt_token_ids" in prompt:
                return None, read_token_ids(prompt["prompt_token_ids"])
        elif not isinstance(prompt, str):
            raise RequestError(f"a prompt of type {type(prompt).__name__}: it must be a string or a mapping with 'prompt', "
                               "'prompt_token_ids' or 'messages'.")
        if self._tokenizer is None:
            raise RequestError("this engine has no tokenizer: give the prompt as {'prompt_token_ids': [...]}.")
        if isinstance(prompt, Mapping) and "messages" in prompt:
            return None, tuple(self._tokenizer.apply_chat_template(prompt["messages"], add_generation_prompt=True))
        text = prompt if isinstance(prompt, str) else prompt["prompt"]
        if not isinstance(text, str):
            raise RequestError(f"a prompt of type {type(text).__name__}: it must be a string.")
        return text, tuple(self._tokenizer.encode(text))

    def add(self, group: Group, *, arrival_time: float | None = None) -> None:
        """Queues a group; it arrives now, or did at `arrival_time` on the monotonic clock."""
        for request in group.requests:
            request.arrival_time = time.monotonic() if arrival_time is None else arrival_time
            self._engine.add(request)

    def finish(self, group: Group) -> None:
        """Forgets a group, withdrawing what still runs of it."""
        for request in group.requests:
            if request.first_token_time is not None:
                self._ttft_s.append(request.first_token_time - request.arrival_time)
            self._engine.end(request)

    def output(self, group: Group) -> RequestOutput:
        """The group's completions, whole or so far."""
        requests, first, outputs = group.requests, group.requests[0], self._engine.outputs
        completions = []
        for request in requests:
            text, stop_reason = outputs.text(request)
            logprobs, cumulative_logprob = outputs.logprobs(request)
            completions.append(CompletionOutput(
                index=request.sample_index, text=text, token_ids=tuple(request.output_token_ids), finish_reason=request.finish_reason,
                stop_reason=stop_reason, logprobs=logprobs, cumulative_logprob=cumulative_logprob))
        failed = next((r for r in requests if r.finish_reason is FinishReason.ERROR), None)
        return RequestOutput(
            request_id=group.request_id, prompt=group.text, prompt_token_ids=first.prompt_token_ids,
            outputs=tuple(completions), num_cached_tokens=first.num_cached_tokens, prompt_logprobs=outputs.prompt_logprobs(first),
            error=None if failed is None else self.why_failed(failed), metrics=times(requests))

    def why_failed(self, request: Request) -> str:
        """The message for a request that ended with ERROR: the layer where its numbers first went wrong, where they did."""
        if request.grammar is not None and request.grammar.error is not None:
            return request.grammar.error
        where = first_non_finite(self._engine.model, request.token_ids(0, request.num_tokens))
        if where is None and request.params.has_rules:
            processors = ", or a logits processor gave NaN or infinity" if request.params.logits_processors else ""
            return (f"what the request bars left no token to sample{processors}: loosen allowed_token_ids, bad_words, min_tokens, logit_bias "
                    "or structured_outputs")
        place = f", first in its {where}" if where else ""
        return f"the model produced non-finite logits{place}: float16 overflows in some models, try dtype='bfloat16'"

    def metrics(self) -> dict[str, Any]:
        """Figures since start or reset_metrics(): latencies in ms, rates a second, memory in bytes. Any thread may ask."""
        m, steps, stats, ttft = self._engine.metrics, self._engine.steps, self._engine.scheduler.stats(), sorted(self._ttft_s)
        return {
            "ttft_ms": 1e3 * ttft[len(ttft) // 2] if ttft else None,
            "decode_tokens_per_s": m.decode_tokens_per_s, "roofline_share": m.roofline_share,
            "num_prompt_tokens": m.num_prefill_tokens, "num_output_tokens": m.num_output_tokens, "num_steps": m.num_steps,
            "host_ms_per_step": 1e3 * m.host_seconds / m.num_steps if m.num_steps else None,
            "num_waiting": stats.num_waiting, "num_running": stats.num_running, "num_preemptions": stats.num_preemptions,
            "num_swapped_tokens": stats.num_swapped_tokens,
            "num_expired": stats.num_expired, "memory_bytes": memory_in_use(),
            "num_compiles_after_warmup": steps.num_compiles_after_warm_up,
            "num_executables": self._engine.warm_up.num_executables,
        }

    def reset_metrics(self) -> None:
        """Starts the figures of metrics() anew, but for what the scheduler counts: that goes on from the start."""
        self._engine.metrics.reset()
        self._ttft_s.clear()


def times(requests: Sequence[Request]) -> RequestMetrics:
    """The times of a prompt's first completion, and the preemptions of all."""
    first = requests[0]

    def since(moment: float | None) -> float | None:
        return None if moment is None else moment - first.arrival_time

    return RequestMetrics(ttft_s=since(first.first_token_time), latency_s=since(first.finish_time),
                          num_preemptions=sum(r.num_preemptions for r in requests))


def failed(prompt: Any, error: JaxInferError) -> RequestOutput:
    """The output of a prompt that could not be served."""
    text = prompt if isinstance(prompt, str) else None
    given = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
    ids = tuple(given) if isinstance(given, Iterable) else ()
    return RequestOutput(request_id="", prompt=text, prompt_token_ids=ids, outputs=(), num_cached_tokens=0, error=str(error),
                         metrics=RequestMetrics(ttft_s=None, latency_s=None, num_preemptions=0))


def memory_in_use() -> int:
    """Bytes: the device allocator's peak on a GPU, the process's resident set on a CPU."""
    device = jax.local_devices()[0]
    if device.platform == "gpu":
        return (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
