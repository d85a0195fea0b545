"""Register-level pieces of the Mosaic GPU kernels: codes to operands, rows of parameters, the transposed store. They validate nothing.

`interpret` picks forms in jax.numpy that Pallas's interpreter knows.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.mosaic import across, only

# Exponent bits, twice in a word, that make the low mantissa bits v a whole number: 128 + v or 1024 + v.
MAGIC = {
    "bfloat16": (0x43004300, 128),      # 0 10000110 vvvvvvv
    "float16": (0x64006400, 1024),      # 0 11001 vvvvvvvvvv
}
ONE = {"bfloat16": 0x3F803F80, "float16": 0x3C003C00}
MINUS_ONE = 0xBF80BF80  # bfloat16
NIBBLES = 0x000F000F    # the mask of a pair of 4-bit codes
ROW_HALF = 4  # dimension of MMA_LHS's register array [row tiles, column tiles, 1, column halves, row halves, ...] of the rows 8 apart


def nibble_mask(*, interpret: bool) -> jax.Array:
    """NIBBLES as a scalar that ptxas takes for a variable of each lane, and so keeps in a register.

    Unpacking is (word & NIBBLES) | exponent, one LOP3, which has room for one of the two as an immediate, and for no uniform register beside
    it. Told the mask, ptxas 13 moves it into a register before every LOP3: 64 of the 390 instructions of a tile of kernel_mosaic, sm_90.
    So the mask comes by way of a special register, whose top bit is never set, and of a shuffle.
    """
    if interpret:
        return jnp.int32(NIBBLES)
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=scalar))
    def through_lanes(ctx: Any) -> Any:
        word = ir.IntegerType.get_signless(32)
        text = "{ .reg .b32 t; mov.u32 t, %smid; shr.s32 t, t, 31; xor.b32 t, t, $1; shfl.sync.idx.b32 $0, t, 0, 31, -1; }"
        value = llvm.inline_asm(word, [_word(NIBBLES)], text, "=r,r", has_side_effects=True)
        return mgpu.FragmentedArray(_registers=np.asarray(value, dtype=object), _layout=scalar.to_mgpu(), _is_signed=True)

    return through_lanes()


def shifted_codes(words: jax.Array, plane: int, mask: jax.Array, *, dtype: Any, layout: Any, interpret: bool) -> jax.Array:
    """One plane of 4-bit codes as the left operand of a product: q + MAGIC's whole number, exactly; nothing is taken off.

    Args:
      words: [64, J] int16 in `layout`.
      plane: which codes of the words.
      mask: `nibble_mask`.
      dtype: bfloat16 or float16.
      layout: MMA_LHS of that width.
      interpret: forms for the interpreter.
    Returns:
      [64, J] dtype.
    """
    magic, offset = MAGIC[np.dtype(dtype).name]
    if interpret:
        return ((lax.shift_right_logical(words.astype(jnp.int32), 4 * plane) & 15) + offset).astype(dtype)

    def convert(ctx: Any, x: Any, mask: Any) -> Any:
        word, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), utils.dtype_to_ir_type(dtype))
        registers = np.empty(x.registers.shape, dtype=object)
        for index, register in np.ndenumerate(x.registers):
            registers[index] = utils.bitcast(_pick(utils.bitcast(register, word), 4 * plane, only(mask), magic), pair)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    out = plgpu.ShapeDtypeStruct(words.shape, dtype, layout=layout)
    return plgpu.inline_mgpu(arg_types=(layout, plgpu.Layout.WG_SPLAT(())), return_type=out)(convert)(words, mask)


def _pick(code: Any, shift: int, mask: Any, magic: int) -> Any:
    """(code >> shift & mask) | magic."""
    return arith.ori(arith.andi(arith.shrui(code, _word(shift)) if shift else code, mask), _word(magic))


def operand(words: jax.Array, plane: int, zero: jax.Array | None, scale: jax.Array | None = None, *, mask: jax.Array, bits: int, dtype: Any,
            layout: Any, row_layout: Any, is_scale_exact: bool = False, out_layout: Any = None, interpret: bool) -> jax.Array:
    """One plane of codes as the left operand of a product: q - z, exactly, or (q - z) * scale, rounded once.

    Args:
      words: [64, J] int16 in `layout`.
      plane: which codes of the words.
      zero: [64] float32 zero points in `row_layout`; None: 2^(bits - 1).
      scale: [64] float32 in `row_layout`; None: no scale.
      mask: `nibble_mask`, of use at 4 bits.
      bits: 4 or 8.
      dtype: bfloat16 or float16.
      layout: MMA_LHS of that width.
      row_layout: one value a row.
      is_scale_exact: scales are values of dtype; otherwise a second part of theirs, of the next eight or eleven bits, is multiplied too.
      out_layout: WGMMA, whose registers are those of MMA_LHS; None: `layout`.
      interpret: forms for the interpreter.
    Returns:
      [64, J] dtype.
    """
    default = 2.0 ** (bits - 1)
    if interpret:
        q = lax.shift_right_logical(words.astype(jnp.int32), bits * plane) & (2**bits - 1)
        q = q.astype(jnp.float32) - (default if zero is None else across(zero, words.shape[1]))
        return (q if scale is None else q * across(scale, words.shape[1])).astype(dtype)
    name = np.dtype(dtype).name
    magic, offset = MAGIC[name]
    seven_bits = (name, bits) == ("bfloat16", 8)  # of a code's eight; the eighth decides whether 128 or 256 is taken off

    def convert(ctx: Any, x: Any, nibbles: Any, *rows: Any) -> Any:
        kept = only(nibbles) if bits == 4 else _word(0x007F007F if seven_bits else 0x00FF00FF)
        word = ir.IntegerType.get_signless(32)
        native, pair = (out_layout or layout).to_mgpu(), ir.VectorType.get((2,), utils.dtype_to_ir_type(dtype))
        values = [[_scalar(value) for value in row.registers.flat] for row in rows]  # of a thread's two rows, eight apart
        shifts = [_splat(-(offset + default), name)] * 2
        if zero is not None:
            base = default if seven_bits else -offset
            shifts = [_twice(arith.subf(_f32(base), value), dtype) for value in values[0]]
        parts = [] if scale is None else [_parts(value, dtype, 1 if is_scale_exact else 2) for value in values[-1]]
        registers = np.empty(x.registers.shape, dtype=object)
        for index, register in np.ndenumerate(x.registers):
            code = utils.bitcast(register, word)
            value = _pick(code, bits * plane, kept, magic)
            if seven_bits:
                code = arith.shrui(code, _word(bits * plane))
                top = arith.ori(arith.andi(arith.xori(code, _word(0x00800080)), _word(0x00800080)), _word(magic))
                value = _fma(top, _word(MINUS_ONE), value, name)
            if not seven_bits or zero is not None:
                value = _fma(value, _word(ONE[name]), shifts[index[ROW_HALF]], name)
            if parts:
                high, *low = parts[index[ROW_HALF]]
                rest = _fma(value, low[0], _word(0), name) if low else _word(0)
                value = _fma(value, high, rest, name)
            registers[index] = utils.bitcast(value, pair)
        return mgpu.FragmentedArray(_registers=registers.reshape(native.registers_shape(x.shape)), _layout=native, _is_signed=None)

    rows = [row for row in (zero, scale) if row is not None]
    out = plgpu.ShapeDtypeStruct(words.shape, dtype, layout=out_layout or layout)
    arg_types = (layout, plgpu.Layout.WG_SPLAT(()), *[row_layout] * len(rows))
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=out)(convert)(words, mask, *rows)


def _word(value: int) -> Any:
    return utils.c(value - (value >> 31 << 32), ir.IntegerType.get_signless(32))


def _scalar(value: Any) -> Any:
    """A register of one value, which may come as a vector."""
    return vector.extract(value, dynamic_position=[], static_position=[0]) if isinstance(value.type, ir.VectorType) else value


def _f32(value: float) -> Any:
    return utils.c(float(value), ir.F32Type.get())


def _splat(value: float, name: str) -> Any:
    """A constant twice in a word."""
    half = int(np.asarray(value, jnp.dtype(name)).view(np.uint16))
    return _word(half << 16 | half)


def _twice(value: Any, dtype: Any) -> Any:
    """A float32 register, rounded to 16 bits, twice in a word."""
    half = ir.IntegerType.get_signless(16)
    bits = arith.extui(ir.IntegerType.get_signless(32), utils.bitcast(arith.truncf(utils.dtype_to_ir_type(dtype), value), half))
    return arith.ori(bits, arith.shli(bits, _word(16)))


def _parts(value: Any, dtype: Any, count: int) -> list[Any]:
    """A float32 register as a sum of `count` 16-bit values, each twice in a word."""
    out, kind = [], utils.dtype_to_ir_type(dtype)
    for _ in range(count):
        out.append(_twice(value, dtype))
        value = arith.subf(value, arith.extf(ir.F32Type.get(), arith.truncf(kind, value)))
    return out


def _fma(a: Any, b: Any, c: Any, name: str) -> Any:
    """a * b + c of pairs; sm_80 has no bfloat16 subtraction."""
    kind = "bf16x2" if name == "bfloat16" else "f16x2"
    return llvm.inline_asm(ir.IntegerType.get_signless(32), [a, b, c], f"fma.rn.{kind} $0, $1, $2, $3;", "=r,r,r,r")


def part(value: jax.Array, start: int, size: int, *, axis: int, layout: Any, interpret: bool) -> jax.Array:
    """Rows or columns start <= i < start + size of an operand, multiples of 16: the registers that hold them."""
    if value.shape[axis] == size:
        return value
    shape = tuple(size if i == axis else n for i, n in enumerate(value.shape))
    if interpret:
        return lax.slice_in_dim(value, start, start + size, axis=axis)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(shape, value.dtype, layout=layout))
    def pick(ctx: Any, x: Any) -> Any:
        # The first dimensions of the register array count tiles along rows and along columns; an operand's tiles are 16 along k.
        picked = np.take(x.registers, range(start // 16, (start + size) // 16), axis=axis)
        return mgpu.FragmentedArray(_registers=picked, _layout=x.layout, _is_signed=x.is_signed)

    return pick(value)


def join(parts: list[jax.Array], *, layout: Any, interpret: bool) -> jax.Array:
    """Operands in WGMMA side by side along columns: all their registers."""
    if len(parts) == 1 or interpret:
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
    shape = (parts[0].shape[0], sum(part.shape[1] for part in parts))

    @plgpu.inline_mgpu(arg_types=(layout,) * len(parts), return_type=plgpu.ShapeDtypeStruct(shape, parts[0].dtype, layout=layout))
    def concatenate(ctx: Any, *xs: Any) -> Any:
        return mgpu.FragmentedArray(_registers=np.concatenate([x.registers for x in xs], axis=1), _layout=xs[0].layout, _is_signed=None)

    return concatenate(*parts)


def load_float(ref: Any, at: Any) -> Any:
    """Element `at` (a 32-bit number) of a GMEM or SMEM ref as a float32 register."""
    kind = ir.MemRefType(ref.type).element_type
    value = llvm.load(kind, utils.getelementptr(utils.memref_ptr(ref), [at], kind))
    return value if kind == ir.F32Type.get() else arith.extf(ir.F32Type.get(), value)


def row_of_floats(ref: Any, native: Any, num_values: int, place: Callable[[Any], Any]) -> Any:
    """[num_values] float32 of a ref in a Mosaic layout of one value a row: `place` says at which element of the ref a position's value is."""
    registers, word = np.empty(native.registers_shape((num_values,)), dtype=object), ir.IntegerType.get_signless(32)
    for index, (position,) in zip(np.ndindex(registers.shape), native.thread_idxs((num_values,)), strict=True):
        value = load_float(ref, place(arith.index_cast(word, position)))
        registers[index] = vector.broadcast(ir.VectorType.get((1,), ir.F32Type.get()), value)
    return mgpu.FragmentedArray(_registers=registers, _layout=native, _is_signed=None)


