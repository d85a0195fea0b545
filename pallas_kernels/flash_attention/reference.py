"""The oracle of flash attention: plain float32 jax.numpy, all scores at once. It shares no helper with the kernels."""

import jax
import jax.numpy as jnp
from jax import lax


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
) -> jax.Array:                             # [B, T, N, H]
    """See api.flash_attention."""
    num_rows, num_tokens, num_heads, head_dim = q.shape
    num_keys, num_kv_heads = k.shape[1:3]
    q_len = jnp.full((num_rows,), num_tokens) if q_lengths is None else q_lengths
    kv_len = jnp.full((num_rows,), num_keys) if kv_lengths is None else kv_lengths
    token, key_pos = jnp.arange(num_tokens), jnp.arange(num_keys)
    asked, held = token < q_len[:, None], key_pos < kv_len[:, None]                             # [B, T], [B, S]
    if q_segment_ids is not None and kv_segment_ids is not None:
        asked, held = asked & (q_segment_ids >= 0), held & (kv_segment_ids >= 0)
    seen = asked[:, :, None] & held[:, None, :]                                                 # [B, T, S]
    query_pos = (kv_len - q_len)[:, None] + token                                               # [B, T]
    if causal:
        seen &= key_pos <= query_pos[:, :, None]
    if sliding_window is not None:
        seen &= key_pos > query_pos[:, :, None] - sliding_window
    if q_segment_ids is not None and kv_segment_ids is not None:
        seen &= q_segment_ids[:, :, None] == kv_segment_ids[:, None, :]
    # What is padding may hold NaN, and 0 * NaN is NaN, in the products and in their derivatives.
    queries = jnp.where(asked[:, :, None, None], q, 0).astype(jnp.float32).reshape(num_rows, num_tokens, num_kv_heads, -1, head_dim)
    keys, values = (jnp.where(held[:, :, None, None], x, 0).astype(jnp.float32) for x in (k, v))
    scores = scale * jnp.einsum("btkgh,bskh->bkgts", queries, keys, precision=lax.Precision.HIGHEST)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    where = seen[:, None, None]
    weights = jnp.where(where, jax.nn.softmax(scores, axis=-1, where=where), 0)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, values, precision=lax.Precision.HIGHEST).reshape(q.shape)
    return jnp.where(jnp.any(seen, axis=2)[:, :, None, None], out, 0).astype(q.dtype)
