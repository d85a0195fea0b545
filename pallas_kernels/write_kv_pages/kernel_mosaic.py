"""Writing decode-sized batches of keys and values into pages in one Mosaic GPU launch, sm_80 and sm_90. It validates nothing."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.ragged import token_positions, token_rows


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
    """See api.write_kv_pages. One block of 128 threads a token and KV head; H is a multiple of 128. `interpret` runs it on the CPU."""
    num_tokens, num_kv_heads, head_dim = k.shape
    page_size = k_pages.shape[2]
    rows, valid = token_rows(cu_q_lens, num_tokens)
    # Position -1 marks padding, which the kernel sends to the null page.
    positions = jnp.where(valid, token_positions(rows, cu_q_lens, kv_lens), -1)
    layout = plgpu.Layout.WG_STRIDED((head_dim,), vec_size=1)

    def body(k_pool, v_pool, k_ref, v_ref, table_ref, rows_ref, positions_ref):  # type: ignore[no-untyped-def]
        token, head = lax.axis_index("token"), lax.axis_index("head")
        pos = positions_ref[token]
        held = jnp.maximum(pos, 0)
        page = jnp.where(pos < 0, 0, table_ref[rows_ref[token], lax.div(held, jnp.int32(page_size))])
        slot = lax.rem(held, jnp.int32(page_size))
        for pool, new in ((k_pool, k_ref), (v_pool, v_ref)):
            pool[page, head, slot] = plgpu.load(new.at[token, head], layout=layout)

    # plgpu.kernel has no input_output_aliases: references to the pools let XLA update them in place where they are donated.
    pools = jax.new_ref(k_pages), jax.new_ref(v_pages)
    mosaic.kernel(body, out_type=(), grid=(num_tokens, num_kv_heads), grid_names=("token", "head"), kernel_name="write_kv_pages",
                 interpret=interpret)(*pools, k, v, page_table, rows, positions)
    return jax.freeze(pools[0]), jax.freeze(pools[1])
