"""Paged prefill attention in Mosaic GPU, one source for sm_80 and sm_90: rows of any lengths, chunks over earlier pages, decode rows among
them. It validates nothing: api.py has.

One block of 128 threads owns (query head, tile of block_q tokens of one row). It walks the row's keys in blocks of block_kv, a page or an
equal part of one, with an online softmax; both products are mma.sync, the probabilities go from one to the other in registers.

    keys    [first page of the window) ... whole blocks, no mask ... | blocks on the diagonal, masked | past the last query: not read
    V       is masked only in the block that holds slots at or past the row's kv_len: they may hold NaN
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mosaic import M_FLOOR, across, constant
from pallas_kernels.ragged import TILE_FIELDS, query_tiles
from pallas_kernels.ragged_paged_attention.config import PrefillConfig
from pallas_kernels.ragged_paged_attention.kernel_mosaic import page_block


def prefill_attention(
    q: jax.Array,           # [T, N, H]
    k_pages: jax.Array,     # [P, K, Z, H]
    v_pages: jax.Array,     # [P, K, Z, H]
    page_table: jax.Array,  # [B, M]
    cu_q_lens: jax.Array,   # [B + 1]
    kv_lens: jax.Array,     # [B]
    *,
    scale: float,
    max_q_len: int | None,
    skip_single: bool,
    sliding_window: int | None,
    softcap: float | None,
    config: PrefillConfig,
    interpret: bool,
) -> jax.Array:             # [T, N, H]
    """See api.ragged_paged_attention. `interpret` runs it on the CPU, slowly, for tests.

    With `skip_single` rows of one token get no output: another kernel attends for them (mixed.py).
    """
    num_tokens = q.shape[0]
    if num_tokens < config.block_q:
        q = jnp.pad(q, ((0, config.block_q - num_tokens), (0, 0), (0, 0)))
    tiles = query_tiles(cu_q_lens, kv_lens, q.shape[0], config.block_q, min(max_q_len or num_tokens, num_tokens),
                        skip_single=skip_single)
    run = _tile_kernel(q, k_pages, num_tiles=tiles.shape[1], scale=scale, sliding_window=sliding_window, softcap=softcap, config=config,
                       interpret=interpret)
    return run(q, k_pages, v_pages, page_table, tiles)[:num_tokens]


def _tile_kernel(q: jax.Array, k_pages: jax.Array, *, num_tiles: int, scale: float, sliding_window: int | None, softcap: float | None,
                 config: PrefillConfig, interpret: bool) -> Any:
    """The kernel: (q [T, N, H], k_pages, v_pages, page_table, tiles [TILE_FIELDS, R]) -> [T, N, H]."""
    num_heads, (_, num_kv_heads, page_size, head_dim) = q.shape[1], k_pages.shape
    dtype, block_q, block_kv = k_pages.dtype, config.block_q, config.block_kv
    blocks_per_page = page_size // block_kv
    acc_layout, lhs_layout, rhs_layout = (layout(dtype) for layout in (plgpu.Layout.MMA_ACC, plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS))
    row_layout = acc_layout.reduce(1)

    def body(*refs):  # type: ignore[no-untyped-def]
        tile, tiles_ref = lax.axis_index("tile"), refs[4]
        # A tile without tokens has nothing to write: it ends before it loads anything.
        pl.when(tiles_ref[2, tile] > tiles_ref[1, tile])(lambda: attend(*refs))

    def attend(q_ref, k_ref, v_ref, table_ref, tiles_ref, out_ref, rows_smem):  # type: ignore[no-untyped-def]
        head, tile = lax.axis_index("head"), lax.axis_index("tile")
        base, first, end, row, pos, kv_end, kv_len = (tiles_ref[i, tile] for i in range(TILE_FIELDS))
        kv_head = lax.div(head, jnp.int32(num_heads // num_kv_heads))
        start = jnp.int32(0)
        if sliding_window is not None:
            start = lax.div(jnp.maximum(pos + first - (sliding_window - 1), 0), jnp.int32(block_kv))
        count = jnp.maximum(lax.div(kv_end + (block_kv - 1), jnp.int32(block_kv)) - start, 0)
        mosaic.load_wide(rows_smem, q_ref.at[pl.ds(base, block_q), head])
        queries = plgpu.load(rows_smem, layout=lhs_layout)

        def masked(scores: jax.Array, first_key: jax.Array) -> jax.Array:
            shape = (block_q, block_kv)
            query = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=acc_layout) + (pos - first_key)
            key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=acc_layout)
            seen = key <= query if sliding_window is None else (key <= query) & (key > query - sliding_window)
            return jnp.where(seen, scores, M_FLOOR)

        def step(index, k_smem, v_smem, carry):  # type: ignore[no-untyped-def]
            acc, m, denom = carry
            first_key = (start + index[0]) * block_kv
            scores = mosaic.mma(constant((block_q, block_kv), 0, acc_layout), queries, plgpu.load(k_smem.T, layout=rhs_layout),
                                interpret=interpret)
            scores = mosaic.scaled_scores(scores, scale, softcap)
            partial = first_key + (block_kv - 1) > pos + first
            if sliding_window is not None:
                partial |= first_key <= pos + (block_q - 1) - sliding_window
            scores = lax.cond(partial, lambda s: masked(s, first_key), lambda s: s, scores)
            new_m = jnp.maximum(m, jnp.max(scores, axis=1))
            alpha = jnp.exp2(m - new_m)
            p = jnp.exp2(scores - across(new_m, block_kv))

            # Only the last block can hold slots without a token.
            pl.when(first_key + block_kv > kv_len)(lambda: mosaic.clear_rows(v_smem, kv_len - first_key))
            values = plgpu.load(v_smem, layout=rhs_layout)
            acc = mosaic.mma(acc * across(alpha, head_dim), mosaic.as_lhs(p.astype(dtype), interpret=interpret), values, interpret=interpret)
            return acc, new_m, denom * alpha + jnp.sum(p, axis=1)

        def block(j: jax.Array) -> tuple[Any, ...]:
            number = start + j
            page, part = lax.div(number, jnp.int32(blocks_per_page)), lax.rem(number, jnp.int32(blocks_per_page))
            return table_ref[row, page], kv_head, part, 0

        pages = page_block((block_kv, head_dim), block, config.swizzle_bytes)
        acc, _, denom = plgpu.emit_pipeline(
            step, grid=(count,), in_specs=[pages, pages], max_concurrent_steps=config.stages,
            init_carry=(constant((block_q, head_dim), 0, acc_layout), constant((block_q,), M_FLOOR, row_layout),
                        constant((block_q,), 0, row_layout)))(k_ref, v_ref)
        # Only the tile of padding tokens has no key: its accumulator is 0, and so is its output.
        out = acc * across(1 / jnp.where(denom == 0, 1.0, denom), head_dim)
        mosaic.store_wide(out_ref.at[pl.ds(base, block_q), head], out.astype(q.dtype), first, end, rows_smem, interpret=interpret)

    return mosaic.kernel(
        body, out_type=jax.ShapeDtypeStruct(q.shape, q.dtype), grid=(num_heads, num_tiles), grid_names=("head", "tile"),
        kernel_name="paged_prefill_attention", scratch_types=[mosaic.tiled_rows((block_q, head_dim), dtype)], interpret=interpret,
        # tanh.approx would be too coarse for a cap; exp2 and division are not.
        compiler_params=plgpu.CompilerParams(approx_math=softcap is None))
