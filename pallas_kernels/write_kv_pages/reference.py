"""The oracle of write_kv_pages: one token after another, as the contract says it. It shares no helper with the kernels."""

import jax
import jax.numpy as jnp
from jax import lax


def write_kv_pages(
    k: jax.Array,           # [T, K, H]
    v: jax.Array,           # [T, K, H]
    k_pages: jax.Array,     # [P, K, Z, H]
    v_pages: jax.Array,     # [P, K, Z, H]
    page_table: jax.Array,  # [B, M]
    cu_q_lens: jax.Array,   # [B + 1]
    kv_lens: jax.Array,     # [B]
) -> tuple[jax.Array, jax.Array]:
    """See api.write_kv_pages."""
    page_size = k_pages.shape[2]

    def write(t: jax.Array, pools: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        mine = (cu_q_lens[:-1] <= t) & (t < cu_q_lens[1:])  # [B], at most one True
        b = jnp.argmax(mine)
        pos = jnp.where(mine[b], kv_lens[b] - cu_q_lens[b + 1] + t, 0)
        page = jnp.where(mine[b], page_table[b, pos // page_size], 0)
        return pools[0].at[page, :, pos % page_size].set(k[t].astype(k_pages.dtype)), \
            pools[1].at[page, :, pos % page_size].set(v[t].astype(v_pages.dtype))

    return lax.fori_loop(0, k.shape[0], write, (k_pages, v_pages))
