"""The step as a pure function: page-table updates, forward pass over the pages, sampling. No jit and no host state here."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.layers.attention import PagedContext
from jaxinfer.models.registry import bind
from jaxinfer.sampling.sampler import sample
from jaxinfer.state import DeviceState, StepInput, StepLayout, StepOutput


def step(
    params: dict[str, jax.Array], state: DeviceState, buffer: jax.Array, *,
    graphdef: Any, layout: StepLayout, num_valid_tokens: int, attention_implementation: str | None,
) -> tuple[StepOutput, DeviceState]:
    """Computes a plan's tokens and samples one token for each row that reached the end of its known tokens.

    Args:
      params: the model's flat parameters, dotted path -> array.
      state: KV pages, page table and last tokens. DONATED: use the one returned.
      buffer: [layout.num_words] int32, packed by engine/pack.py.
      graphdef: the model's structure, from nnx.split at load.
      layout: the bucket; static, as are the remaining arguments.
      num_valid_tokens: vocabulary ids at or above this are never sampled.
      attention_implementation: one implementation by name, or None to let the op choose.

    Returns:
      What the host reads, and the new state. Padding rows write to page 0 and slot S only.
    """
    inputs = layout.unpack(buffer)
    page_table = state.page_table.at[inputs.update_slots, inputs.update_entries].set(inputs.update_pages)
    model = bind(graphdef, params)
    context = PagedContext(
        cache=state.cache, page_table=page_table[inputs.slots], cu_q_lens=inputs.cu_q_lens, kv_lens=inputs.kv_lens,
        prompt_lens=inputs.prompt_lens, max_q_len=1 if layout.decode_only else None, implementation=attention_implementation)
    token_ids = _token_ids(inputs, state.last_tokens, layout)
    hidden, context = model(token_ids, _positions(inputs, layout), context)
    with jax.named_scope("lm_head"):
        last = hidden if layout.decode_only else hidden[jnp.maximum(inputs.cu_q_lens[1:] - 1, 0)]
        logits = model.logits(last)
    tokens, finite = sample(logits, inputs.sampling, num_valid_tokens=num_valid_tokens)
    sampled_slots = jnp.where(inputs.samples == 1, inputs.slots, layout.null_slot)
    last_tokens = state.last_tokens.at[sampled_slots].set(tokens)
    return StepOutput(tokens=tokens, finite=finite), DeviceState(cache=context.cache, page_table=page_table, last_tokens=last_tokens)


def update_page_table(state: DeviceState, slots: jax.Array, entries: jax.Array, pages: jax.Array) -> DeviceState:
    """Page-table writes that a step's own buffer has no room for (a long cached prefix). DONATES state; all [U] int32."""
    return DeviceState(cache=state.cache, page_table=state.page_table.at[slots, entries].set(pages), last_tokens=state.last_tokens)


def _token_ids(inputs: StepInput, last_tokens: jax.Array, layout: StepLayout) -> jax.Array:
    """[T] ids, with those that are still on the device filled in from their slots."""
    fresh = last_tokens[inputs.slots]
    if layout.decode_only:  # row b owns token b
        return jnp.where(inputs.from_device == 1, fresh, inputs.token_ids)
    index = jnp.where(inputs.from_device == 1, inputs.cu_q_lens[:-1], layout.num_tokens)
    return inputs.token_ids.at[index].set(fresh, mode="drop")


def _positions(inputs: StepInput, layout: StepLayout) -> jax.Array:
    """[T] position of each token in its sequence; 0 in padding."""
    if layout.decode_only:
        return jnp.maximum(inputs.kv_lens - 1, 0)
    index = jnp.arange(layout.num_tokens, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(inputs.cu_q_lens[1:], index, side="right"), layout.num_rows - 1)
    position = inputs.kv_lens[row] - inputs.cu_q_lens[row + 1] + index
    return jnp.where(index < inputs.cu_q_lens[-1], position, 0)
