"""Ragged rows on the device: which row a token belongs to and where in it. Shared by kernels, never by references."""

import jax
import jax.numpy as jnp


def token_rows(cu_q_lens: jax.Array, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """The row of every token.

    Args:
      cu_q_lens: [B + 1] int32; row b owns tokens [cu_q_lens[b], cu_q_lens[b + 1]); empty rows may stand anywhere.
      num_tokens: T, padding included.
    Returns:
      rows [T] int32, the last row for padding tokens; valid [T] bool, False for padding tokens.
    """
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    # Comparing with every row's end is a few small fused ops; a binary search would be a loop.
    rows = jnp.sum(tokens[:, None] >= cu_q_lens[None, 1:], axis=1, dtype=jnp.int32)
    return jnp.minimum(rows, cu_q_lens.shape[0] - 2), tokens < cu_q_lens[-1]


def token_positions(rows: jax.Array, cu_q_lens: jax.Array, kv_lens: jax.Array) -> jax.Array:
    """Position of every token in its sequence, counted from 0; a row's last token sits at kv_lens - 1.

    Args:
      rows: [T] int32, from `token_rows`.
      cu_q_lens: [B + 1] int32.
      kv_lens: [B] int32.
    Returns:
      [T] int32; meaningless for padding tokens.
    """
    tokens = jnp.arange(rows.shape[0], dtype=jnp.int32)
    return tokens + (kv_lens - cu_q_lens[1:])[rows]
