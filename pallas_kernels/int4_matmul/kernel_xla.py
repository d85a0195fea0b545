"""int4_matmul in jax.numpy for any device: weights dequantised strip by strip of columns, then XLA's dot. It validates nothing: api.py has."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.int4_matmul import layout


def int4_matmul(
    x: jax.Array,              # [m, k]
    packed: jax.Array,         # [n', k', 64, J]
    scales: jax.Array,         # [g, n]
    zeros: jax.Array | None,   # [g, n]
    bias: jax.Array | None,    # [n]
    *,
    bits: int,
    out_dtype: str,
    strip_tiles: int,
) -> jax.Array:                # [m, n]
    """See api.int4_matmul. Weights of `strip_tiles` tiles of 64 columns exist at a time, rounded once to x's dtype."""
    def weights(tiles: jax.Array, scales: jax.Array, zeros: jax.Array | None) -> jax.Array:
        return _weights(tiles, scales, zeros, k=x.shape[1], bits=bits).astype(x.dtype)

    return by_strips(weights, x, packed, scales, zeros, bias, out_dtype=out_dtype, strip_tiles=strip_tiles)


def by_strips(weights: Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array], x: jax.Array, packed: jax.Array, scales: jax.Array,
              zeros: jax.Array | None, bias: jax.Array | None, *, out_dtype: str, strip_tiles: int,
              product_dtype: Any = jnp.float32) -> jax.Array:
    """The product with weights that exist by strips of columns.

    Args:
      weights: from tiles of some columns, and their scales and zero points, to these columns as rows [n, k] in x's dtype.
      x, packed, scales, zeros, bias: as in api.int4_matmul.
      out_dtype: dtype of the output.
      strip_tiles: tiles of 64 columns of a strip.
      product_dtype: what the dot gives. A GPU's sums in float32 whatever it gives; asked for float32, XLA rounds in a pass of its own.
    Returns:
      [m, n] out_dtype.
    """
    n, strips = scales.shape[1], []
    for first in range(0, packed.shape[0], strip_tiles):
        tiles = packed[first:first + strip_tiles]
        columns = slice(first * layout.TILE_N, min((first + tiles.shape[0]) * layout.TILE_N, n))
        # Materialised: a dot that XLA fuses with the unpacking redoes it for every tile of tokens.
        strip = lax.optimization_barrier(weights(tiles, scales[:, columns], None if zeros is None else zeros[:, columns]))
        strips.append(lax.dot_general(x, strip, (((1,), (1,)), ((), ())), preferred_element_type=product_dtype,
                                      precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None))
    out = strips[0] if len(strips) == 1 else jnp.concatenate(strips, axis=1)
    return (out if bias is None else out + bias.astype(jnp.float32)).astype(out_dtype)


def _weights(tiles: jax.Array, scales: jax.Array, zeros: jax.Array | None, *, k: int, bits: int) -> jax.Array:
    """The columns of some tiles as rows, [n, k] float32: the packed order, which needs the least moving."""
    num_groups, n = scales.shape
    planes = layout.planes(bits)
    shifts = jnp.arange(planes, dtype=jnp.uint16)[:, None] * bits
    words = lax.bitcast_convert_type(tiles, jnp.uint16)[:, :, :, None]              # [tiles_n, tiles_k, 64, 1, J]
    codes = words >> shifts & jnp.uint16(2**bits - 1)        # [tiles_n, tiles_k, 64, planes, J]
    codes = jnp.transpose(codes, (0, 2, 1, 3, 4)).reshape(tiles.shape[0] * layout.TILE_N, -1)[:n, :k]
    q = codes.astype(jnp.float32).reshape(n, num_groups, -1)
    z = 2.0 ** (bits - 1) if zeros is None else zeros.astype(jnp.float32).T[:, :, None]
    return ((q - z) * scales.astype(jnp.float32).T[:, :, None]).reshape(n, k)
