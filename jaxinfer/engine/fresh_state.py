"""The device state that an engine starts from: KV pages, page table, slots' tables, zero and beside the weights."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxinfer.engine.placement import Placement
from jaxinfer.engine.resolve import ResolvedConfig
from jaxinfer.errors import CapacityError
from jaxinfer.models.config import ModelConfig
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.sampling.processors import NO_PROCESSORS, ProcessorTable
from jaxinfer.sampling.rules import token_rules
from jaxinfer.state import NUM_RECENT, DeviceState, KVCache, SlotTables


def new_state(resolved: ResolvedConfig, placement: Placement, processors: ProcessorTable) -> DeviceState:
    """A zeroed state, beside the weights.

    Raises:
      CapacityError: the device has no room for it.
    """
    m = resolved.memory
    message = (f"a KV pool of {resolved.num_pages} pages ({m.kv_bytes} bytes) does not fit on {resolved.hardware.name} beside "
               f"{m.weight_bytes} bytes of weights and what else is there (another framework, a trainer, jax's own preallocation): set "
               "kv_cache_memory_bytes to what is free, or lower gpu_memory_utilization, which is a share of the whole device.")
    with no_room(lambda error: message):
        return jax.block_until_ready(_zeroed_state(resolved, placement, processors))


@contextlib.contextmanager
def no_room(message: Callable[[Exception], str]) -> Iterator[None]:
    """Where the device's memory runs out inside, raises a CapacityError with what `message` makes of the error."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise CapacityError(message(error)) from error


def _zeroed_state(resolved: ResolvedConfig, placement: Placement, processors: ProcessorTable) -> DeviceState:
    shapes = make_state(
        resolved.model, jax.ShapeDtypeStruct, max_num_seqs=resolved.max_num_seqs, num_pages=resolved.num_pages,
        page_size=resolved.page_size, num_pages_per_seq=resolved.num_pages_per_seq,
        max_num_tokens=max(x.num_tokens for x in resolved.layouts if not x.decode_only), dtype=resolved.dtype, kv_dtype=resolved.kv_dtype,
        processors=processors)

    def zeros(sharding: Sharding, shapes: Any) -> Any:
        return jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype, device=sharding), shapes)

    return jax.tree.map(zeros, placement.state, shapes)


def make_state(config: ModelConfig, zeros: Callable[[tuple[int, ...], Any], Any], *, max_num_seqs: int, num_pages: int, page_size: int,
               num_pages_per_seq: int, max_num_tokens: int, dtype: Any, kv_dtype: Any,
               processors: ProcessorTable = NO_PROCESSORS) -> DeviceState:
    """A state of the shapes that an engine needs.

    Args:
      config: the model.
      zeros: makes one array of a shape and dtype; jax.ShapeDtypeStruct makes shapes alone.
      max_num_seqs: S.
      num_pages: P, the null page included.
      page_size: Z.
      num_pages_per_seq: M.
      max_num_tokens: T of the largest mixed bucket.
      dtype: of activations.
      kv_dtype: of keys and values.
      processors: the engine's.
    """
    num_slots, shape = max_num_seqs + 1, (num_pages, config.num_kv_heads, page_size, config.head_dim)
    k, v = (tuple(zeros(shape, kv_dtype) for _ in range(config.num_layers)) for _ in "kv")
    one = token_rules(SamplingParams(), (), (), vocab_size=config.vocab_size, processors=processors)
    slots = SlotTables(
        recent_tokens=zeros((num_slots, NUM_RECENT), np.int32), counts=zeros((num_slots, config.vocab_size), np.int32),
        rules=jax.tree.map(lambda x: zeros((num_slots, *x.shape), x.dtype), one))
    return DeviceState(cache=KVCache(k=k, v=v), page_table=zeros((num_slots, num_pages_per_seq), np.int32), slots=slots,
                       hidden=zeros((max_num_tokens, config.dim), dtype))
