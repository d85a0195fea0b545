"""What the Mosaic GPU kernels share: tensor-core products, layouts the library lacks, and rows stored under a bound.

`interpret` picks forms that Pallas's interpreter knows on the CPU; it has no rule for plgpu.mma nor for inlined Mosaic code.
"""

import functools
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

# Below every score but finite: exp2(M_FLOOR - M_FLOOR) is 1 and exp2(M_FLOOR - score) is 0. Softmax runs in base 2, so scores carry LOG2_E.
# A power of two: a factor times it is exact, in a multiply-add too, whose unrounded product would otherwise miss the rounded one by 1e22.
M_FLOOR = -2.0 ** 100
LOG2_E = math.log2(math.e)
WIDE = plgpu.Layout.WGMMA_UPCAST_4X  # of [64 k, 32 m]: a thread has 8 neighbours of a row


def kernel(body: Callable[..., None], *, kernel_name: str, interpret: bool, **launch: Any) -> Any:
    """plgpu.kernel, made so that a kernel is the same bytes whenever it is lowered.

    Mosaic GPU writes a name for dumps into a kernel, numbered in the order in which the process lowers kernels. By a kernel's bytes it looks
    up what it has compiled, and jax what it has on disk: a kernel in two programs would be compiled twice, and a start whose threads lower
    in another order than the last one's would find nothing. So the name goes without a number, unless there are dumps to be told apart.

    Args:
      body: of the input, output and scratch references.
      kernel_name: for profiles and dumps.
      interpret: run it on the CPU.
      launch: further arguments of plgpu.kernel.
    """
    names_dumps = not interpret and not any(name.startswith("MOSAIC_GPU_DUMP") for name in os.environ)

    @functools.wraps(body)
    def named(*refs: Any) -> None:
        if names_dumps:
            @plgpu.inline_mgpu()
            def name_dumps(ctx: Any) -> None:
                ctx.module.operation.attributes["mosaic_gpu.dump_basename"] = ir.StringAttr.get(kernel_name)

            name_dumps()
        body(*refs)

    return plgpu.kernel(named, kernel_name=kernel_name, interpret=plgpu.InterpretGPUParams() if interpret else None, **launch)


def mma(acc: jax.Array, a: jax.Array, b: jax.Array, *, interpret: bool) -> jax.Array:
    """acc + a @ b by warp-level mma.sync, sm_80 and later."""
    return acc + lax.dot(a, b, preferred_element_type=jnp.float32) if interpret else plgpu.mma(acc, a, b)


