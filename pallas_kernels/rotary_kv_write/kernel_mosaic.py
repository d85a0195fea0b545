"""Rotation and write in one Mosaic GPU launch, sm_80 and sm_90. It validates nothing: api.py has.

The rows of qkv lie one behind the other, T tokens, K KV heads of each, G + 2 members of each of these:

    member   0 .. G - 1     G        G + 1
    holds    queries        key      value
    goes to  q              k_pages  v_pages

A thread takes 8 values of a row's first half and the 8 of its second half that turn with them, each in one access, and finds from their
number alone where they go. So a block takes the pairs that come next, whatever tokens and heads they belong to, and nothing is padded.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic, vectors
from pallas_kernels.rotary_kv_write.config import MOSAIC_VECTOR, mosaic_block


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
    """See api.rotary_kv_write. H is a multiple of 16. `interpret` runs it on the CPU."""
    num_tokens, num_kv_heads, members, head_dim = qkv.shape
    page_size, groups, half = k_pages.shape[2], members - 2, head_dim // 2
    row_pairs = half // MOSAIC_VECTOR
    num_pairs = num_tokens * num_kv_heads * members * row_pairs
    block = mosaic_block(num_pairs)
    load, store = functools.partial(vectors.load, interpret=interpret), functools.partial(vectors.store, interpret=interpret)

    def body(k_pool, v_pool, qkv_ref, *refs):  # type: ignore[no-untyped-def]
        query_cos_ref, query_sin_ref, key_cos_ref, key_sin_ref, slots_ref, q_ref = refs
        pair = vectors.numbers(lax.axis_index("block"), block)
        held = jnp.minimum(pair, num_pairs - 1)  # those beyond the last one read it again and write nothing
        row, column = held // row_pairs, held % row_pairs * MOSAIC_VECTOR
        head, member = row // members, row % members  # KV heads are counted over all tokens
        token, columns = head // num_kv_heads, (column, column + half)
        is_query, is_key, is_value = ((pair < num_pairs) & mine for mine in (member < groups, member == groups, member > groups))

        # All that is read is read before anything is written, so that a thread waits for memory once.
        halves = first, second = [load(qkv_ref, row, at, MOSAIC_VECTOR) for at in columns]
        sin, cos = (load(query, token, column, MOSAIC_VECTOR, other=key, from_other=is_key)
                    for query, key in ((query_sin_ref, key_sin_ref), (query_cos_ref, key_cos_ref)))
        slot = load(slots_ref, token, jnp.zeros_like(token), 1)

        a, b = first.astype(jnp.float32), second.astype(jnp.float32)
        turned = [x.astype(qkv.dtype) for x in (a * cos - b * sin, a * sin + b * cos)]
        pool_row = (slot // page_size * num_kv_heads + head % num_kv_heads) * page_size + slot % page_size
        for ref, to, values, mine in ((q_ref, head * groups + member, turned, is_query), (k_pool, pool_row, turned, is_key),
                                      (v_pool, pool_row, halves, is_value)):
            for value, at in zip(values, columns, strict=True):
                store(ref, value, to, at, mine)

    # plgpu.kernel has no input_output_aliases: references to the pools let XLA update them in place where they are donated.
    pools = jax.new_ref(k_pages), jax.new_ref(v_pages)
    slots = _slots(page_table, cu_q_lens, kv_lens, num_tokens, page_size)
    q = mosaic.kernel(
        body, out_type=jax.ShapeDtypeStruct((num_tokens, num_kv_heads * groups, head_dim), qkv.dtype), grid=(-(-num_pairs // block),),
        grid_names=("block",), kernel_name="rotary_kv_write", interpret=interpret,
    )(*pools, qkv, query_cos, query_sin, key_cos, key_sin, slots[:, None])
    return q, jax.freeze(pools[0]), jax.freeze(pools[1])


def _slots(page_table: jax.Array, cu_q_lens: jax.Array, kv_lens: jax.Array, num_tokens: int, page_size: int) -> jax.Array:
    """Where each token's key and value go, slots counted over all pages: [T] uint32. Padding goes to the null page's first.

    Every token looks at every row, so that XLA makes one launch of it: finding the row first would take another.
    """
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
    mine = (cu_q_lens[:-1] <= tokens) & (tokens < cu_q_lens[1:])  # [T, B], at most one True a token
    position = jnp.where(mine, tokens - cu_q_lens[1:] + kv_lens, 0).astype(jnp.uint32)
    page = page_table[jnp.arange(kv_lens.shape[0]), position // page_size].astype(jnp.uint32)
    return jnp.sum(jnp.where(mine, page * page_size + position % page_size, 0), axis=1, dtype=jnp.uint32)
