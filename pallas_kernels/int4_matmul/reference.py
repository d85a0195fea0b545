"""The oracle of int4_matmul: float32 throughout, the whole matrix at once. It shares no helper with the kernels nor with layout.py."""

import jax
import jax.numpy as jnp
from jax import lax


def int4_matmul(
    x: jax.Array,              # [m, k]
    packed: jax.Array,         # [n', k', 64, J]
    scales: jax.Array,         # [g, n]
    zeros: jax.Array | None,   # [g, n]
    bias: jax.Array | None,    # [n]
    *,
    bits: int,
    out_dtype: str,
) -> jax.Array:                # [m, n]
    """See api.int4_matmul."""
    k, (num_groups, n) = x.shape[1], scales.shape
    num_words = 16 * bits
    row = jnp.arange(k)
    tile, plane, word = row // 256, row % 256 // num_words, row % num_words
    column = jnp.arange(n)
    words = packed[column[None, :] // 64, tile[:, None], column[None, :] % 64, word[:, None]].astype(jnp.int32)
    q = (words >> (bits * plane[:, None])) & (2**bits - 1)
    group = row // (k // num_groups)
    z = 2 ** (bits - 1) if zeros is None else zeros[group].astype(jnp.float32)
    weights = (q.astype(jnp.float32) - z) * scales[group].astype(jnp.float32)
    out = jnp.dot(x.astype(jnp.float32), weights, precision=lax.Precision.HIGHEST)
    return (out if bias is None else out + bias.astype(jnp.float32)).astype(out_dtype)
