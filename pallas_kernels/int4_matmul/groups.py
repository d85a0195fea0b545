"""How a tile of k is multiplied group by group: what kernel_mosaic and kernel_stream share. It validates nothing.

With few tokens of bfloat16, codes of 4 bits go into the product as they come out of unpacking, 128 + q, and the product with a row of ones
makes up for it once a group (kernel_mosaic.py says why):

    sum of x (q - z)   =   sum of x (128 + q)   -   (128 + z) sum of x
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.int4_matmul import fragments
from pallas_kernels.mosaic import across

CHUNK = 64  # words of a tile that are unpacked at a time: one swizzled row


def sums_tokens(block_m: int, bits: int, dtype: Any) -> bool:
    """Whether codes go into the product as 128 + q, sums of x making up for it. float16's 1024 + q would cost 8 bits of 24."""
    return (block_m, bits, jnp.dtype(dtype)) == (8, 4, jnp.bfloat16)


def pieces(group_k: int, num_k: int) -> Iterator[tuple[int, int, int]]:
    """(first k of the chunk, k, values) of what is multiplied at a time: a chunk of a tile, or a group where that is less."""
    size = min(group_k, CHUNK)
    for k in range(0, num_k, size):
        yield k // CHUNK * CHUNK, k, size


def weights(words: jax.Array, plane: int, zero: list[jax.Array], *, by_sums: bool, mask: jax.Array, bits: int, dtype: Any, layout: Any,
            row_layout: Any, interpret: bool) -> jax.Array:
    """One plane of codes as the left operand: 128 + q if `by_sums`, else q - z. The rest as in fragments.operand; `zero` may be empty."""
    if by_sums:
        return fragments.shifted_codes(words, plane, mask, dtype=dtype, layout=layout, interpret=interpret)
    return fragments.operand(words, plane, zero[0] if zero else None, mask=mask, bits=bits, dtype=dtype, layout=layout, row_layout=row_layout,
                             interpret=interpret)


def offset(zero: list[jax.Array], num_columns: int, *, bits: int, dtype: Any) -> Any:
    """What shifted codes are too large by, for a product of so many columns."""
    base = float(fragments.MAGIC[jnp.dtype(dtype).name][1])
    return across(zero[0] + base, num_columns) if zero else base + 2.0 ** (bits - 1)
