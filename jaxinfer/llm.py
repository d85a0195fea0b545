"""The offline facade: prompts in, texts out. Composes tokenizer, loader and engine; decides nothing about scheduling."""

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError, JaxInferError, RequestError
from jaxinfer.request import CompletionOutput, FinishReason, Request, RequestMetrics, RequestOutput
from jaxinfer.sampling.params import SamplingParams

if TYPE_CHECKING:
    from jaxinfer.engine.load import LoadedModel
    from jaxinfer.tokenizer import Tokenizer

type Prompt = str | Mapping[str, Any]
type Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model ready to generate.

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
        from jaxinfer.tokenizer import Tokenizer

        self._start_engine(load(path, dtype=config.dtype), Tokenizer.from_dir(path), config, start)

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
        self._prompts: dict[str, str | None] = {}
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
        """
        if on_error not in ("raise", "return"):
            raise ConfigError(f"on_error = {on_error!r}: must be 'raise' or 'return'.")
        listed = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        each = self._params_for(listed, params)
        groups: list[list[Request] | RequestOutput] = []
        for prompt, p in zip(listed, each, strict=True):
            try:
                groups.append(self._requests(prompt, p))
            except RequestError as error:
                if on_error == "raise":
                    raise
                groups.append(_failed(prompt, error))
        return self._run(groups, use_tqdm=use_tqdm, on_error=on_error, on_output=on_output or (lambda index, output: None))

    def chat(self, messages: Messages | Sequence[Messages], params: SamplingParams | Sequence[SamplingParams] | None = None, *,
             use_tqdm: bool = False, on_error: str = "raise") -> list[RequestOutput]:
        """Answers conversations (lists of {"role", "content"}; one or a list of them) through the model's chat template."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if one else messages
        return self.generate([{"messages": m} for m in conversations], params, use_tqdm=use_tqdm, on_error=on_error)

    def stream(self, prompt: Prompt | Messages, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Yields the output so far (text and ids cumulative) after each step that added a token, the last time finished.

        Closing the iterator early withdraws the request.
        """
        if not isinstance(prompt, str | Mapping):
            prompt = {"messages": prompt}
        requests = self._requests(prompt, params or SamplingParams())
        try:
            self._add(requests)
            while not all(r.is_finished for r in requests):
                progressed = self.engine.step()
                if any(r in requests for r in progressed):
                    yield self._output(requests)
        finally:
            for request in requests:
                self.engine.abort(request.request_id)
            self._finish(requests)

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

    def _params_for(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(f"{len(params)} sampling parameters for {len(prompts)} prompts: give one for all, or one a prompt.")
        return list(params)

    def _requests(self, prompt: Prompt, params: SamplingParams) -> list[Request]:
        """The n requests of one prompt, checked but not yet queued."""
        from jaxinfer.engine.engine import check_prompt
        from jaxinfer.engine.requests import make_requests

        text, token_ids = self._encode(prompt)
        check_prompt(token_ids, self.engine.resolved)
        number = next(self._numbers)
        seed = params.seed if params.seed is not None else (self.config.seed * 1_000_003 + number) % 2**32
        requests = make_requests(f"{number}", token_ids, params, seed=seed, end_token_ids=self._end_token_ids,
                                 resolved=self.engine.resolved, tokenizer=self.tokenizer)
        self._prompts.update({r.request_id: text for r in requests})
        return requests

    def _encode(self, prompt: Prompt) -> tuple[str | None, tuple[int, ...]]:
        """(text, token ids) of a prompt in any of its forms."""
        if isinstance(prompt, Mapping):
            keys = set(prompt) & {"prompt", "prompt_token_ids", "messages"}
            if len(keys) != 1:
                raise RequestError(f"a prompt mapping with keys {sorted(prompt)}: it needs exactly one of 'prompt', 'prompt_token_ids' or "
                                   "'messages'.")
            if "prompt_token_ids" in prompt:
                ids = tuple(prompt["prompt_token_ids"])
                if not all(isinstance(t, int) and not isinstance(t, bool) for t in ids):
                    raise RequestError("prompt_token_ids: every entry must be an integer.")
                return None, ids
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

    def _add(self, requests: Sequence[Request]) -> None:
        for request in requests:
            request.arrival_time = time.monotonic()
            self.engine.add(request)

    def _run(self, groups: list[list[Request] | RequestOutput], *, use_tqdm: bool, on_error: str,
             on_output: Callable[[int, RequestOutput], None]) -> list[RequestOutput]:
        """Queues the groups, steps until all are done and gathers their outputs in order."""
        results: dict[int, RequestOutput] = {i: g for i, g in enumerate(groups) if isinstance(g, RequestOutput)}
        live: dict[str, int] = {}
        open_groups = {i: g for i, g in enumerate(groups) if not isinstance(g, RequestOutput)}
        try:
            for i, group in list(open_groups.items()):
                try:
                    self._add(group)
                    live.update({r.request_id: i for r in group})
                except RequestError as error:
                    if on_error == "raise":
                        raise
                    results[i] = _failed({"prompt_token_ids": group[0].prompt_token_ids}, error)
                    del open_groups[i]
            for i, failed in results.items():
                on_output(i, failed)
            with _progress_bar(len(open_groups), use_tqdm) as bar:
                while open_groups:
                    for request in self.engine.step():
                        index = live.get(request.request_id)  # None: another caller's, such as a stream left open
                        if index in open_groups and all(r.is_finished for r in open_groups[index]):
                            group = open_groups.pop(index)
                            results[index] = self._output(group)
                            self._finish(group)
                            on_output(index, results[index])
                            bar.update(1)
        finally:
            for group in open_groups.values():
                for request in group:
                    self.engine.abort(request.request_id)
                self._finish(group)
        return [results[i] for i in range(len(groups))]

    def _finish(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.first_token_time is not None:
                self._ttft_s.append(request.first_token_time - request.arrival_time)
            self.engine.outputs.end(request)
            self._prompts.pop(request.request_id, None)

    def _output(self, requests: Sequence[Request]) -> RequestOutput:
        first = requests[0]
        completions = []
        for request in requests:
            text, stop_reason = self.engine.outputs.text(request)
            logprobs, cumulative_logprob = self.engine.outputs.logprobs(request)
            completions.append(CompletionOutput(
                index=request.sample_index, text=text, token_ids=tuple(request.output_token_ids), finish_reason=request.finish_reason,
                stop_reason=stop_reason, logprobs=logprobs, cumulative_logprob=cumulative_logprob))
        failed = any(r.finish_reason is FinishReason.ERROR for r in requests)
        barred = "; or what the request bars left no token to sample" if first.params.has_rules else ""
        return RequestOutput(
            request_id=first.request_id, prompt=self._prompts.get(first.request_id), prompt_token_ids=first.prompt_token_ids,
            outputs=tuple(completions), num_cached_tokens=first.num_cached_tokens,
            prompt_logprobs=self.engine.outputs.prompt_logprobs(first),
            error=(f"the model produced non-finite logits: float16 overflows in some models, try dtype='bfloat16'{barred}" if failed
                   else None),
            metrics=RequestMetrics(ttft_s=_since(first, first.first_token_time), latency_s=_since(first, first.finish_time),
                                   num_preemptions=sum(r.num_preemptions for r in requests)))


def _since(request: Request, moment: float | None) -> float | None:
    return None if moment is None else moment - request.arrival_time


def _failed(prompt: Any, error: JaxInferError) -> RequestOutput:
    text = prompt if isinstance(prompt, str) else None
    ids = tuple(prompt["prompt_token_ids"]) if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt else ()
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
