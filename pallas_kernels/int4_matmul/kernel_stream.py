"""int4_matmul for one to eight tokens in Mosaic GPU, one source for sm_80 and sm_90. It validates nothing: api.py has.

So few tokens are a matter of how soon weights come and how few instructions they meet. So each lane copies what it will multiply into places
of its own in shared memory, `depth` tiles ahead (cp.async, which both architectures have), and warps wait for themselves alone. The product is
transposed as in kernel_mosaic, out^T = W^T x^T. A block owns a split of k of `columns` columns in each of `places` places. Its warps, 16
columns each, share the tiles of 256 values of k among them in turn (columns 32, two warpgroups, so four parts):

    tiles of k          0    1    2    3    4    5    6  ...
    warps 0, 1          step 0              step 1             columns 0 .. 15 and 16 .. 31
    warps 2, 3               step 0              step 1
    warps 4, 5                    step 0              step 1
    warps 6, 7                         step 0              step 1

A lane's 16 bytes are 8 words of one column, where a tensor core's operand wants 2 and 2 more 8 further on. A sum does not mind the order of its
terms: lanes take the tokens in that same order, which is 8 values in a row too (`stream.Walk.tokens`).

Instructions: 4 bits in bfloat16 go in as 128 + q, with a product by ones for what they are too large by (groups.py).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.int4_matmul import fragments, groups, layout, stream
from pallas_kernels.int4_matmul.groups import CHUNK, pieces, sums_tokens
from pallas_kernels.int4_matmul.launch import added_up, widened
from pallas_kernels.int4_matmul.stream import BLOCK_M, ROW_SKEW, THREADS, TILE_K, TILE_N, WARP_COLUMNS
from pallas_kernels.int4_matmul.stream_config import StreamConfig, stream_steps
from pallas_kernels.mosaic import across, constant


def int4_matmul(
    x: jax.Array,              # [m, k]
    packed: jax.Array,         # [n', k', 64, J]
    scales: jax.Array,         # [g, n]
    zeros: jax.Array | None,   # [g, n]
    bias: jax.Array | None,    # [n]
    *,
    bits: int,
    out_dtype: str,
    config: StreamConfig,
    interpret: bool,
) -> jax.Array:                # [m, n], or [m, n / 2] where it is gated
    """See api.int4_matmul. `interpret` runs it on the CPU, slowly, for tests."""
    m, n = x.shape[0], scales.shape[1]
    more_k, more_n = -x.shape[1] % 8, -n % 8  # tokens and parameters are copied 16 bytes at a time
    if interpret:                             # which lets nothing out of bounds
        x = jnp.pad(x, ((0, BLOCK_M - m), (0, 0)))
        more_k, more_n = packed.shape[1] * TILE_K - x.shape[1], -n % (config.columns * config.places)
        bias = None if bias is None else widened(bias, more_n)
    x, scales = widened(x, more_k), widened(scales, more_n)
    zeros = None if zeros is None else widened(zeros.astype(jnp.bfloat16), more_n)
    width = n + more_n if interpret else n
    shape = (x.shape[0], width // 2 if config.gated else width)
    out = jax.ShapeDtypeStruct(shape, out_dtype) if config.splits == 1 else jax.ShapeDtypeStruct((config.splits, *shape), jnp.float32)
    has_bias = bias is not None and config.splits == 1
    run = _kernel(x, packed, scales, up=n // 2, has_zeros=zeros is not None, has_bias=has_bias, bits=bits, out=out, config=config,
                  interpret=interpret)
    sums = run(x, packed, scales, *([] if zeros is None else [zeros]), *([bias[None]] if has_bias and bias is not None else []))
    if config.splits == 1:
        return sums[:m, :n // 2] if config.gated else sums[:m, :n]
    return added_up(sums[:, :m, :n], bias, out_dtype)


def _kernel(x: jax.Array, packed: jax.Array, scales: jax.Array, *, up: int, has_zeros: bool, has_bias: bool, bits: int, out: Any,
            config: StreamConfig, interpret: bool) -> Any:
    """The kernel: (x, packed, scales, zeros?, bias [1, n]?) -> `out`; the second half of the columns begins at `up`."""
    dtype, group_k = x.dtype, config.group_k
    _, num_tiles, _, num_words = packed.shape
    num_planes = layout.planes(bits)
    shares = TILE_N // config.columns                   # of a warpgroup's warps in k
    num_parts = config.warpgroups * shares
    tiles_a_split = -(-num_tiles // config.splits)
    steps = stream_steps(num_tiles, config.columns, config.warpgroups, config.splits)
    stays = config.places > 1                           # a warp keeps its tiles of k and goes from place to place
    items = config.places * steps                       # of a warp
    assert not stays or config.depth % steps == 0, config
    are_full = num_tiles % config.splits == 0 and tiles_a_split == steps * num_parts
    by_sums = sums_tokens(BLOCK_M, bits, dtype)
    acc_layout, lhs_layout, rhs_layout = (form(dtype) for form in (plgpu.Layout.MMA_ACC, plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS))
    row_layout = acc_layout.reduce(1)

    def body(x_ref, packed_ref, scales_ref, *refs):  # type: ignore[no-untyped-def]
        bias_ref = refs[has_zeros] if has_bias else None
        out_ref, x_smem, words_smem, rows_smem, sums_smem, *done = refs[has_zeros + has_bias:]
        block, split, member = (lax.axis_index(name) for name in ("block", "split", "warpgroup"))
        start = lax.div(split * num_tiles, jnp.int32(config.splits))
        walk = stream.Walk(packed_ref, [scales_ref, *refs[:has_zeros]], words_smem, rows_smem, config, start=start, member=member,
                     count=lax.div((split + 1) * num_tiles, jnp.int32(config.splits)) - start, num_parts=num_parts, interpret=interpret)
        mask = fragments.nibble_mask(interpret=interpret)
        nothing = constant((TILE_N, BLOCK_M), 0, acc_layout)
        ones = plgpu.layout_cast(jnp.ones((TILE_N, min(group_k, CHUNK)), dtype), lhs_layout)
        weights_of = functools.partial(groups.weights, by_sums=by_sums, mask=mask, bits=bits, dtype=dtype, layout=lhs_layout,
                                       row_layout=row_layout, interpret=interpret)
        offset_of = functools.partial(groups.offset, bits=bits, dtype=dtype)

        def column_of(place: jax.Array) -> jax.Array:
            if not config.gated:
                return (block * config.places + place) * config.columns
            pair = block * (config.places // 2) + lax.div(place, jnp.int32(2))
            return pair * config.columns + lax.rem(place, jnp.int32(2)) * up

        def place_and_step(item: jax.Array) -> tuple[jax.Array, jax.Array]:
            return (lax.div(item, jnp.int32(steps)), lax.rem(item, jnp.int32(steps))) if stays else (jnp.int32(0), item)

        def send(item: jax.Array) -> None:
            """Asks for an item's words and parameters, if there is such an item."""
            place, step = place_and_step(item)
            walk.send(column_of(place), step, lax.rem(item, jnp.int32(config.depth)), item < items)

        def right_of(step: jax.Array, tokens: dict[int, Any], chunk: int, k: int, size: int) -> list[jax.Array]:
            """Values k .. k + size of a tile of the tokens, whose chunks are kept."""
            if chunk not in tokens:
                tokens[chunk] = walk.tokens(x_ref if interpret else x_smem, step, chunk, rhs_layout)
            return [fragments.part(each, k - chunk, size, axis=0, layout=rhs_layout, interpret=interpret) for each in tokens[chunk]]

        def sums_of(step: jax.Array) -> list[jax.Array]:
            """The tokens' sums over each group of a tile."""
            sums = [nothing] * (TILE_K // group_k)
            tokens: dict[int, Any] = {}
            for chunk, k, size in pieces(group_k, num_words * num_planes):
                sums[k // group_k] = _mma(sums[k // group_k], ones, right_of(step, tokens, chunk, k, size), interpret=interpret)
            return sums

        def multiply(place: jax.Array, step: jax.Array, acc: jax.Array, sums: list[Any] | None) -> jax.Array:
            """acc plus the scaled products of an item; `sums` of the tokens are those of the step, if they are at hand."""
            item, column, before = place * steps + step, column_of(place), acc
            slot = lax.rem(item, jnp.int32(config.depth))
            walk.wait()
            words = [walk.words(slot, c, column, step, lhs_layout) for c in range(0, num_words, CHUNK)]
            parameters = [walk.parameters(slot, k, column, step, row_layout) for k in range(0, TILE_K, group_k)]
            send(item + config.depth)
            tokens: dict[int, Any] = {}
            for chunk, k, size in pieces(group_k, num_words * num_planes):
                plane, c = divmod(chunk, num_words)
                if k % group_k == 0:
                    scale, *zero = parameters[k // group_k]
                    product, total = nothing, nothing
                left = fragments.part(words[c // CHUNK], k - chunk, size, axis=1, layout=lhs_layout, interpret=interpret)
                right = right_of(step, tokens, chunk, k, size)
                product = _mma(product, weights_of(left, plane, zero), right, interpret=interpret)
                if by_sums and sums is None:
                    total = _mma(total, ones, right, interpret=interpret)
                if (k + size) % group_k == 0:
                    if by_sums:
                        product = product - (total if sums is None else sums[k // group_k]) * offset_of(zero, BLOCK_M)
                    acc = acc + product * across(scale, BLOCK_M)
            return acc if are_full else jnp.where(across(walk.is_there(step, row_layout), BLOCK_M) > 0, acc, before)

        def put(place: jax.Array, acc: jax.Array) -> None:
            """A warpgroup's part of the sums of a place."""
            if interpret:
                sums_smem[member, place] = acc.T
            else:
                stream.put_sums(sums_smem, acc, member * config.places + place, acc_layout)

        def visit(place: jax.Array, _: None) -> None:
            acc = nothing
            for step in range(steps):
                acc = multiply(place, jnp.int32(step), acc, kept[step] if kept else None)
            put(place, acc)

        if not interpret:
            stream.copy_tokens(x_ref, x_smem, start * TILE_K, num_threads=THREADS * config.warpgroups)
        for item in range(config.depth):
            send(jnp.int32(item))
        if not interpret:
            stream.wait(config.depth)  # for the tokens, which were asked for before
            mosaic.meet(config.warpgroups, config.warpgroups)
        # Bounds that the compiler cannot see: it would unroll the loops, and take all registers.
        if stays:
            kept = [sums_of(jnp.int32(step)) for step in range(steps)] if by_sums else []
            lax.fori_loop(0, jnp.minimum(jnp.int32(config.places), walk.count * items), visit, None)
        else:
            put(jnp.int32(0), lax.fori_loop(0, jnp.minimum(jnp.int32(steps), walk.count * items),
                                            lambda step, acc: multiply(jnp.int32(0), step, acc, None), nothing))
        if interpret:
            plgpu.barrier_arrive(done[0])
        else:
            mosaic.meet(config.warpgroups, config.warpgroups)

        @pl.when(member == 0)
        def _() -> None:
            if interpret:
                plgpu.barrier_wait(done[0])
            target = out_ref if config.splits == 1 else out_ref.at[split]
            stream.write_out(target, sums_smem, bias_ref, column_of(jnp.int32(0)), columns=config.columns, up=up if config.gated else None,
                             interpret=interpret)

    warps = config.warpgroups * THREADS // 32
    rows = TILE_K // group_k * WARP_COLUMNS * (scales.dtype.itemsize + 2 * has_zeros)  # bytes of an item's parameters
    scratch = [plgpu.SMEM((out.shape[-2], tiles_a_split * TILE_K + ROW_SKEW), dtype),
               plgpu.SMEM((warps * config.depth * num_words * WARP_COLUMNS,), packed.dtype),
               plgpu.SMEM((warps * config.depth * rows,), jnp.int8),
               plgpu.SMEM((config.warpgroups, config.places, out.shape[-2], TILE_N), jnp.float32),
               *([plgpu.Barrier(num_arrivals=config.warpgroups)] if interpret else [])]
    blocks = -(-out.shape[-1] // (config.columns * (config.places // 2 if config.gated else config.places)))
    return mosaic.kernel(body, out_type=out, grid=(blocks, config.splits), grid_names=("block", "split"), num_threads=config.warpgroups,
                         thread_name="warpgroup", kernel_name="int4_matmul_stream", scratch_types=scratch, interpret=interpret,
                         compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True))  # `meet` is all that is needed


def _mma(acc: jax.Array, left: jax.Array, rights: list[jax.Array], *, interpret: bool) -> jax.Array:
    """acc + left @ right, in the interpreter of rows that have a right operand each."""
    if not interpret:
        return mosaic.mma(acc, left, rights[0], interpret=False)
    lefts = jnp.split(left, len(rights))
    return acc + jnp.concatenate([lax.dot(a, b, preferred_element_type=jnp.float32) for a, b in zip(lefts, rights, strict=True)])
