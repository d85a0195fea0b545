"""What the lanes of kernel_stream do: where each one's part lies, its copies and loads, and the sums at the end. It validates nothing.

`interpret` picks forms in jax.numpy that Pallas's interpreter knows, which copy nothing: they read where the copies would have come from.
"""

import functools
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

from pallas_kernels.int4_matmul import layout
from pallas_kernels.int4_matmul.fragments import _word, load_float
from pallas_kernels.int4_matmul.groups import CHUNK
from pallas_kernels.int4_matmul.stream_config import StreamConfig
from pallas_kernels.mosaic import only

BLOCK_M = 8
WARP_COLUMNS = 16
THREADS = 128      # of a warpgroup
ROW_SKEW = 32      # values between rows of tokens in shared memory: neighbours' banks differ
TILE_N, TILE_K = layout.TILE_N, layout.TILE_K


class Walk:
    """Which tiles of k and which columns a lane takes, and its places in shared memory. Rows of operands are columns of the weights, `columns`
    for each part of k.

    A method is an operation of all threads of a warpgroup; on a GPU each finds its own place from its number.
    """

    def __init__(self, packed: Any, rows: list[Any], words_smem: Any, rows_smem: Any, config: StreamConfig, *, start: jax.Array,
                 count: jax.Array, member: jax.Array, num_parts: int, interpret: bool) -> None:
        """Tiles start .. start + count of k for `num_parts` parts of warps, of which `member` is the warpgroup."""
        self._packed, self._rows, self._words_smem, self._rows_smem, self._config = packed, rows, words_smem, rows_smem, config
        self._start, self._num_parts, self._interpret = start, num_parts, interpret
        self._shares, self._first = TILE_N // config.columns, member * (TILE_N // config.columns)
        self.count = count
        self._row_bytes = [WARP_COLUMNS * ref.dtype.itemsize for ref in rows]
        self._num_words = packed.shape[3]

    def _tile(self, step: jax.Array, share: int) -> jax.Array:
        """For the interpreter: the tile of a share of the warpgroup, from the split's first on; past the last one the last one."""
        return jnp.minimum(step * self._num_parts + self._first + share, self.count - 1)

    def _places(self, row: Any, first: Any, step: Any, count: Any) -> tuple[Any, Any, Any]:
        """(column, tile, whether that is there) of a row of an operand; past the last tile the last one."""
        columns = self._config.columns
        share, column = arith.shrui(row, _word(columns.bit_length() - 1)), arith.andi(row, _word(columns - 1))
        tile = arith.addi(arith.muli(step, _word(self._num_parts)), arith.addi(first, share))
        return column, arith.minsi(tile, arith.subi(count, _word(1))), arith.cmpi(arith.CmpIPredicate.slt, tile, count)

    def _inline(self, function: Any, refs: list[Any], scalars: list[Any], out: Any = ()) -> Any:
        """function(refs, scalars, first, count) of registers, for each thread."""
        numbers = [jnp.int32(value) for value in (*scalars, self._first, self.count)]

        @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(refs), *[plgpu.Layout.WG_SPLAT(())] * len(numbers)), return_type=out)
        def run(ctx: Any, *args: Any) -> Any:
            return function(*args[:len(refs)], *[only(value) for value in args[len(refs):]])

        return run(*refs, *numbers)

    def send(self, column: jax.Array, step: jax.Array, slot: jax.Array, is_wanted: jax.Array) -> None:
        """Asks for the words and parameters of a step, to a slot; as one of the groups of copies that `wait` counts, wanted or not."""
        if self._interpret:
            return
        num_strips, num_tiles, _, num_words = self._packed.shape
        num_groups, num_columns = self._rows[0].shape
        group_k, group_size = self._config.group_k, self._config.group_size
        column_limit = num_strips * TILE_N - self._config.columns  # past the last one nothing is stored

        def copy(*args: Any) -> None:
            packed, *rows, words_smem, rows_smem, column, step, slot, wanted, start, first, count = args
            long, byte = ir.IntegerType.get_signless(64), ir.IntegerType.get_signless(8)
            warp, row, part = _lane()
            place, tile, there = self._places(arith.muli(warp, _word(WARP_COLUMNS)), first, step, count)
            llvm.inline_asm(None, [], "bar.warp.sync 0xffffffff;", "~{memory}", has_side_effects=True)  # all lanes have read the slot
            there, tile = arith.andi(there, _is(wanted)), arith.addi(start, tile)
            size, held = arith.select(there, _word(16), _word(0)), self._slot(slot)

            at = arith.addi(arith.minsi(column, _word(column_limit)), place)
            strip, at = arith.shrui(at, _word(6)), arith.addi(arith.andi(at, _word(TILE_N - 1)), row)
            index = arith.addi(arith.muli(strip, _word(num_tiles)), tile)
            line = arith.addi(arith.muli(arith.extui(long, index), utils.c(TILE_N * num_words * 2, long)), arith.extui(
                long, arith.addi(arith.muli(at, _word(num_words * 2)), arith.muli(part, _word(16)))))
            source = utils.getelementptr(utils.memref_ptr(packed), [line], byte)
            target = utils.getelementptr(utils.memref_ptr(words_smem), [self._lane_words(held)], byte)
            for number, offset in enumerate(self._pieces()):
                _send(target, number * 512, source, offset, size)

            lane = arith.andi(utils.thread_idx(), _word(31))
            first_k, before = arith.muli(tile, _word(TILE_K)), 0
            for ref, num_bytes in zip(rows, self._row_bytes, strict=True):
                chunks, width = num_bytes // 16, num_bytes // WARP_COLUMNS
                group = arith.divui(arith.addi(first_k, arith.muli(arith.divui(lane, _word(chunks)), _word(group_k))), _word(group_size))
                at = arith.addi(arith.addi(column, place), arith.muli(arith.remui(lane, _word(chunks)), _word(16 // width)))
                inside = arith.cmpi(arith.CmpIPredicate.ult, at, _word(num_columns))
                element = arith.addi(arith.muli(arith.minui(group, _word(num_groups - 1)), _word(num_columns)),
                                     arith.select(inside, at, _word(0)))
                source = utils.getelementptr(utils.memref_ptr(ref), [arith.muli(arith.extui(long, element), utils.c(width, long))], byte)
                to = arith.addi(arith.addi(arith.muli(held, _word(self._item_bytes)), _word(before)), arith.muli(lane, _word(16)))
                target = utils.getelementptr(utils.memref_ptr(rows_smem), [to], byte)
                mine = arith.cmpi(arith.CmpIPredicate.ult, lane, _word(TILE_K // group_k * chunks))
                _send(target, 0, source, 0, arith.select(inside, size, _word(0)), mine)
                before += TILE_K // group_k * num_bytes
            llvm.inline_asm(None, [], "cp.async.commit_group;", "~{memory}", has_side_effects=True)

        self._inline(copy, [self._packed, *self._rows, self._words_smem, self._rows_smem],
                     [column, step, slot, is_wanted.astype(jnp.int32), self._start])

    @property
    def _item_bytes(self) -> int:
        """Of parameters."""
        return TILE_K // self._config.group_k * sum(self._row_bytes)

    def _pieces(self) -> list[int]:
        """Byte offsets, from a lane's first, of the 16 bytes that it has: of each chunk of words in two rows eight apart, two halves."""
        return [2 * (chunk + 8 * half * self._num_words + 32 * piece)
                for chunk in range(0, self._num_words, CHUNK) for half in range(2) for piece in range(2)]

    def _slot(self, slot: Any) -> Any:
        """The number of a slot of the thread's warp, counted over the block."""
        warp = arith.shrui(utils.thread_idx(), _word(5))
        return arith.addi(arith.muli(warp, _word(self._config.depth)), slot)

    def _lane_words(self, held: Any) -> Any:
        """The byte at which the lane's own words begin; the next 16 are 512 further on."""
        lane = arith.andi(utils.thread_idx(), _word(31))
        return arith.addi(arith.muli(held, _word(2 * self._num_words * WARP_COLUMNS)), arith.muli(lane, _word(16)))

    def wait(self) -> None:
        """Until the oldest slot's copies are there, for the lanes of each warp."""
        if not self._interpret:
            wait(self._config.depth - 1)

    def words(self, slot: jax.Array, chunk: int, column: jax.Array, step: jax.Array, out_layout: Any) -> jax.Array:
        """Words chunk .. chunk + 64 of a slot's tile, [64, 64] int16, with the words of a row in the order that `tokens` has.

        In the interpreter, straight from `column` and `step`.
        """
        if self._interpret:
            column = jnp.minimum(column, self._packed.shape[0] * TILE_N - self._config.columns)
            strip, at = lax.div(column, jnp.int32(TILE_N)), lax.rem(column, jnp.int32(TILE_N))
            return jnp.concatenate([
                self._packed[strip, self._start + self._tile(step, share), pl.ds(at, self._config.columns), pl.ds(chunk, CHUNK)]
                for share in range(self._shares)])

        def load(source: Any, slot: Any, first: Any, count: Any) -> Any:
            word, native = ir.IntegerType.get_signless(32), out_layout.to_mgpu()
            registers = np.empty(native.registers_shape((TILE_N, CHUNK)), dtype=object)
            pointer = utils.getelementptr(utils.memref_ptr(source), [self._lane_words(self._slot(slot))], ir.IntegerType.get_signless(8))
            for half in range(2):
                for piece in range(2):
                    number = 4 * (chunk // CHUNK) + 2 * half + piece
                    four = llvm.inline_asm(llvm.StructType.get_literal([word] * 4), [llvm.ptrtoint(word, pointer)],
                                           f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{512 * number}];", "=r,=r,=r,=r,r,~{memory}",
                                           has_side_effects=True)
                    for i in range(4):
                        value = utils.bitcast(llvm.extractvalue(word, four, [i]), ir.VectorType.get((2,), ir.IntegerType.get_signless(16)))
                        registers[0, 2 * piece + i // 2, 0, i % 2, half] = value
            return mgpu.FragmentedArray(_registers=registers, _layout=native, _is_signed=True)

        return self._inline(load, [self._words_smem], [slot], plgpu.ShapeDtypeStruct((TILE_N, CHUNK), jnp.int16, layout=out_layout))

    def parameters(self, slot: jax.Array, k: int, column: jax.Array, step: jax.Array, row_layout: Any) -> list[jax.Array]:
        """Scales and, if there are some, zero points of value k of the rows' tiles: [64] float32 each."""
        out, before = [], 0
        for ref, num_bytes in zip(self._rows, self._row_bytes, strict=True):
            out.append(self._row(ref, slot, before + k // self._config.group_k * num_bytes, k, column, step, row_layout))
            before += TILE_K // self._config.group_k * num_bytes
        return out

    def _row(self, ref: Any, slot: jax.Array, offset: int, k: int, column: jax.Array, step: jax.Array, row_layout: Any) -> jax.Array:
        """Parameters from byte `offset` of a slot on."""
        num_groups, num_columns = ref.shape
        if self._interpret:
            def of_share(share: int) -> jax.Array:
                tile = self._start + self._tile(step, share)
                group = jnp.minimum(lax.div(tile * TILE_K + k, jnp.int32(self._config.group_size)), num_groups - 1)
                return ref[group, pl.ds(jnp.minimum(column, num_columns - self._config.columns), self._config.columns)]

            return jnp.concatenate([of_share(share) for share in range(self._shares)]).astype(jnp.float32)

        def load(source: Any, slot: Any, first: Any, count: Any) -> Any:
            native, kind = row_layout.to_mgpu(), utils.dtype_to_ir_type(ref.dtype)
            word, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
            bits = utils.bitwidth(kind)
            registers = np.empty(native.registers_shape((TILE_N,)), dtype=object)
            base = arith.muli(self._slot(slot), _word(self._item_bytes))
            for index, (position,) in zip(np.ndindex(registers.shape), native.thread_idxs((TILE_N,)), strict=True):
                at = arith.muli(arith.andi(arith.index_cast(word, position), _word(WARP_COLUMNS - 1)), _word(bits // 8))
                pointer = utils.getelementptr(utils.memref_ptr(source), [arith.addi(base, at)], ir.IntegerType.get_signless(8))
                value = llvm.inline_asm(ir.IntegerType.get_signless(bits), [llvm.ptrtoint(word, pointer)],
                                        f"ld.shared.b{bits} $0, [$1+{offset}];", f"={'h' if bits == 16 else 'r'},r,~{{memory}}",
                                        has_side_effects=True)
                value = utils.bitcast(value, kind)
                value = value if kind == f32 else arith.extf(f32, value)
                registers[index] = vector.broadcast(ir.VectorType.get((1,), f32), value)
            return mgpu.FragmentedArray(_registers=registers, _layout=native, _is_signed=None)

        return self._inline(load, [self._rows_smem], [slot], plgpu.ShapeDtypeStruct((TILE_N,), jnp.float32, layout=row_layout))

    def tokens(self, ref: Any, step: jax.Array, chunk: int, out_layout: Any) -> list[jax.Array]:
        """Values chunk .. chunk + 64 of a tile of the tokens, [64, 8], in the order of `words`: one for each share in the interpreter."""
        if self._interpret:
            return [ref[:, pl.ds((self._start + self._tile(step, share)) * TILE_K + chunk, CHUNK)].T for share in range(self._shares)]
        num_rows, width = ref.shape

        def load(source: Any, step: Any, first: Any, count: Any) -> Any:
            native, half = out_layout.to_mgpu(), ir.IntegerType.get_signless(16)
            word = ir.IntegerType.get_signless(32)
            registers = np.empty(native.registers_shape((CHUNK, BLOCK_M)), dtype=object)
            warp, token, part = _lane()
            _, tile, _ = self._places(arith.muli(warp, _word(WARP_COLUMNS)), first, step, count)
            token = arith.minui(token, _word(num_rows - 1)) if num_rows < BLOCK_M else token
            line = arith.addi(arith.addi(arith.muli(token, _word(width)), arith.muli(tile, _word(TILE_K))), arith.muli(part, _word(8)))
            for piece in range(2):
                pointer = utils.getelementptr(utils.memref_ptr(source), [arith.addi(line, _word(chunk + 32 * piece))], half)
                four = llvm.load(ir.VectorType.get((4,), word), pointer, alignment=16)
                for i in range(4):
                    value = vector.extract(four, dynamic_position=[], static_position=[i])
                    registers[2 * piece + i // 2, 0, i % 2] = utils.bitcast(value, ir.VectorType.get((2,), utils.dtype_to_ir_type(ref.dtype)))
            return mgpu.FragmentedArray(_registers=registers, _layout=native, _is_signed=None)

        return [self._inline(load, [ref], [step], plgpu.ShapeDtypeStruct((CHUNK, BLOCK_M), ref.dtype, layout=out_layout))]

    def is_there(self, step: jax.Array, row_layout: Any) -> jax.Array:
        """1 in the rows whose tile of a step exists, else 0: [64] float32."""
        if self._interpret:
            return jnp.concatenate([jnp.full(self._config.columns, step * self._num_parts + self._first + share < self.count, jnp.float32)
                                    for share in range(self._shares)])

        def compare(step: Any, first: Any, count: Any) -> Any:
            native, word = row_layout.to_mgpu(), ir.IntegerType.get_signless(32)
            registers = np.empty(native.registers_shape((TILE_N,)), dtype=object)
            for index, (position,) in zip(np.ndindex(registers.shape), native.thread_idxs((TILE_N,)), strict=True):
                there = arith.uitofp(ir.F32Type.get(), self._places(arith.index_cast(word, position), first, step, count)[2])
                registers[index] = vector.broadcast(ir.VectorType.get((1,), ir.F32Type.get()), there)
            return mgpu.FragmentedArray(_registers=registers, _layout=native, _is_signed=None)

        return self._inline(compare, [], [step], plgpu.ShapeDtypeStruct((TILE_N,), jnp.float32, layout=row_layout))


def _lane() -> tuple[Any, Any, Any]:
    """(warp of its warpgroup, row of eight, part of four) of a thread, as operands of a tensor core lie on lanes."""
    thread = utils.thread_idx()
    warp, lane = arith.andi(arith.shrui(thread, _word(5)), _word(3)), arith.andi(thread, _word(31))
    return warp, arith.shrui(lane, _word(2)), arith.andi(lane, _word(3))


def _is(flag: Any) -> Any:
    return arith.cmpi(arith.CmpIPredicate.ne, flag, _word(0))


def _send(target: Any, to: int, source: Any, offset: int, size: Any, mine: Any = None) -> None:
    """Begins to copy 16 bytes, of which `size` are read and the others zero, between byte offsets; nothing where `mine` says so."""
    word = ir.IntegerType.get_signless(32)
    copy, values, kinds = f"cp.async.cg.shared.global [$0+{to}], [$1+{offset}], 16, $2;", [llvm.ptrtoint(word, target), source, size], "r,l,r"
    if mine is not None:
        copy, kinds = f"{{ .reg .pred p; setp.ne.s32 p, $3, 0; @p {copy} }}", f"{kinds},r"
        values.append(arith.extui(word, mine))
    llvm.inline_asm(None, values, copy, f"{kinds},~{{memory}}", has_side_effects=True)


def wait(num_groups: int) -> None:
    """Until all but the latest groups of copies are there, for the lanes of each warp."""
    @plgpu.inline_mgpu()
    def wait(ctx: Any) -> None:
        llvm.inline_asm(None, [], f"cp.async.wait_group {num_groups}; bar.warp.sync 0xffffffff;", "~{memory}", has_side_effects=True)

    wait()


def put_sums(ref: Any, value: jax.Array, number: jax.Array, layout: Any) -> None:
    """Writes [64, 8] to the `number`-th place of an SMEM ref [.., .., m, 64], transposed and without the tokens that are not."""
    num_tokens = ref.shape[2]

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def put(ctx: Any, x: Any, target: Any, number: Any) -> None:
        word = ir.IntegerType.get_signless(32)
        base = arith.muli(only(number), _word(num_tokens * TILE_N))
        for register, (r, c) in zip(x.registers.flat, x.layout.thread_idxs(x.shape), strict=True):
            for i in range(x.layout.vector_length):
                token = arith.addi(arith.index_cast(word, c), _word(i))
                place = arith.addi(arith.addi(base, arith.muli(token, _word(TILE_N))), arith.index_cast(word, r))
                with utils.when(arith.cmpi(arith.CmpIPredicate.ult, token, _word(num_tokens))):
                    item = vector.extract(register, dynamic_position=[], static_position=[i])
                    llvm.store(item, utils.getelementptr(utils.memref_ptr(target), [place], ir.F32Type.get()))

    put(value, ref, jnp.int32(number))


def copy_tokens(source: Any, target: Any, start: jax.Array, *, num_threads: int) -> None:
    """Columns `start` .. of a GMEM ref [m, k] to an SMEM ref [m, K + ROW_SKEW] by a block's threads, zeros past k. One group of copies."""
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), scalar))
    def copy(ctx: Any, source: Any, target: Any, start: Any) -> None:
        long, word, half = (ir.IntegerType.get_signless(bits) for bits in (64, 32, 16))
        num_columns, (num_rows, width) = ir.MemRefType(source.type).shape[1], ir.MemRefType(target.type).shape
        chunks = (width - ROW_SKEW) // 8
        for done in range(0, num_rows * chunks, num_threads):
            index = arith.addi(utils.thread_idx(), _word(done))
            row, at = arith.divui(index, _word(chunks)), arith.muli(arith.remui(index, _word(chunks)), _word(8))
            column = arith.addi(only(start), at)
            inside = arith.cmpi(arith.CmpIPredicate.ult, column, _word(num_columns))
            element = arith.addi(arith.muli(arith.minui(row, _word(num_rows - 1)), _word(num_columns)), arith.select(inside, column, _word(0)))

            place = utils.getelementptr(utils.memref_ptr(target), [arith.addi(arith.muli(row, _word(width)), at)], half)
            mine = arith.cmpi(arith.CmpIPredicate.ult, index, _word(num_rows * chunks))
            _send(place, 0, utils.getelementptr(utils.memref_ptr(source), [arith.extui(long, element)], half), 0,
                  arith.select(inside, _word(16), _word(0)), mine if done + num_threads > num_rows * chunks else None)
        llvm.inline_asm(None, [], "cp.async.commit_group;", "~{memory}", has_side_effects=True)

    copy(source, target, jnp.int32(start))


def write_out(out_ref: Any, sums: Any, bias_ref: Any, column: jax.Array, *, columns: int, up: int | None, interpret: bool) -> None:
    """Adds up what the parts of k gave, SMEM [warpgroups, places, m, 64], and writes it to columns `column` .. of a GMEM ref [m, n].

    With `up` it is silu of one place's sums times the next one's, which belong to columns `up` further on.
    """
    num_members, num_places, num_rows, _ = sums.shape
    each, shares = 1 if up is None else 2, TILE_N // columns  # places of an output
    width = num_places // each * columns
    if interpret:
        def total(place: int, first: jax.Array) -> jax.Array:
            parts = sum(sums[member, place, :, pl.ds(share * columns, columns)] for member in range(num_members) for share in range(shares))
            return parts if bias_ref is None else parts + bias_ref[0, pl.ds(first, columns)].astype(jnp.float32)

        for place in range(0, num_places, each):
            first = column + place // each * columns
            value = total(place, first)
            if up is not None:
                value = jax.nn.silu(value) * total(place + 1, first + up)
            out_ref[:, pl.ds(first, columns)] = value.astype(out_ref.dtype)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT(()), *[plgpu.RefType()] * (bias_ref is not None)))
    def put(ctx: Any, target: Any, source: Any, first: Any, *biases: Any) -> None:
        long, kind = ir.IntegerType.get_signless(64), ir.MemRefType(target.type)
        num_columns = kind.shape[1]

        def total(at: Any, token: Any, n: Any, number: int) -> Any:
            """The `number`-th of the sums of an output, column `at` of the block's and `n` of all."""
            place = arith.addi(arith.muli(arith.divui(at, _word(columns)), _word(each)), _word(number))
            part = arith.addi(arith.muli(arith.addi(arith.muli(place, _word(num_rows)), token), _word(TILE_N)),
                              arith.remui(at, _word(columns)))
            values = [load_float(source, arith.addi(part, _word(member * num_places * num_rows * TILE_N + share * columns)))
                      for member in range(num_members) for share in range(shares)]
            values += [load_float(bias, arith.addi(n, _word(number * (up or 0)))) for bias in biases]
            return functools.reduce(arith.addf, values)

        for done in range(0, num_rows * width, THREADS):
            index = arith.addi(arith.andi(utils.thread_idx(), _word(THREADS - 1)), _word(done))
            token, at = arith.divui(index, _word(width)), arith.remui(index, _word(width))
            n = arith.addi(only(first), at)
            inside = arith.andi(arith.cmpi(arith.CmpIPredicate.ult, token, _word(num_rows)),
                                arith.cmpi(arith.CmpIPredicate.ult, n, _word(num_columns)))
            with utils.when(inside):
                value = total(at, token, n, 0)
                if up is not None:
                    value = arith.mulf(_silu(value), total(at, token, n, 1))
                value = value if kind.element_type == ir.F32Type.get() else arith.truncf(kind.element_type, value)
                offset = arith.addi(arith.muli(arith.extui(long, token), utils.c(num_columns, long)), arith.extui(long, n))
                llvm.store(value, utils.getelementptr(utils.memref_ptr(target), [offset], kind.element_type))

    put(out_ref, sums, jnp.int32(column), *([] if bias_ref is None else [bias_ref]))


def _silu(value: Any) -> Any:
    """value / (1 + exp(-value)) of a float32 register, to some 22 bits."""
    text = ("{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.f32 t, t; add.f32 t, t, 0f3F800000; rcp.approx.f32 t, t; "
            "mul.f32 $0, $1, t; }")
    return llvm.inline_asm(ir.F32Type.get(), [value], text, "=f,f")
