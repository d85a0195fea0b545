"""The oracle of rotary_kv_write: one token after another, as the contract says it. It shares no helper with the kernels."""

import jax
import jax.numpy as jnp
from jax import lax


def rotary_kv_write(
    qkv: jax.Array,         # [T, K, G + 2, H]
    query_cos: jax.Array,   # [T, H // 2]
    query_sin: jax.Array,   # [T, H // 2]
    key_cos: jax.Array,     # [T, H // 2]
    key_sin: jax.Array,     # [T, H // 2]
    k_pages: jax.Array,     # [P, K, Z, H]
    v_pages: jax.Array,     # [P, K, Z, H]
    page_table: jax.Array,  # [B, M]
    cu_q_lens: jax.Array,   # [B + 1]
    kv_lens: jax.Array,     # [B]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See api.rotary_kv_write."""
    num_tokens, num_kv_heads, members, head_dim = qkv.shape
    page_size = k_pages.shape[2]

    def turned(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """x as complex numbers x[i] + j x[i + H // 2], times cos + j sin."""
        wide = x.astype(jnp.float32)
        re, im = wide[..., :head_dim // 2], wide[..., head_dim // 2:]
        return jnp.concatenate([re * cos - im * sin, re * sin + im * cos], axis=-1).astype(x.dtype)

    def one(t: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        queries, keys, values = carry
        mine = (cu_q_lens[:-1] <= t) & (t < cu_q_lens[1:])  # [B], at most one True
        b = jnp.argmax(mine)
        pos = jnp.where(mine[b], kv_lens[b] - cu_q_lens[b + 1] + t, 0)
        page = jnp.where(mine[b], page_table[b, pos // page_size], 0)
        queries = queries.at[t].set(turned(qkv[t, :, :members - 2], query_cos[t], query_sin[t]))
        keys = keys.at[page, :, pos % page_size].set(turned(qkv[t, :, members - 2], key_cos[t], key_sin[t]).astype(keys.dtype))
        return queries, keys, values.at[page, :, pos % page_size].set(qkv[t, :, members - 1].astype(values.dtype))

    start = jnp.zeros((num_tokens, num_kv_heads, members - 2, head_dim), qkv.dtype)
    queries, keys, values = lax.fori_loop(0, num_tokens, one, (start, k_pages, v_pages))
    return queries.reshape(num_tokens, -1, head_dim), keys, values
