"""The only jax.jit calls of the engine: the closed set of executables, their warm-up, and the count of compiles."""

import concurrent.futures
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import monitoring

from jaxinfer.engine.load import LoadedModel
from jaxinfer.engine.resolve import ResolvedConfig
from jaxinfer.engine.step import step, update_page_table
from jaxinfer.state import DeviceState, KVCache, StepLayout, StepOutput

logger = logging.getLogger(__name__)

NUM_BULK_UPDATES = 1024  # page-table writes in one call of the bulk updater
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts every backend compile of the process, stray jnp operations included, by jax.monitoring. Monotonic."""

    _lock_free_count = 0  # written by the listener, under the GIL
    _registered = False

    def __init__(self) -> None:
        if not CompileCounter._registered:
            CompileCounter._registered = True
            monitoring.register_event_duration_secs_listener(CompileCounter._listen)

    @staticmethod
    def _listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILE_EVENT:
            CompileCounter._lock_free_count += 1

    @property
    def count(self) -> int:
        return CompileCounter._lock_free_count


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmUp:
    """What start-up compiled."""

    num_executables: int
    seconds: float
    temp_bytes: int
    """Largest temporary memory of any executable."""
    aliased_bytes: int
    """Donated bytes that the largest bucket reuses in place; less than the state means that a pool is copied."""
    state_bytes: int


def enable_compilation_cache(folder: str | None) -> None:
    """Points jax's persistent compilation cache at `folder`, unless the process has set one already; None leaves it alone."""
    if folder is None or jax.config.jax_compilation_cache_dir is not None:
        return
    Path(folder).expanduser().mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(Path(folder).expanduser()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def jit_logits(model: LoadedModel) -> Callable[..., jax.Array]:
    """A jitted `tokens [B, T], lengths [B] -> logits [B, T, V]` of a loaded model, its weights passed as arguments."""
    def logits(params: dict[str, jax.Array], tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        return dataclasses.replace(model, params=params).logits(tokens, lengths)

    return functools.partial(jax.jit(logits), model.params)


class CompiledSteps:
    """The executables of one engine, and the device state that they hand on.

    The state is owned here: it is donated to each call and replaced by what the call returns.
    """

    def __init__(self, model: LoadedModel, resolved: ResolvedConfig) -> None:
        self.resolved = resolved
        self.params = model.params
        self.counter = CompileCounter()
        self.state = _new_state(resolved, model)
        self._step = functools.partial(
            step, graphdef=model.graphdef, num_valid_tokens=resolved.num_valid_tokens,
            attention_implementation=resolved.attention_implementation)
        self._executables: dict[StepLayout, jax.stages.Compiled] = {}
        self._bulk_update: jax.stages.Compiled | None = None

    def warm_up(self) -> WarmUp:
        """Compiles every bucket, in threads, and runs each once on padding alone. After this nothing compiles."""
        start = time.perf_counter()
        if not self.resolved.enforce_eager:
            logger.info("compiling %d executables (once; later starts find them in jax's persistent cache)", len(self.resolved.layouts))
            workers = min(len(self.resolved.layouts), os.cpu_count() or 1)
            with concurrent.futures.ThreadPoolExecutor(workers) as pool:
                self._executables = dict(zip(self.resolved.layouts, pool.map(self._compile, self.resolved.layouts), strict=True))
            updates = jax.ShapeDtypeStruct((NUM_BULK_UPDATES,), np.int32)
            self._bulk_update = jax.jit(update_page_table, donate_argnames=("state",)).lower(
                _abstract(self.state), updates, updates, updates).compile()
            self._rehearse()
        self.compiles_at_start = self.counter.count
        plans = [plan for e in self._executables.values() if (plan := e.memory_analysis()) is not None]
        return WarmUp(
            num_executables=len(self._executables), seconds=time.perf_counter() - start,
            temp_bytes=max((p.temp_size_in_bytes for p in plans), default=0),
            aliased_bytes=min((p.alias_size_in_bytes for p in plans), default=0),
            state_bytes=sum(x.nbytes for x in jax.tree.leaves(self.state)))

    @property
    def num_compiles_after_warm_up(self) -> int:
        return self.counter.count - self.compiles_at_start

    def run(self, layout: StepLayout, buffer: np.ndarray) -> StepOutput:
        """Dispatches one step and starts the copy of its output to the host; does not wait for it."""
        if self.resolved.enforce_eager:
            output, self.state = self._step(self.params, self.state, jax.numpy.asarray(buffer), layout=layout)
        else:
            output, self.state = self._executables[layout](self.params, self.state, buffer)
        output.tokens.copy_to_host_async()
        output.finite.copy_to_host_async()
        return output

    def write_page_table(self, updates: list[tuple[int, int, int]]) -> None:
        """Page-table writes (slot, entry, page) beyond what a step's buffer takes."""
        for start in range(0, len(updates), NUM_BULK_UPDATES):
            part = np.zeros((3, NUM_BULK_UPDATES), np.int32)
            part[0] = self.resolved.max_num_seqs
            chunk = updates[start:start + NUM_BULK_UPDATES]
            part[:, :len(chunk)] = np.asarray(chunk, np.int32).T
            write = self._bulk_update if self._bulk_update is not None else update_page_table
            self.state = write(self.state, *part)

    def _compile(self, layout: StepLayout) -> jax.stages.Compiled:
        jitted = jax.jit(self._step, static_argnames=("layout",), donate_argnames=("state",))
        buffer = jax.ShapeDtypeStruct((layout.num_words,), np.int32)
        compiled = jitted.lower(_abstract(self.params), _abstract(self.state), buffer, layout=layout).compile()
        logger.debug("compiled %s", layout)
        return compiled

    def _rehearse(self) -> None:
        """Runs every executable on padding, so that first-call costs (module load, autotuned plans) fall here."""
        for layout in self.resolved.layouts:
            buffer = np.zeros(layout.num_words, np.int32)
            layout.view(buffer, "slots")[:] = layout.null_slot
            layout.view(buffer, "update_slots")[:] = layout.null_slot
            output = self.run(layout, buffer)
        self.write_page_table([(self.resolved.max_num_seqs, 0, 0)])
        jax.block_until_ready((output, self.state))
        np.asarray(output.tokens), np.asarray(output.finite)


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def _new_state(resolved: ResolvedConfig, model: LoadedModel) -> DeviceState:
    """Zeroed pages, page table and last tokens, placed beside the weights."""
    config = model.config
    sharding = next(iter(model.params.values())).sharding
    shape = (resolved.num_pages, config.num_kv_heads, resolved.page_size, config.head_dim)

    def zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jax.numpy.zeros(shape, dtype, device=sharding)

    pools = [tuple(zeros(shape, resolved.kv_dtype) for _ in range(config.num_layers)) for _ in "kv"]
    return DeviceState(
        cache=KVCache(k=pools[0], v=pools[1]), last_tokens=zeros((resolved.max_num_seqs + 1,), np.int32),
        page_table=zeros((resolved.max_num_seqs + 1, resolved.num_pages_per_seq), np.int32))
