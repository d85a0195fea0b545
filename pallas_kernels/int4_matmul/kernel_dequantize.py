"""int4_matmul for many tokens: weights to x's dtype in Mosaic GPU, whole, then XLA's dot. sm_80 and sm_90. It validates nothing: api.py has.

A block turns one tile of 64 columns by 256 values of k into rows of the transposed weights [n, k]. A thread reads 8 neighbouring words of a
column and writes 8 neighbouring values for each of their planes, 16 bytes at a time, so that both ways are whole lines of memory:

    8 words of a column    plane 0 -> k .. k + 7        plane 1 -> k + 64 ..        plane 2 -> k + 128 ..        plane 3 -> k + 192 ..

For 3584 x 37888 on an H200 a product of 256 tokens takes 184 us by it where the product of plain weights takes 94, so that some 90 are its own
(bench/results/kernels-int4-nvidia-h200.json); XLA's own code took some 190.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels import mosaic
from pallas_kernels.int4_matmul import kernel_xla, layout
from pallas_kernels.int4_matmul.fragments import _f32, _word, load_float
from pallas_kernels.mosaic import only

WORDS = 8           # that a thread reads at a time, and values of a plane that it writes
THREADS = 128
BIASED = 0x4B000000  # 2^23 as float32: a whole number below it, put into these bits, is that number added to it


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
    interpret: bool,
) -> jax.Array:                # [m, n]
    """See api.int4_matmul. Weights of `strip_tiles` tiles of 64 columns exist at a time; k is a multiple of 8."""
    def weights(tiles: jax.Array, scales: jax.Array, zeros: jax.Array | None) -> jax.Array:
        zeros = None if zeros is None else zeros.astype(jnp.bfloat16)
        return _weights(tiles, scales, zeros, k=x.shape[1], bits=bits, dtype=x.dtype, interpret=interpret)

    rounds_itself = bias is None and not interpret
    return kernel_xla.by_strips(weights, x, packed, scales, zeros, bias, out_dtype=out_dtype, strip_tiles=strip_tiles,
                                product_dtype=out_dtype if rounds_itself else jnp.float32)


def _weights(tiles: jax.Array, scales: jax.Array, zeros: jax.Array | None, *, k: int, bits: int, dtype: Any, interpret: bool) -> jax.Array:
    """The columns of some tiles as rows, [n, k] dtype, rounded once."""
    (num_groups, n), (num_strips, num_tiles, _, num_words) = scales.shape, tiles.shape
    group_size, shape = k // num_groups, (num_strips * layout.TILE_N, num_tiles * layout.TILE_K)

    def body(packed_ref, scales_ref, *refs):  # type: ignore[no-untyped-def]
        strip, tile = lax.axis_index("strip"), lax.axis_index("tile")
        if interpret:
            words, rows = packed_ref[strip, tile].astype(jnp.int32), jnp.arange(layout.TILE_K)
            q = jnp.concatenate([lax.shift_right_logical(words, bits * p) & (2**bits - 1) for p in range(layout.planes(bits))], axis=1)
            group = jnp.minimum((tile * layout.TILE_K + rows) // group_size, num_groups - 1)
            scale, *zero = (ref[...][:, pl.ds(strip * layout.TILE_N, layout.TILE_N)][group].T.astype(jnp.float32)
                            for ref in (scales_ref, *refs[:-1]))
            refs[-1][pl.ds(strip * layout.TILE_N, layout.TILE_N), pl.ds(tile * layout.TILE_K, layout.TILE_K)] = (
                (q.astype(jnp.float32) - (zero[0] if zero else 2.0 ** (bits - 1))) * scale).astype(dtype)
            return
        scalar = plgpu.Layout.WG_SPLAT(())

        @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * (2 + len(refs)), scalar, scalar))
        def convert(ctx: Any, packed: Any, scales: Any, *rest: Any) -> None:
            *zeros, out = rest[:-2]
            strip, tile = (only(value) for value in rest[-2:])
            lane = arith.andi(utils.thread_idx(), _word(THREADS - 1))
            chunks = num_words // WORDS
            for done in range(0, layout.TILE_N * chunks, THREADS):
                index = arith.addi(lane, _word(done))
                row, word = arith.divui(index, _word(chunks)), arith.muli(arith.remui(index, _word(chunks)), _word(WORDS))
                column = arith.addi(arith.muli(strip, _word(layout.TILE_N)), row)
                with utils.when(arith.cmpi(arith.CmpIPredicate.ult, column, _word(n))):
                    block = arith.addi(arith.muli(strip, _word(num_tiles)), tile)
                    at = arith.addi(arith.muli(arith.addi(arith.muli(block, _word(layout.TILE_N)), row), _word(num_words)), word)
                    _convert_chunk(_load(packed, at, 4), scales, zeros, out, column, word, tile)

        def _convert_chunk(words: list[Any], scales: Any, zeros: list[Any], out: Any, column: Any, word: Any, tile: Any) -> None:
            known: dict[int, list[Any]] = {}
            for plane in range(layout.planes(bits)):
                first = arith.addi(arith.muli(tile, _word(layout.TILE_K)), arith.addi(word, _word(num_words * plane)))
                # Planes of one group share its parameters; where a plane holds several groups, a chunk of 8 is of one.
                key = plane * num_words // group_size if group_size % num_words == 0 and group_size < layout.TILE_K else plane
                key = 0 if group_size % layout.TILE_K == 0 or num_groups == 1 else key
                if key not in known:
                    group = arith.minui(arith.divui(first, _word(group_size)), _word(num_groups - 1))
                    place = arith.addi(arith.muli(group, _word(n)), column)
                    known[key] = [load_float(ref, place) for ref in (scales, *zeros)]
                scale, *zero = known[key]
                offset = arith.addf(zero[0], _f32(2.0**23)) if zero else _f32(2.0**23 + 2.0 ** (bits - 1))
                pairs = [_pair([_weight(value, half + bits * plane, scale, offset) for half in (0, 16)]) for value in words]
                with utils.when(arith.cmpi(arith.CmpIPredicate.ult, first, _word(k))):
                    _store(out, column, first, pairs)

        def _weight(word: Any, shift: int, scale: Any, offset: Any) -> Any:
            code = arith.andi(arith.shrui(word, _word(shift)) if shift else word, _word(2**bits - 1))
            biased = utils.bitcast(arith.ori(code, _word(BIASED)), ir.F32Type.get())
            return arith.mulf(arith.subf(biased, offset), scale)

        def _pair(values: list[Any]) -> Any:
            name = "bf16x2" if jnp.dtype(dtype) == jnp.bfloat16 else "f16x2"
            return llvm.inline_asm(ir.IntegerType.get_signless(32), [values[1], values[0]], f"cvt.rn.{name}.f32 $0, $1, $2;", "=r,f,f")

        def _store(out: Any, row: Any, first: Any, pairs: list[Any]) -> None:
            long = ir.IntegerType.get_signless(64)
            place = arith.addi(arith.muli(arith.extui(long, row), utils.c(k, long)), arith.extui(long, first))
            pointer = utils.getelementptr(utils.memref_ptr(out), [place], ir.MemRefType(out.type).element_type)
            llvm.store(vector.from_elements(ir.VectorType.get((4,), pairs[0].type), pairs), pointer)

        convert(packed_ref, scales_ref, *refs, jnp.int32(strip), jnp.int32(tile))

    if interpret:  # which lets nothing out of bounds
        beyond = ((0, 0), (0, shape[0] - n))
        scales, zeros = jnp.pad(scales, beyond), None if zeros is None else jnp.pad(zeros, beyond)
    out = jax.ShapeDtypeStruct(shape if interpret else (n, k), dtype)
    arrays = (tiles, scales, *(() if zeros is None else (zeros,)))
    return mosaic.kernel(body, out_type=out, grid=(num_strips, num_tiles), grid_names=("strip", "tile"), kernel_name="int4_dequantize",
                         interpret=interpret)(*arrays)[:n, :k]


def _load(ref: Any, at: Any, count: int) -> list[Any]:
    """So many words of 32 bits from element `at` of a GMEM ref on."""
    word = ir.IntegerType.get_signless(32)
    offset = arith.extui(ir.IntegerType.get_signless(64), at)
    pointer = utils.getelementptr(utils.memref_ptr(ref), [offset], ir.MemRefType(ref.type).element_type)
    values = llvm.load(ir.VectorType.get((count,), word), pointer)
    return [vector.extract(values, dynamic_position=[], static_position=[i]) for i in range(count)]
