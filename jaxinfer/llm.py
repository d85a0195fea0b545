"""The offline facade: prompts in, texts out. Composes tokenizer, loader and engine; decides nothing about scheduling."""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.checkpoint import read_manifest
from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError, RequestError
from jaxinfer.request import RequestOutput
from jaxinfer.sampling.params import SamplingParams

if TYPE_CHECKING:
    from jaxinfer.engine.load import LoadedModel
    from jaxinfer.groups import Group, Messages, Prompt
    from jaxinfer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


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
        loaded = load(path, dtype=dtype, tensor_parallel_size=config.tensor_parallel_size)
        self._start_engine(loaded, tokenizer, config, start)

    @classmethod
    def from_model(cls, model: "LoadedModel", *, tokenizer: "Tokenizer | None" = None, **settings: Any) -> "LLM":
        """An LLM over weights that are already on a device, or split over several; they are shared, not copied.

        Args:
          model: from jaxinfer.load or jaxinfer.from_params. Weights that are split must be as `jaxinfer.tensor_parallel_shardings` has
            them, under any mesh; the engine then runs over as many devices. Where devices hold the same parts, the first of them serve.
          tokenizer: without one, prompts are token ids and texts stay empty.
          settings: fields of EngineConfig; vLLM's spellings are accepted.

        Raises:
          ConfigError: the weights lie in another way; and as for LLM.
        """
        llm = cls.__new__(cls)
        config = EngineConfig.from_settings({"model": str(model.path or ""), **settings})
        llm._start_engine(model, tokenizer, config, time.perf_counter())
        return llm

    def _start_engine(self, model: "LoadedModel", tokenizer: "Tokenizer | None", config: EngineConfig, start: float) -> None:
        from jaxinfer.engine.compiled import enable_compilation_cache
        from jaxinfer.engine.engine import Engine
        from jaxinfer.groups import Groups

        enable_compilation_cache(config.compilation_cache_dir)
        self.tokenizer = tokenizer
        self.engine = Engine(model, tokenizer, config)
        self.config = self.engine.resolved.engine
        self.groups = Groups(self.engine)
        self.startup_s = time.perf_counter() - start

    def generate(self, prompts: "Prompt | Sequence[Prompt]", params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                 priority: int | Sequence[int] = 0, deadline_s: float | Sequence[float | None] | None = None, use_tqdm: bool = False,
                 on_error: str = "raise", on_output: Callable[[int, RequestOutput], None] | None = None) -> list[RequestOutput]:
        """Completes prompts, batched together.

        Args:
          prompts: texts, or mappings {"prompt_token_ids": [...]} or {"prompt": "..."}; one or a list.
          params: one for all, or one a prompt; default SamplingParams().
          priority: one for all, or one a prompt; smaller is more urgent. Other than 0 only under a scheduling policy that looks at it.
          deadline_s: seconds from arrival, one for all or one a prompt: what has not ended then ends with the finish reason "abort",
            the stop reason "deadline" and its output so far; None: never. Looked at before each step, or burst of steps.
          use_tqdm: show a progress bar on stderr.
          on_error: "raise" stops at the first prompt that cannot be served, before any work; "return" serves the others and gives
            that prompt an output whose `error` says why.
          on_output: called with (index of the prompt, its output) as soon as each is done, in the order in which they end.

        Returns:
          One output a prompt, in order.

        Raises:
          RequestError: a prompt that cannot be served (on_error="raise").
          EngineError: a step failed before, another thread is using this LLM, or it is asleep.
        """
        from jaxinfer.batch import run
        from jaxinfer.engine.requests import read_each, read_params
        from jaxinfer.groups import failed

        if on_error not in ("raise", "return"):
            raise ConfigError(f"on_error = {on_error!r}: must be 'raise' or 'return'.")
        if not isinstance(prompts, Iterable):
            raise RequestError(f"prompts of type {type(prompts).__name__}: give a string, a mapping with 'prompt', 'prompt_token_ids' or "
                               "'messages', or a list of these.")
        listed = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        asked = zip(listed, read_params(params, len(listed)), read_each("priority", priority, len(listed)),
                    read_each("deadline_s", deadline_s, len(listed)), strict=True)
        groups: list[Group | RequestOutput] = []
        for prompt, p, rank, seconds in asked:
            try:
                groups.append(self.groups.make(prompt, p, priority=rank, deadline_s=seconds))
            except RequestError as error:
                if on_error == "raise":
                    raise
                groups.append(failed(prompt, error))
        return run(groups, self.groups, self.engine, use_tqdm=use_tqdm, on_error=on_error,
                   on_output=on_output or (lambda index, output: None))

    def chat(self, messages: "Messages | Sequence[Messages]", params: SamplingParams | Sequence[SamplingParams] | None = None, *,
             priority: int | Sequence[int] = 0, deadline_s: float | Sequence[float | None] | None = None, use_tqdm: bool = False,
             on_error: str = "raise") -> list[RequestOutput]:
        """Answers conversations (lists of {"role", "content"}; one or a list of them) through the model's chat template."""
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
            raise RequestError(f"messages of type {type(messages).__name__}: give a list of {{'role': ..., 'content': ...}}, or a list of "
                               "such lists.")
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if one else messages
        return self.generate([{"messages": m} for m in conversations], params, priority=priority, deadline_s=deadline_s,
                             use_tqdm=use_tqdm, on_error=on_error)

    def stream(self, prompt: "Prompt | Messages", params: SamplingParams | None = None, *, priority: int = 0,
               deadline_s: float | None = None) -> Iterator[RequestOutput]:
        """Yields the output so far (text and ids cumulative) after each step that added a token, the last time finished.

        In a burst (num_scheduler_steps) steps are read together: an output then holds that many tokens more than the one before.
        Closing the iterator early withdraws the request.
        """
        from jaxinfer.batch import step
        from jaxinfer.engine.requests import read_params

        if not isinstance(prompt, str | Mapping):
            prompt = {"messages": prompt}
        group = self.groups.make(prompt, read_params(params, 1)[0], priority=priority, deadline_s=deadline_s)
        has_ended = False
        try:
            self.groups.add(group)
            while not group.is_finished:
                progressed = step(self.engine)
                if any(r in group.requests for r in progressed):
                    has_ended = group.is_finished
                    yield self.groups.output(group)
            if not has_ended:  # another caller's steps brought it to its end
                yield self.groups.output(group)
        finally:
            self.groups.finish(group)

    def metrics(self) -> dict[str, Any]:
        """Figures since start or reset_metrics(): latencies in ms, rates a second, memory in bytes."""
        return {**self.groups.metrics(), "startup_s": self.startup_s}

    def reset_metrics(self) -> None:
        """Starts the figures of metrics() anew."""
        self.groups.reset_metrics()

    def update_weights(self, params: Mapping[str, Any], *, wait: bool = False) -> None:
        """Replaces weights by arrays of the same shapes and dtypes. No executable of the engine is compiled again; forgets the prefix cache.

        Arrays that lie where the old ones do are shared, not copied: they must not be donated to another computation while the LLM
        uses them. Others (of numpy too) are copied there; where they are split otherwise over several devices, jax compiles these moves
        once. Either all are taken or, where one does not fit, none.

        Args:
          params: dotted path -> array; paths left out keep their weights.
          wait: run the requests that are open (streams) to their end first; otherwise they are a reason to refuse.

        Raises:
          CheckpointError: a path that the model does not have, or an array of another shape or dtype; all are named.
          EngineError: requests are open, the LLM is asleep at level 1, or it is broken or in use.
        """
        while wait and self.engine.has_work:
            self.engine.step()
        with self.engine.while_idle("update_weights") as weights:
            weights.update(params)

    def dump_step(self, folder: str | Path) -> None:
        """Writes the inputs and the tokens of the next step into a file in this folder, for python -m jaxinfer.replay.

        Raises:
          ConfigError: the folder cannot be written to.
        """
        self.engine.dumps.keep_next(folder)

    def sleep(self, level: int = 1) -> None:
        """Gives the device's memory to others until wake(): frees the KV pool, with it the prefix cache, and lets go of the weights.

        Weights that the caller still holds elsewhere, as with from_model, stay on the device.

        Args:
          level: 1 keeps a copy of the weights in host memory, 2 does not: update_weights must then bring all of them before wake().

        Raises:
          ConfigError: another level.
          EngineError: requests are open, the LLM is asleep already, or it is broken or in use.
        """
        with self.engine.while_idle("sleep") as weights:
            weights.sleep(level)

    def wake(self) -> None:
        """Ends sleep(). Compiles nothing; outputs are those of before. Does nothing while awake.

        Raises:
          EngineError: weights are missing (level 2); the message names them.
          CapacityError: the device's memory is in use; free some and call again.
        """
        with self.engine.while_idle("wake") as weights:
            weights.wake()

    def save_prefix_cache(self, path: str | Path) -> int:
        """Writes the prefix cache into one file (safetensors), whole or not at all, for load_prefix_cache of a later process.

        Returns:
          Pages written.

        Raises:
          PrefixCacheError: the file cannot be written.
          ConfigError: prefix caching is off.
          EngineError: requests are open, or the LLM is asleep, broken or in use.
        """
        with self.engine.while_idle("save_prefix_cache") as weights:
            weights.check_awake()
            return self.engine.saved_prefixes.save(path, weights.model)

    def load_prefix_cache(self, path: str | Path) -> int:
        """Takes what save_prefix_cache wrote in place of what is cached: the most recently used pages, as many as the pool holds.

        Returns:
          Pages taken.

        Raises:
          PrefixCacheError: absent, damaged, or of other weights, another KV dtype or page size; what was cached before stays, unless
            the damage is found behind the first checks.
          ConfigError: prefix caching is off.
          EngineError: requests are open, or the LLM is asleep, broken or in use.
        """
        with self.engine.while_idle("load_prefix_cache") as weights:
            weights.check_awake()
            return self.engine.saved_prefixes.load(path, weights.model)


def _claim_gpu_memory(config: EngineConfig) -> None:
    """Lets jax preallocate the share that the settings allow, unless the process has decided that already."""
    if "jax" not in sys.modules:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{min(config.gpu_memory_utilization + 0.03, 0.97):.2f}")
