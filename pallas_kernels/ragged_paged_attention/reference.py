"""The oracle of ragged paged attention: plain float32 jax.numpy, slow and simple. It shares no helper with the kernels."""

import jax
import jax.numpy as jnp
from jax import lax


def ragged_paged_attention(
    q: jax.Array,           # [T, N, H]
    k_pages: jax.Array,     # [P, K, Z, H]
    v_pages: jax.Array,     # [P, K, Z, H]
    page_table: jax.Array,  # [B, M]
    cu_q_lens: jax.Array,   # [B + 1]
    kv_lens: jax.Array,     # [B]
    *,
    scale: float,
    max_q_len: int | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:             # [T, N, H]
    """See api.ragged_paged_attention. Every row attends with all T tokens over its whole table, and keeps its own tokens' results.

    `max_q_len` is a promise about cu_q_lens that the reference has no use for.
    """
    del max_q_len
    num_tokens, num_heads, head_dim = q.shape
    _, num_kv_heads, page_size, _ = k_pages.shape
    num_rows, num_entries = page_table.shape
    num_keys = num_entries * page_size
    token = jnp.arange(num_tokens)
    key_pos = jnp.arange(num_keys)
    queries = q.astype(jnp.float32).reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)

    def add_row(b: jax.Array, out: jax.Array) -> jax.Array:
        kv_len, start, end = kv_lens[b], cu_q_lens[b], cu_q_lens[b + 1]
        written = (key_pos < kv_len)[:, None, None]
        # [M, K, Z, H] -> [S, K, H]; slots that hold no token of the row may hold NaN, and 0 * NaN is NaN.
        k, v = (jnp.moveaxis(pages[page_table[b]].astype(jnp.float32), 1, 2).reshape(num_keys, num_kv_heads, head_dim)
                for pages in (k_pages, v_pages))
        k, v = jnp.where(written, k, 0), jnp.where(written, v, 0)
        scores = scale * jnp.einsum("tkgh,skh->tkgs", queries, k, precision=lax.Precision.HIGHEST)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        query_pos = kv_len - end + token
        seen = (key_pos[None, :] <= query_pos[:, None]) & (key_pos < kv_len)[None, :]
        if sliding_window is not None:
            seen &= key_pos[None, :] > query_pos[:, None] - sliding_window
        weights = jax.nn.softmax(scores, axis=-1, where=seen[:, None, None, :])
        row_out = jnp.einsum("tkgs,skh->tkgh", weights, v, precision=lax.Precision.HIGHEST)
        mine = (token >= start) & (token < end)
        return jnp.where(mine[:, None, None], row_out.reshape(q.shape), out)

    return lax.fori_loop(0, num_rows, add_row, jnp.zeros(q.shape, jnp.float32)).astype(q.dtype)
