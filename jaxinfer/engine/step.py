"""The step as a pure function: page-table updates, forward pass over the pages, greedy tokens; beside it the burst that loops over it and
the functions that sample for rows that ask for more, copy pages, write a slot's tables and score prompt tokens. No jit and no host state."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.layers.attention import PagedContext
from jaxinfer.layers.forced import ForcedKernels
from jaxinfer.models.registry import bind
from jaxinfer.sampling.logprobs import logprobs_of
from jaxinfer.sampling.processors import ProcessorTable
from jaxinfer.sampling.sampler import greedy, sample
from jaxinfer.state import (
    NUM_RECENT,
    DeviceState,
    KVCache,
    SamplingState,
    SlotTables,
    StepInput,
    StepLayout,
    StepOutput,
    TokenLogprobs,
    TokenRules,
)


def step(
    params: dict[str, jax.Array], state: DeviceState, buffer: jax.Array, *,
    graphdef: Any, layout: StepLayout, num_valid_tokens: int, forced: ForcedKernels,
) -> tuple[StepOutput, jax.Array, DeviceState]:
    """Computes a plan's tokens, and the likeliest next token of each row. Where a row asks for more, sample_rows must follow.

    Args:
      params: the model's flat parameters, dotted path -> array.
      state: KV pages, page table and the slots' tables. DONATED: use the one returned.
      buffer: [layout.num_words] int32, packed by engine/pack.py.
      graphdef: the model's structure, from nnx.split at load.
      layout: the bucket; static, as are the remaining arguments.
      num_valid_tokens: vocabulary ids at or above this are never sampled.
      forced: the implementations that ops are asked for by name.

    Returns:
      What the host reads, the logits [B, V] float32, and the new state. Padding rows write to page 0 and slot S only.
    """
    inputs = layout.unpack(buffer)
    page_table = state.page_table.at[inputs.update_slots, inputs.update_entries].set(inputs.update_pages)
    model = bind(graphdef, params)
    context = PagedContext(
        cache=state.cache, page_table=page_table[inputs.slots], cu_q_lens=inputs.cu_q_lens, kv_lens=inputs.kv_lens,
        prompt_lens=inputs.prompt_lens, max_q_len=1 if layout.decode_only else None, forced=forced)
    token_ids = _token_ids(inputs, state.slots, layout)
    hidden, context = model(token_ids, _positions(inputs, layout), context)
    with jax.named_scope("lm_head"):
        last = hidden if layout.decode_only else hidden[jnp.maximum(inputs.cu_q_lens[1:] - 1, 0)]
        logits = model.logits(last, implementation=forced.matmul)
    tokens, finite = greedy(logits, num_valid_tokens=num_valid_tokens)
    kept = state.hidden if layout.decode_only else jax.lax.dynamic_update_slice(state.hidden, hidden, (0, 0))
    slots = _remember(state.slots, tokens, _sampled_slots(inputs.sampling, inputs.samples, layout), inputs.sampling.position)
    return StepOutput(tokens=tokens, finite=finite), logits, DeviceState(cache=context.cache, page_table=page_table, slots=slots, hidden=kept)


def burst(params: dict[str, jax.Array], state: DeviceState, buffers: jax.Array, *,
          step: Callable[..., tuple[StepOutput, jax.Array, DeviceState]]) -> tuple[StepOutput, DeviceState]:
    """K steps of one bucket as a loop on the device, each after the first from the tokens of the one before. Greedy rows only.

    Args:
      params: the model's flat parameters.
      state: DONATED: use the one returned. The loop carries it in place; no pool is copied.
      buffers: [K, layout.num_words] int32, one a step, in order.
      step: the function above with its static arguments.

    Returns:
      What the host reads, tokens [K, B] int32 and finite [K, B] bool, and the new state.
    """
    def one(state: DeviceState, buffer: jax.Array) -> tuple[DeviceState, StepOutput]:
        output, _, state = step(params, state, buffer)
        return state, output

    state, output = jax.lax.scan(one, state, buffers)
    return output, state


def sample_rows(slots: SlotTables, logits: jax.Array, row_words: jax.Array, *, layout: StepLayout, num_valid_tokens: int,
                processors: ProcessorTable) -> tuple[StepOutput, SlotTables]:
    """Samples for the rows of the step just run, in place of its greedy tokens.

    Args:
      slots: the slots' tables. DONATED: use the ones returned.
      logits: [B, V] float32, the step's.
      row_words: [layout.num_row_words] int32, the first part of the step's buffer.
      layout: any bucket with B rows; static, as are the remaining arguments.
      num_valid_tokens: vocabulary ids at or above this are never sampled.
      processors: the logit processors that a row may ask for.
    """
    sampling, samples = layout.unpack_rows(row_words)
    tokens, finite = sample(logits, sampling, slots, num_valid_tokens=num_valid_tokens, processors=processors)
    sampled = _sampled_slots(sampling, samples, layout)
    counted = jnp.where(sampling.counts, sampled, layout.null_slot)
    slots = dataclasses.replace(_remember(slots, tokens, sampled, sampling.position), counts=slots.counts.at[counted, tokens].add(1))
    return StepOutput(tokens=tokens, finite=finite), slots


def _sampled_slots(sampling: SamplingState, samples: jax.Array, layout: StepLayout) -> jax.Array:
    """[B] the slots of rows that sample; S in place of the others."""
    return jnp.where(samples == 1, sampling.slots, layout.null_slot)


def _remember(slots: SlotTables, tokens: jax.Array, sampled: jax.Array, position: jax.Array) -> SlotTables:
    return dataclasses.replace(slots, recent_tokens=slots.recent_tokens.at[sampled, position % NUM_RECENT].set(tokens))


def update_page_table(state: DeviceState, slots: jax.Array, entries: jax.Array, pages: jax.Array) -> DeviceState:
    """Page-table writes that a step's own buffer has no room for (a long cached prefix). DONATES state; all [U] int32."""
    return dataclasses.replace(state, page_table=state.page_table.at[slots, entries].set(pages))


