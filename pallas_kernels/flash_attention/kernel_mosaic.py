"""Flash attention in Mosaic GPU, one source for sm_80 and sm_90. It validates nothing: api.py has.

One block of 128 threads owns (row, query head, tile of block_q tokens). It walks the keys that the tile sees in blocks of block_kv with an
online softmax; both products are mma.sync, the probabilities go from one to the other in registers.

    keys    | before window or segment: not read | whole blocks, no mask | blocks at an edge, masked | past the last key seen: not read
    V       is cleared past the row's kv_len, in the one block that reaches it: what is there may be NaN

A tile's rows at or past T lie in the tile before it, from which they are not stored. K and V are read as [B, S, K * H], whose last two
dimensions are a block's: neither TMA nor cp.async into tiled shared memory skips a dimension between them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.flash_attention.config import MosaicConfig
from pallas_kernels.mosaic import M_FLOOR, across, constant

TILE_FIELDS = 4  # of `key_ranges`, in order


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Statics:
    """What the kernel's code depends on besides shapes."""

    causal: bool
    scale: float
    sliding_window: int | None
    softcap: float | None
    config: MosaicConfig
    interpret: bool


def flash_attention(
    q: jax.Array,                           # [B, T, N, H]
    k: jax.Array,                           # [B, S, K, H]
    v: jax.Array,                           # [B, S, K, H]
    q_lengths: jax.Array | None,            # [B]
    kv_lengths: jax.Array | None,           # [B]
    q_segment_ids: jax.Array | None,        # [B, T]
    kv_segment_ids: jax.Array | None,       # [B, S]
    *,
    causal: bool,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    config: MosaicConfig,
    interpret: bool,
) -> jax.Array:                             # [B, T, N, H]
    """See api.flash_attention. `interpret` runs it on the CPU, slowly, for tests.

    K and V are padded, by a copy, where S is not a multiple of block_kv; with segments V is copied once more without its padding.
    """
    num_rows, num_tokens = q.shape[:2]
    num_keys, num_kv_heads, head_dim = k.shape[1:]
    q_len = jnp.full((num_rows,), num_tokens, jnp.int32) if q_lengths is None else jnp.clip(q_lengths, 0, num_tokens)
    kv_len = jnp.full((num_rows,), num_keys, jnp.int32) if kv_lengths is None else jnp.clip(kv_lengths, 0, num_keys)
    segments: tuple[jax.Array, ...] = ()
    if q_segment_ids is not None and kv_segment_ids is not None:
        v = jnp.where((kv_segment_ids >= 0)[:, :, None, None], v, 0)
        # Ids of padding differ on the two sides, and so nothing sees it.
        segments = (_padded(jnp.maximum(q_segment_ids, -1), config.block_q - num_tokens, -1),
                    _padded(jnp.where(kv_segment_ids < 0, -2, kv_segment_ids), -num_keys % config.block_kv, -2))
    statics = _Statics(causal=causal, scale=scale, sliding_window=sliding_window, softcap=softcap, config=config, interpret=interpret)
    k, v = (_padded(x, -num_keys % config.block_kv).reshape(num_rows, -1, num_kv_heads * head_dim) for x in (k, v))
    queries = _padded(q, config.block_q - num_tokens)
    ranges = key_ranges(q_len, kv_len, segments, -(-num_tokens // config.block_q), statics)
    run = _tile_kernel(queries, num_kv_heads=num_kv_heads, num_tiles=ranges.shape[2], num_segments=len(segments), statics=statics)
    return run(queries, k, v, kv_len, ranges, *segments)[:, :num_tokens]


def _padded(x: jax.Array, num_more: int, fill: int = 0) -> jax.Array:
    """[B, T, ...] with `num_more` tokens appended to every row, if that is more than none."""
    return x if num_more <= 0 else jnp.pad(x, [(0, 0), (0, num_more)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)


def key_ranges(q_len: jax.Array, kv_len: jax.Array, segments: tuple[jax.Array, ...], num_tiles: int, statics: _Statics) -> jax.Array:
    """Where each tile's keys lie.

    Args:
      q_len, kv_len: [B] int32.
      segments: none, or queries' [B, T] and keys' [B, S] segment ids, negative for padding.
      num_tiles: R, tiles of a row.
      statics: mask and tile sizes.
    Returns:
      [TILE_FIELDS, B, R] int32: own, the tile's queries that are not padding; pos, position of its first token; start, the first block of
      keys; end, the key after the last that the tile sees, at most `start` blocks where it sees none.
    """
    block_q, block_kv = statics.config.block_q, statics.config.block_kv
    tile = jnp.arange(num_tiles, dtype=jnp.int32) * block_q
    own = jnp.clip(q_len[:, None] - tile, 0, block_q)                                       # [B, R]
    pos = (kv_len - q_len)[:, None] + tile
    start, end = jnp.zeros_like(own), jnp.broadcast_to(kv_len[:, None], own.shape)
    if statics.causal:
        end = jnp.minimum(end, pos + own)
    if statics.sliding_window is not None:
        start = jnp.maximum(pos - (statics.sliding_window - 1), 0)
    if segments:
        q_ids = jnp.pad(segments[0], ((0, 0), (0, num_tiles * block_q - segments[0].shape[1])), constant_values=-1)
        q_ids = q_ids.reshape(*own.shape, block_q)
        least, most = jnp.min(jnp.where(q_ids < 0, jnp.iinfo(jnp.int32).max, q_ids), axis=2), jnp.max(q_ids, axis=2)
        # Keys of segments between the tile's least and greatest: for packed sequences exactly the tile's own.
        near = (segments[1][:, None] >= least[:, :, None]) & (segments[1][:, None] <= most[:, :, None])  # [B, R, S]
        key = jnp.arange(segments[1].shape[1], dtype=jnp.int32)
        start = jnp.maximum(start, jnp.min(jnp.where(near, key, key.size), axis=2))
        end = jnp.minimum(end, jnp.max(jnp.where(near, key + 1, 0), axis=2))
    return jnp.stack([own, pos, start // block_kv, jnp.where(own > 0, end, 0)])


def _tile_kernel(q: jax.Array, *, num_kv_heads: int, num_tiles: int, num_segments: int, statics: _Statics) -> Any:
    """The kernel: (q [B, T, N, H], k and v [B, S, K * H], kv_len [B], ranges, segment ids of queries and keys if any) -> [B, T, N, H]."""
    num_rows, num_tokens, num_heads, head_dim = q.shape
    dtype, config, interpret, window = q.dtype, statics.config, statics.interpret, statics.sliding_window
    block_q, block_kv = config.block_q, config.block_kv
    acc_layout, lhs_layout, rhs_layout = (layout(dtype) for layout in (plgpu.Layout.MMA_ACC, plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS))
    row_layout = acc_layout.reduce(1)

    def body(q_ref, k_ref, v_ref, len_ref, ranges_ref, *refs):  # type: ignore[no-untyped-def]
        segment_refs, (out_ref, rows_smem) = refs[:num_segments], refs[num_segments:]
        # A row's last tiles are its longest under a causal mask and should start first.
        row, head, tile = lax.axis_index("row"), lax.axis_index("head"), num_tiles - 1 - lax.axis_index("tile")
        own, tile_pos, start, end = (ranges_ref[i, row, tile] for i in range(TILE_FIELDS))
        kv_len, kv_head = len_ref[row], lax.div(head, jnp.int32(num_heads // num_kv_heads))
        base = jnp.minimum(tile * block_q, num_tokens - block_q)
        first = tile * block_q - base           # tokens of the tile before this one
        pos = tile_pos - first                  # position of token `base`
        count = jnp.maximum(lax.div(end + (block_kv - 1), jnp.int32(block_kv)) - start, 0)
        mosaic.load_wide(rows_smem, q_ref.at[row, pl.ds(base, block_q), head])
        queries = plgpu.load(rows_smem, layout=lhs_layout)
        if num_segments:
            q_ids = plgpu.load(segment_refs[0].at[row, pl.ds(base, block_q)], layout=row_layout, optimized=False)

        def masked(scores: jax.Array, first_key: jax.Array) -> jax.Array:
            shape = (block_q, block_kv)
            key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=acc_layout)
            seen = key < kv_len - first_key
            if statics.causal:
                query = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=acc_layout) + (pos - first_key)
                seen &= key <= query if window is None else (key <= query) & (key > query - window)
            if num_segments:
                k_ids = plgpu.load(segment_refs[1].at[row, pl.ds(first_key, block_kv)], layout=acc_layout.reduce(0), optimized=False)
                seen &= across(q_ids, block_kv) == lax.broadcast_in_dim(k_ids, shape, (1,))
            return jnp.where(seen, scores, M_FLOOR)

        def step(index, k_smem, v_smem, carry):  # type: ignore[no-untyped-def]
            acc, m, denom = carry
            first_key = (start + index[0]) * block_kv
            scores = mosaic.mma(constant((block_q, block_kv), 0, acc_layout), queries, plgpu.load(k_smem.T, layout=rhs_layout),
                                interpret=interpret)
            scores = mosaic.scaled_scores(scores, statics.scale, statics.softcap)
            if num_segments:
                scores = masked(scores, first_key)
            else:
                last_key = first_key + (block_kv - 1)
                partial = last_key >= kv_len
                if statics.causal:
                    partial |= last_key > pos + first
                if window is not None:
                    partial |= first_key <= pos + (block_q - 1) - window
                scores = lax.cond(partial, lambda s: masked(s, first_key), lambda s: s, scores)
            new_m = jnp.maximum(m, jnp.max(scores, axis=1))
            alpha = jnp.exp2(m - new_m)
            p = jnp.exp2(scores - across(new_m, block_kv))
            # Only the last block can hold keys past the row's last.
            pl.when(first_key + block_kv > kv_len)(lambda: mosaic.clear_rows(v_smem, kv_len - first_key))
            values = plgpu.load(v_smem, layout=rhs_layout)
            acc = mosaic.mma(acc * across(alpha, head_dim), mosaic.as_lhs(p.astype(dtype), interpret=interpret), values, interpret=interpret)
            return acc, new_m, denom * alpha + jnp.sum(p, axis=1)

        # Given, not inferred: an untiled cp.async would copy consecutive memory instead of a column of blocks.
        blocks = plgpu.BlockSpec((None, block_kv, head_dim), lambda j: (row, start + j, kv_head), transforms=mosaic.tiles(),
                                 oob_fill_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
        acc, m, denom = plgpu.emit_pipeline(
            step, grid=(count,), in_specs=[blocks, blocks], max_concurrent_steps=config.stages,
            init_carry=(constant((block_q, head_dim), 0, acc_layout), constant((block_q,), M_FLOOR, row_layout),
                        constant((block_q,), 0, row_layout)))(k_ref, v_ref)
        out = acc * across(1 / jnp.where(denom == 0, 1.0, denom), head_dim)
        # A query that sees no key weighed all alike, padding queries attended like others. A sum that is NaN stays: what went wrong is to
        # be seen, and a maximum need not keep NaN.
        blind = (across(m, head_dim) == M_FLOOR) & (across(denom, head_dim) > 0)
        token = plgpu.broadcasted_iota(jnp.int32, (block_q, head_dim), 0, layout=acc_layout)
        out = jnp.where(blind | (token >= first + own), 0.0, out)
        mosaic.store_wide(out_ref.at[row, pl.ds(base, block_q), head], out.astype(dtype), first, block_q, rows_smem, interpret=interpret)

    return mosaic.kernel(
        body, out_type=jax.ShapeDtypeStruct(q.shape, dtype), grid=(num_rows, num_heads, num_tiles), grid_names=("row", "head", "tile"),
        kernel_name="flash_attention", scratch_types=[mosaic.tiled_rows((block_q, head_dim), dtype)], interpret=interpret,
        # tanh.approx would be too coarse for a cap; exp2 and division are not.
        compiler_params=plgpu.CompilerParams(approx_math=statics.softcap is None))
