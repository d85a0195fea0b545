"""Flash attention in plain jax.numpy, for CPU and any GPU, differentiable by JAX in both modes. It validates nothing: api.py has.

Queries are taken in tiles, keys in blocks with an online softmax; a block that no query of the tile sees is passed over. Both loops are
scans whose steps are recomputed in the backward pass, so that memory stays at one tile's scores, and one tile's accumulators, forward and
backward.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.flash_attention.config import XlaConfig

# Below every score, but finite: exp(-inf - M_FLOOR) is 0 and exp(M_FLOOR - M_FLOOR) is 1, so fully masked blocks change nothing.
M_FLOOR = -1e30


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Masking:
    """Static parameters of the scores."""

    causal: bool
    scale: float
    sliding_window: int | None
    softcap: float | None
    widen: bool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Queries:
    """A tile of queries, or all of them with the tiles' axis in front."""

    q: jax.Array        # [B, X, K, G, H]
    pos: jax.Array      # [B, X]
    segment: jax.Array  # [B, X], -1 for padding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Keys:
    """A block of keys and values, or all of them with the blocks' axis in front."""

    k: jax.Array        # [B, Y, K, H]
    v: jax.Array        # [B, Y, K, H]
    pos: jax.Array      # [B, Y]
    segment: jax.Array  # [B, Y], -2 for padding: no query's


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
    config: XlaConfig,
) -> jax.Array:                             # [B, T, N, H]
    """See api.flash_attention; `config` holds the tile sizes."""
    num_rows, num_tokens, num_heads, _ = q.shape
    num_keys, num_kv_heads = k.shape[1:3]
    q_len = jnp.full((num_rows,), num_tokens, jnp.int32) if q_lengths is None else q_lengths
    kv_len = jnp.full((num_rows,), num_keys, jnp.int32) if kv_lengths is None else kv_lengths
    q_pos, q_segment = _positions(q_len, kv_len - q_len, q_segment_ids, num_tokens, padding=-1)
    kv_pos, kv_segment = _positions(kv_len, jnp.zeros_like(kv_len), kv_segment_ids, num_keys, padding=-2)
    # Padding may hold NaN, and 0 * NaN is NaN, in the products and in their derivatives.
    q = jnp.where((q_segment >= 0)[:, :, None, None], q, 0).reshape(num_rows, num_tokens, num_kv_heads, num_heads // num_kv_heads, -1)
    k, v = (jnp.where((kv_segment >= 0)[:, :, None, None], x, 0) for x in (k, v))
    queries = _Queries(q=_cut(q, config.block_q), pos=_cut(q_pos, config.block_q), segment=_cut(q_segment, config.block_q, -1))
    keys = _Keys(k=_cut(k, config.block_kv), v=_cut(v, config.block_kv), pos=_cut(kv_pos, config.block_kv),
                 segment=_cut(kv_segment, config.block_kv, -2))
    masking = _Masking(causal=causal, scale=scale, sliding_window=sliding_window, softcap=softcap, widen=config.widen)
    tile = jax.checkpoint(lambda keys, queries: _attend_tile(queries, keys, masking).astype(q.dtype), prevent_cse=False)
    _, out = lax.scan(lambda _, part: (None, tile(keys, part)), None, queries)                      # [R, B, K, G, X, H]
    out = jnp.moveaxis(out, (0, 4), (1, 2))                                                         # [B, R, X, K, G, H]
    return out.reshape(num_rows, -1, *out.shape[3:])[:, :num_tokens].reshape(num_rows, num_tokens, num_heads, -1)


def _positions(length: jax.Array, first: jax.Array, segment_ids: jax.Array | None, num_tokens: int, *,
               padding: int) -> tuple[jax.Array, jax.Array]:
    """Positions [B, num_tokens], and segments [B, num_tokens] with `padding` past the rows' lengths and for negative ids."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    held = token < length[:, None]
    segment = jnp.zeros(held.shape, jnp.int32)
    if segment_ids is not None:
        held, segment = held & (segment_ids >= 0), segment_ids
    return first[:, None] + token, jnp.where(held, segment, padding)


def _cut(x: jax.Array, length: int, fill: int = 0) -> jax.Array:
    """[B, T, ...] as [ceil(T / length), B, length, ...]."""
    pad = -x.shape[1] % length
    if pad:
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, length, *x.shape[2:]), 1, 0)


def _attend_tile(queries: _Queries, keys: _Keys, masking: _Masking) -> jax.Array:
    """Online softmax of one tile over all blocks of keys: [B, K, G, X, H] float32, 0 where a query sees no key."""
    num_rows, block_q, num_kv_heads, num_groups, head_dim = queries.q.shape
    stat = jnp.zeros((num_rows, num_kv_heads, num_groups, block_q, 1), jnp.float32)
    carry = stat + M_FLOOR, stat, jnp.zeros((*stat.shape[:-1], head_dim), jnp.float32)
    step = jax.checkpoint(lambda carry, block: _attend_block(queries, block, carry, masking), prevent_cse=False)
    (_, denom, acc), _ = lax.scan(lambda carry, block: (step(carry, block), None), carry, keys)
    return acc / jnp.where(denom == 0, 1, denom)


def _attend_block(queries: _Queries, block: _Keys, carry: tuple[jax.Array, jax.Array, jax.Array],
                  masking: _Masking) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One step of the online softmax, or nothing where no query sees a key of the block."""
    query_pos, key_pos = queries.pos[:, :, None], block.pos[:, None, :]
    seen = queries.segment[:, :, None] == block.segment[:, None, :]                                 # [B, X, Y]
    if masking.causal:
        seen &= key_pos <= query_pos
    if masking.sliding_window is not None:
        seen &= key_pos > query_pos - masking.sliding_window

    def attend(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        m, denom, acc = carry
        q, k, v = (x.astype(jnp.float32) if masking.widen else x for x in (queries.q, block.k, block.v))
        precision = lax.Precision.HIGHEST if masking.widen else None
        scores = jnp.einsum("bxkgh,bykh->bkgxy", q, k, precision=precision, preferred_element_type=jnp.float32) * masking.scale
        if masking.softcap is not None:
            scores = jnp.tanh(scores / masking.softcap) * masking.softcap
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        # The result does not depend on the maximum that is subtracted, and so no derivative goes through it.
        new_m = lax.stop_gradient(jnp.maximum(m, jnp.max(scores, axis=-1, keepdims=True)))
        p, alpha = jnp.exp(scores - new_m), jnp.exp(m - new_m)
        part = jnp.einsum("bkgxy,bykh->bkgxh", p.astype(v.dtype), v, precision=precision, preferred_element_type=jnp.float32)
        return new_m, denom * alpha + jnp.sum(p, axis=-1, keepdims=True), acc * alpha + part

    return lax.cond(jnp.any(seen), attend, lambda carry: carry, carry)