def copy_pages(state: DeviceState, sources: jax.Array, destinations: jax.Array) -> DeviceState:
    """Copies the keys and values of pages over all layers, in place: only the copied pages are moved. DONATES state.

    Args:
      state: after every step that writes a source, before the one that reads a destination.
      sources: [C] int32; all of them are read before anything is written. The null page in padding.
      destinations: [C] int32, no two alike but for the null page in padding, which is copied onto itself.
    """
    def copied(pages: jax.Array) -> jax.Array:  # [P, K, Z, H]
        moved = jax.lax.optimization_barrier(pages[sources])  # read for good: fused with the write, the pool would be copied first
        return pages.at[destinations].set(moved)

    with jax.named_scope("copy_pages"):
        return dataclasses.replace(state, cache=KVCache(k=tuple(map(copied, state.cache.k)), v=tuple(map(copied, state.cache.v))))


def write_rules(state: DeviceState, slot: jax.Array, recent_tokens: jax.Array, rules: TokenRules) -> DeviceState:
    """Gives a slot the rules of the request that takes it over, and the last tokens of its output [NUM_RECENT]. DONATES state."""
    slots = dataclasses.replace(
        state.slots, recent_tokens=state.slots.recent_tokens.at[slot].set(recent_tokens),
        rules=jax.tree.map(lambda table, row: table.at[slot].set(row), state.slots.rules, rules))
    return dataclasses.replace(state, slots=slots)


def write_masks(table: jax.Array, slots: jax.Array, masks: jax.Array) -> jax.Array:
    """Gives rows under a grammar the mask of their next token.

    Args:
      table: [S + 1, 2, W] uint32, TokenRules.masks of all slots. DONATED: use the one returned.
      slots: [C] int32; S in padding.
      masks: [C, W] uint32.
    """
    return table.at[slots, 0].set(masks)


def write_counts(state: DeviceState, slot: jax.Array, counts: jax.Array) -> DeviceState:
    """Gives a slot the token counts [V] of the request that takes it over. DONATES state."""
    return dataclasses.replace(state, slots=dataclasses.replace(state.slots, counts=state.slots.counts.at[slot].set(counts)))


def score_prompt(params: dict[str, jax.Array], hidden: jax.Array, rows: jax.Array, targets: jax.Array, *, graphdef: Any,
                 num_valid_tokens: int, num_logprobs: int, forced: ForcedKernels) -> TokenLogprobs:
    """Log-probabilities of prompt tokens from what the step before them gave the vocabulary head.

    Args:
      params: the model's flat parameters.
      hidden: DeviceState.hidden after the step.
      rows: [C] int32; where in it each position stands.
      targets: [C] int32; the token that follows each position.
      graphdef: the model's structure.
      num_valid_tokens: ids at or above this have the log-probability -inf.
      num_logprobs: likeliest tokens to report.
      forced: the implementations that ops are asked for by name.

    Returns:
      Log-probabilities, one entry for each of `rows`.
    """
    logits = bind(graphdef, params).logits(hidden[rows], implementation=forced.matmul)
    valid = jnp.arange(logits.shape[1]) < num_valid_tokens
    return logprobs_of(jnp.where(valid, logits, -jnp.inf), targets, num_logprobs=min(num_logprobs, logits.shape[1]))


def _token_ids(inputs: StepInput, slots: SlotTables, layout: StepLayout) -> jax.Array:
    """[T] ids, with those that are still on the device filled in from their slots."""
    fresh = slots.recent_tokens[inputs.slots, jnp.maximum(inputs.kv_lens - 1, 0) % NUM_RECENT]
    if layout.decode_only:  # row b owns token b
        return jnp.where(inputs.from_device == 1, fresh, inputs.token_ids)
    index = jnp.where(inputs.from_device == 1, inputs.cu_q_lens[:-1], layout.num_tokens)
    return inputs.token_ids.at[index].set(fresh, mode="drop")


def _positions(inputs: StepInput, layout: StepLayout) -> jax.Array:
    """[T] position of each token in its sequence; 0 in padding."""
    if layout.decode_only:
        return jnp.maximum(inputs.kv_lens - 1, 0)
    index = jnp.arange(layout.num_tokens, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(inputs.cu_q_lens[1:], index, side="right", method="compare_all"), layout.num_rows - 1)
    position = inputs.kv_lens[row] - inputs.cu_q_lens[row + 1] + index
    return jnp.where(index < inputs.cu_q_lens[-1], position, 0)
