"""The offline facade: prompts in, texts out. Composes tokenizer, loader and engine; decides nothing about scheduling."""

import dataclasses
import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.checkpoint import read_manifest
from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError, EngineError, JaxInferError, RequestError
from jaxinfer.request import CompletionOutput, FinishReason, Request, RequestMetrics, RequestOutput
from jaxinfer.sampling.params import SamplingParams

if TYPE_CHECKING:
    from jaxinfer.engine.load import LoadedModel
    from jaxinfer.tokenizer import Tokenizer

type Prompt = str | Mapping[str, Any]
type Messages = Sequence[Mapping[str, Any]]

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Group:
    """One prompt under way: its text, where it has one, and its n requests."""

    text: str | None
    requests: list[Request]

    @property
    def is_finished(self) -> bool:
        return all(r.is_finished for r in self.requests)


class LLM:
    """A model ready to generate.

    One thread at a time may use it: one that comes while another is in a step gets an EngineError. Within a thread, streams may stay
    open beside each other and beside generate. Ctrl-C ends a generate or a stream between two steps; the LLM stays usable. After any
    other exception inside a step it does not: every later call raises an EngineError that names the cause.

    Args:
      model: converted checkpoint, Hugging Face folder or .gguf file; the latter two are converted once, into a cache.
      settings: fields of EngineConfig; vLLM's spellings are accepted.

    Raises:
      ConfigError, CheckpointError, CapacityError: see their messages for the value, the limit and the remedy.
    """

    def __init__(self, model: str | Path, **settings: Any) -> None:
        from jaxinfer.source import converted_checkpoint

        config = EngineConfig.from_settings({"model": str(model), **settings})
        start = time.perf_counter()
        path = converted_checkpoint(config.model, dtype=config.dtype)
        _claim_gpu_memory(config)
        # jax is imported only now: the share of GPU memory that it preallocates is read at its import.
        from jaxinfer.engine.load import load
        from jaxinfer.engine.resolve import running_dtype
        from jaxinfer.tokenizer import Tokenizer, has_tokenizer

        tokenizer = Tokenizer.from_dir(path) if has_tokenizer(path) else None
        if tokenizer is None:
            logger.warning("%s has no tokenizer: prompts must be token ids, and texts stay empty", path)
        stored = read_manifest(path)["dtype"]
        dtype = running_dtype(config.dtype, stored)
        if config.dtype == "auto" and dtype != stored:
            logger.info("running in %s what is stored in %s; dtype=%r would keep it", dtype, stored, stored)
        self._start_engine(load(path, dtype=dtype), tokenizer, config, start)

    @classmethod
    def from_model(cls, model: "LoadedModel", *, tokenizer: "Tokenizer | None" = None, **settings: Any) -> "LLM":
        """An LLM over weights that are already on the device; they are shared, not copied.

        Without a tokenizer, prompts are token ids and texts stay empty.
        """
        llm = cls.__new__(cls)
        config = EngineConfig.from_settings({"model": str(model.path or ""), **settings})
        llm._start_engine(model, tokenizer, config, time.perf_counter())
        return llm

    def _start_engine(self, model: "LoadedModel", tokenizer: "Tokenizer | None", config: EngineConfig, start: float) -> None:
        from jaxinfer.engine.compiled import enable_compilation_cache
        from jaxinfer.engine.engine import Engine

        enable_compilation_cache(config.compilation_cache_dir)
        self.config = config
        self.tokenizer = tokenizer
        self.engine = Engine(model, tokenizer, config)
        self._end_token_ids = frozenset(model.manifest.get("end_token_ids", ())) | (tokenizer.end_token_ids if tokenizer else frozenset())
        self._numbers = itertools.count()
        self._ttft_s: list[float] = []
        self.startup_s = time.perf_counter() - start

    def generate(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                 use_tqdm: bool = False, on_error: str = "raise",
                 on_output: Callable[[int, RequestOutput], None] | None = None) -> list[RequestOutput]:
        """Completes prompts, batched together.

        Args:
          prompts: texts, or mappings {"prompt_token_ids": [...]} or {"prompt": "..."}; one or a list.
          params: one for all, or one a prompt; default SamplingParams().
          use_tqdm: show a progress bar on stderr.
          on_error: "raise" stops at the first prompt that cannot be served, before any work; "return" serves the others and gives
            that prompt an output whose `error` says why.
          on_output: called with (index of the prompt, its output) as soon as each is done, in the order in which they end.

        Returns:
          One output a prompt, in order.

        Raises:
          RequestError: a prompt that cannot be served (on_error="raise").
          EngineError: a step failed before, or another thread is using this LLM.
        """
        from jaxinfer.engine.requests import read_params

        if on_error not in ("raise", "return"):
            raise ConfigError(f"on_error = {on_error!r}: must be 'raise' or 'return'.")
        if not isinstance(prompts, Iterable):
            raise RequestError(f"prompts of type {type(prompts).__name__}: give a string, a mapping with 'prompt', 'prompt_token_ids' or "
                               "'messages', or a list of these.")
        listed = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        groups: list[_Group | RequestOutput] = []
        for prompt, p in zip(listed, read_params(params, len(listed)), strict=True):
            try:
                groups.append(self._group(prompt, p))
            except RequestError as error:
                if on_error == "raise":
                    raise
                groups.append(_failed(prompt, error))
        return self._run(groups, use_tqdm=use_tqdm, on_error=on_error, on_output=on_output or (lambda index, output: None))

    def chat(self, messages: Messages | Sequence[Messages], params: SamplingParams | Sequence[SamplingParams] | None = None, *,
             use_tqdm: bool = False, on_error: str = "raise") -> list[RequestOutput]:
        """Answers conversations (lists of {"role", "content"}; one or a list of them) through the model's chat template."""
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
            raise RequestError(f"messages of type {type(messages).__name__}: give a list of {{'role': ..., 'content': ...}}, or a list of "
                               "such lists.")
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if one else messages
        return self.generate([{"messages": m} for m in conversations], params, use_tqdm=use_tqdm, on_error=on_error)

    def stream(self, prompt: Prompt | Messages, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Yields the output so far (text and ids cumulative) after each step that added a token, the last time finished.

        Closing the iterator early withdraws the request.
        """
        from jaxinfer.engine.requests import read_params

        if not isinstance(prompt, str | Mapping):
            prompt = {"messages": prompt}
        group = self._group(prompt, read_params(params, 1)[0])
        has_ended = False
        try:
            self._add(group)
            while not group.is_finished:
                progressed = self._step()
                if any(r in group.requests for r in progressed):
                    has_ended = group.is_finished
                    yield self._output(group)
            if not has_ended:  # another caller's steps brought it to its end
                yield self._output(group)
        finally:
            self._finish(group)

    def metrics(self) -> dict[str, Any]:
        """Figures since start or reset_metrics(): latencies in ms, rates a second, memory in bytes."""
        m, steps = self.engine.metrics, self.engine.steps
        ttft = sorted(self._ttft_s)
        return {
            "ttft_ms": 1e3 * ttft[len(ttft) // 2] if ttft else None,
            "decode_tokens_per_s": m.decode_tokens_per_s, "roofline_share": m.roofline_share,
            "num_prompt_tokens": m.num_prefill_tokens, "num_output_tokens": m.num_output_tokens, "num_steps": m.num_steps,
            "host_ms_per_step": 1e3 * m.host_seconds / m.num_steps if m.num_steps else None,
            "memory_bytes": memory_in_use(), "startup_s": self.startup_s,
            "num_compiles_after_warmup": steps.num_compiles_after_warm_up,
            "num_executables": self.engine.warm_up.num_executables,
        }

    def reset_metrics(self) -> None:
        """Starts the figures of metrics() anew."""
        self.engine.metrics.reset()
        self._ttft_s.clear()

    def _group(self, prompt: Prompt, params: SamplingParams) -> _Group:
        """One prompt's requests, checked but not yet queued."""
        from jaxinfer.engine.engine import check_prompt
        from jaxinfer.engine.requests import make_requests

        text, token_ids = self._encode(prompt)
        check_prompt(token_ids, self.engine.resolved)
        number = next(self._numbers)
        seed = params.seed if params.seed is not None else (self.config.seed * 1_000_003 + number) % 2**32
        requests = make_requests(f"{number}", token_ids, params, seed=seed, end_token_ids=self._end_token_ids,
                                 resolved=self.engine.resolved, tokenizer=self.tokenizer)
        return _Group(text=text, requests=requests)

    def _encode(self, prompt: Prompt) -> tuple[str | None, tuple[int, ...]]:
        """(text, token ids) of a prompt in any of its forms."""
        from jaxinfer.engine.requests import read_token_ids

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
        if self.tokenizer is None:
            raise RequestError("this engine has no tokenizer: give the prompt as {'prompt_token_ids': [...]}.")
        if isinstance(prompt, Mapping) and "messages" in prompt:
            return None, tuple(self.tokenizer.apply_chat_template(prompt["messages"], add_generation_prompt=True))
        text = prompt if isinstance(prompt, str) else prompt["prompt"]
        if not isinstance(text, str):
            raise RequestError(f"a prompt of type {type(text).__name__}: it must be a string.")
        return text, tuple(self.tokenizer.encode(text))

    def _add(self, group: _Group) -> None:
        for request in group.requests:
            request.arrival_time = time.monotonic()
            self.engine.add(request)

    def _step(self) -> list[Request]:
        """A step for a caller whose requests have not all ended."""
        if not self.engine.has_work:
            raise EngineError("internal error: requests are open and the engine has no work for them. Make a new LLM (LLM.from_model shares "
                              "the weights), and please report this.")
        return self.engine.step()

    def _run(self, groups: list[_Group | RequestOutput], *, use_tqdm: bool, on_error: str,
             on_output: Callable[[int, RequestOutput], None]) -> list[RequestOutput]:
        """Queues the groups, steps until all are done and gathers their outputs in order."""
        results: dict[int, RequestOutput] = {i: g for i, g in enumerate(groups) if isinstance(g, RequestOutput)}
        live: dict[str, int] = {}
        open_groups = {i: g for i, g in enumerate(groups) if isinstance(g, _Group)}
        try:
            for i, group in list(open_groups.items()):
                try:
                    self._add(group)
                    live.update({r.request_id: i for r in group.requests})
                except RequestError as error:
                    if on_error == "raise":
                        raise
                    results[i] = _failed({"prompt_token_ids": group.requests[0].prompt_token_ids}, error)
                    self._finish(open_groups.pop(i))
            for i, failed in results.items():
                on_output(i, failed)
            with _progress_bar(len(open_groups), use_tqdm) as bar:
                for index in self._steps_to_ends(open_groups, live):
                    results[index] = self._output(open_groups[index])
                    self._finish(open_groups.pop(index))
                    on_output(index, results[index])
                    bar.update(1)
        finally:
            for group in open_groups.values():
                self._finish(group)
        return [results[i] for i in range(len(groups))]

    def _steps_to_ends(self, open_groups: Mapping[int, _Group], live: Mapping[str, int]) -> Iterator[int]:
        """Steps until the taker has taken all groups out; gives the index of each as it ends, also where others' steps ended it."""
        seen = -1
        while open_groups:
            ended = [i for i, group in open_groups.items() if group.is_finished] if seen != self.engine.num_step_calls else []
            if not ended and not self.engine.has_work:
                ended = [i for i, group in open_groups.items() if group.is_finished]  # withdrawn from outside
            seen = self.engine.num_step_calls
            if not ended:
                touched = dict.fromkeys(live.get(r.request_id) for r in self._step())  # None: another caller's, such as an open stream
                seen += 1
                ended = [i for i in touched if i is not None and i in open_groups and open_groups[i].is_finished]
            yield from ended

    def _finish(self, group: _Group) -> None:
        """Forgets a group, withdrawing what still runs of it."""
        for request in group.requests:
            if request.first_token_time is not None:
                self._ttft_s.append(request.first_token_time - request.arrival_time)
            self.engine.end(request)

    def _output(self, group: _Group) -> RequestOutput:
        requests, first = group.requests, group.requests[0]
        completions = []
        for request in requests:
            text, stop_reason = self.engine.outputs.text(request)
            logprobs, cumulative_logprob = self.engine.outputs.logprobs(request)
            completions.append(CompletionOutput(
                index=request.sample_index, text=text, token_ids=tuple(request.output_token_ids), finish_reason=request.finish_reason,
                stop_reason=stop_reason, logprobs=logprobs, cumulative_logprob=cumulative_logprob))
        failed = next((r for r in requests if r.finish_reason is FinishReason.ERROR), None)
        return RequestOutput(
            request_id=first.request_id, prompt=group.text, prompt_token_ids=first.prompt_token_ids,
            outputs=tuple(completions), num_cached_tokens=first.num_cached_tokens,
            prompt_logprobs=self.engine.outputs.prompt_logprobs(first),
            error=None if failed is None else self._why_failed(failed),
            metrics=RequestMetrics(ttft_s=_since(first, first.first_token_time), latency_s=_since(first, first.finish_time),
                                   num_preemptions=sum(r.num_preemptions for r in requests)))

    def _why_failed(self, request: Request) -> str:
        """The message for a request that ended with ERROR: the layer where its numbers first went wrong, where they did."""
        from jaxinfer.engine.load import first_non_finite

        where = first_non_finite(self.engine.model, request.token_ids(0, request.num_tokens))
        if where is None and request.params.has_rules:
            return "what the request bars left no token to sample: loosen allowed_token_ids, bad_words, min_tokens or logit_bias"
        place = f", first in its {where}" if where else ""
        return f"the model produced non-finite logits{place}: float16 overflows in some models, try dtype='bfloat16'"


def _since(request: Request, moment: float | None) -> float | None:
    return None if moment is None else moment - request.arrival_time


def _failed(prompt: Any, error: JaxInferError) -> RequestOutput:
    text = prompt if isinstance(prompt, str) else None
    given = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
    ids = tuple(given) if isinstance(given, Iterable) else ()
    return RequestOutput(request_id="", prompt=text, prompt_token_ids=ids, outputs=(), num_cached_tokens=0, error=str(error),
                         metrics=RequestMetrics(ttft_s=None, latency_s=None, num_preemptions=0))


def _progress_bar(total: int, shown: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, disable=not shown, unit="prompt", file=sys.stderr)


def _claim_gpu_memory(config: EngineConfig) -> None:
    """Lets jax preallocate the share that the settings allow, unless the process has decided that already."""
    if "jax" not in sys.modules:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{min(config.gpu_memory_utilization + 0.03, 0.97):.2f}")


def memory_in_use() -> int:
    """Bytes: the device allocator's peak on a GPU, the process's resident set on a CPU."""
    import jax

    device = jax.local_devices()[0]
    if device.platform == "gpu":
        return (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
