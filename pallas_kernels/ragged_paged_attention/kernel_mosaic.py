"""Paged decode attention in Mosaic GPU, one source for sm_80 and sm_90. One query token a row; it validates nothing: api.py has.

One block of 128 threads owns (token, KV head, split): it walks its share of the row's pages with an online softmax, the G query
heads of the KV head as the rows of one tensor-core tile. With one split it writes the output; with several a second kernel combines
them, one block a token and query head. The page pipeline is cp.async on sm_80 and TMA on sm_90; plgpu.emit_pipeline picks.

    row's pages   first ............................ end      first: the page of the window's first key, else 0
    split 0       [first, first + per)
    split 1                   [first + per, first + 2 per)    per = max(ceil((end - first) / splits), min_pages)
    later splits                             empty: their part is not written, and the combination does not look at it
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mosaic import M_FLOOR, across, constant
from pallas_kernels.ragged import token_rows
from pallas_kernels.ragged_paged_attention.config import MOSAIC_GROUP_ROWS, MosaicConfig

SPLIT_ROWS = 16  # splits that the combination takes at once: the rows of a tile


def decode_attention(
    q: jax.Array,           # [T, N, H]
    k_pages: jax.Array,     # [P, K, Z, H]
    v_pages: jax.Array,     # [P, K, Z, H]
    page_table: jax.Array,  # [B, M]
    cu_q_lens: jax.Array,   # [B + 1]
    kv_lens: jax.Array,     # [B]
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    config: MosaicConfig,
    interpret: bool,
) -> jax.Array:             # [T, N, H]
    """See api.ragged_paged_attention, of which this does max_q_len = 1. `interpret` runs it on the CPU, slowly, for tests."""
    rows, valid = token_rows(cu_q_lens, q.shape[0])
    lens = jnp.where(valid, kv_lens[rows], 0)
    run = _split_kernel(q, k_pages, scale=scale, sliding_window=sliding_window, softcap=softcap, config=config, interpret=interpret)
    out = run(q, k_pages, v_pages, page_table, rows, lens)
    if config.splits == 1:
        return out
    return _combine_kernel(q, page_size=k_pages.shape[2], sliding_window=sliding_window, config=config, interpret=interpret)(*out, lens)


def _pages_of_splits(kv_len: jax.Array, *, page_size: int, sliding_window: int | None,
                     config: MosaicConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(first page, end, pages a split) of a row, as the drawing above has them."""
    first_key = jnp.maximum(kv_len - sliding_window, 0) if sliding_window is not None else jnp.int32(0)
    first, end = lax.div(first_key, jnp.int32(page_size)), lax.div(kv_len + (page_size - 1), jnp.int32(page_size))
    return first, end, jnp.maximum(lax.div(end - first + (config.splits - 1), jnp.int32(config.splits)), config.min_pages)


