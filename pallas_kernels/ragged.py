"""Ragged rows on the device: which row a token belongs to and where in it. Shared by kernels, never by references."""

import jax
import jax.numpy as jnp


def token_rows(cu_q_lens: jax.Array, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """The row of every token.

    Args:
      cu_q_lens: [B + 1] int32; row b owns tokens [cu_q_lens[b], cu_q_lens[b + 1]); empty rows may stand anywhere.
      num_tokens: T, padding included.
    Returns:
      rows [T] int32, the last row for padding tokens; valid [T] bool, False for padding tokens.
    """
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    # Comparing with every row's end is a few small fused ops; a binary search would be a loop.
    rows = jnp.sum(tokens[:, None] >= cu_q_lens[None, 1:], axis=1, dtype=jnp.int32)
    return jnp.minimum(rows, cu_q_lens.shape[0] - 2), tokens < cu_q_lens[-1]


def token_positions(rows: jax.Array, cu_q_lens: jax.Array, kv_lens: jax.Array) -> jax.Array:
    """Position of every token in its sequence, counted from 0; a row's last token sits at kv_lens - 1.

    Args:
      rows: [T] int32, from `token_rows`.
      cu_q_lens: [B + 1] int32.
      kv_lens: [B] int32.
    Returns:
      [T] int32; meaningless for padding tokens.
    """
    tokens = jnp.arange(rows.shape[0], dtype=jnp.int32)
    return tokens + (kv_lens - cu_q_lens[1:])[rows]


TILE_FIELDS = 7  # of `query_tiles`, in order: base, first, end, row, pos, kv_end, kv_len


def query_tiles(cu_q_lens: jax.Array, kv_lens: jax.Array, num_tokens: int, block_q: int, longest: int, *,
                skip_single: bool) -> jax.Array:
    """Cuts packed rows into tiles of block_q tokens, none across two rows; padding tokens are tiles of a row without keys.

        tokens   ...............|row b, q_len 10, block_q 4     |............
        tiles                   [0 1 2 3][4 5 6 7][8 9 . .]      each in block_q consecutive tokens that begin at `base`

    The tiles stand from the last to the first, since a row's last tiles are its longest and should start first; spare tiles, of which
    there are many where the bucket has room for many rows, stand behind them.

    Args:
      cu_q_lens: [B + 1] int32, as in the attention contract.
      kv_lens: [B] int32.
      num_tokens: T, at least block_q.
      block_q: tokens of a tile.
      longest: bound on the tokens of a row.
      skip_single: rows of one token get no tile.
    Returns:
      [TILE_FIELDS, R] int32: base, first of block_q tokens in [0, T); first and end, the tile's own among these (0 of them in a spare
      tile); row; pos, position of token `base`, of use from `first` on; kv_end, keys that the last query sees; kv_len of the row.
    """
    num_rows = kv_lens.shape[0]
    most = -(-num_tokens // block_q)
    num_tiles = min((num_tokens + (num_rows + 1) * (block_q - 1)) // block_q, num_rows * -(-longest // block_q) + most)
    q_lens = jnp.diff(cu_q_lens, append=jnp.full((1,), num_tokens, jnp.int32))
    padded_kv_lens = jnp.concatenate([kv_lens, jnp.zeros((1,), jnp.int32)])
    counts = (q_lens + (block_q - 1)) // block_q
    if skip_single:
        counts = jnp.where((q_lens == 1) & (jnp.arange(num_rows + 1) < num_rows), 0, counts)
    end_tiles = jnp.cumsum(counts, dtype=jnp.int32)
    tiles = end_tiles[-1] - 1 - jnp.arange(num_tiles, dtype=jnp.int32)  # below 0: spare
    rows = jnp.minimum(jnp.sum(tiles[:, None] >= end_tiles, axis=1, dtype=jnp.int32), num_rows)
    offset = (tiles - (end_tiles - counts)[rows]) * block_q
    token = jnp.clip(cu_q_lens[rows] + offset, 0, num_tokens)
    own = jnp.where(tiles < 0, 0, jnp.clip(q_lens[rows] - offset, 0, block_q))
    base = jnp.minimum(token, num_tokens - block_q)
    kv_len, first = padded_kv_lens[rows], token - base
    pos = kv_len - q_lens[rows] + offset - first
    kv_end = jnp.where((rows < num_rows) & (own > 0), pos + first + own, 0)
    return jnp.stack([base, first, first + own, jnp.minimum(rows, num_rows - 1), pos, kv_end, kv_len])
