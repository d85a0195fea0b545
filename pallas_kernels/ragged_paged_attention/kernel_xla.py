"""Ragged paged attention in plain jax.numpy, for CPU and any GPU. It validates nothing: api.py has.

Queries are cut into tiles of one row each. A tile walks the row's pages in blocks with an online softmax, from the first key
that its first query sees to the last that its last query sees, so that cost follows the true lengths and not the table's width.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ragged import token_rows
from pallas_kernels.ragged_paged_attention.config import XlaConfig

# Below every score, but finite: exp(-inf - M_FLOOR) is 0 and exp(M_FLOOR - M_FLOOR) is 1, so fully masked blocks change nothing.
M_FLOOR = -1e30


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Masking:
    """Static parameters of the scores."""

    scale: float
    sliding_window: int | None
    softcap: float | None


def ragged_paged_attention(
    q: jax.Array,           # [T, N, H]
    k_pages: jax.Array,     # [P, K, Z, H]
    v_pages: jax.Array,     # [P, K, Z, H]
    page_table: jax.Array,  # [B, M]
    cu_q_lens: jax.Array,   # [B + 1]
    kv_lens: jax.Array,     # [B]
    *,
    scale: float,
    max_q_len: int | None,
    sliding_window: int | None,
    softcap: float | None,
    config: XlaConfig,
) -> jax.Array:             # [T, N, H]
    """See api.ragged_paged_attention; `config` holds the tile sizes."""
    masking = _Masking(scale=scale, sliding_window=sliding_window, softcap=softcap)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_pages.shape[1]
    rows, valid = token_rows(cu_q_lens, num_tokens)
    grouped = q.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    if max_q_len == 1:
        lens = kv_lens[rows]
        tiles = _Tiles(q=grouped, page_table=page_table[rows], q_pos=lens[:, None] - 1, kv_end=jnp.where(valid, lens, 0))
        out = _attend_tiles(tiles, k_pages, v_pages, masking, config).reshape(q.shape)
    else:
        longest = min(max_q_len or num_tokens, num_tokens)
        tiles, first_tile = _cut_tiles(grouped, page_table, cu_q_lens, kv_lens, longest, config)
        out = _attend_tiles(tiles, k_pages, v_pages, masking, config)          # [tiles, K, BQ * G, H]
        out = out.reshape(-1, num_kv_heads, config.block_q, num_heads // num_kv_heads, head_dim)
        offset = jnp.arange(num_tokens, dtype=jnp.int32) - cu_q_lens[rows]
        out = out[first_tile[rows] + offset // config.block_q, :, offset % config.block_q].reshape(q.shape)
    return jnp.where(valid[:, None, None], out, 0).astype(q.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tiles:
    """Query tiles, each of one row; the arrays' first axis counts tiles. X = BQ * G query vectors, the group innermost."""

    q: jax.Array           # [R, K, X, H]
    page_table: jax.Array  # [R, M]
    q_pos: jax.Array       # [R, BQ] position of each query; those past the row's end are never read back
    kv_end: jax.Array      # [R] keys that the tile's last query sees; 0 in an empty tile


