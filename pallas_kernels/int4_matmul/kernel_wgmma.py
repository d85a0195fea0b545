"""int4_matmul on Hopper's warpgroup tensor cores (sm_90), for more tokens than a few. It validates nothing: api.py has.

The product is transposed as in kernel_mosaic. A block owns (a few strips of 64 columns, split of k, tile of up to 256 tokens): each of its
warpgroups has a strip, and they share the tokens, which are read from shared memory by the tensor cores as they stand. Weights become
(q - z) * scale in registers, rounded once to x's dtype, and go from there into the product: with so many tokens a second accumulator for the
sums of a group would not fit beside the first.

    tokens     ring of pieces of 64 values of k, fetched by warpgroup 0 once all have let go of a place
    weights    a ring of tiles of 256 values of k for each warpgroup, fetched by itself

    warpgroup  ... | wgmma of piece i running: unpack piece i + 1 | wait | wgmma of piece i + 1 running: ...
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.int4_matmul import fragments, layout
from pallas_kernels.int4_matmul.config import WgmmaConfig
from pallas_kernels.int4_matmul.launch import launch

PIECE = 64          # values of k of a piece: one swizzled row of 16-bit values
TILE_N, TILE_K = layout.TILE_N, layout.TILE_K
PIECES = TILE_K // PIECE


def int4_matmul(*arrays: Any, bits: int, out_dtype: str, config: WgmmaConfig, interpret: bool) -> jax.Array:
    """See api.int4_matmul; arrays are x, packed, scales, zeros and bias. `interpret` runs it on the CPU, slowly, for tests."""
    return launch(_kernel, *arrays, bits=bits, out_dtype=out_dtype, config=config, interpret=interpret)


def _kernel(x: jax.Array, packed: jax.Array, scales: jax.Array, *, has_zeros: bool, has_bias: bool, bits: int, out: Any,
            config: WgmmaConfig, copies_async: bool, interpret: bool) -> Any:
    """The kernel: (x, packed, scales, zeros?, bias [1, n]?) -> `out`."""
    dtype, block_m, stages, token_stages, num_groups = x.dtype, config.block_m, config.stages, config.token_stages, scales.shape[0]
    num_strips, num_tiles, num_words, group_k = packed.shape[0], packed.shape[1], packed.shape[3], config.group_k
    lhs_layout, acc_layout = plgpu.Layout.MMA_LHS(dtype), plgpu.Layout.WGMMA
    row_layout = acc_layout.reduce(1)
    parameters = functools.partial(fragments.row_parameters, num_rows=TILE_N, layout=row_layout, interpret=interpret)

    def body(x_ref, packed_ref, scales_ref, *refs):  # type: ignore[no-untyped-def]
        zeros_ref = refs[0] if has_zeros else None
        bias_ref = refs[has_zeros] if has_bias else None
        out_ref, w_smem, x_smem, w_full, x_full, x_free = refs[has_zeros + has_bias:]
        block, split, token, group = (lax.axis_index(name) for name in ("block", "split", "token", "warpgroup"))
        strip = block * config.strips + group
        start = lax.div(split * num_tiles, jnp.int32(config.splits))
        count = lax.div((split + 1) * num_tiles, jnp.int32(config.splits)) - start
        column, num_pieces, mask = strip * TILE_N, count * PIECES, fragments.nibble_mask(count, interpret=interpret)

        def fetch_weights(j: jax.Array) -> None:
            slot = lax.rem(j, jnp.int32(stages))
            # Past the last strip the last one serves; what comes of it is not stored.
            plgpu.copy_gmem_to_smem(packed_ref.at[jnp.minimum(strip, num_strips - 1), start + j], w_smem.at[group, slot],
                                    w_full.at[group * stages + slot])

        def fetch_tokens(i: jax.Array) -> None:
            slot = lax.rem(i, jnp.int32(token_stages))
            plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(token * block_m, block_m), pl.ds(start * TILE_K + i * PIECE, PIECE)], x_smem.at[slot],
                                    x_full.at[slot])

        def groups_of(j: jax.Array) -> tuple[tuple[jax.Array, ...], ...]:
            """Scales, and zero points, of the groups in tile j of this split."""
            first = (start + j) * TILE_K
            numbers = [jnp.minimum(lax.div(first + i * group_k, jnp.int32(config.group_size)), num_groups - 1)
                       for i in range(TILE_K // group_k)]
            return tuple(tuple(parameters(ref, number, column) for ref in ((scales_ref, zeros_ref) if has_zeros else (scales_ref,)))
                         for number in numbers)

        def weights_of(words: list[jax.Array], piece: int, rows: tuple[tuple[jax.Array, ...], ...]) -> jax.Array:
            """A piece of the weights, [64, 64], made of two halves where a group is half of it."""
            plane, c = divmod(piece * PIECE, num_words)
            size = min(group_k, PIECE)
            out = []
            for at in range(0, PIECE, size):
                scale, *zero = rows[(piece * PIECE + at) // group_k]
                part = fragments.part(words[c // PIECE], at, size, axis=1, layout=lhs_layout, interpret=interpret)
                out.append(fragments.operand(part, plane, zero[0] if zero else None, scale, mask=mask, bits=bits, dtype=dtype,
                                             layout=lhs_layout, row_layout=row_layout, is_scale_exact=scales.dtype == dtype,
                                             out_layout=acc_layout, interpret=interpret))
            return fragments.join(out, layout=acc_layout, interpret=interpret)

        def step(j: jax.Array, carry: tuple[Any, Any], acc_ref: Any) -> tuple[Any, Any]:
            rows, acc = carry
            pl.when(j + (stages - 1) < count)(lambda: fetch_weights(j + (stages - 1)))
            slot = lax.rem(j, jnp.int32(stages))
            plgpu.barrier_wait(w_full.at[group * stages + slot])
            following = groups_of(jnp.minimum(j + 1, count - 1))  # asked for a tile ahead: they come from global memory
            words = [plgpu.load(w_smem.at[group, slot, :, pl.ds(c, PIECE)], layout=lhs_layout) for c in range(0, num_words, PIECE)]
            weights = weights_of(words, 0, rows)
            for piece in range(PIECES):
                i = j * PIECES + piece
                place = lax.rem(i, jnp.int32(token_stages))
                plgpu.barrier_wait(x_full.at[place])
                if interpret:  # which knows no left operand in registers
                    acc = acc + lax.dot(weights, x_smem[place].T, preferred_element_type=jnp.float32)
                else:
                    plgpu.wgmma(acc_ref, weights, x_smem.at[place].T)
                if piece + 1 < PIECES:
                    weights = weights_of(words, piece + 1, rows)
                if not interpret:
                    plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(x_free.at[place])

                @pl.when((group == 0) & (i + token_stages < num_pieces))
                def _(i: jax.Array = i, place: jax.Array = place) -> None:
                    plgpu.barrier_wait(x_free.at[place])
                    fetch_tokens(i + token_stages)

            return following, acc

        def run(acc_ref: Any) -> jax.Array:
            for j in range(stages - 1):
                pl.when(j < count)(functools.partial(fetch_weights, jnp.int32(j)))
            for i in range(token_stages):
                pl.when((group == 0) & (i < num_pieces))(functools.partial(fetch_tokens, jnp.int32(i)))
            zero = mosaic.constant((TILE_N, block_m), 0, acc_layout) if interpret else jnp.int32(0)
            _, acc = lax.fori_loop(0, count, functools.partial(step, acc_ref=acc_ref), (groups_of(jnp.int32(0)), zero))
            return acc if interpret else acc_ref[...]

        acc = run(None) if interpret else pl.run_scoped(run, plgpu.ACC((TILE_N, block_m), jnp.float32))
        if bias_ref is not None:
            acc = acc + mosaic.across(parameters(bias_ref, jnp.int32(0), column), block_m)
        target = out_ref if config.splits == 1 else out_ref.at[split]
        fragments.store_transposed(target, acc.astype(out.dtype), token * block_m, column, acc_layout, interpret=interpret)

        # Who waits on a barrier must see it through, the interpreter says: the last places are let go of as well.
        @pl.when(group == 0)
        def _() -> None:
            def drain(i: jax.Array, _: None) -> None:
                plgpu.barrier_wait(x_free.at[lax.rem(i, jnp.int32(token_stages))])

            lax.fori_loop(jnp.maximum(num_pieces - token_stages, 0), num_pieces, drain, None)

    transforms: tuple[Any, ...] = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
    scratch: list[Any] = [plgpu.SMEM((config.strips, stages, TILE_N, num_words), packed.dtype, transforms=transforms),
               plgpu.SMEM((token_stages, block_m, PIECE), dtype, transforms=transforms),
               plgpu.Barrier(num_barriers=config.strips * stages), plgpu.Barrier(num_barriers=token_stages),
               plgpu.Barrier(num_arrivals=config.strips, num_barriers=token_stages)]
    return plgpu.kernel(
        body, out_type=out, grid=(-(-num_strips // config.strips), config.splits, -(-out.shape[-2] // block_m)),
        grid_names=("block", "split", "token"), num_threads=config.strips, thread_name="warpgroup", kernel_name="int4_matmul_wgmma",
        scratch_types=scratch, interpret=mosaic.interpret_params(interpret))
