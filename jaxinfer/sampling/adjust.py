"""What a request's rules and penalties do to its logits, on the device. Reads the slots' tables; changes none of them.

Order, as in vLLM: allowed tokens and end tokens before min_tokens -> barred words -> biases -> penalties.
"""

import jax
import jax.numpy as jnp

from jaxinfer.state import NUM_RECENT, PROMPT_BIT, SamplingState, SlotTables, TokenRules


def adjust(logits: jax.Array, sampling: SamplingState, slots: SlotTables) -> jax.Array:
    """The logits that sampling starts from; rows that ask for nothing keep theirs bit for bit.

    Args:
      logits: [B, V] float32, -inf where padded.
      sampling: per-row settings.
      slots: counts and rules by slot.

    Returns:
      [B, V] float32; -inf where a token is barred.
    """
    rules = jax.tree.map(lambda table: table[sampling.slots], slots.rules)
    logits = jnp.where(_allowed(rules, sampling, logits.shape[1]), logits, -jnp.inf)
    logits = _bar_words(logits, rules, sampling, slots)
    logits = _add_biases(logits, rules, sampling)
    return penalise(logits, slots.counts[sampling.slots], sampling)


def _allowed(rules: TokenRules, sampling: SamplingState, vocab_size: int) -> jax.Array:
    """[B, V] bool: what the row's mask lets pass, everything where it has none."""
    rows = jnp.arange(sampling.mask.shape[0])
    words = jnp.asarray(rules.masks)[rows, jnp.maximum(sampling.mask - 1, 0)]
    words = jnp.where(sampling.mask[:, None] > 0, words, jnp.uint32(0xFFFFFFFF))
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(words.shape[0], -1)[:, :vocab_size] != 0


def _bar_words(logits: jax.Array, rules: TokenRules, sampling: SamplingState, slots: SlotTables) -> jax.Array:
    """Bars the last token of each word whose other tokens end the output."""
    position = sampling.position[:, None] - jnp.arange(NUM_RECENT - 1, 0, -1)
    recent = slots.recent_tokens[sampling.slots[:, None], position % NUM_RECENT]
    recent = jnp.where(position >= sampling.prompt_lens[:, None], recent, -2)  # equals no token and no -1
    prefixes = jnp.asarray(rules.word_prefixes)
    fits = jnp.all((prefixes == -1) | (prefixes == recent[:, None, :]), axis=2) & (sampling.has_words > 0)[:, None]
    ends = jnp.where(fits, rules.word_ends, logits.shape[1])
    return logits.at[jnp.arange(logits.shape[0])[:, None], ends].set(-jnp.inf, mode="drop")


def _add_biases(logits: jax.Array, rules: TokenRules, sampling: SamplingState) -> jax.Array:
    ids = jnp.where((sampling.has_biases > 0)[:, None], rules.bias_ids, logits.shape[1])
    return logits.at[jnp.arange(logits.shape[0])[:, None], ids].add(rules.bias_values, mode="drop")


def penalise(logits: jax.Array, counts: jax.Array, sampling: SamplingState) -> jax.Array:
    """Penalties on repeated tokens.

    l -> (l / r if l > 0 else l * r) where prompt or output hold the token; then l - frequency * n - presence * (n > 0), n being the
    times that the output holds it.

    Args:
      logits: [B, V] float32.
      counts: [B, V] int32, rows of SlotTables.counts; any values in rows without penalties.
      sampling: per-row settings.

    Returns:
      [B, V] float32.
    """
    on = sampling.penalises[:, None]
    held = jnp.where(on & (counts != 0), sampling.repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / held, logits * held)
    n = counts & (PROMPT_BIT - 1)
    taken = sampling.frequency_penalty[:, None] * n.astype(jnp.float32) + jnp.where(n > 0, sampling.presence_penalty[:, None], 0.0)
    return jnp.where(on, logits - taken, logits)
