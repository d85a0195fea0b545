"""Rotation as jnp arithmetic and the write as one XLA scatter a pool, for CPU and any GPU. It validates nothing: api.py has."""

import jax
import jax.numpy as jnp

from pallas_kernels.write_kv_pages.kernel_xla import write_kv_pages


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
    """See api.rotary_kv_write. In place where the pools are donated."""
    q = _rotated(qkv[:, :, :-2].reshape(qkv.shape[0], -1, qkv.shape[-1]), query_cos, query_sin)
    k = _rotated(qkv[:, :, -2], key_cos, key_sin)
    return q, *write_kv_pages(k, qkv[:, :, -1], k_pages, v_pages, page_table, cu_q_lens, kv_lens)


def _rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """[T, heads, H], computed in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
