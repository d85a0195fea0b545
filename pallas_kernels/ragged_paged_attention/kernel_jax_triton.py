"""Paged decode attention in Triton, called through jax-triton: a second backend, independent of Mosaic GPU. It validates nothing: api.py has.

One program owns (token, KV head, split): it walks its share of the row's keys in blocks with an online softmax, the G query heads of the
KV head as the rows of one tensor-core tile. Every key's page is looked up by itself, so that blocks and pages need not match and any page
size does. With one split it writes the output; with several a second kernel combines them, one program a token and query head.

    row's keys    first .............................. len    first: the window's first key, else 0
    split 0       [first, first + per)
    split 1                    [first + per, first + 2 per)   per = max(ceil((len - first) / splits), min_keys), whole blocks
    later splits                             empty: denom 0, and the combination does not look at their part
"""

import inspect

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl

from pallas_kernels.ragged import token_rows
from pallas_kernels.ragged_paged_attention.config import TritonConfig

# jax-triton 0.4 renamed what 0.3 calls out_shape.
_OUT = "out_shape" if "out_shape" in inspect.signature(jax_triton.triton_call).parameters else "out_type"
M_FLOOR = tl.constexpr(-1e30)  # below every score but finite: exp2(M_FLOOR - score) is 0
LOG2_E = tl.constexpr(1.4426950408889634)


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
    config: TritonConfig,
    compute_capability: tuple[int, int],
) -> jax.Array:             # [T, N, H]
    """See api.ragged_paged_attention, of which this does max_q_len = 1."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, page_size = k_pages.shape[1:3]
    num_groups = num_heads // num_kv_heads
    rows, valid = token_rows(cu_q_lens, num_tokens)
    lens = jnp.where(valid, kv_lens[rows], 0)
    struct, stats = jax.ShapeDtypeStruct, (num_tokens, num_kv_heads, config.splits, num_groups)
    out_types = (struct(q.shape, q.dtype), *[struct((1,), jnp.float32)] * 2) if config.splits == 1 else (
        struct((*stats, head_dim), jnp.float32), *[struct(stats, jnp.float32)] * 2)
    capability = 10 * compute_capability[0] + compute_capability[1]
    out, m, denom = jax_triton.triton_call(
        q, k_pages, v_pages, page_table, rows, lens, kernel=_decode_kernel, grid=(num_tokens, num_kv_heads, config.splits),
        name="paged_decode_attention", num_warps=config.num_warps, num_stages=config.stages, compute_capability=capability,
        scale=scale, window=sliding_window or 0, softcap=softcap or 0.0, num_entries=page_table.shape[1], num_kv_heads=num_kv_heads,
        num_groups=num_groups, group_rows=config.group_rows, head_dim=head_dim, page_size=page_size, block_kv=config.block_kv,
        min_keys=config.min_keys, num_splits=config.splits, **{_OUT: out_types})
    if config.splits == 1:
        return out
    return jax_triton.triton_call(
        out, m, denom, kernel=_combine_kernel, grid=(num_tokens, num_heads), name="paged_decode_combine", num_warps=4,
        compute_capability=capability, num_groups=num_groups, head_dim=head_dim, num_splits=config.splits,
        split_rows=triton.next_power_of_2(config.splits), **{_OUT: struct(q.shape, q.dtype)})


@triton.jit
def _decode_kernel(  # type: ignore[no-untyped-def]
        q_ptr, k_ptr, v_ptr, table_ptr, rows_ptr, lens_ptr, out_ptr, m_ptr, denom_ptr, scale: tl.constexpr, window: tl.constexpr,
        softcap: tl.constexpr, num_entries: tl.constexpr, num_kv_heads: tl.constexpr, num_groups: tl.constexpr, group_rows: tl.constexpr,
        head_dim: tl.constexpr, page_size: tl.constexpr, block_kv: tl.constexpr, min_keys: tl.constexpr, num_splits: tl.constexpr):
    token, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_len = tl.load(lens_ptr + token)
    table_row = table_ptr + tl.load(rows_ptr + token) * num_entries
    first_key = tl.maximum(kv_len - window, 0) if window > 0 else 0
    # Whole blocks, so that a key's place in its block depends on the row alone.
    first_block, end_block = first_key // block_kv, tl.cdiv(kv_len, block_kv)
    per_split = tl.maximum(tl.cdiv(end_block - first_block, num_splits), min_keys // block_kv)
    start = first_block + split * per_split
    stop = tl.minimum(start + per_split, end_block)

    group = tl.arange(0, group_rows)
    dim = tl.arange(0, head_dim)
    is_head = group < num_groups
    heads = token.to(tl.int64) * num_kv_heads * num_groups + head * num_groups + group
    queries = tl.load(q_ptr + heads[:, None] * head_dim + dim[None, :], mask=is_head[:, None], other=0.0)

    m = tl.full((group_rows,), M_FLOOR, tl.float32)
    denom = tl.zeros((group_rows,), tl.float32)
    acc = tl.zeros((group_rows, head_dim), tl.float32)
    for block in range(start, stop):
        key = block * block_kv + tl.arange(0, block_kv)
        held = (key < kv_len) & (key >= first_key)
        page = tl.load(table_row + key // page_size, mask=held, other=0)
        # 64 bits: a pool may hold more than 2^31 elements.
        slot = (page.to(tl.int64) * num_kv_heads + head) * page_size + key % page_size
        place = slot[:, None] * head_dim + dim[None, :]
        # Slots without a token may hold NaN, and 0 * NaN is NaN: they are not even read.
        keys = tl.load(k_ptr + place, mask=held[:, None], other=0.0)
        values = tl.load(v_ptr + place, mask=held[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(keys))
        if softcap > 0:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1), right at both infinities; NaN stays NaN.
            scores = (1 - 2 / (tl.exp2(scores * (2 * scale / softcap * LOG2_E)) + 1)) * (softcap * LOG2_E)
        else:
            scores = scores * (scale * LOG2_E)
        scores = tl.where(held[None, :], scores, M_FLOOR)
        new_m = tl.maximum(m, tl.max(scores, 1))
        alpha = tl.exp2(m - new_m)
        p = tl.exp2(scores - new_m[:, None])
        denom = denom * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(values.dtype), values)
        m = new_m

    if num_splits == 1:
        acc = acc / tl.where(denom == 0, 1.0, denom)[:, None]  # without a key acc is 0
        tl.store(out_ptr + heads[:, None] * head_dim + dim[None, :], acc.to(out_ptr.dtype.element_ty), mask=is_head[:, None])
    else:
        part = ((token.to(tl.int64) * num_kv_heads + head) * num_splits + split) * num_groups + group
        tl.store(out_ptr + part[:, None] * head_dim + dim[None, :], acc, mask=is_head[:, None] & (stop > start))
        tl.store(m_ptr + part, m, mask=is_head)
        tl.store(denom_ptr + part, denom, mask=is_head)


@triton.jit
def _combine_kernel(  # type: ignore[no-untyped-def]
        part_ptr, m_ptr, denom_ptr, out_ptr, num_groups: tl.constexpr, head_dim: tl.constexpr, num_splits: tl.constexpr,
        split_rows: tl.constexpr):
    """Splits of one token and query head, parts [T, K, S, G, H], to [T, N, H]."""
    token, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    kv_heads = num_heads // num_groups
    split = tl.arange(0, split_rows)
    dim = tl.arange(0, head_dim)
    is_split = split < num_splits
    place = ((token.to(tl.int64) * kv_heads + head // num_groups) * num_splits + split) * num_groups + head % num_groups
    denom = tl.load(denom_ptr + place, mask=is_split, other=0.0)
    used = denom != 0  # NaN of a row that went wrong is not 0, and stays
    m = tl.load(m_ptr + place, mask=used, other=M_FLOOR)
    weight = tl.where(used, tl.exp2(m - tl.max(m, 0)), 0.0)
    total = tl.sum(weight * denom, 0)
    values = tl.load(part_ptr + place[:, None] * head_dim + dim[None, :], mask=used[:, None], other=0.0)
    acc = tl.sum(weight[:, None] * values, 0)
    out = acc / tl.where(total == 0, 1.0, total)
    tl.store(out_ptr + (token.to(tl.int64) * num_heads + head) * head_dim + dim, out.to(out_ptr.dtype.element_ty))