def constant(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    """A float32 array of one value in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def across(row: jax.Array, num_columns: int) -> jax.Array:
    """A row vector [R] repeated along columns: [R, num_columns]."""
    return lax.broadcast_in_dim(row, (row.shape[0], num_columns), (0,))


def scaled_scores(scores: jax.Array, scale: float, softcap: float | None) -> jax.Array:
    """Raw products to capped scores in base 2."""
    if softcap is None:
        return scores * (scale * LOG2_E)
    return jnp.tanh(scores * (scale / softcap)) * (softcap * LOG2_E)


def clear_rows(ref: Any, num_kept: jax.Array) -> None:
    """Zeroes the rows of a 16-bit SMEM tile [16 k, 32 m] from `num_kept` on, whatever they held. A later TMA copy into it needs a fence.

    In shared memory rather than after the load as an operand: plgpu.broadcasted_iota is wrong in MMA_RHS, whose registers hold neighbours
    of a column (both get the upper row's number, so a mask lets the row after an odd bound through), and a selected operand would have to
    be in registers whole.
    """
    layout = plgpu.Layout.MMA_ACC(ref.dtype, m_warps=1 if ref.shape[0] % 32 else 2)
    row = plgpu.broadcasted_iota(jnp.int32, ref.shape, 0, layout=layout)
    ref[...] = jnp.where(row < num_kept, plgpu.load(ref, layout=layout, optimized=False), jnp.zeros((), ref.dtype))


def meet(number: jax.Array | int, num_warpgroups: int) -> None:
    """Waits until all threads of so many warpgroups have come here with this number, a block's count of warpgroups or more and below 15.

    A barrier of the hardware's: on sm_80 plgpu.barrier_wait spins, with every thread.
    """
    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()),))
    def wait(ctx: Any, number: Any) -> None:
        word = ir.IntegerType.get_signless(32)
        # 0 is the whole block's, the next ones are those of single warpgroups.
        llvm.inline_asm(None, [arith.addi(only(number), utils.c(1, word))], f"bar.sync $0, {128 * num_warpgroups};", "r", has_side_effects=True)

    wait(jnp.int32(number))


def as_lhs(p: jax.Array, *, interpret: bool) -> jax.Array:
    """A 16-bit array [64 k, C] in MMA_ACC as the left operand of the next product: the same registers under another name."""
    if interpret:
        return p
    source, target = plgpu.Layout.MMA_ACC(p.dtype), plgpu.Layout.MMA_LHS(p.dtype)

    @plgpu.inline_mgpu(arg_types=(source,), return_type=plgpu.ShapeDtypeStruct(p.shape, p.dtype, layout=target))
    def rename(ctx: Any, x: Any) -> Any:
        word, native = ir.IntegerType.get_signless(32), target.to_mgpu()
        registers = np.empty(x.registers.size, dtype=object)
        for i, register in enumerate(x.registers.flat):
            # Without an operation in between, the rename folds away and the layouts no longer agree.
            registers[i] = utils.bitcast(utils.bitcast(register, word), register.type)
        return mgpu.FragmentedArray(_registers=registers.reshape(native.registers_shape(x.shape)), _layout=native, _is_signed=x.is_signed)

    return rename(p)


def load_rows(ref: Any, num_rows: int, layout: Any, *, interpret: bool) -> jax.Array:
    """A small GMEM ref [R, C] as [num_rows, C] in a tiled layout. Rows below its R repeat the last one: nothing waits for memory here."""
    held, (num_columns, dtype) = ref.shape[0], (ref.shape[1], ref.dtype)
    if interpret:
        return ref[...][jnp.minimum(jnp.arange(num_rows), held - 1)]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((num_rows, num_columns), dtype, layout=layout))
    def load(ctx: Any, source: Any) -> Any:
        native, index_type = layout.to_mgpu(), ir.IndexType.get()
        packed = ir.VectorType.get((native.vector_length,), utils.dtype_to_ir_type(dtype))
        registers = np.empty(native.registers_shape((num_rows, num_columns)), dtype=object)
        for index, (row, column) in zip(np.ndindex(registers.shape), native.thread_idxs((num_rows, num_columns)), strict=True):
            registers[index] = llvm.load(packed, _pointer(source, arith.minui(row, utils.c(held - 1, index_type)), column))
        return mgpu.FragmentedArray(_registers=registers, _layout=native, _is_signed=None)

    return load(ref)


def store_rows(ref: Any, value: jax.Array, first: jax.Array | int, end: jax.Array | int, layout: Any, *, interpret: bool) -> None:
    """Writes rows first <= r < end of `value` [R, C] to the same rows of a GMEM ref [R', C], and nothing else.

    Rows outside may lie out of bounds.
    """
    if interpret:
        def put(r: jax.Array, _: None) -> None:
            ref[r] = lax.dynamic_index_in_dim(value, r, keepdims=False)

        lax.fori_loop(jnp.int32(first), jnp.int32(end), put, None)
        return
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType(), scalar, scalar))
    def store(ctx: Any, x: Any, target: Any, low: Any, high: Any) -> None:
        word = ir.IntegerType.get_signless(32)
        low, high = (only(x) for x in (low, high))
        for register, (row, column) in zip(x.registers.flat, x.layout.thread_idxs(x.shape), strict=True):
            r = arith.index_cast(word, row)
            inside = arith.andi(arith.cmpi(arith.CmpIPredicate.sge, r, low), arith.cmpi(arith.CmpIPredicate.slt, r, high))
            with utils.when(inside):
                llvm.store(register, _pointer(target, row, column))

    store(value, ref, jnp.int32(first), jnp.int32(end))


def tiles(width_bytes: int = 128) -> tuple[Any, ...]:
    """Transforms of 16-bit rows in shared memory: tiles of 8 rows, so wide, which tensor cores read and wide accesses do not collide in."""
    return plgpu.TilingTransform((8, width_bytes // 2)), plgpu.SwizzleTransform(width_bytes)  # type: ignore[abstract]


def tiled_rows(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for 16-bit rows [.., 8 k, 64 m] in `tiles`."""
    return plgpu.SMEM(shape, dtype, transforms=tiles())


def load_wide(smem: Any, source: Any) -> None:
    """A GMEM tile [64 k, 32 m] of 16-bit values to shared memory of `tiled_rows`, whatever row it begins at, 16 bytes a thread at a time.

    The layouts of tensor-core operands have a thread load its columns two by two. On an H200, with `store_wide`, us of wgmma prefill, before
    and after: one prompt of 512 tokens 17.6 and 16.0, 16 of them 179 and 151, one of 2048 96.8 and 88.5
    (bench/results/kernels-attention-nvidia-h200.json).
    """
    smem[...] = plgpu.load(source, layout=WIDE, optimized=False)


def store_wide(ref: Any, value: jax.Array, first: jax.Array | int, end: jax.Array | int, smem: Any, *, interpret: bool) -> None:
    """`store_rows` of 16-bit values [64 k, 32 m], 16 bytes a thread at a time, by way of shared memory of `tiled_rows` that is free by now.

    An accumulator's registers have columns two by two.
    """
    smem[...] = value
    store_rows(ref, plgpu.load(smem, layout=WIDE), first, end, WIDE, interpret=interpret)


def only(value: Any) -> Any:
    """The register of a scalar argument of inlined code."""
    return value.registers.item() if isinstance(value, mgpu.FragmentedArray) else value


def _pointer(ref: Any, row: Any, column: Any) -> Any:
    """Address of element (row, column) of a 2-D memref whose columns are contiguous."""
    kind, long = ir.MemRefType(ref.type), ir.IntegerType.get_signless(64)
    strides, _ = kind.get_strides_and_offset()
    offset = arith.addi(arith.muli(arith.index_cast(long, row), utils.c(strides[0], long)), arith.index_cast(long, column))
    return utils.getelementptr(utils.memref_ptr(ref), [offset], kind.element_type)


def store(ref: Any, value: jax.Array) -> None:
    """Registers to global memory. jax 0.12 refuses `ref[...] = value` where cache lines are partly filled; 0.11 has no plgpu.store."""
    if hasattr(plgpu, "store"):
        functools.partial(plgpu.store, optimized=False)(ref, value)
    else:
        ref[...] = value
