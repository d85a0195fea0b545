"""Pages to dense keys and values as one XLA gather a pool, for CPU and any GPU. It validates nothing: api.py has."""

import jax
import jax.numpy as jnp


def paged_gather(
    k_pages: jax.Array,                 # [P, K, Z, H]
    v_pages: jax.Array,                 # [P, K, Z, H]
    page_table: jax.Array,              # [B, M]
    kv_lens: jax.Array,                 # [B]
    *,
    max_len: int,
) -> tuple[jax.Array, jax.Array]:       # ([B, max_len, K, H], [B, max_len, K, H])
    """See api.paged_gather."""
    page_size = k_pages.shape[2]
    pos = jnp.arange(max_len, dtype=jnp.int32)
    pages = page_table[:, jnp.minimum(pos // page_size, page_table.shape[1] - 1)]                   # [B, max_len]
    held = (pos < kv_lens[:, None])[:, :, None, None]
    # Token by token rather than page by page: the gather then writes the result's layout itself, and no transpose follows.
    k, v = (jnp.where(held, pool.at[pages, :, pos % page_size].get(mode="clip", wrap_negative_indices=False), 0) for pool in (k_pages, v_pages))
    return k, v
