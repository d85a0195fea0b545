"""Scales and zero points of a warpgroup's part of k, in shared memory before its first tile. It validates nothing.

Read from global memory a tile ahead they come too late: a tile takes less time than the way from memory, and a third of a kernel's time went by
waiting for them (profile of 3584 x 37888 and 8 tokens on an H200). So each warpgroup copies all that its tiles need at the start, rows of
64 columns, by cp.async, which both architectures have and which takes 16 bytes and zeros beyond the last column.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.int4_matmul import layout
from pallas_kernels.int4_matmul.fragments import _only, _word

CHUNK_BYTES = 16  # of one cp.async
THREADS = 128     # of a warpgroup


def fetch(sources: Sequence[Any], targets: Sequence[Any], first: jax.Array, column: jax.Array, *, interpret: bool) -> None:
    """Begins to copy rows first .. first + R and 64 columns of each source; all threads of a warpgroup call it.

    Args:
      sources: GMEM refs [g, n], n a multiple of 16 bytes.
      targets: SMEM refs [R, 64] of the same dtypes.
      first: the first row; first + R <= g.
      column: the first column; what lies beyond n comes as zeros.
      interpret: forms for the interpreter.
    """
    scalar = plgpu.Layout.WG_SPLAT(())
    for source, target in zip(sources, targets, strict=True):
        if interpret:
            target[...] = source[pl.ds(first, target.shape[0]), pl.ds(column, layout.TILE_N)]
            continue

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), scalar, scalar))
        def copy(ctx: Any, source: Any, target: Any, first: Any, column: Any) -> None:
            long, byte = ir.IntegerType.get_signless(64), ir.IntegerType.get_signless(8)
            first, column = _only(first), _only(column)
            kind, (num_rows, num_columns) = ir.MemRefType(source.type), ir.MemRefType(target.type).shape
            width = utils.bitwidth(kind.element_type) // 8
            values, chunks = CHUNK_BYTES // width, num_columns * width // CHUNK_BYTES  # of a copy, of a row
            lane = arith.andi(utils.thread_idx(), _word(THREADS - 1))
            to, base = utils.memref_ptr(target), utils.memref_ptr(source)
            for done in range(0, num_rows * chunks, THREADS):
                index = arith.addi(lane, _word(done))
                there = arith.cmpi(arith.CmpIPredicate.ult, index, _word(num_rows * chunks))
                row = arith.addi(arith.divui(index, _word(chunks)), first)
                at = arith.addi(arith.muli(arith.remui(index, _word(chunks)), _word(values)), column)
                inside = arith.cmpi(arith.CmpIPredicate.ult, at, _word(kind.shape[1]))
                element = arith.addi(arith.muli(row, _word(kind.shape[1])), arith.select(inside, at, _word(0)))
                with utils.when(there):
                    offset = arith.muli(arith.extui(long, element), utils.c(width, long))
                    pointer = utils.getelementptr(base, [offset], byte)
                    place = utils.getelementptr(to, [arith.muli(index, _word(CHUNK_BYTES))], byte)
                    llvm.inline_asm(None, [llvm.ptrtoint(ir.IntegerType.get_signless(32), place), pointer,
                                           arith.select(inside, _word(CHUNK_BYTES), _word(0))],
                                    "cp.async.cg.shared.global [$0], [$1], 16, $2;", "r,l,r", has_side_effects=True)

        copy(source, target, jnp.int32(first), jnp.int32(column))


def wait(*, copies_async: bool, interpret: bool) -> None:
    """Until what `fetch` began is there for the warpgroup. Where all copies are cp.async, waiting for a later one has done it already."""
    if interpret or copies_async:
        return

    @plgpu.inline_mgpu()
    def wait_for_all(ctx: Any) -> None:
        llvm.inline_asm(None, [], "cp.async.wait_all;", "", has_side_effects=True)
        utils.warpgroup_barrier()

    wait_for_all()


def read(source: Any, row: jax.Array, row_layout: Any, *, interpret: bool) -> jax.Array:
    """[64] float32 values of a row of an SMEM ref [R, 64]."""
    if interpret:
        return source[row].astype(jnp.float32)
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar),
                       return_type=plgpu.ShapeDtypeStruct((layout.TILE_N,), jnp.float32, layout=row_layout))
    def load(ctx: Any, source: Any, row: Any) -> Any:
        native, word, kind = row_layout.to_mgpu(), ir.IntegerType.get_signless(32), ir.MemRefType(source.type)
        start = arith.muli(_only(row), _word(kind.shape[1]))
        registers = np.empty(native.registers_shape((layout.TILE_N,)), dtype=object)
        for index, (position,) in zip(np.ndindex(registers.shape), native.thread_idxs((layout.TILE_N,)), strict=True):
            pointer = utils.getelementptr(utils.memref_ptr(source), [arith.addi(start, arith.index_cast(word, position))], kind.element_type)
            value = llvm.load(kind.element_type, pointer)
            if kind.element_type != ir.F32Type.get():
                value = arith.extf(ir.F32Type.get(), value)
            registers[index] = vector.broadcast(ir.VectorType.get((1,), ir.F32Type.get()), value)
        return mgpu.FragmentedArray(_registers=registers, _layout=native, _is_signed=None)

    return load(source, jnp.int32(row))
