"""Vectors that lie anywhere in global memory, read and written in accesses of up to 16 bytes. It validates nothing.

Of V vectors, a multiple of 128, thread t has numbers t, t + 128, ...: an array [V] lies in `layout(V)`, the vectors' values [V * width] in
`layout(V, width)`. A vector stands at a row, counted over all dimensions of a GMEM ref but the last, and a column. Rows are uint32, which no
pool exceeds (2^32 rows of 16 values would take 128 GiB, and there are two pools); elements may be more.

Places that fold to a constant lose their layout on the way into inlined code: they are told it again.

`interpret` picks forms in jax.numpy that Pallas's interpreter knows; it runs one block after the other.
"""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

MAX_ACCESS = 16  # bytes


def layout(num_vectors: int, width: int = 1) -> Any:
    """How the values of vectors lie on threads."""
    return plgpu.Layout.WG_STRIDED((num_vectors * width,), width)


def numbers(block: Any, num_vectors: int) -> jax.Array:
    """[V] uint32: the numbers, among all, of the vectors of the `block`-th block of V."""
    return (block * num_vectors).astype(jnp.uint32) + plgpu.broadcasted_iota(jnp.uint32, (num_vectors,), 0, layout=layout(num_vectors))


def load(ref: Any, row: jax.Array, column: jax.Array, width: int, *, other: Any = None, from_other: jax.Array | None = None,
         interpret: bool) -> jax.Array:
    """[V * width] from places [V] of a ref that nobody writes, or of another of its shape where `from_other` [V] says so."""
    refs = (ref,) if other is None else (ref, other)
    places = (row, column) if from_other is None else (row, column, from_other)
    if interpret:
        columns = column[:, None] + jnp.arange(width, dtype=column.dtype)
        values = [x[...].reshape(-1, x.shape[-1])[row[:, None], columns] for x in refs]
        return (values[0] if from_other is None else jnp.where(from_other[:, None], values[1], values[0])).reshape(-1)
    out = layout(row.shape[0], width)

    @plgpu.inline_mgpu(arg_types=((plgpu.RefType(),) * len(refs), (layout(row.shape[0]),) * len(places)),
                       return_type=plgpu.ShapeDtypeStruct((row.shape[0] * width,), ref.dtype, layout=out))
    def read(ctx: Any, sources: Any, places: Any) -> Any:
        kind = ir.VectorType.get((width,), utils.dtype_to_ir_type(ref.dtype))
        registers = []
        for row, column, *from_other in _by_vector(*places):
            pointers = [_pointer(source, row, column) for source in sources]
            pointer = llvm.select(from_other[0], pointers[1], pointers[0]) if from_other else pointers[0]
            registers.append(llvm.load(kind, pointer, alignment=_alignment(kind), invariant=True))
        return mgpu.FragmentedArray(_registers=np.array(registers, dtype=object), _layout=out.to_mgpu(),
                                    _is_signed=utils.is_signed(ref.dtype))

    return read(refs, tuple(plgpu.layout_cast(x, layout(row.shape[0])) for x in places))


def store(ref: Any, value: jax.Array, row: jax.Array, column: jax.Array, where: jax.Array, *, interpret: bool) -> None:
    """Writes [V * width] to places [V] where `where` [V] holds; places elsewhere may lie out of bounds."""
    num_vectors = row.shape[0]
    width = value.shape[0] // num_vectors
    if interpret:
        rows = ref[...].reshape(-1, ref.shape[-1])
        columns = column[:, None] + jnp.arange(width, dtype=column.dtype)
        row = jnp.where(where, row, rows.shape[0])
        ref[...] = rows.at[row[:, None], columns].set(value.reshape(num_vectors, width), mode="drop").reshape(ref.shape)
        return
    places = layout(num_vectors)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout(num_vectors, width), (places,) * 3))
    def write(ctx: Any, target: Any, value: Any, places: Any) -> None:
        for register, (row, column, where) in zip(value.registers.flat, _by_vector(*places), strict=True):
            with utils.when(where):
                llvm.store(register, _pointer(target, row, column), alignment=_alignment(register.type))

    write(ref, value, tuple(plgpu.layout_cast(x, places) for x in (row, column, where)))


def _by_vector(*arrays: Any) -> Any:
    """The scalars of each of a thread's vectors."""
    for registers in zip(*(array.registers.flat for array in arrays), strict=True):
        yield tuple(vector.extract(register, dynamic_position=[], static_position=[0]) for register in registers)


def _pointer(ref: Any, row: Any, column: Any) -> Any:
    """Address of an element of a contiguous ref; in LLVM's global address space, whose accesses need not ask which memory is meant."""
    long, kind = ir.IntegerType.get_signless(64), ir.MemRefType(ref.type)
    offset = arith.addi(arith.muli(arith.extui(long, row), utils.c(kind.shape[-1], long)), arith.extui(long, column))
    base = llvm.addrspacecast(llvm.PointerType.get(1), utils.memref_ptr(ref))
    return utils.getelementptr(base, [offset], kind.element_type)


def _alignment(kind: Any) -> int:
    return min(MAX_ACCESS, kind.shape[0] * utils.bitwidth(kind.element_type) // 8)
