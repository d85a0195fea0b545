"""Rotation and write in one Mosaic GPU launch, sm_80 and sm_90. It validates nothing: api.py has.

One block of 128 threads owns a token and a KV head. Its rows, of which it holds the two halves that rotate into each other:

    row      0 .. G - 1     G      G + 1     G + 2 ..
    holds    queries        key    value     nothing, up to a tile of 16 rows
    goes to  q              k_pages v_pages
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.ragged import token_positions, token_rows

TILE_ROWS = 16


def rotary_kv_write(
    qkv: jax.Array,         # [T, K, G + 2, H]
    query_cos: jax.Array,   # [T, H // 2]
    query_sin: jax.Array,   # [T, H // 2]
    key_cos: jax.Array,     # [T, H // 2]
    key_sin: jax.Array,     # [T, H // 2]
    k_pages: jax.Array,     # [P, K, Z, H]
    v_pages: jax.Array,     # [P, K, Z, H]
    page_table: jax.Array,  # [B, M]
    cu_q_lens: jax.Array,   # [B + 1]
    kv_lens: jax.Array,     # [B]
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See api.rotary_kv_write. H is a multiple of 64. `interpret` runs it on the CPU."""
    num_tokens, num_kv_heads, members, head_dim = qkv.shape
    page_size, groups, half = k_pages.shape[2], members - 2, head_dim // 2
    rows, valid = token_rows(cu_q_lens, num_tokens)
    # Position -1 marks padding, which the kernel sends to the null page.
    positions = jnp.where(valid, token_positions(rows, cu_q_lens, kv_lens), -1)
    shape = (-(-members // TILE_ROWS) * TILE_ROWS, half)
    layout = plgpu.Layout.MMA_ACC(qkv.dtype, m_warps=1)

    def body(k_pool, v_pool, qkv_ref, *refs):  # type: ignore[no-untyped-def]
        query_cos_ref, query_sin_ref, key_cos_ref, key_sin_ref, table_ref, rows_ref, positions_ref, q_ref = refs
        token, head = lax.axis_index("token"), lax.axis_index("head")
        pos = positions_ref[token]
        held = jnp.maximum(pos, 0)
        page = jnp.where(pos < 0, 0, table_ref[rows_ref[token], lax.div(held, jnp.int32(page_size))])
        slot = lax.rem(held, jnp.int32(page_size))
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)

        def turns(query_ref, key_ref):  # type: ignore[no-untyped-def]
            query, key = (lax.broadcast_in_dim(plgpu.load(ref.at[token], layout=layout.reduce(0), optimized=False), shape, (1,))
                          for ref in (query_ref, key_ref))
            return jnp.where(row == groups, key, query)

        cos, sin = turns(query_cos_ref, key_cos_ref), turns(query_sin_ref, key_sin_ref)
        first, second = (mosaic.load_rows(qkv_ref.at[token, head, pl.ds(0, members), pl.ds(start, half)], shape[0], layout,
                                          interpret=interpret) for start in (0, half))
        a, b = first.astype(jnp.float32), second.astype(jnp.float32)
        rotated = (a * cos - b * sin).astype(qkv.dtype), (b * cos + a * sin).astype(qkv.dtype)
        for start, turned, plain in zip((0, half), rotated, (first, second), strict=True):
            columns = pl.ds(start, half)
            mosaic.store_rows(q_ref.at[token, pl.ds(head * groups, groups), columns], turned, 0, groups, layout, interpret=interpret)
            for pool, value, member in ((k_pool, turned, groups), (v_pool, plain, groups + 1)):
                mosaic.store_rows(pool.at[page, head, pl.ds(0, page_size), columns], value, member, member + 1, layout,
                                  shift=slot - member, interpret=interpret)

    # plgpu.kernel has no input_output_aliases: references to the pools let XLA update them in place where they are donated.
    pools = jax.new_ref(k_pages), jax.new_ref(v_pages)
    q = mosaic.kernel(
        body, out_type=jax.ShapeDtypeStruct((num_tokens, num_kv_heads * groups, head_dim), qkv.dtype), grid=(num_tokens, num_kv_heads),
        grid_names=("token", "head"), kernel_name="rotary_kv_write", interpret=interpret,
    )(*pools, qkv, query_cos, query_sin, key_cos, key_sin, page_table, rows, positions)
    return q, jax.freeze(pools[0]), jax.freeze(pools[1])
