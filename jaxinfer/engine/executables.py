"""The closed set of executables of one engine: what each is called with, lowered one after the other, compiled in threads.

Decides nothing about when they run (engine/compiled.py does) and computes nothing itself (engine/step.py does).
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxinfer.engine.load import LoadedModel
from jaxinfer.engine.page_moves import NUM_PAGES_MOVED, read_pages, write_pages
from jaxinfer.engine.placement import Placement
from jaxinfer.engine.prompt_scores import NUM_SCORES
from jaxinfer.engine.resolve import ResolvedConfig
from jaxinfer.engine.step import burst, copy_pages, sample_rows, score_prompt, step, update_page_table, write_counts, write_masks, write_rules
from jaxinfer.sampling.logprobs import token_logprobs
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.sampling.processors import ProcessorTable
from jaxinfer.sampling.rules import token_rules
from jaxinfer.state import NUM_RECENT, DeviceState, SlotTables, StepLayout, StepOutput, TokenLogprobs, TokenRules

logger = logging.getLogger(__name__)

NUM_BULK_UPDATES = 1024  # page-table writes in one call of the bulk updater
NUM_PAGE_COPIES = 8      # pages copied by one call
NUM_MASKS = 16           # rows under a grammar whose masks one call writes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Executables:
    """What an engine calls on the device: functions of engine/step.py as they are, or compiled. All are given arrays of one shape each."""

    steps: dict[StepLayout, Callable[..., tuple[StepOutput, jax.Array, DeviceState]]]
    bursts: dict[StepLayout, Callable[..., tuple[StepOutput, DeviceState]]]
    """Of the buckets whose bursts are loops on the device; none where nothing is compiled."""
    samplers: dict[int, Callable[..., tuple[StepOutput, SlotTables]]]
    """By number of rows; dispatched after a step in which a row asks for more than the greedy token."""
    logprobs: dict[int, Callable[..., TokenLogprobs]]
    """By number of rows."""
    score: Callable[..., TokenLogprobs]
    update_page_table: Callable[..., DeviceState] = update_page_table
    copy_pages: Callable[..., DeviceState] = copy_pages
    write_rules: Callable[..., DeviceState] = write_rules
    write_masks: Callable[..., jax.Array] = write_masks
    write_counts: Callable[..., DeviceState] = write_counts
    read_pages: Callable[..., jax.Array] = read_pages
    write_pages: Callable[..., DeviceState] = write_pages

    @property
    def of_buckets(self) -> list[Any]:
        """Steps and bursts."""
        return [*self.steps.values(), *self.bursts.values()]


def jit_placed(function: Callable[..., Any], placement: Placement, outputs: Any, **options: Any) -> jax.stages.Wrapped:
    """jax.jit; over several devices the results lie as `outputs` says (a tree of shardings, or the beginning of one)."""
    return jax.jit(function, **options) if placement.mesh is None else jax.jit(function, out_shardings=outputs, **options)


def empty_slot(resolved: ResolvedConfig, processors: ProcessorTable) -> tuple[np.ndarray, TokenRules, np.ndarray]:
    """The padding's slot, and what leaves it without rules and counts."""
    vocab_size = resolved.model.vocab_size
    rules = token_rules(SamplingParams(), (), (), vocab_size=vocab_size, processors=processors)
    return np.asarray(resolved.max_num_seqs, np.int32), rules, np.zeros(vocab_size, np.int32)