def _split_kernel(q: jax.Array, k_pages: jax.Array, *, scale: float, sliding_window: int | None, softcap: float | None,
                  config: MosaicConfig, interpret: bool) -> Any:
    """The kernel: (q, k_pages, v_pages, page_table, rows [T], lens [T]) -> the output, or parts, m and denom where there are splits."""
    num_tokens, num_heads, _ = q.shape
    _, num_kv_heads, page_size, head_dim = k_pages.shape
    num_groups, dtype = num_heads // num_kv_heads, k_pages.dtype
    # 16 rows are one m-tile: all four warps lie along n (keys, then head dim). Pages that four warps cannot share, 8 keys each, two do; the
    # other two have rows of padding, which costs products and no bytes.
    m_warps = 1 if page_size % 32 == 0 else 2
    group_rows = m_warps * MOSAIC_GROUP_ROWS
    acc_layout, lhs_layout, rhs_layout = (layout(dtype, m_warps=m_warps)
                                          for layout in (plgpu.Layout.MMA_ACC, plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS))
    row_layout = acc_layout.reduce(1)

    def walk(p_smem, q_ref, k_ref, v_ref, table_ref, rows_ref, lens_ref):  # type: ignore[no-untyped-def]
        token, head, split = (lax.axis_index(name) for name in ("token", "head", "split"))
        row, kv_len = rows_ref[token], lens_ref[token]
        first_page, end_page, per_split = _pages_of_splits(kv_len, page_size=page_size, sliding_window=sliding_window, config=config)
        start = first_page + split * per_split
        count = jnp.maximum(jnp.minimum(start + per_split, end_page) - start, 0)
        queries = mosaic.load_rows(q_ref.at[token, pl.ds(head * num_groups, num_groups)], group_rows, lhs_layout, interpret=interpret)

        def step(index, k_smem, v_smem, carry):  # type: ignore[no-untyped-def]
            acc, m, denom = carry
            shift = (start + index[0]) * page_size
            scores = mosaic.mma(constant((group_rows, page_size), 0, acc_layout), queries, plgpu.load(k_smem.T, layout=rhs_layout),
                                interpret=interpret)
            scores = mosaic.scaled_scores(scores, scale, softcap)
            key = plgpu.broadcasted_iota(jnp.int32, (group_rows, page_size), 1, layout=acc_layout)
            held = key < kv_len - shift if sliding_window is None else (key < kv_len - shift) & (key >= kv_len - sliding_window - shift)
            scores = jnp.where(held, scores, M_FLOOR)
            new_m = jnp.maximum(m, jnp.max(scores, axis=1))
            alpha = jnp.exp2(m - new_m)
            p = jnp.exp2(scores - across(new_m, page_size))
            p_smem[...] = p.astype(dtype)  # from the accumulator's layout to an operand's, by way of shared memory
            # Slots without a token may hold NaN, and 0 * NaN is NaN. Only the row's last page has such.
            pl.when(shift + page_size > kv_len)(lambda: mosaic.clear_rows(v_smem, kv_len - shift))
            acc = mosaic.mma(acc * across(alpha, head_dim), plgpu.load(p_smem, layout=lhs_layout), plgpu.load(v_smem, layout=rhs_layout),
                             interpret=interpret)
            return acc, new_m, denom * alpha + jnp.sum(p, axis=1)

        # The page's number is read from the table by the pipeline itself, as it fetches.
        pages = page_block((page_size, head_dim), lambda j: (table_ref[row, start + j], head, 0, 0), config.swizzle_bytes)
        acc, m, denom = plgpu.emit_pipeline(
            step, grid=(count,), in_specs=[pages, pages], max_concurrent_steps=config.stages,
            init_carry=(constant((group_rows, head_dim), 0, acc_layout), constant((group_rows,), M_FLOOR, row_layout),
                        constant((group_rows,), 0, row_layout)))(k_ref, v_ref)
        return (token, head, split), count, acc, m, denom

    def whole(*refs):  # type: ignore[no-untyped-def]
        out_ref, p_smem = refs[6:]
        (token, head, _), _, acc, _, denom = walk(p_smem, *refs[:6])
        out = acc * across(1 / jnp.where(denom == 0, 1.0, denom), head_dim)  # without a key acc is 0
        mosaic.store_rows(out_ref.at[token, pl.ds(head * num_groups, num_groups)], out.astype(q.dtype), 0, num_groups, acc_layout,
                          interpret=interpret)

    def part(*refs):  # type: ignore[no-untyped-def]
        out_ref, m_ref, denom_ref, p_smem = refs[6:]
        where, count, acc, m, denom = walk(p_smem, *refs[:6])
        pl.when(count > 0)(lambda: mosaic.store_rows(out_ref.at[where[0], where[1], where[2]], acc, 0, num_groups, acc_layout,
                                                     interpret=interpret))
        mosaic.store(m_ref.at[where[0], where[1], where[2]], m)
        mosaic.store(denom_ref.at[where[0], where[1], where[2]], denom)

    struct, stats = jax.ShapeDtypeStruct, (num_tokens, num_kv_heads, -(-config.splits // SPLIT_ROWS) * SPLIT_ROWS, group_rows)
    out_type = struct(q.shape, q.dtype) if config.splits == 1 else (
        struct((num_tokens, num_kv_heads, config.splits, num_groups, head_dim), jnp.float32), *[struct(stats, jnp.float32)] * 2)
    return mosaic.kernel(
        whole if config.splits == 1 else part, out_type=out_type, grid=(num_tokens, num_kv_heads, config.splits),
        grid_names=("token", "head", "split"), kernel_name="paged_decode_attention", scratch_types=[plgpu.SMEM((group_rows, page_size), dtype)],
        interpret=interpret, compiler_params=plgpu.CompilerParams(approx_math=softcap is None))


def page_block(shape: tuple[int, int], index: Callable[[jax.Array], tuple[Any, ...]], swizzle_bytes: int) -> Any:
    """Keys or values of one KV head, 16 bits wide, as a pipeline fetches them from a pool [P, K, Z, H].

    Args:
      shape: tokens of a page, or of an equal part of one, and H.
      index: from a step of the pipeline to its block of the pool.
      swizzle_bytes: width of a tile of 8 rows in shared memory.
    """
    return plgpu.BlockSpec((None, None, *shape), index, transforms=mosaic.tiles(swizzle_bytes),
                           oob_fill_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


def _combine_kernel(q: jax.Array, *, page_size: int, sliding_window: int | None, config: MosaicConfig, interpret: bool) -> Any:
    """The kernel: (parts [T, K, S, G, H], m and denom [T, K, S, 16 or 32], lens [T]) -> [T, N, H], of splits that were not empty."""
    num_heads, head_dim = q.shape[1:]
    layout = plgpu.Layout.MMA_ACC(jnp.bfloat16, m_warps=1)
    shape = (SPLIT_ROWS, head_dim)

    def body(out_ref, m_ref, denom_ref, lens_ref, result_ref):  # type: ignore[no-untyped-def]
        token, head = lax.axis_index("token"), lax.axis_index("head")
        first_page, end_page, per_split = _pages_of_splits(lens_ref[token], page_size=page_size, sliding_window=sliding_window, config=config)
        num_groups = out_ref.shape[3]
        kv_head, group = lax.div(head, jnp.int32(num_groups)), lax.rem(head, jnp.int32(num_groups))

        def down(column: jax.Array) -> jax.Array:
            return lax.broadcast_in_dim(column, shape, (1,))

        def add(first: int, before: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            """`before` and the splits from `first` on, as many as a tile has rows."""
            top, total, acc = before
            splits = pl.ds(first, SPLIT_ROWS)
            m, denom = (across(plgpu.load(ref.at[token, kv_head, splits, group], layout=layout.reduce(1), optimized=False), head_dim)
                        for ref in (m_ref, denom_ref))
            # Rows past the last split are not written at all; NaN of a row that went wrong is not 0, and stays.
            used = (plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) < config.splits - first) & (denom != 0)
            new_top = jnp.maximum(top, jnp.max(jnp.where(used, m, M_FLOOR), axis=0))
            weight = jnp.where(used, jnp.exp2(m - down(new_top)), 0.0)
            values = mosaic.load_rows(out_ref.at[token, kv_head, pl.ds(first, min(SPLIT_ROWS, config.splits - first)), group], SPLIT_ROWS,
                                      layout, interpret=interpret)
            old = jnp.exp2(top - new_top)
            return (new_top, total * old + jnp.sum(jnp.where(used, weight * denom, 0.0), axis=0),
                    acc * old + jnp.sum(jnp.where(used, weight * values, 0.0), axis=0))

        state = add(0, (constant((head_dim,), M_FLOOR, layout.reduce(0)), *[constant((head_dim,), 0, layout.reduce(0))] * 2))
        if config.splits > SPLIT_ROWS:
            def add_others(before: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                for first in range(SPLIT_ROWS, config.splits, SPLIT_ROWS):
                    before = add(first, before)
                return before

            # The others all at once, so that none waits for what another one reads.
            state = lax.cond(SPLIT_ROWS * per_split >= end_page - first_page, lambda before: before, add_others, state)
        _, total, acc = state
        mosaic.store(result_ref.at[token, head], (acc / jnp.where(total == 0, 1.0, total)).astype(q.dtype))

    return mosaic.kernel(body, out_type=jax.ShapeDtypeStruct(q.shape, q.dtype), grid=(q.shape[0], num_heads), grid_names=("token", "head"),
                        kernel_name="paged_decode_combine", interpret=interpret)
