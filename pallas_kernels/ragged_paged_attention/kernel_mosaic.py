"""Paged decode attention in Mosaic GPU, one source for sm_80 and sm_90. One query token a row; it validates nothing: api.py has.

One block of 128 threads owns (token, KV head, split): it walks its share of the row's pages with an online softmax, the G query
heads of the KV head as the rows of one tensor-core tile. The splits are combined afterwards in jax.numpy. The page pipeline is
cp.async on sm_80 and TMA on sm_90; plgpu.emit_pipeline picks.

    row's pages   first ............................ end      first: the page of the window's first key, else 0
    split 0       [first, first + per)
    split 1                   [first + per, first + 2 per)    per = max(ceil((end - first) / splits), min_pages)
    later splits                             empty: their o is not written, and the combination does not look at it
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged import token_rows
from pallas_kernels.ragged_paged_attention.config import MOSAIC_GROUP_ROWS, MosaicConfig

# Below every score but finite; softmax runs in base 2, so scores carry a factor log2(e).
M_FLOOR = -1e30
LOG2_E = math.log2(math.e)


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
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_pages.shape[1]
    num_groups = num_heads // num_kv_heads
    rows, valid = token_rows(cu_q_lens, num_tokens)
    lens = jnp.where(valid, kv_lens[rows], 0)
    tiles = jnp.pad(q.reshape(num_tokens, num_kv_heads, num_groups, head_dim),
                    ((0, 0), (0, 0), (0, MOSAIC_GROUP_ROWS - num_groups), (0, 0)))
    run = _split_kernel(num_tokens=num_tokens, k_pages=k_pages, scale=scale, sliding_window=sliding_window, softcap=softcap,
                        config=config, interpret=interpret)
    out, m, denom = run(tiles, k_pages, v_pages, page_table, rows, lens)
    return _combine(out[:, :, :, :num_groups], m[..., :num_groups], denom[..., :num_groups]).reshape(q.shape).astype(q.dtype)


def _combine(out: jax.Array, m: jax.Array, denom: jax.Array) -> jax.Array:
    """Joins splits: out [T, K, splits, G, H] unnormalised, m and denom [T, K, splits, G] in base 2; 0 where no key was seen."""
    if out.shape[2] == 1:
        out, denom = out[:, :, 0], denom[:, :, 0, :, None]
        return jnp.where(denom == 0, 0, out / denom)
    # An empty split left its part of `out` unwritten: whatever lies there must not be multiplied, not even by 0.
    out = jnp.where(denom[..., None] == 0, 0, out)
    m, denom = (jnp.broadcast_to(x[..., None], out.shape) for x in (m, denom))

    def join(a: Any, b: Any) -> Any:
        top = jnp.maximum(a[0], b[0])
        left, right = jnp.exp2(a[0] - top), jnp.exp2(b[0] - top)
        return top, a[1] * left + b[1] * right, a[2] * left + b[2] * right

    # One reduction over triples is one kernel; separate reductions for maximum, denominator and sum would be three.
    _, denom, out = lax.reduce((m, denom, out), (jnp.float32(M_FLOOR), jnp.float32(0), jnp.float32(0)), join, (2,))
    return jnp.where(denom == 0, 0, out / denom)


def _split_kernel(*, num_tokens: int, k_pages: jax.Array, scale: float, sliding_window: int | None, softcap: float | None,
                  config: MosaicConfig, interpret: bool) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
    """The kernel: (q [T, K, 16, H], k_pages, v_pages, page_table, rows [T], lens [T]) -> out, m, denom for each split."""
    _, num_kv_heads, page_size, head_dim = k_pages.shape
    dtype, group_rows = k_pages.dtype, MOSAIC_GROUP_ROWS
    # 16 rows are one m-tile: all four warps lie along n (keys, then head dim).
    acc_layout, lhs_layout, rhs_layout = (layout(dtype, m_warps=1)
                                          for layout in (plgpu.Layout.MMA_ACC, plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS))
    row_layout = acc_layout.reduce(1)

    def mma(acc: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return acc + lax.dot(a, b, preferred_element_type=jnp.float32) if interpret else plgpu.mma(acc, a, b)

    def constant(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def across(row: jax.Array, num_columns: int) -> jax.Array:
        return lax.broadcast_in_dim(row, (group_rows, num_columns), (0,))

    def body(q_ref, k_ref, v_ref, table_ref, rows_ref, lens_ref, out_ref, m_ref, denom_ref, p_smem):  # type: ignore[no-untyped-def]
        token, head, split = (lax.axis_index(name) for name in ("token", "head", "split"))
        row, kv_len = rows_ref[token], lens_ref[token]
        first_key = jnp.maximum(kv_len - sliding_window, 0) if sliding_window is not None else jnp.int32(0)
        first_page = lax.div(first_key, jnp.int32(page_size))
        end_page = lax.div(kv_len + (page_size - 1), jnp.int32(page_size))
        per_split = jnp.maximum(lax.div(end_page - first_page + (config.splits - 1), jnp.int32(config.splits)), config.min_pages)
        start = first_page + split * per_split
        count = jnp.maximum(jnp.minimum(start + per_split, end_page) - start, 0)
        q = plgpu.load(q_ref.at[token, head], layout=lhs_layout, optimized=False)

        def held(shape: tuple[int, int], axis: int, layout: Any, page: jax.Array) -> jax.Array:
            key = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout) + page * page_size
            return key < kv_len if sliding_window is None else (key < kv_len) & (key >= first_key)

        def step(index, k_smem, v_smem, carry):  # type: ignore[no-untyped-def]
            acc, m, denom = carry
            page = start + index[0]
            scores = mma(constant((group_rows, page_size), 0, acc_layout), q, plgpu.load(k_smem.T, layout=rhs_layout))
            if softcap is None:
                scores = scores * (scale * LOG2_E)
            else:
                scores = jnp.tanh(scores * (scale / softcap)) * (softcap * LOG2_E)
            scores = jnp.where(held((group_rows, page_size), 1, acc_layout, page), scores, M_FLOOR)
            new_m = jnp.maximum(m, jnp.max(scores, axis=1))
            alpha = jnp.exp2(m - new_m)
            p = jnp.exp2(scores - across(new_m, page_size))
            p_smem[...] = p.astype(dtype)  # from the accumulator's layout to an operand's, by way of shared memory
            v = plgpu.load(v_smem, layout=rhs_layout)
            # Slots without a token may hold NaN, and 0 * NaN is NaN: V's rows are masked as well as the scores.
            v = jnp.where(held((page_size, head_dim), 0, rhs_layout, page), v, jnp.zeros((), dtype))
            acc = mma(acc * across(alpha, head_dim), plgpu.load(p_smem, layout=lhs_layout), v)
            return acc, new_m, denom * alpha + jnp.sum(p, axis=1)

        # The page's number is read from the table by the pipeline itself, as it fetches.
        pages = plgpu.BlockSpec((None, None, page_size, head_dim), lambda j: (table_ref[row, start + j], head, 0, 0),
                                oob_fill_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
        acc, m, denom = plgpu.emit_pipeline(
            step, grid=(count,), in_specs=[pages, pages], max_concurrent_steps=config.stages,
            init_carry=(constant((group_rows, head_dim), 0, acc_layout), constant((group_rows,), M_FLOOR, row_layout),
                        constant((group_rows,), 0, row_layout)))(k_ref, v_ref)
        pl.when(count > 0)(lambda: _store(out_ref.at[token, head, split], acc))
        _store(m_ref.at[token, head, split], m)
        _store(denom_ref.at[token, head, split], denom)

    parts = (num_tokens, num_kv_heads, config.splits, group_rows)
    return plgpu.kernel(
        body, out_type=(jax.ShapeDtypeStruct((*parts, head_dim), jnp.float32), *[jax.ShapeDtypeStruct(parts, jnp.float32)] * 2),
        grid=parts[:3], grid_names=("token", "head", "split"), kernel_name="paged_decode_attention",
        scratch_types=[plgpu.SMEM((group_rows, page_size), dtype)], interpret=plgpu.InterpretGPUParams() if interpret else None)


def _store(ref: jax.Ref, value: jax.Array) -> None:
    """Registers to global memory. jax 0.12 refuses `ref[...] = value` where cache lines are partly filled; 0.11 has no plgpu.store."""
    if hasattr(plgpu, "store"):
        functools.partial(plgpu.store, optimized=False)(ref, value)
    else:
        ref[...] = value
