"""Around the Mosaic GPU kernels: operands made to fit their copies, and splits of k added up. It validates nothing."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils

from pallas_kernels.int4_matmul import layout
from pallas_kernels.int4_matmul.config import Tiles


def launch(
    make_kernel: Callable[..., Any],
    x: jax.Array,              # [m, k]
    packed: jax.Array,         # [n', k', 64, J]
    scales: jax.Array,         # [g, n]
    zeros: jax.Array | None,   # [g, n]
    bias: jax.Array | None,    # [n]
    *,
    bits: int,
    out_dtype: str,
    config: Tiles,
    leaves_parts: bool,
    interpret: bool,
) -> jax.Array:                # [m, n], or [splits, m, n]
    """See api.int4_matmul.

    Args:
      make_kernel: from operands, static facts and `out` to a function of (x, packed, scales, zeros?, bias [1, n]?) that gives `out`:
        [m, n] out_dtype, or with several splits [splits, m, n] float32, which are added up here: XLA fuses that with what follows.
      config: tiles: block_m, strips (of 64 columns a block) and splits are read here.
      leaves_parts: gives several splits' sums as they are. There is no bias then.
      interpret: run it on the CPU, slowly, for tests.
    """
    m, n = x.shape[0], scales.shape[1]
    copies_async = not interpret and utils._infer_arch() < (9, 0)
    x = _padded(x, packed.shape[1] * layout.TILE_K, config.block_m, exact=copies_async or interpret)
    if zeros is not None:
        zeros = zeros.astype(jnp.bfloat16)
    width = config.strips * layout.TILE_N
    if interpret:  # which lets nothing out of bounds
        scales = widened(scales, -n % width)
        zeros, bias = (None if row is None else widened(row, -n % width) for row in (zeros, bias))
    elif n % 8:  # rows of parameters are copied 16 bytes at a time
        scales, zeros = widened(scales, -n % 8), None if zeros is None else widened(zeros, -n % 8)
    shape = (-(-m // config.block_m) * config.block_m, -(-n // width) * width) if interpret else (m, n)
    out = jax.ShapeDtypeStruct(shape, out_dtype) if config.splits == 1 else jax.ShapeDtypeStruct((config.splits, *shape), jnp.float32)
    run = make_kernel(x, packed, scales, has_zeros=zeros is not None, has_bias=bias is not None and config.splits == 1, bits=bits, out=out,
                      config=config, copies_async=copies_async, interpret=interpret)
    arrays = [x, packed, scales, *([] if zeros is None else [zeros])]
    if config.splits == 1:
        return run(*arrays, *([] if bias is None else [bias[None]]))[:m, :n]
    parts = run(*arrays)[:, :m, :n]
    return parts if leaves_parts else added_up(parts, bias, out_dtype)


def added_up(
    parts: jax.Array,          # [splits, m, n]
    bias: jax.Array | None,    # [n, or more]
    out_dtype: str,
) -> jax.Array:                # [m, n]
    """The float32 sums of splits of k, and the bias, as one product."""
    total = jnp.sum(parts, axis=0)
    return (total if bias is None else total + bias[:total.shape[1]].astype(jnp.float32)).astype(out_dtype)


def _padded(x: jax.Array, k: int, block_m: int, *, exact: bool) -> jax.Array:
    """x with zeros as far as copies reach. TMA puts zeros past the end itself, where the end is one of a swizzled tile of 8 x 64."""
    rows, columns = -x.shape[0] % block_m, k - x.shape[1]
    if not exact:
        rows = rows if x.shape[0] > 8 and x.shape[0] % 8 else 0
        columns = columns if x.shape[1] % 64 else 0
    return jnp.pad(x, ((0, rows), (0, columns))) if rows or columns else x


def widened(rows: jax.Array, columns: int) -> jax.Array:
    """[..., n] with so many columns of zeros more."""
    return jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, columns)]) if columns else rows