def bias_rows(ref: Any, first: jax.Array, num_rows: int, layout: Any, *, interpret: bool) -> jax.Array:
    """[num_rows] float32 values ref[0, first ...] of a GMEM ref [1, n], `first` < n a multiple of num_rows; past n the last one repeats."""
    if interpret:
        return ref[0, pl.ds(first, num_rows)].astype(jnp.float32)
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar), return_type=plgpu.ShapeDtypeStruct((num_rows,), jnp.float32, layout=layout))
    def load(ctx: Any, source: Any, first: Any) -> Any:
        first, num_columns = only(first), ir.MemRefType(source.type).shape[1]

        def place(position: Any) -> Any:
            column = arith.addi(position, first)
            return arith.minui(column, _word(num_columns - 1)) if num_columns % num_rows else column

        return row_of_floats(source, layout.to_mgpu(), num_rows, place)

    return load(ref, jnp.int32(first))


def store_transposed(ref: Any, value: jax.Array, row: jax.Array, column: jax.Array, layout: Any, *, interpret: bool) -> None:
    """Writes the transpose of `value` [R, C] to a GMEM ref from (row, column) on, as far as the ref goes."""
    if interpret:
        ref[pl.ds(row, value.shape[1]), pl.ds(column, value.shape[0])] = value.T
        return
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType(), scalar, scalar))
    def put(ctx: Any, x: Any, target: Any, row: Any, column: Any) -> None:
        row, column = only(row), only(column)
        long, word = ir.IntegerType.get_signless(64), ir.IntegerType.get_signless(32)
        kind = ir.MemRefType(target.type)
        num_rows, num_columns = kind.shape
        for register, (r, c) in zip(x.registers.flat, x.layout.thread_idxs(x.shape), strict=True):
            n = arith.addi(arith.index_cast(word, r), column)
            for i in range(x.layout.vector_length):
                m = arith.addi(arith.addi(arith.index_cast(word, c), row), _word(i))
                inside = arith.andi(arith.cmpi(arith.CmpIPredicate.ult, m, _word(num_rows)),
                                    arith.cmpi(arith.CmpIPredicate.ult, n, _word(num_columns)))
                with utils.when(inside):
                    offset = arith.addi(arith.muli(arith.extui(long, m), utils.c(num_columns, long)), arith.extui(long, n))
                    item = vector.extract(register, dynamic_position=[], static_position=[i])
                    llvm.store(item, utils.getelementptr(utils.memref_ptr(target), [offset], kind.element_type))

    put(value, ref, jnp.int32(row), jnp.int32(column))