def _cut_tiles(q: jax.Array, page_table: jax.Array, cu_q_lens: jax.Array, kv_lens: jax.Array, longest: int,
               config: XlaConfig) -> tuple[_Tiles, jax.Array]:
    """Tiles of block_q queries, none across two rows, and each row's first tile [B]."""
    num_tokens, num_kv_heads, num_groups, head_dim = q.shape
    num_rows, block_q = kv_lens.shape[0], config.block_q
    # A row of n queries takes ceil(n / block_q) tiles: over all rows at most the smaller of these two.
    num_tiles = min((num_tokens + num_rows * (block_q - 1)) // block_q, num_rows * math.ceil(longest / block_q))
    q_lens = jnp.diff(cu_q_lens)
    end_tile = jnp.cumsum((q_lens + block_q - 1) // block_q)
    first_tile = jnp.concatenate([jnp.zeros((1,), jnp.int32), end_tile[:-1]])
    rows, used = token_rows(jnp.concatenate([first_tile, end_tile[-1:]]), num_tiles)
    offset = (jnp.arange(num_tiles, dtype=jnp.int32) - first_tile[rows]) * block_q
    start = (kv_lens - q_lens)[rows] + offset
    tokens = (cu_q_lens[rows] + offset)[:, None] + jnp.arange(block_q, dtype=jnp.int32)
    tile_q = jnp.take(q, tokens, axis=0, mode="clip")                          # [tiles, BQ, K, G, H]
    return _Tiles(
        q=tile_q.swapaxes(1, 2).reshape(num_tiles, num_kv_heads, block_q * num_groups, head_dim),
        page_table=page_table[rows],
        q_pos=start[:, None] + jnp.arange(block_q, dtype=jnp.int32),
        kv_end=jnp.where(used, jnp.minimum(start + block_q, kv_lens[rows]), 0),
    ), first_tile


def _attend_tiles(tiles: _Tiles, k_pages: jax.Array, v_pages: jax.Array, masking: _Masking, config: XlaConfig) -> jax.Array:
    """Runs the tiles in groups of tile_batch; [R, K, X, H] float32."""
    num_tiles, num_entries = tiles.page_table.shape
    whole = num_entries <= config.block_pages
    group = min(config.tile_batch, num_tiles)
    pad_tiles, pad_entries = -num_tiles % group, -num_entries % config.block_pages
    if pad_entries:  # a block is never cut short: entries past the table point at the null page
        tiles = dataclasses.replace(tiles, page_table=jnp.pad(tiles.page_table, ((0, 0), (0, pad_entries))))
    if group == num_tiles:
        return _attend_group(tiles, k_pages, v_pages, masking, config, loop=not whole)
    tiles = jax.tree.map(lambda x: jnp.pad(x, [(0, pad_tiles)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, group, *x.shape[1:]), tiles)
    out = lax.map(lambda part: _attend_group(part, k_pages, v_pages, masking, config, loop=True), tiles)
    return out.reshape(-1, *out.shape[2:])[:num_tiles]


def _attend_group(tiles: _Tiles, k_pages: jax.Array, v_pages: jax.Array, masking: _Masking, config: XlaConfig, *, loop: bool) -> jax.Array:
    """Online softmax of a group of tiles over blocks of keys; [R, K, X, H] float32, 0 where a query sees no key."""
    block_len = config.block_pages * k_pages.shape[2]
    num_x = tiles.q.shape[2]
    stat = jnp.zeros((*tiles.q.shape[:3], 1), jnp.float32)
    carry = (stat + M_FLOOR, stat, jnp.zeros(tiles.q.shape, jnp.float32))
    q = tiles.q.astype(jnp.float32) if config.widen else tiles.q
    first_seen = jnp.zeros_like(tiles.kv_end)
    if masking.sliding_window is not None:
        first_seen = jnp.maximum(tiles.q_pos[:, 0] - (masking.sliding_window - 1), 0)
    q_pos = jnp.repeat(tiles.q_pos, num_x // tiles.q_pos.shape[1], axis=1)[:, None, :, None]

    def step(index: jax.Array | int, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        m, denom, acc = carry
        pages = lax.dynamic_slice_in_dim(tiles.page_table, index * config.block_pages, config.block_pages, axis=1)
        k, v = (_gather_block(pool, pages, config.widen) for pool in (k_pages, v_pages))  # [R, K, S, H]
        pos = index * block_len + jnp.arange(block_len, dtype=jnp.int32)
        held = (pos < tiles.kv_end[:, None]) & (pos >= first_seen[:, None])               # [R, S]
        # Slots outside may hold anything, NaN included, and 0 * NaN is NaN: V's rows are masked as well as the scores.
        v = jnp.where(held[:, None, :, None], v, 0)
        seen = held[:, None, None, :] & (pos <= q_pos)
        if masking.sliding_window is not None:
            seen &= pos > q_pos - masking.sliding_window
        scores = jnp.where(seen, _scores(q, k, masking), -jnp.inf)
        new_m = jnp.maximum(m, jnp.max(scores, axis=-1, keepdims=True))
        p, alpha = jnp.exp(scores - new_m), jnp.exp(m - new_m)
        part = jnp.einsum("rkxs,rksh->rkxh", p.astype(v.dtype), v, precision=lax.Precision.HIGHEST if config.widen else None,
                          preferred_element_type=jnp.float32)
        return new_m, denom * alpha + jnp.sum(p, axis=-1, keepdims=True), acc * alpha + part

    if loop:
        first, last = jnp.min(first_seen) // block_len, (jnp.max(tiles.kv_end) + block_len - 1) // block_len
        _, denom, acc = lax.fori_loop(first, last, step, carry)
    else:
        _, denom, acc = step(0, carry)
    return jnp.where(denom == 0, 0, acc / denom)


def _scores(q: jax.Array, k: jax.Array, masking: _Masking) -> jax.Array:
    """Scaled and capped scores [R, K, X, S] float32."""
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    scores = jnp.einsum("rkxh,rksh->rkxs", q, k, precision=precision, preferred_element_type=jnp.float32) * masking.scale
    return scores if masking.softcap is None else jnp.tanh(scores / masking.softcap) * masking.softcap


def _gather_block(pool: jax.Array, pages: jax.Array, widen: bool) -> jax.Array:
    """The keys or values of `pages` [R, n] as [R, K, n * Z, H]; indexing the heads too spares a transpose of the block."""
    num_kv_heads, page_size, head_dim = pool.shape[1:]
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :, None]
    block = pool.at[pages[:, None, :], heads].get(mode="clip", wrap_negative_indices=False)  # [R, K, n, Z, H]
    block = block.reshape(pages.shape[0], num_kv_heads, pages.shape[1] * page_size, head_dim)
    return block.astype(jnp.float32) if widen else block
