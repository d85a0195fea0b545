"""Batches that mix prompts and decoding rows: a row of one token goes to a decode kernel, all others to a prefill kernel. No kernel of its own.

In a prefill kernel such a row fills a tile of 64 or 128 tokens with one, and walks all its keys alone in it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

FEW_ROWS = 8  # up to here single tokens stay with the prefill kernel: their few tiles cost less than two more launches a layer

type Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def attend_mixed(
    q: jax.Array,           # [T, N, H]
    k_pages: jax.Array,     # [P, K, Z, H]
    v_pages: jax.Array,     # [P, K, Z, H]
    page_table: jax.Array,  # [B, M]
    cu_q_lens: jax.Array,   # [B + 1]
    kv_lens: jax.Array,     # [B]
    *,
    prefill: Attend,
    decode: Attend,
) -> jax.Array:             # [T, N, H]
    """See api.ragged_paged_attention.

    Args:
      prefill: attends for every row; what it gives a row of one token is not looked at.
      decode: attends for one token a row, T = B.
    """
    num_tokens, num_rows = q.shape[0], kv_lens.shape[0]
    is_single = jnp.diff(cu_q_lens) == 1
    first = jnp.minimum(cu_q_lens[:-1], num_tokens - 1)
    decoded = decode(q[first], k_pages, v_pages, page_table, jnp.arange(num_rows + 1, dtype=jnp.int32), jnp.where(is_single, kv_lens, 0))
    out = prefill(q, k_pages, v_pages, page_table, cu_q_lens, kv_lens)
    return out.at[jnp.where(is_single, first, num_tokens)].set(decoded, mode="drop")
