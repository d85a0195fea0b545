"""int4_matmul in Mosaic GPU, one source for sm_80 and sm_90: few tokens by mma, weights read once. It validates nothing: api.py has.

The product is transposed, out^T = W^T x^T: 64 columns of the weights are the 64 rows of a tensor-core tile, tokens its columns, 8 at least.
A block owns (a few strips of 64 columns, split of k, tile of tokens). A strip's warpgroups share its tiles of k among them, each with a ring
of copies of its own, so that none waits for another before the end:

    tiles of k    0 ........................................... k / 256
    split 0       [warpgroup 0 | warpgroup 1 | ...]
    split 1                                        [warpgroup 0 | warpgroup 1 | ...]

A step takes one tile: 64 columns x 256 values of k, 8 KiB at 4 bits, and the same 256 of every token. Codes become q - z in
registers, exactly, in x's 16-bit dtype; the product of a group is scaled, not its weights. At the end the warpgroups' sums meet in shared
memory; those of several splits go to XLA as float32, which adds them up together with whatever follows. Copies are cp.async on sm_80 and TMA
on sm_90; scales and zero points come at the start, all at once (parameters.py).

Instructions are what bounds few tokens, so there (8 tokens, 4 bits, bfloat16) nothing is taken off the codes, which come out of unpacking as
128 + q; the product with a row of ones makes up for it once a group:

    sum of x (q - z)   =   sum of x (128 + q)   -   (128 + z) sum of x

All of it is float32: terms 30 times as large as x (q - z) cost 5 of its 24 bits, where rounding weights to bfloat16 would cost 16.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.int4_matmul import fragments, groups, layout, parameters
from pallas_kernels.int4_matmul.config import MosaicConfig
from pallas_kernels.int4_matmul.groups import CHUNK, pieces, sums_tokens
from pallas_kernels.int4_matmul.launch import launch
from pallas_kernels.mosaic import across, constant

TILE_N, TILE_K = layout.TILE_N, layout.TILE_K
IN_BOUNDS = plgpu.OOBFillMode.PROMISE_IN_BOUNDS


def int4_matmul(*arrays: Any, bits: int, out_dtype: str, config: MosaicConfig, leaves_parts: bool = False,
                interpret: bool) -> jax.Array:
    """See api.int4_matmul; arrays are x, packed, scales, zeros and bias. `interpret` runs it on the CPU, slowly, for tests."""
    return launch(_kernel, *arrays, bits=bits, out_dtype=out_dtype, config=config, leaves_parts=leaves_parts, interpret=interpret)


def _kernel(x: jax.Array, packed: jax.Array, scales: jax.Array, *, has_zeros: bool, has_bias: bool, bits: int, out: Any,
            config: MosaicConfig, copies_async: bool, interpret: bool) -> Any:
    """The kernel: (x, packed, scales, zeros?, bias [1, n]?) -> `out`."""
    dtype, block_m, stages, num_groups = x.dtype, config.block_m, config.stages, scales.shape[0]
    num_tiles, num_words, num_planes = packed.shape[1], packed.shape[3], layout.planes(bits)
    group_k = config.group_k
    num_shares, num_strips, num_threads = config.splits * config.warpgroups, packed.shape[0], config.warpgroups * config.strips
    by_sums = sums_tokens(block_m, bits, dtype)
    acc_layout, lhs_layout, rhs_layout = plgpu.Layout.MMA_ACC(dtype), plgpu.Layout.MMA_LHS(dtype), plgpu.Layout.MMA_RHS(dtype)
    row_layout = acc_layout.reduce(1)
    num_kinds = 1 + has_zeros  # of parameters

    def body(x_ref, packed_ref, scales_ref, *refs):  # type: ignore[no-untyped-def]
        bias_ref = refs[has_zeros] if has_bias else None
        out_ref, w_smem, x_smem, sums_smem, *rest = refs[has_zeros + has_bias:]
        rows_smem, barriers = rest[:num_kinds], rest[num_kinds:]
        block, split, token, group = (lax.axis_index(name) for name in ("block", "split", "token", "warpgroup"))
        mine, member = lax.div(group, jnp.int32(config.warpgroups)), lax.rem(group, jnp.int32(config.warpgroups))  # strip, place in it
        strip, share = block * config.strips + mine, split * config.warpgroups + member
        start = lax.div(share * num_tiles, jnp.int32(num_shares))
        count = lax.div((share + 1) * num_tiles, jnp.int32(num_shares)) - start
        read = jnp.minimum(strip, num_strips - 1)  # past the last strip the last one serves; what comes of it is not stored
        column, mask = read * TILE_N, fragments.nibble_mask(interpret=interpret)
        ones = plgpu.layout_cast(jnp.ones((TILE_N, min(group_k, CHUNK)), dtype), lhs_layout)
        weights_of = functools.partial(groups.weights, by_sums=by_sums, mask=mask, bits=bits, dtype=dtype, layout=lhs_layout,
                                       row_layout=row_layout, interpret=interpret)
        offset_of = functools.partial(groups.offset, bits=bits, dtype=dtype)

        def fetch(j: jax.Array) -> None:
            slot = lax.rem(j, jnp.int32(stages))
            copies = ((packed_ref.at[read, start + j], w_smem.at[group, slot]),
                      (x_ref.at[pl.ds(token * block_m, block_m), pl.ds((start + j) * TILE_K, TILE_K)], x_smem.at[group, slot]))
            for source, target in copies:
                if copies_async:
                    plgpu.copy_gmem_to_smem(source, target, oob_mode=IN_BOUNDS)
                else:
                    plgpu.copy_gmem_to_smem(source, target, barriers[0].at[group * stages + slot])

        rows = parameters.Parameters((scales_ref, *refs[:has_zeros]), [smem.at[group] for smem in rows_smem], config, start=start,
                                     column=column, num_groups=num_groups, row_layout=row_layout, interpret=interpret)

        def multiply(j: jax.Array, slot: jax.Array, acc: jax.Array) -> jax.Array:
            """acc plus the scaled products of tile j of this share, which is in a slot."""
            nothing = constant((TILE_N, block_m), 0, acc_layout)
            words = [plgpu.load(w_smem.at[group, slot, :, pl.ds(c, CHUNK)], layout=lhs_layout) for c in range(0, num_words, CHUNK)]
            product, sums = nothing, nothing
            for chunk, k, size in pieces(group_k, num_words * num_planes):
                plane, c = divmod(chunk, num_words)
                if k == chunk:
                    tokens = plgpu.load(x_smem.at[group, slot, :, pl.ds(chunk, CHUNK)].T, layout=rhs_layout)
                if k % group_k == 0:
                    scale, *zero = rows.of_group(j, k // group_k)
                    product, sums = nothing, nothing
                left = fragments.part(words[c // CHUNK], k - chunk, size, axis=1, layout=lhs_layout, interpret=interpret)
                right = fragments.part(tokens, k - chunk, size, axis=0, layout=rhs_layout, interpret=interpret)
                product = mosaic.mma(product, weights_of(left, plane, zero), right, interpret=interpret)
                if by_sums:
                    sums = mosaic.mma(sums, ones, right, interpret=interpret)
                if (k + size) % group_k == 0:
                    acc = acc + (product - sums * offset_of(zero, block_m) if by_sums else product) * across(scale, block_m)
            return acc

        def step(j: jax.Array, acc: jax.Array) -> jax.Array:
            more = j + (stages - 1) < count
            pl.when(more)(lambda: fetch(j + (stages - 1)))
            if copies_async:  # which counts copies, not slots; two a step
                lax.cond(more, lambda: plgpu.wait_gmem_to_smem(2 * (stages - 1)), lambda: plgpu.wait_gmem_to_smem(0))
            else:
                plgpu.barrier_wait(barriers[0].at[group * stages + lax.rem(j, jnp.int32(stages))])
            return multiply(j, lax.rem(j, jnp.int32(stages)), acc)

        rows.fetch()
        for j in range(stages - 1):
            pl.when(j < count)(functools.partial(fetch, jnp.int32(j)))
        parameters.wait(copies_async=copies_async, interpret=interpret)
        acc = lax.fori_loop(0, count, step, constant((TILE_N, block_m), 0, acc_layout))

        def finish(acc: jax.Array) -> None:
            for other in range(config.warpgroups - 1):
                acc = acc + plgpu.load(sums_smem.at[mine, other], layout=acc_layout, optimized=False)
            if bias_ref is not None:
                bias = fragments.bias_rows(bias_ref, column, TILE_N, row_layout, interpret=interpret)
                acc = acc + across(bias, block_m)
            target = out_ref if config.splits == 1 else out_ref.at[split]
            fragments.store_transposed(target, acc.astype(out.dtype), token * block_m, strip * TILE_N, acc_layout, interpret=interpret)

        if config.warpgroups == 1:
            finish(acc)
            return

        def hand_over() -> None:
            sums_smem[mine, member - 1] = acc

        pl.when(member > 0)(hand_over)
        if copies_async:
            mosaic.meet(num_threads + mine, config.warpgroups)
        else:
            plgpu.barrier_arrive(barriers[-1].at[mine])

        @pl.when(member == 0)
        def _() -> None:
            if not copies_async:
                plgpu.barrier_wait(barriers[-1].at[mine])
            finish(acc)

    ring = (num_threads, stages)
    scratch: list[Any] = [mosaic.tiled_rows((*ring, TILE_N, num_words), packed.dtype),
               mosaic.tiled_rows((*ring, block_m, TILE_K), dtype),
               plgpu.SMEM((config.strips, config.warpgroups - 1, TILE_N, block_m) if config.warpgroups > 1 else (1, 1, 8, 8), jnp.float32),
               *parameters.scratch(config, scales, num_tiles=num_tiles, has_zeros=has_zeros),
               *([] if copies_async else [plgpu.Barrier(num_arrivals=2, num_barriers=num_threads * stages),
                                          plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=config.strips)])]
    return mosaic.kernel(
        body, out_type=out, grid=(-(-num_strips // config.strips), config.splits, -(-out.shape[-2] // block_m)),
        grid_names=("block", "split", "token"), num_threads=num_threads, thread_name="warpgroup",
        kernel_name="int4_matmul", scratch_types=scratch, interpret=interpret)
