"""Scales and zero points of a warpgroup's part of k, in shared memory before its first tile. It validates nothing.

Read from global memory a tile ahead they come too late: a tile takes less time than the way from memory, and a third of a kernel's time went by
waiting for them (profile of 3584 x 37888 and 8 tokens on an H200). So each warpgroup copies all that its tiles need at the start, rows of
64 columns, by cp.async, which both architectures have and which takes 16 bytes and zeros beyond the last column.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.int4_matmul import layout
from pallas_kernels.int4_matmul.config import Tiles, parameter_rows
from pallas_kernels.int4_matmul.fragments import _word, row_of_floats
from pallas_kernels.mosaic import only

CHUNK_BYTES = 16  # of one cp.async
THREADS = 128     # of a warpgroup


class Parameters:
    """Of one warpgroup, all of whose threads call it: scales and, where there are some, zero points."""

    def __init__(self, sources: Sequence[Any], targets: Sequence[Any], config: Tiles, *, start: jax.Array,
                 column: jax.Array, num_groups: int, row_layout: Any, interpret: bool) -> None:
        """Says what is copied; copies nothing.

        Args:
          sources: GMEM refs [g, n], n a multiple of 16 bytes.
          targets: SMEM refs [R, 64] of the same dtypes, from `scratch`.
          config: the kernel's tiles.
          start: the warpgroup's first tile of k.
          column: its first column; what lies beyond n comes as zeros.
          num_groups: g.
          row_layout: how rows of parameters lie in registers.
          interpret: forms for the interpreter.
        """
        self._refs, self._config, self._start, self._column = list(zip(sources, targets, strict=True)), config, start, column
        self._num_groups, self._row_layout, self._interpret = num_groups, row_layout, interpret
        self._first = jnp.minimum(self._group_at(start * layout.TILE_K), num_groups - targets[0].shape[0])

    def fetch(self) -> None:
        """Begins to copy."""
        for source, target in self._refs:
            if self._interpret:
                target[...] = source[pl.ds(self._first, target.shape[0]), pl.ds(self._column, layout.TILE_N)]
            else:
                _copy(source, target, self._first, self._column)

    def of_group(self, j: jax.Array, number: int) -> tuple[jax.Array, ...]:
        """Scale, and zero point, of a group of the warpgroup's tile j: [64] float32 each."""
        group = self._group_at((self._start + j) * layout.TILE_K + number * self._config.group_k)
        row = jnp.minimum(group, self._num_groups - 1) - self._first
        return tuple(_read(target, row, self._row_layout, interpret=self._interpret) for _, target in self._refs)

    def _group_at(self, k: jax.Array) -> jax.Array:
        return lax.div(k, jnp.int32(self._config.group_size))


def scratch(config: Tiles, scales: jax.Array, *, num_tiles: int, has_zeros: bool) -> list[Any]:
    """SMEM refs for the parameters of a block's warpgroups."""
    shape = (config.strips * config.warpgroups, parameter_rows(config, num_tiles, scales.shape[0]), layout.TILE_N)
    return [plgpu.SMEM(shape, dtype) for dtype in (scales.dtype, *[jnp.bfloat16] * has_zeros)]


def wait(*, copies_async: bool, interpret: bool) -> None:
    """Until what `Parameters.fetch` began is there for the warpgroup. Where all copies are cp.async, waiting for a later one has done it."""
    if interpret or copies_async:
        return

    @plgpu.inline_mgpu()
    def wait_for_all(ctx: Any) -> None:
        llvm.inline_asm(None, [], "cp.async.wait_all;", "", has_side_effects=True)
        utils.warpgroup_barrier()

    wait_for_all()


def _copy(source: Any, target: Any, first: jax.Array, column: jax.Array) -> None:
    """Rows first .. first + R and 64 columns of a GMEM ref to an SMEM ref [R, 64], by cp.async."""
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), scalar, scalar))
    def copy(ctx: Any, source: Any, target: Any, first: Any, column: Any) -> None:
        long, byte = ir.IntegerType.get_signless(64), ir.IntegerType.get_signless(8)
        first, column = only(first), only(column)
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


def _read(source: Any, row: jax.Array, row_layout: Any, *, interpret: bool) -> jax.Array:
    """[64] float32 values of a row of an SMEM ref [R, 64]."""
    if interpret:
        return source[row].astype(jnp.float32)
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar),
                       return_type=plgpu.ShapeDtypeStruct((layout.TILE_N,), jnp.float32, layout=row_layout))
    def load(ctx: Any, source: Any, row: Any) -> Any:
        start = arith.muli(only(row), _word(ir.MemRefType(source.type).shape[1]))
        return row_of_floats(source, row_layout.to_mgpu(), layout.TILE_N, lambda position: arith.addi(start, position))

    return load(source, jnp.int32(row))
