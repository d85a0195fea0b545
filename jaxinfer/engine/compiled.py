"""Runs one engine's executables: their warm-up, the device state that they hand on, and the count of compiles."""

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import monitoring

from jaxinfer.engine.executables import NUM_BULK_UPDATES, NUM_MASKS, NUM_PAGE_COPIES, Builder, empty_slot, jit_placed
from jaxinfer.engine.fresh_state import new_state, no_room
from jaxinfer.engine.load import LoadedModel, teacher_forced_logits
from jaxinfer.engine.page_moves import NUM_PAGES_MOVED, padded
from jaxinfer.engine.placement import Placement, device_nbytes
from jaxinfer.engine.prompt_scores import NUM_SCORES
from jaxinfer.engine.resolve import ResolvedConfig
from jaxinfer.sampling.processors import registered_processors
from jaxinfer.state import NUM_RECENT, StepLayout, StepOutput, TokenLogprobs, TokenRules

logger = logging.getLogger(__name__)

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
    """Points jax's persistent compilation cache at `folder`, unless the process has set one already; None leaves it alone.

    A folder that cannot be made costs later starts their time and is said in the log, as jax says it of one that cannot be written to.
    """
    if folder is None or jax.config.jax_compilation_cache_dir is not None:
        return
    try:
        Path(folder).expanduser().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("compilation_cache_dir = %r cannot be made (%s): every start will compile anew; name another folder", folder,
                       error.strerror or error)
        return
    jax.config.update("jax_compilation_cache_dir", str(Path(folder).expanduser()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def jit_logits(model: LoadedModel) -> Callable[..., jax.Array]:
    """A jitted `tokens [B, T], lengths [B] -> logits [B, T, V]` of a loaded model, its weights passed as arguments."""
    return functools.partial(jax.jit(teacher_forced_logits, static_argnames=("graphdef",)), model.graphdef, model.params)


class CompiledSteps:
    """The executables of one engine, and the device state that they hand on.

    The state is owned here: it is donated to each call and replaced by what the call returns.
    """

    def __init__(self, model: LoadedModel, resolved: ResolvedConfig, placement: Placement) -> None:
        self.resolved = resolved
        self.placement = placement
        self.params = model.params
        self.counter = CompileCounter()
        self.processors = registered_processors()
        self.processors.check_functions(resolved.model.vocab_size)
        self.state = new_state(resolved, placement, self.processors)
        self._builder = Builder(model, resolved, placement, self.processors)
        self._executables = self._builder.functions()
        self._asides: dict[Callable[..., Any], Callable[..., Any]] = {}

    def warm_up(self) -> WarmUp:
        """Compiles every bucket, in threads, and runs each once on padding alone. After this nothing compiles."""
        start = time.perf_counter()
        if not self.resolved.enforce_eager:
            num_executables = len(self.resolved.layouts) + len(self.resolved.burst_layouts)
            logger.info("preparing %d executables (compiled once; later starts read jax's persistent cache)", num_executables)
            with no_room(self._no_room):
                self._executables = self._builder.compiled(self.params, self.state)
                self._rehearse()
        self.compiles_at_start = self.counter.count
        executables = [] if self.resolved.enforce_eager else self._executables.of_buckets
        plans = [plan for e in executables if (plan := e.memory_analysis()) is not None]
        return WarmUp(
            num_executables=len(executables), seconds=time.perf_counter() - start,
            temp_bytes=max((p.temp_size_in_bytes for p in plans), default=0),
            aliased_bytes=min((p.alias_size_in_bytes for p in plans), default=0),
            state_bytes=sum(map(device_nbytes, jax.tree.leaves(self.state))))

    def _no_room(self, error: Exception) -> str:
        m = self.resolved.memory
        return (f"{self.resolved.hardware.name} has no room for the largest step beside {m.weight_bytes / 1e9:.2f} GB of weights, a KV pool of "
                f"{m.kv_bytes / 1e9:.2f} GB and what else is there: lower gpu_memory_utilization or max_num_batched_tokens. "
                f"({' '.join(str(error).split())[:300]})")

    def free_state(self) -> None:
        """Frees the device state; nothing runs until renew_state()."""
        for x in jax.tree.leaves(self.state):
            x.delete()

    def renew_state(self) -> None:
        """A device state as at start."""
        with self.aside():
            self.state = new_state(self.resolved, self.placement, self.processors)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """For work that is no part of a step: what it compiles does not count among the compiles after warm-up."""
        before = self.counter.count
        yield
        self.compiles_at_start += self.counter.count - before

    def run_aside(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a pure function that is no part of a step, between requests: nobody waits for a token while its first call compiles it."""
        if function not in self._asides:
            self._asides[function] = function if self.resolved.enforce_eager else jit_placed(function, self.placement, self.placement.whole)
        with self.aside():
            return self._asides[function](*arguments)

    @property
    def num_compiles_after_warm_up(self) -> int:
        return self.counter.count - self.compiles_at_start

    def run(self, layout: StepLayout, buffer: np.ndarray, *, samples: bool, wants_logprobs: bool,
            before_sampling: Callable[[], None] = lambda: None) -> StepOutput:
        """Dispatches one step and starts the copy of its output to the host; does not wait for it.

        Args:
          layout: the bucket.
          buffer: [layout.num_words] int32, from pack().
          samples: a row asks for more than its greedy token.
          wants_logprobs: a row wants log-probabilities.
          before_sampling: called between the dispatch of the step and that of its sampler, if a row asks for more.
        """
        words: Any = jax.numpy.asarray(buffer) if self.resolved.enforce_eager else buffer
        output, logits, self.state = self._executables.steps[layout](self.params, self.state, words)
        if samples:
            before_sampling()
            output, slots = self._executables.samplers[layout.num_rows](self.state.slots, logits, buffer[:layout.num_row_words])
            self.state = dataclasses.replace(self.state, slots=slots)
        if wants_logprobs:
            output = dataclasses.replace(output, logprobs=self._executables.logprobs[layout.num_rows](logits, output.tokens))
        return _on_its_way(output)

    def runs_bursts(self, layout: StepLayout) -> bool:
        """Bursts of the bucket are one executable."""
        return layout in self._executables.bursts

    def run_burst(self, layout: StepLayout, buffers: np.ndarray) -> StepOutput:
        """As run(), for K = num_scheduler_steps steps in a row in which every row is greedy and plain: one launch for all of them.

        Args:
          layout: the bucket, one for which runs_bursts().
          buffers: [K, layout.num_words] int32, of the steps in order.

        Returns:
          tokens and finite [K, B].
        """
        output, self.state = self._executables.bursts[layout](self.params, self.state, buffers)
        return _on_its_way(output)

    def score_prompt(self, rows: np.ndarray, targets: np.ndarray) -> TokenLogprobs:
        """Log-probabilities of `targets` at `rows` of the last mixed step's hidden states, both [NUM_SCORES] int32."""
        return _on_its_way(self._executables.score(self.params, self.state.hidden, rows, targets))

    def write_rules(self, slot: int, recent_tokens: np.ndarray, rules: TokenRules) -> None:
        """Gives a slot its request's rules and last output tokens."""
        self.state = self._executables.write_rules(self.state, np.asarray(slot, np.int32), recent_tokens, rules)

    def write_masks(self, slots: np.ndarray, masks: np.ndarray) -> None:
        """Gives slots [n] int32 the masks [n, ceil(V / 32)] uint32 of their next token."""
        for start in range(0, len(slots), NUM_MASKS):
            part, words = np.full(NUM_MASKS, self.resolved.max_num_seqs, np.int32), np.zeros((NUM_MASKS, masks.shape[1]), np.uint32)
            n = len(slots[start:start + NUM_MASKS])
            part[:n], words[:n] = slots[start:start + n], masks[start:start + n]
            tables = self.state.slots
            rules = dataclasses.replace(tables.rules, masks=self._executables.write_masks(tables.rules.masks, part, words))
            self.state = dataclasses.replace(self.state, slots=dataclasses.replace(tables, rules=rules))

    def write_counts(self, slot: int, counts: np.ndarray) -> None:
        """Gives a slot its request's token counts [V]."""
        self.state = self._executables.write_counts(self.state, np.asarray(slot, np.int32), counts)

    def write_page_table(self, updates: list[tuple[int, int, int]]) -> None:
        """Page-table writes (slot, entry, page) beyond what a step's buffer takes."""
        for start in range(0, len(updates), NUM_BULK_UPDATES):
            part = np.zeros((3, NUM_BULK_UPDATES), np.int32)
            part[0] = self.resolved.max_num_seqs
            chunk = updates[start:start + NUM_BULK_UPDATES]
            part[:, :len(chunk)] = np.asarray(chunk, np.int32).T
            self.state = self._executables.update_page_table(self.state, *part)

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies pages (source, destination) over all layers, after the steps dispatched before and before the next one."""
        for start in range(0, len(copies), NUM_PAGE_COPIES):
            part = np.zeros((2, NUM_PAGE_COPIES), np.int32)  # padding copies the null page onto itself
            chunk = copies[start:start + NUM_PAGE_COPIES]
            part[:, :len(chunk)] = np.asarray(chunk, np.int32).T
            self.state = self._executables.copy_pages(self.state, *part)

    def read_pages(self, pages: Sequence[int]) -> jax.Array:
        """Contents of pages, after the steps dispatched before: [NUM_PAGES_MOVED, 2, L, K, Z, H], on their way to the host, the null page's
        behind those asked for. Compiled at warm-up where pages are swapped."""
        return _on_its_way(self._executables.read_pages(self.state.cache, padded(pages)))

    def write_pages(self, pages: Sequence[int], rows: np.ndarray) -> None:
        """Gives at most NUM_PAGES_MOVED pages their contents [n, 2, L, K, Z, H], before the next step. Compiled as read_pages."""
        block = np.zeros((NUM_PAGES_MOVED, *rows.shape[1:]), rows.dtype)
        block[:len(rows)] = rows
        self.state = self._executables.write_pages(self.state, padded(pages), block)

    def run_largest(self) -> int:
        """Runs the largest bucket on padding alone, waits for it, and says how many tokens it has."""
        layout = max((x for x in self.resolved.layouts if not x.decode_only), key=lambda x: x.num_tokens)
        jax.block_until_ready(self.run(layout, _padding(layout), samples=False, wants_logprobs=False))
        return layout.num_tokens

    def _rehearse(self) -> None:
        """Runs every executable on padding, so that first-call costs (module load, autotuned plans) fall here."""
        for layout in self.resolved.layouts:
            buffer = _padding(layout)
            output = self.run(layout, buffer, samples=True, wants_logprobs=True)
            if self.runs_bursts(layout):
                self.run_burst(layout, np.tile(buffer, (self.resolved.num_scheduler_steps, 1)))
        self.write_page_table([(self.resolved.max_num_seqs, 0, 0)])
        if self.resolved.engine.enable_prefix_caching:
            self.copy_pages([(0, 0)])
        slot, rules, counts = empty_slot(self.resolved, self.processors)
        self.write_rules(int(slot), np.zeros(NUM_RECENT, np.int32), rules)
        self.write_counts(int(slot), counts)
        self.write_masks(slot[None], np.asarray(rules.masks)[:1])
        scores = self.score_prompt(np.zeros(NUM_SCORES, np.int32), np.zeros(NUM_SCORES, np.int32))
        jax.block_until_ready(self.state)
        jax.device_get((output, scores))


def _padding(layout: StepLayout) -> np.ndarray:
    """A packed buffer without rows."""
    buffer = np.zeros(layout.num_words, np.int32)
    layout.view(buffer, "slots")[:] = layout.null_slot
    layout.view(buffer, "update_slots")[:] = layout.null_slot
    return buffer


def _on_its_way[T](output: T) -> T:
    """The same, its copy to the host begun."""
    for x in jax.tree.leaves(output):
        x.copy_to_host_async()
    return output
