"""int4_matmul on Hopper's warpgroup tensor cores (sm_90). It validates nothing: api.py has.

The product is transposed as in kernel_mosaic. A block owns (a few strips of 64 columns, split of k, tile of up to 256 tokens). Of each strip
its warpgroups share the tiles of k among them; warpgroups of the same tiles, one a strip, share the tokens, which the tensor cores read from
shared memory as they stand. Weights go from registers into the product.

    tokens     a ring of places for the warpgroups of the same tiles of k, filled by the first strip's once all have let go of a place
    weights    a ring of tiles of 256 values of k for each warpgroup, filled by itself

How scales come in, config.scales_product says:

    True    q - z goes into the product, exactly, and the product of a group is scaled: another accumulator beside the sum.
    False   (q - z) * scale goes into the product, rounded once to x's dtype: for so many tokens that a second accumulator costs more than
            scaling weights does, and for groups of less than a piece of 64 values of k.

The product of a piece runs while the warpgroup unpacks the next, of the next group or tile too:

        tensor cores    piece i                  piece i + 1              ...
        warpgroup       unpack piece i + 1       unpack piece i + 2       ...

Where registers hold no second piece (`is_tight`), it unpacks and multiplies in turn, and the others of its core fill the gaps.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.int4_matmul import fragments, layout, parameters
from pallas_kernels.int4_matmul.launch import launch
from pallas_kernels.int4_matmul.wgmma_config import PIECE_K, WgmmaConfig

TILE_N, TILE_K = layout.TILE_N, layout.TILE_K
PIECES = TILE_K // PIECE_K
# Registers of a thread in blocks of so many warpgroups, and what a thread needs beside its sums, two pieces and the words of a tile.
REGISTERS, REST = {1: 255, 2: 255, 3: 168, 4: 128, 5: 96}, 30

type Words = Callable[[int], tuple[jax.Array, int]]
type Kept = tuple[jax.Array, ...]
type Row = tuple[jax.Array, ...]
type Ahead = tuple[Kept, Row, Any]  # words, parameters, codes


def int4_matmul(*arrays: Any, bits: int, out_dtype: str, config: WgmmaConfig, leaves_parts: bool = False,
                interpret: bool) -> jax.Array:
    """See api.int4_matmul; arrays are x, packed, scales, zeros and bias. `interpret` runs it on the CPU, slowly, for tests."""
    return launch(_kernel, *arrays, bits=bits, out_dtype=out_dtype, config=config, leaves_parts=leaves_parts, interpret=interpret)


def _kernel(x: jax.Array, packed: jax.Array, scales: jax.Array, *, has_zeros: bool, has_bias: bool, bits: int, out: Any,
            config: WgmmaConfig, copies_async: bool, interpret: bool) -> Any:
    """The kernel: (x, packed, scales, zeros?, bias [1, n]?) -> `out`."""
    dtype, block_m, stages, token_stages, num_groups = x.dtype, config.block_m, config.stages, config.token_stages, scales.shape[0]
    num_strips, num_tiles, num_words, group_k = packed.shape[0], packed.shape[1], packed.shape[3], config.group_k
    groups_a_tile = TILE_K // group_k
    num_shares, num_threads = config.splits * config.warpgroups, config.strips * config.warpgroups
    place_k, places_a_tile = config.place_k, TILE_K // config.place_k
    is_tight = block_m // 2 * (1 + config.scales_product) + 32 + num_words // 4 + REST > REGISTERS[num_threads]
    lhs_layout, acc_layout = plgpu.Layout.MMA_LHS(dtype), plgpu.Layout.WGMMA
    row_layout = acc_layout.reduce(1)
    num_kinds = 1 + has_zeros  # of parameters

    def body(x_ref, packed_ref, scales_ref, *refs):  # type: ignore[no-untyped-def]
        bias_ref = refs[has_zeros] if has_bias else None
        out_ref, w_smem, x_smem, sums_smem, *rest = refs[has_zeros + has_bias:]
        rows_smem, (w_full, x_full, x_free, done) = rest[:num_kinds], rest[num_kinds:]
        block, split, token, group = (lax.axis_index(name) for name in ("block", "split", "token", "warpgroup"))
        member, mine = lax.div(group, jnp.int32(config.strips)), lax.rem(group, jnp.int32(config.strips))  # place in its strip, strip
        strip, share = block * config.strips + mine, split * config.warpgroups + member
        start = lax.div(share * num_tiles, jnp.int32(num_shares))
        count = lax.div((share + 1) * num_tiles, jnp.int32(num_shares)) - start
        read = jnp.minimum(strip, num_strips - 1)  # past the last strip the last one serves; what comes of it is not stored
        column, num_places, mask = read * TILE_N, count * places_a_tile, fragments.nibble_mask(interpret=interpret)

        def fetch_weights(j: jax.Array) -> None:
            slot = lax.rem(j, jnp.int32(stages))
            plgpu.copy_gmem_to_smem(packed_ref.at[read, start + j], w_smem.at[group, slot],
                                    w_full.at[group * stages + slot])

        def place_of(i: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Where the i-th piece or tile of the tokens stands in the ring, and the number of its barriers."""
            place = lax.rem(i, jnp.int32(token_stages))
            return place, member * token_stages + place

        def fetch_tokens(i: jax.Array) -> None:
            place, barrier = place_of(i)
            plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(token * block_m, block_m), pl.ds(start * TILE_K + i * place_k, place_k)],
                                    x_smem.at[member, place], x_full.at[barrier])

        def let_go(i: jax.Array) -> None:
            """Gives a place back. The first strip's warpgroup fills the one before it, of which the others have mostly let go by now."""
            if config.strips > 1:
                plgpu.barrier_arrive(x_free.at[place_of(i)[1]])
            last = i - 1 if config.strips > 1 else i

            @pl.when((mine == 0) & (last >= 0) & (last + token_stages < num_places))
            def _() -> None:
                if config.strips > 1:
                    plgpu.barrier_wait(x_free.at[place_of(last)[1]])
                fetch_tokens(last + token_stages)

        rows = parameters.Parameters((scales_ref, *refs[:has_zeros]), [smem.at[group] for smem in rows_smem], config, start=start,
                                     column=column, num_groups=num_groups, row_layout=row_layout, interpret=interpret)

        def codes_of(words: Words, piece: int, row: Row) -> jax.Array:
            """A piece of q - z, [64, 64]."""
            (picked, plane), (_, *zero) = words(piece), row
            return fragments.operand(picked, plane, zero[0] if zero else None, mask=mask, bits=bits, dtype=dtype, layout=lhs_layout,
                                     row_layout=row_layout, out_layout=acc_layout, interpret=interpret)

        def weights_of(words: Words, piece: int, rows: tuple[tuple[jax.Array, ...], ...]) -> jax.Array:
            """A piece of the weights, [64, 64], made of two halves where a group is half of it."""
            picked, plane = words(piece)
            size = min(group_k, PIECE_K)
            out = []
            for at in range(0, PIECE_K, size):
                scale, *zero = rows[(piece * PIECE_K + at) // group_k]
                part = fragments.part(picked, at, size, axis=1, layout=lhs_layout, interpret=interpret)
                out.append(fragments.operand(part, plane, zero[0] if zero else None, scale, mask=mask, bits=bits, dtype=dtype,
                                             layout=lhs_layout, row_layout=row_layout, is_scale_exact=scales.dtype == dtype,
                                             out_layout=acc_layout, interpret=interpret))
            return fragments.join(out, layout=acc_layout, interpret=interpret)

        def group_product(j: jax.Array, number: int, ahead: Ahead) -> tuple[jax.Array, Ahead]:
            """The product of the codes of a group of tile j and the tokens, [64, block_m] float32. Lets go of the places that end with it."""
            first, end = number * group_k, (number + 1) * group_k
            for i in range(first // place_k, -(-end // place_k)):
                if i * place_k >= first:
                    plgpu.barrier_wait(x_full.at[place_of(j * places_a_tile + i)[1]])

            def tokens_of(piece: int) -> Any:
                i, k = divmod(piece * PIECE_K, place_k)
                return x_smem.at[member, place_of(j * places_a_tile + i)[0], :, pl.ds(k, PIECE_K)].T

            def run(product: Any = None) -> tuple[jax.Array, Ahead]:
                found: Any = jnp.zeros((TILE_N, block_m), jnp.float32) if interpret else None
                kept, row, codes = ahead
                for piece in range(first // PIECE_K, end // PIECE_K):
                    if is_tight:
                        codes = codes_of(words_of(j, kept), piece, row)
                    if interpret:  # which knows no left operand in registers
                        found += lax.dot(codes, tokens_of(piece)[...], preferred_element_type=jnp.float32)
                    else:
                        plgpu.wgmma(product, codes, tokens_of(piece))
                        plgpu.wgmma_wait(0 if is_tight else 1)
                    if not is_tight:
                        kept, row, codes = after(j, piece, kept, row)
                return found if interpret else product[...], (kept, row, codes)

            found, ahead = run() if interpret else pl.run_scoped(run, plgpu.ACC((TILE_N, block_m), jnp.float32))
            for i in range(first // place_k, end // place_k):
                let_go(j * places_a_tile + i)
            return found, ahead

        def begin(j: jax.Array) -> Kept:
            """Asks for the tile that takes the place of the last one, and waits for tile j: its words, where registers have room for them."""
            pl.when(j + (stages - 1) < count)(lambda: fetch_weights(j + (stages - 1)))
            barrier = w_full.at[group * stages + lax.rem(j, jnp.int32(stages))]
            pl.when(j < count)(lambda: plgpu.barrier_wait(barrier))
            return () if is_tight else tuple(load(j, c) for c in range(0, num_words, PIECE_K))

        def load(j: jax.Array, c: int) -> jax.Array:
            return plgpu.load(w_smem.at[group, lax.rem(j, jnp.int32(stages)), :, pl.ds(c, PIECE_K)], layout=lhs_layout)

        def words_of(j: jax.Array, kept: Kept) -> Words:
            """From a piece of tile j to the words that hold it, [64, 64], and its plane in them."""
            def words(piece: int) -> tuple[jax.Array, int]:
                plane, c = divmod(piece * PIECE_K, num_words)
                return kept[c // PIECE_K] if kept else load(j, c // PIECE_K * PIECE_K), plane

            return words

        def first_of(j: jax.Array) -> Ahead:
            """Words, parameters and codes that tile j begins with. Past the end they are of no tile, and of no use."""
            kept, row = begin(j), rows.of_group(jnp.minimum(j, count - 1), 0)
            return kept, row, codes_of(words_of(j, kept), 0, row)

        def after(j: jax.Array, piece: int, kept: Kept, row: Row) -> Ahead:
            """What the piece after one of tile j begins with."""
            if piece + 1 == PIECES:
                return first_of(j + 1)
            number, rest = divmod((piece + 1) * PIECE_K, group_k)
            row = row if rest else rows.of_group(j, number)
            return kept, row, codes_of(words_of(j, kept), piece + 1, row)

        def step_scaling_products(j: jax.Array, state: tuple[jax.Array, Ahead | None]) -> tuple[jax.Array, Ahead | None]:
            acc, ahead = state
            kept = begin(j) if ahead is None else ahead[0]
            for number in range(groups_a_tile):
                now = ahead or (kept, rows.of_group(j, number), None)
                found, more = group_product(j, number, now)
                acc, ahead = acc + found * mosaic.across(now[1][0], block_m), more if ahead else None
            return acc, ahead

        def step_scaling_weights(j: jax.Array, acc: Any, acc_ref: Any) -> Any:
            words, groups = words_of(j, begin(j)), tuple(rows.of_group(j, number) for number in range(groups_a_tile))
            for piece in range(PIECES):
                i = j * PIECES + piece
                weights = weights_of(words, piece, groups)  # while the product of the piece before runs
                place, barrier = place_of(i)
                plgpu.barrier_wait(x_full.at[barrier])
                if interpret:
                    acc = acc + lax.dot(weights, x_smem[member, place].T, preferred_element_type=jnp.float32)
                else:
                    plgpu.wgmma(acc_ref, weights, x_smem.at[member, place].T)
                    plgpu.wgmma_wait(1)
                if piece:
                    let_go(i - 1)
                else:
                    pl.when(j > 0)(functools.partial(let_go, i - 1))
            return acc

        def sum_of_products() -> jax.Array:
            acc = mosaic.constant((TILE_N, block_m), 0, acc_layout)
            return lax.fori_loop(0, count, step_scaling_products, (acc, None if is_tight else first_of(jnp.int32(0))))[0]

        def product_of_weights(acc_ref: Any = None) -> jax.Array:
            acc = mosaic.constant((TILE_N, block_m), 0, acc_layout) if interpret else jnp.int32(0)
            acc = lax.fori_loop(0, count, functools.partial(step_scaling_weights, acc_ref=acc_ref), acc)
            if config.strips > 1:
                let_go(num_places - 1)
            return acc if interpret else acc_ref[...]

        def finish(acc: jax.Array) -> None:
            for other in range(config.warpgroups - 1):
                acc = acc + plgpu.load(sums_smem.at[mine, other], layout=acc_layout, optimized=False)
            if bias_ref is not None:
                bias = fragments.bias_rows(bias_ref, column, TILE_N, row_layout, interpret=interpret)
                acc = acc + mosaic.across(bias, block_m)
            target = out_ref if config.splits == 1 else out_ref.at[split]
            fragments.store_transposed(target, acc.astype(out.dtype), token * block_m, strip * TILE_N, acc_layout, interpret=interpret)

        for j in range(stages - 1):
            pl.when(j < count)(functools.partial(fetch_weights, jnp.int32(j)))
        for i in range(token_stages):
            pl.when((mine == 0) & (i < num_places))(functools.partial(fetch_tokens, jnp.int32(i)))
        rows.fetch()
        parameters.wait(copies_async=copies_async, interpret=interpret)
        if config.scales_product:
            acc = sum_of_products()
        else:
            acc = product_of_weights() if interpret else pl.run_scoped(product_of_weights, plgpu.ACC((TILE_N, block_m), jnp.float32))
        if config.warpgroups == 1:
            finish(acc)
        else:
            def hand_over() -> None:
                sums_smem[mine, member - 1] = acc

            pl.when(member > 0)(hand_over)
            plgpu.barrier_arrive(done.at[mine])

            @pl.when(member == 0)
            def _() -> None:
                plgpu.barrier_wait(done.at[mine])
                finish(acc)

        if interpret and config.strips > 1:  # who waits on a barrier must see it through, it says: the last places are let go of as well
            @pl.when(mine == 0)
            def _() -> None:
                def drain(i: jax.Array, _: None) -> None:
                    plgpu.barrier_wait(x_free.at[place_of(i)[1]])

                lax.fori_loop(jnp.maximum(num_places - token_stages, 0), num_places, drain, None)

    rings = config.warpgroups * token_stages
    scratch: list[Any] = [mosaic.tiled_rows((num_threads, stages, TILE_N, num_words), packed.dtype),
               mosaic.tiled_rows((config.warpgroups, token_stages, block_m, place_k), dtype),
               plgpu.SMEM((config.strips, config.warpgroups - 1, TILE_N, block_m) if config.warpgroups > 1 else (1, 1, 8, 8), jnp.float32),
               *parameters.scratch(config, scales, num_tiles=num_tiles, has_zeros=has_zeros),
               plgpu.Barrier(num_barriers=num_threads * stages), plgpu.Barrier(num_barriers=rings),
               plgpu.Barrier(num_arrivals=config.strips, num_barriers=rings),
               plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=config.strips)]
    return mosaic.kernel(
        body, out_type=out, grid=(-(-num_strips // config.strips), config.splits, -(-out.shape[-2] // block_m)),
        grid_names=("block", "split", "token"), num_threads=num_threads, thread_name="warpgroup", kernel_name="int4_matmul_wgmma",
        scratch_types=scratch, interpret=interpret)