class Builder:
    """Makes an engine's executables.

    Args:
      model: structure and weights.
      resolved: settings and buckets.
      placement: where weights and state lie.
      processors: the logit processors that rows may ask for.
    """

    def __init__(self, model: LoadedModel, resolved: ResolvedConfig, placement: Placement, processors: ProcessorTable) -> None:
        self._resolved = resolved
        self._placement = placement
        self._processors = processors
        self._graphdef, self._weights = placement.graphdef(model), {name: x.sharding for name, x in model.params.items()}
        self._step_outputs = (placement.whole, placement.whole, placement.state)

    def functions(self) -> Executables:
        """Those that run without jit."""
        r, whole = self._resolved, self._placement.whole
        rows = {layout.num_rows: layout for layout in r.layouts}
        return Executables(
            steps={layout: functools.partial(self._step, layout=layout) for layout in r.layouts}, bursts={},
            samplers={n: functools.partial(sample_rows, layout=layout, num_valid_tokens=r.num_valid_tokens, processors=self._processors)
                      for n, layout in rows.items()},
            logprobs={n: functools.partial(token_logprobs, num_valid_tokens=r.num_valid_tokens, num_logprobs=r.engine.max_logprobs)
                      for n in rows},
            score=self._placement.on_each(
                functools.partial(score_prompt, graphdef=self._graphdef, num_valid_tokens=r.num_valid_tokens,
                                  num_logprobs=r.engine.max_logprobs, forced=r.forced),
                inputs=(self._weights, whole, whole, whole), outputs=whole))

    def compiled(self, params: dict[str, jax.Array], state: DeviceState) -> Executables:
        """All of them compiled for arrays such as these.

        Tracing and lowering are Python, which threads would only take turns at: so they are done here, one executable after the other,
        and what XLA and its assembler do of the first ones goes on beside the lowering of the next.
        """
        plain = self.functions()
        # Where pages are not swapped, these are compiled by their first call, between requests.
        found: dict[str, Any] = {
            "read_pages": self._jit(read_pages, self._placement.whole),
            "write_pages": self._jit(write_pages, self._placement.state, donate_argnames=("state",))}
        pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1)
        try:
            with _no_garbage_collection():  # a seventh of a second an executable, for garbage that is freed at the end
                lowered = self._lowered(plain, _abstract(params), _abstract(state))
                pending = [(field, key, pool.submit(_compile, field, key, one)) for field, key, one in lowered]
            for field, key, future in pending:
                if key is None:
                    found[field] = future.result()
                else:
                    found.setdefault(field, {})[key] = future.result()
        finally:
            pool.shutdown(cancel_futures=True)  # after an error or Ctrl-C nobody waits for more than what is being compiled
        return dataclasses.replace(plain, **found)

    def _step(self, params: dict[str, jax.Array], state: DeviceState, buffer: jax.Array, *,
              layout: StepLayout) -> tuple[StepOutput, jax.Array, DeviceState]:
        """engine/step.py's, by every device on its share."""
        one = functools.partial(step, graphdef=self._graphdef, layout=layout, num_valid_tokens=self._resolved.num_valid_tokens,
                                forced=self._resolved.forced)
        inputs = self._weights, self._placement.state, self._placement.whole
        return self._placement.on_each(one, inputs=inputs, outputs=self._step_outputs)(params, state, buffer)

    def _lowered(self, plain: Executables, params: Any, state: Any) -> Iterator[tuple[str, Any, jax.stages.Lowered]]:
        """(field of Executables, key in it or None, the lowered program), what compiles longest first."""
        yield from self._lowered_buckets(params, state)
        whole = self._placement.whole
        for num_rows, sampler in plain.samplers.items():
            words = sampler.keywords["layout"].num_row_words  # type: ignore[attr-defined]
            yield "samplers", num_rows, self._jit(sampler, whole, donate_argnames=("slots",)).lower(
                state.slots, self._logits(num_rows), self._from_host(words))
        for num_rows, logprobs in plain.logprobs.items():
            tokens = jax.ShapeDtypeStruct((num_rows,), np.int32, sharding=whole)
            yield "logprobs", num_rows, self._jit(logprobs, whole).lower(self._logits(num_rows), tokens)
        scores = self._from_host(NUM_SCORES)
        yield "score", None, self._jit(plain.score, whole).lower(params, state.hidden, scores, scores)
        yield from self._lowered_writers(state)

    def _lowered_buckets(self, params: Any, state: Any) -> Iterator[tuple[str, Any, jax.stages.Lowered]]:
        """A bucket's step, and its burst if it has one, which loops over the jitted step: so the model is traced once for both."""
        jitted = self._jit(self._step, self._step_outputs, static_argnames=("layout",), donate_argnames=("state",))
        num_steps, bursts = self._resolved.num_scheduler_steps, self._resolved.burst_layouts
        for layout in reversed(self._resolved.layouts):
            yield "steps", layout, jitted.lower(params, state, self._from_host(layout.num_words), layout=layout)
            if layout in bursts:
                looped = functools.partial(burst, step=functools.partial(jitted, layout=layout))
                yield "bursts", layout, self._jit(looped, (self._placement.whole, self._placement.state), donate_argnames=("state",)).lower(
                    params, state, self._from_host(num_steps, layout.num_words))

    def _lowered_writers(self, state: Any) -> Iterator[tuple[str, Any, jax.stages.Lowered]]:
        """Long page-table updates, page copies, swaps, the writers of slots' tables."""
        def writer(function: Callable[..., DeviceState], *args: Any) -> jax.stages.Lowered:
            return self._jit(function, self._placement.state, donate_argnames=("state",)).lower(state, *args)

        r, whole, updates, copies = self._resolved, self._placement.whole, self._from_host(NUM_BULK_UPDATES), self._from_host(NUM_PAGE_COPIES)
        slot, rules, counts = jax.tree.map(lambda x: self._from_host(*x.shape, dtype=x.dtype), empty_slot(r, self._processors))
        yield "update_page_table", None, writer(update_page_table, updates, updates, updates)
        if r.engine.enable_prefix_caching:
            yield "copy_pages", None, writer(copy_pages, copies, copies)
        if r.num_host_pages:
            m, pages = r.model, self._from_host(NUM_PAGES_MOVED)
            rows = self._from_host(NUM_PAGES_MOVED, 2, m.num_layers, m.num_kv_heads, r.page_size, m.head_dim, dtype=r.kv_dtype)
            yield "read_pages", None, self._jit(read_pages, whole).lower(state.cache, pages)
            yield "write_pages", None, writer(write_pages, pages, rows)
        yield "write_rules", None, writer(write_rules, slot, self._from_host(NUM_RECENT), rules)
        yield "write_counts", None, writer(write_counts, slot, counts)
        masks = state.slots.rules.masks
        yield "write_masks", None, self._jit(write_masks, whole, donate_argnames=("table",)).lower(
            masks, self._from_host(NUM_MASKS), self._from_host(NUM_MASKS, masks.shape[2], dtype=np.uint32))

    def _jit(self, function: Callable[..., Any], outputs: Any, **options: Any) -> jax.stages.Wrapped:
        return jit_placed(function, self._placement, outputs, **options)

    def _logits(self, num_rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_rows, self._resolved.model.vocab_size), np.float32, sharding=self._placement.whole)

    def _from_host(self, *shape: int, dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
        """What a call brings along as a numpy array."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._placement.host_array)


def _compile(field: str, key: Any, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    compiled = lowered.compile()
    logger.debug("compiled %s%s", field, "" if key is None else f" of {key}")
    return compiled


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Python's, which would look through all that lowering has made again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
