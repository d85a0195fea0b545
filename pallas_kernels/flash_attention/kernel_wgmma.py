"""Causal flash attention on Hopper's warpgroup tensor cores (sm_90), by the paged prefill kernel. It validates nothing: api.py has.

Keys and values are laid out as pages in one pass over them, which costs their bytes once more, little beside the products of a prefill or
a training step; the batch's queries are packed rows already. A row becomes three where lengths vary, since the kernel wants
every query to have a key:

    tokens of row b   | before the first key  | queries              | padding              |    T = all three
    paged row         | 3 b, no key: output 0 | 3 b + 1, kv_len keys | 3 b + 2, no key      |
"""

import jax
import jax.numpy as jnp

from pallas_kernels.flash_attention.config import WGMMA_PAGE_SIZE
from pallas_kernels.ragged_paged_attention import kernel_wgmma
from pallas_kernels.ragged_paged_attention.config import WgmmaConfig


def flash_attention(
    q: jax.Array,                       # [B, T, N, H]
    k: jax.Array,                       # [B, S, K, H]
    v: jax.Array,                       # [B, S, K, H]
    q_lengths: jax.Array | None,        # [B]
    kv_lengths: jax.Array | None,       # [B]
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    plain_rows: bool,
    config: WgmmaConfig,
    interpret: bool,
) -> jax.Array:                         # [B, T, N, H]
    """See api.flash_attention, of which this does causal=True without segments. `plain_rows`: every query of every row has a key."""
    num_rows, num_tokens, num_heads, head_dim = q.shape
    num_keys = k.shape[1]
    kv_len = jnp.full((num_rows,), num_keys, jnp.int32) if kv_lengths is None else kv_lengths
    q_len = jnp.full((num_rows,), num_tokens, jnp.int32) if q_lengths is None else q_lengths
    k_pages, v_pages = (_paged(x) for x in (k, v))
    page_table = jnp.arange(k_pages.shape[0], dtype=jnp.int32).reshape(num_rows, -1)
    starts = jnp.arange(num_rows, dtype=jnp.int32) * num_tokens
    if plain_rows:
        cu_q_lens, kv_lens = jnp.append(starts, num_rows * num_tokens), kv_len
    else:
        page_table = jnp.repeat(page_table, 3, axis=0)
        first, none = jnp.clip(q_len - kv_len, 0, q_len), jnp.zeros_like(kv_len)
        cu_q_lens = jnp.append(jnp.stack([starts, starts + first, starts + q_len], axis=1).reshape(-1), num_rows * num_tokens)
        kv_lens = jnp.stack([none, kv_len, none], axis=1).reshape(-1)
    out = kernel_wgmma.prefill_attention(
        q.reshape(num_rows * num_tokens, num_heads, head_dim), k_pages, v_pages, page_table, cu_q_lens.astype(jnp.int32), kv_lens, scale=scale,
        max_q_len=num_tokens, skip_single=False, sliding_window=sliding_window, softcap=softcap, config=config, interpret=interpret)
    return out.reshape(q.shape)


def _paged(x: jax.Array) -> jax.Array:
    """[B, S, K, H] as [B * ceil(S / Z), K, Z, H]."""
    num_rows, num_keys, num_kv_heads, head_dim = x.shape
    x = jnp.pad(x, ((0, 0), (0, -num_keys % WGMMA_PAGE_SIZE), (0, 0), (0, 0)))
    return x.reshape(-1, WGMMA_PAGE_SIZE, num_kv_heads, head_dim).swapaxes(1, 2)
