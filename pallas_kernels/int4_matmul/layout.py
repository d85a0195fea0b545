"""The packed layout of 4- and 8-bit weights: pack, unpack, dequantize, in numpy and in jax. It multiplies nothing.

Codes q [k, n] are unsigned: 0..15 or 0..255. They stand in 16-bit words, and the words in tiles of 64 columns n by 256 values of k, so that
a tile is one piece of memory (8 KiB at 4 bits, 16 at 8) and the tiles of a strip of 64 columns follow each other along k:

    packed [ceil(n / 64), ceil(k / 256), 64, J] int16       J = 64 words at 4 bits, 128 at 8 bits

    word (i, j) of tile (a, b) holds column n = 64 a + i and, plane p by plane p, k = 256 b + J p + j:

      4 bits   bit 15 .. 12   11 ..  8    7 ..  4    3 ..  0
                  plane 3     plane 2    plane 1    plane 0
                 k + 192      k + 128    k +  64    k            k = 256 b + j

      8 bits   bit 15 ................ 8    7 .............. 0
                       plane 1                  plane 0
                       k + 128                  k

One plane of a tile is a tile of the left operand of mma with bfloat16's width, so that a kernel gets it by ldmatrix and turns two values at
once into bfloat16 or float16: shift, mask, and `or` an exponent. Columns and values of k beyond n and k are padding of code 0.

Scales and zero points stay as they are, [k / group_size, n]; the shape of the scales says what k and n are.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.contract import ArrayLike, check_rank, dtype_name
from pallas_kernels.dispatch import ContractError

OP = "int4_matmul"
TILE_N = 64     # columns of a tile: four warps of 16 rows of the transposed product
TILE_K = 256    # values of k of a tile
BITS = (4, 8)
ZERO_DTYPES = ("bfloat16", "float16", "float32", "int8", "uint8", "int16", "int32")

type Array = jax.Array | np.ndarray[Any, Any]


def planes(bits: int) -> int:
    """Codes in a word."""
    return 16 // bits


def tile_words(bits: int) -> int:
    """Words of a column in a tile: at least 64, the 128 bytes that are one swizzled row of shared memory."""
    return TILE_K // planes(bits)


def packed_shape(k: int, n: int, *, bits: int) -> tuple[int, int, int, int]:
    """Shape of the packed weights of a [k, n] matrix."""
    return -(-n // TILE_N), -(-k // TILE_K), TILE_N, tile_words(bits)


def pack(q: Array, *, bits: int = 4) -> Array:
    """Codes to words, exactly; on the side (numpy or jax) that the codes are on.

    Args:
      q: [k, n] uint8 codes 0 .. 2^bits - 1.
      bits: 4 or 8.
    Returns:
      `packed_shape` int16.
    Raises:
      ContractError: not uint8 [k, n], bits other than 4 or 8, or (where the values are at hand, in numpy) a code of more bits.
    """
    _check_bits(bits)
    check_rank(OP, "q", q, "kn")
    if dtype_name(q) != "uint8":
        raise ContractError(f"{OP}: q has dtype {dtype_name(q)}: must be uint8 codes 0..{2**bits - 1}; cast it.")
    if isinstance(q, np.ndarray) and q.max() >= 2**bits:
        raise ContractError(f"{OP}: q has a code {q.max()}: {bits} bits hold 0..{2**bits - 1}; clip it, or give bits=8.")
    xp = np if isinstance(q, np.ndarray) else jnp
    k, n = q.shape
    tiles_n, tiles_k, _, _ = packed_shape(k, n, bits=bits)
    padded = xp.pad(q & np.uint8(2**bits - 1), ((0, tiles_k * TILE_K - k), (0, tiles_n * TILE_N - n)))
    codes = padded.reshape(tiles_k, planes(bits), tile_words(bits), tiles_n, TILE_N)
    words = codes[:, 0].astype(np.uint16)                       # [tiles_k, J, tiles_n, 64]
    for p in range(1, planes(bits)):
        words = words | codes[:, p].astype(np.uint16) << np.uint16(bits * p)
    words = xp.transpose(words, (2, 0, 3, 1))
    return np.ascontiguousarray(words).view(np.int16) if xp is np else jax.lax.bitcast_convert_type(words, jnp.int16)


def unpack(packed: Array, *, k: int, n: int, bits: int = 4) -> Array:
    """Words to codes, the inverse of `pack`, without the padding.

    Args:
      packed: `packed_shape(k, n)` int16.
      k, n: shape of the matrix.
      bits: 4 or 8.
    Returns:
      [k, n] uint8.
    Raises:
      ContractError: another shape or dtype, or bits other than 4 or 8.
    """
    check_packed(packed, k=k, n=n, bits=bits)
    xp = np if isinstance(packed, np.ndarray) else jnp
    return xp.transpose(_columns(packed, bits)[:n, :k], (1, 0))


def dequantize(packed: Array, scales: Array, zeros: Array | None = None, *, group_size: int, bits: int = 4) -> Array:
    """The weights that the codes stand for: (q - z) * float32(scale), each exact but for the product's rounding.

    Args:
      packed: codes of a [k, n] matrix, from `pack`.
      scales: [k / group_size, n] float32, bfloat16 or float16.
      zeros: [k / group_size, n] whole numbers 0 .. 2^bits; None: 2^(bits - 1).
      group_size: values of k that share a scale.
      bits: 4 or 8.
    Returns:
      [k, n] float32.
    Raises:
      ContractError: shapes or dtypes that do not belong together.
    """
    check_rank(OP, "scales", scales, "gn")
    xp = np if isinstance(packed, np.ndarray) else jnp
    num_groups, n = scales.shape
    q = unpack(packed, k=num_groups * group_size, n=n, bits=bits).reshape(num_groups, group_size, n).astype(np.float32)
    z = np.float32(2 ** (bits - 1)) if zeros is None else xp.asarray(zeros).astype(np.float32)[:, None]
    return ((q - z) * xp.asarray(scales).astype(np.float32)[:, None]).reshape(num_groups * group_size, n)


def pack_zeros(zeros: Array) -> Array:
    """Zero points in the form that the kernels read without a conversion: bfloat16, which holds whole numbers up to 256."""
    return zeros.astype(jnp.bfloat16)


def check_packed(packed: ArrayLike, *, k: int, n: int, bits: int) -> None:
    """Requires the packed weights of a [k, n] matrix.

    Raises:
      ContractError: another shape or dtype, or bits other than 4 or 8.
    """
    _check_bits(bits)
    want = packed_shape(k, n, bits=bits)
    if tuple(packed.shape) != want or dtype_name(packed) != "int16":
        raise ContractError(f"{OP}: packed is {dtype_name(packed)}{list(packed.shape)}: a [{k}, {n}] matrix of {bits} bits is "
                            f"int16{list(want)}; make it with pack(q, bits={bits}).")


def _check_bits(bits: int) -> None:
    if bits not in BITS:
        raise ContractError(f"{OP}: bits = {bits!r}: must be 4 or 8; pack narrower codes as 4 bits, wider ones as 8.")


def _columns(packed: Array, bits: int) -> Array:
    """The codes by column, padding included: [n', k'] uint8."""
    xp = np if isinstance(packed, np.ndarray) else jnp
    words = packed.view(np.uint16) if isinstance(packed, np.ndarray) else jax.lax.bitcast_convert_type(packed, jnp.uint16)
    parts = [(words >> np.uint16(bits * p) & np.uint16(2**bits - 1)).astype(np.uint8) for p in range(planes(bits))]
    codes = xp.stack(parts, axis=3)                             # [tiles_n, tiles_k, 64, planes, J]
    return xp.transpose(codes, (0, 2, 1, 3, 4)).reshape(packed.shape[0] * TILE_N, -1)
