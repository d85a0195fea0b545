"""Writing keys and values into pages as one XLA scatter a pool, for CPU and any GPU. It validates nothing: api.py has."""

import jax
import jax.numpy as jnp

from pallas_kernels.ragged import token_positions, token_rows


def write_kv_pages(
    k: jax.Array,           # [T, K, H]
    v: jax.Array,           # [T, K, H]
    k_pages: jax.Array,     # [P, K, Z, H]
    v_pages: jax.Array,     # [P, K, Z, H]
    page_table: jax.Array,  # [B, M]
    cu_q_lens: jax.Array,   # [B + 1]
    kv_lens: jax.Array,     # [B]
) -> tuple[jax.Array, jax.Array]:
    """See api.write_kv_pages. In place where the pools are donated."""
    num_tokens, page_size = k.shape[0], k_pages.shape[2]
    rows, valid = token_rows(cu_q_lens, num_tokens)
    # Padding goes to the null page, spread over its slots; collisions there do not matter.
    pos = jnp.where(valid, token_positions(rows, cu_q_lens, kv_lens), jnp.arange(num_tokens, dtype=jnp.int32))
    slots = pos % page_size
    entries = jnp.minimum(pos // page_size, page_table.shape[1] - 1)
    pages = jnp.where(valid, page_table[rows, entries], 0)
    k_pages, v_pages = (pool.at[pages, :, slots].set(new.astype(pool.dtype), mode="drop", wrap_negative_indices=False)
                        for pool, new in ((k_pages, k), (v_pages, v)))
    return k_pages, v_pages
