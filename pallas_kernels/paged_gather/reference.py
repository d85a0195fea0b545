"""The oracle of paged_gather: whole tables, row by row. It shares no helper with the implementations."""

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
    num_kv_heads, page_size, head_dim = k_pages.shape[1:]
    num_slots = page_table.shape[1] * page_size

    def row(pages: jax.Array, b: int) -> jax.Array:
        dense = jnp.moveaxis(pages[page_table[b]], 1, 2).reshape(num_slots, num_kv_heads, head_dim)
        dense = jnp.where((jnp.arange(num_slots) < kv_lens[b])[:, None, None], dense, 0)
        return jnp.pad(dense, ((0, max(max_len - num_slots, 0)), (0, 0), (0, 0)))[:max_len]

    rows = range(page_table.shape[0])
    return jnp.stack([row(k_pages, b) for b in rows]), jnp.stack([row(v_pages, b) for b in rows])
