"""Keys and values into pages in one Mosaic GPU launch, sm_80 and sm_90. It validates nothing: api.py has.

A thread takes 16 bytes of k and those of v at the same place, and finds from their number alone where they go. So a block takes the vectors
that come next, whatever tokens and heads they belong to, and nothing is padded.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic, vectors
from pallas_kernels.write_kv_pages.config import MOSAIC_FAN, MOSAIC_VECTOR, mosaic_block


def write_kv_pages(
    k: jax.Array,           # [T, K, H]
    v: jax.Array,           # [T, K, H]
    k_pages: jax.Array,     # [P, K, Z, H]
    v_pages: jax.Array,     # [P, K, Z, H]
    page_table: jax.Array,  # [B, M]
    cu_q_lens: jax.Array,   # [B + 1]
    kv_lens: jax.Array,     # [B]
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """See api.write_kv_pages. 16 bytes divide a head. `interpret` runs it on the CPU."""
    num_tokens, num_kv_heads, head_dim = k.shape
    page_size, num_rows, width = k_pages.shape[2], kv_lens.shape[0], MOSAIC_VECTOR[k.dtype.name]
    head_vectors = head_dim // width
    num_vectors = num_tokens * num_kv_heads * head_vectors
    block = mosaic_block(num_vectors)
    load, store = functools.partial(vectors.load, interpret=interpret), functools.partial(vectors.store, interpret=interpret)

    def body(k_pool, v_pool, k_ref, v_ref, table_ref, cu_ref, lens_ref):  # type: ignore[no-untyped-def]
        # What would follow the last vector is that one again, written twice alike.
        number = jnp.minimum(vectors.numbers(lax.axis_index("block"), block), num_vectors - 1)
        head, column = number // head_vectors, number % head_vectors * width  # KV heads are counted over all tokens
        token, zero = head // num_kv_heads, jnp.zeros_like(number)
        values = [load(ref, head, column, width) for ref in (k_ref, v_ref)]

        # The token's row, found here since a launch that finds it takes as long as a small write. For padding it is B.
        row = _last(lambda b: load(cu_ref, zero, b, 1).astype(jnp.uint32) <= token, zero, num_rows)
        valid = row < num_rows
        row = jnp.where(valid, row, 0)
        end, kv_len = (load(ref, zero, b, 1).astype(jnp.uint32) for ref, b in ((cu_ref, row + 1), (lens_ref, row)))
        position = jnp.where(valid, token - end + kv_len, token % page_size)  # padding is spread over the null page
        page = jnp.where(valid, load(table_ref, row, position // page_size, 1).astype(jnp.uint32), 0)

        # Every thread writes: under a condition, its reads would be put there too, one behind the other.
        pool_row = (page * num_kv_heads + head % num_kv_heads) * page_size + position % page_size
        for pool, value in zip((k_pool, v_pool), values, strict=True):
            store(pool, value, pool_row, column, jnp.full_like(number, True, jnp.bool_))

    # plgpu.kernel has no input_output_aliases: references to the pools let XLA update them in place where they are donated.
    pools = jax.new_ref(k_pages), jax.new_ref(v_pages)
    mosaic.kernel(body, out_type=(), grid=(-(-num_vectors // block),), grid_names=("block",), kernel_name="write_kv_pages",
                 interpret=interpret)(*pools, k, v, page_table, cu_q_lens, kv_lens)
    return jax.freeze(pools[0]), jax.freeze(pools[1])


def _last(holds: Callable[[jax.Array], jax.Array], zero: jax.Array, most: int) -> jax.Array:
    """The largest number from 0 to `most` for which something holds that holds for 0 and, where it does not, for nothing larger.

    It asks for MOSAIC_FAN - 1 numbers at once, since answers come from memory: some more of them cost less than waiting once more.
    """
    found, step = zero, 1
    while step * MOSAIC_FAN <= most:
        step *= MOSAIC_FAN
    while step:
        asked = [jnp.minimum(found + i * step, most) for i in range(1, min(MOSAIC_FAN, most // step + 1))]
        found = jnp.minimum(found + sum(jnp.where(holds(x), jnp.uint32(step), jnp.uint32(0)) for x in asked), most)
        step //= MOSAIC_FAN
    return found
