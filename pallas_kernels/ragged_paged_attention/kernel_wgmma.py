"""Paged prefill attention on Hopper's warpgroup tensor cores (sm_90): rows of any lengths, chunks over earlier pages. It validates nothing.

A block is three warpgroups that own (query head, tile of 128 tokens of one row): two attend for 64 tokens each, the third fetches. The two
take turns: while one has the tensor cores (P V of a block of keys, then Q K of the next), the other does its softmax.

    fetcher    wait until slot is free | copy the block's pages of K, of V ............................ | last V: clear dead slots
    attender 0   QK | softmax | PV QK | softmax | PV QK ...
    attender 1        QK      | softmax | PV QK | softmax ...      `turn` is where they meet

Slots at or past the row's kv_len may hold NaN, which P = 0 does not stop. They lie in the last block only; its V goes by a pair of barriers
of its own, between which the fetcher zeroes them.

Source: 'FlashAttention-3', https://arxiv.org/abs/2407.08608, section 3.1.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mosaic import M_FLOOR, across, constant
from pallas_kernels.ragged import TILE_FIELDS, query_tiles
from pallas_kernels.ragged_paged_attention.config import WgmmaConfig

GROUP_Q = 64        # tokens of one attending warpgroup, the height of a wgmma
FETCHER = 2         # number of the warpgroup that copies
CLEAR_ROWS = 32     # V slots zeroed at once: the fetcher has few registers
ATTENDER_REGISTERS, FETCHER_REGISTERS = 232, 40


def prefill_attention(
    q: jax.Array,           # [T, N, H]
    k_pages: jax.Array,     # [P, K, Z, H]
    v_pages: jax.Array,     # [P, K, Z, H]
    page_table: jax.Array,  # [B, M]
    cu_q_lens: jax.Array,   # [B + 1]
    kv_lens: jax.Array,     # [B]
    *,
    scale: float,
    max_q_len: int | None,
    skip_single: bool,
    sliding_window: int | None,
    softcap: float | None,
    config: WgmmaConfig,
    interpret: bool,
) -> jax.Array:             # [T, N, H]
    """See api.ragged_paged_attention. `interpret` runs it on the CPU, slowly, for tests.

    With `skip_single` rows of one token get no output: another kernel attends for them (mixed.py).
    """
    num_tokens, block_q = q.shape[0], 2 * GROUP_Q
    if num_tokens < block_q:
        q = jnp.pad(q, ((0, block_q - num_tokens), (0, 0), (0, 0)))
    tiles = query_tiles(cu_q_lens, kv_lens, q.shape[0], block_q, min(max_q_len or num_tokens, num_tokens),
                        skip_single=skip_single)
    run = _tile_kernel(q, k_pages, page_table, num_tiles=tiles.shape[1], scale=scale, sliding_window=sliding_window, softcap=softcap,
                       config=config, interpret=interpret)
    return run(q, k_pages, v_pages, page_table, tiles)[:num_tokens]


def _tile_kernel(q: jax.Array, k_pages: jax.Array, page_table: jax.Array, *, num_tiles: int, scale: float, sliding_window: int | None,
                 softcap: float | None, config: WgmmaConfig, interpret: bool) -> Any:
    """The kernel: (q [T, N, H], k_pages, v_pages, page_table, tiles [TILE_FIELDS, R]) -> [T, N, H]."""
    num_heads, (_, num_kv_heads, page_size, head_dim) = q.shape[1], k_pages.shape
    dtype, block_kv, stages, layout = k_pages.dtype, config.block_kv, config.stages, plgpu.Layout.WGMMA
    block_pages, last_entry = block_kv // page_size, page_table.shape[1] - 1

    def body(q_ref, k_ref, v_ref, table_ref, tiles_ref, out_ref, q_smem, k_smem, v_smem, k_full, v_full, k_free, v_free,  # type: ignore[no-untyped-def]
             last_v_full, last_v_clear, turn_barrier):
        head, tile, group = lax.axis_index("head"), lax.axis_index("tile"), lax.axis_index("group")
        base, first, end, row, pos, kv_end, kv_len = (tiles_ref[i, tile] for i in range(TILE_FIELDS))
        start = jnp.int32(0)
        if sliding_window is not None:
            start = lax.div(jnp.maximum(pos + first - (sliding_window - 1), 0), jnp.int32(block_kv))
        count = jnp.maximum(lax.div(kv_end + (block_kv - 1), jnp.int32(block_kv)) - start, 0)
        has_dead_slots = (start + count) * block_kv > kv_len

        def slot_of(i: jax.Array) -> jax.Array:
            return lax.rem(i, jnp.int32(stages))

        def is_cleared(i: jax.Array) -> jax.Array:
            return has_dead_slots & (i == count - 1)

        def fetch() -> None:
            plgpu.set_max_registers(FETCHER_REGISTERS, action="decrease")
            kv_head = lax.div(head, jnp.int32(num_heads // num_kv_heads))

            def copy(pages_ref: Any, smem: Any, i: jax.Array, barrier: Any) -> None:
                for part in range(block_pages):
                    # Entries past the row's last page point at the null page; past the table's end the last entry serves.
                    page = table_ref[row, jnp.minimum((start + i) * block_pages + part, last_entry)]
                    plgpu.copy_gmem_to_smem(pages_ref.at[page, kv_head], smem.at[slot_of(i), pl.ds(part * page_size, page_size)], barrier)

            def copy_both(i: jax.Array, wait: Callable[[Any], None]) -> None:
                slot = slot_of(i)
                wait(k_free.at[slot])
                copy(k_ref, k_smem, i, k_full.at[slot])
                wait(v_free.at[slot])
                lax.cond(is_cleared(i), lambda: copy(v_ref, v_smem, i, last_v_full), lambda: copy(v_ref, v_smem, i, v_full.at[slot]))

            fresh = jnp.minimum(count, stages)
            lax.fori_loop(0, fresh, lambda i, _: copy_both(i, lambda barrier: None), None)
            lax.fori_loop(fresh, count, lambda i, _: copy_both(i, plgpu.barrier_wait), None)

            @pl.when(has_dead_slots & (count > 0))
            def _() -> None:
                slot = slot_of(count - 1)
                plgpu.barrier_wait(last_v_full)
                for low in range(0, block_kv, CLEAR_ROWS):
                    mosaic.clear_rows(v_smem.at[slot, pl.ds(low, CLEAR_ROWS)], kv_len - (start + count - 1) * block_kv - low)
                plgpu.commit_smem()  # wgmma reads it by way of the asynchronous proxy
                plgpu.barrier_arrive(last_v_clear)

            def drain(slot: jax.Array, _: None) -> None:
                for barriers in (k_free, v_free):
                    plgpu.barrier_wait(barriers.at[slot])

            lax.fori_loop(0, fresh, drain, None)

        def attend() -> None:
            plgpu.set_max_registers(ATTENDER_REGISTERS, action="increase")
            own = pos + group * GROUP_Q  # position of the warpgroup's first token
            # By way of registers: a TMA copy into a tiled ref would have to begin at a multiple of 8 tokens.
            mosaic.load_wide(q_smem.at[group], q_ref.at[pl.ds(base + group * GROUP_Q, GROUP_Q), head])
            plgpu.commit_smem()

            def turn() -> None:
                plgpu.barrier_arrive(turn_barrier)
                plgpu.barrier_wait(turn_barrier)

            def masked(scores: jax.Array, first_key: jax.Array) -> jax.Array:
                query = plgpu.broadcasted_iota(jnp.int32, (GROUP_Q, block_kv), 0, layout=layout) + (own - first_key)
                key = plgpu.broadcasted_iota(jnp.int32, (GROUP_Q, block_kv), 1, layout=layout)
                seen = key <= query if sliding_window is None else (key <= query) & (key > query - sliding_window)
                return jnp.where(seen, scores, M_FLOOR)

            def step(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array], mask: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
                acc, m, denom = carry
                slot = slot_of(i)

                def products(scores_ref: Any) -> jax.Array:
                    plgpu.wgmma(scores_ref, q_smem.at[group], k_smem.at[slot].T)
                    turn()  # its products are issued: the other one may have the tensor cores
                    return scores_ref[...]

                scores = pl.run_scoped(products, plgpu.ACC((GROUP_Q, block_kv), jnp.float32))
                plgpu.barrier_arrive(k_free.at[slot])
                if softcap is not None:
                    scores = mosaic.scaled_scores(scores, scale, softcap)
                if mask:
                    scores = masked(scores, (start + i) * block_kv)
                factor = scale * mosaic.LOG2_E if softcap is None else 1.0  # folded into the exponent's multiply-add
                new_m = jnp.maximum(m, jnp.max(scores, axis=1) * factor)
                alpha = jnp.exp2(m - new_m)
                p = jnp.exp2(scores * factor - across(new_m, block_kv))
                acc = acc * across(alpha, head_dim)
                denom = denom * alpha + jnp.sum(p, axis=1)
                weights = p.astype(dtype)
                acc, new_m, denom, weights = lax.optimization_barrier((acc, new_m, denom, weights))
                plgpu.barrier_arrive(turn_barrier)
                if mask:
                    lax.cond(is_cleared(i), lambda: plgpu.barrier_wait(last_v_clear), lambda: plgpu.barrier_wait(v_full.at[slot]))
                else:
                    plgpu.barrier_wait(v_full.at[slot])
                plgpu.barrier_wait(turn_barrier)

                def await_next() -> None:
                    pl.when(i + 1 < count)(lambda: plgpu.barrier_wait(k_full.at[slot_of(i + 1)]))

                def weigh(acc_ref: Any) -> None:
                    plgpu.wgmma(acc_ref, weights, v_smem.at[slot])
                    await_next()

                if interpret:  # which knows no left operand in registers
                    acc = acc + lax.dot(weights, v_smem[slot], preferred_element_type=jnp.float32)
                    await_next()
                else:
                    acc = pl.run_state(weigh)(plgpu.ACC.init(acc))
                plgpu.barrier_arrive(v_free.at[slot])
                return acc, new_m, denom

            pl.when(count > 0)(lambda: plgpu.barrier_wait(k_full.at[0]))
            pl.when(group == 1)(turn)
            carry = (constant((GROUP_Q, head_dim), 0, layout), constant((GROUP_Q,), M_FLOOR, layout.reduce(1)),
                     constant((GROUP_Q,), 0, layout.reduce(1)))
            if sliding_window is None:
                # Blocks that every token of the warpgroup sees whole; those with dead slots are never among them.
                open_blocks = jnp.clip(lax.div(own + 1, jnp.int32(block_kv)), 0, count - has_dead_slots.astype(jnp.int32))
                carry = lax.fori_loop(0, open_blocks, lambda i, c: step(i, c, False), carry)
            else:
                open_blocks = jnp.int32(0)
            acc, _, denom = lax.fori_loop(open_blocks, count, lambda i, c: step(i, c, True), carry)
            pl.when(group == 0)(turn)
            # Only the tile of padding tokens has no key: its accumulator is 0, and so is its output.
            out = acc * across(1 / jnp.where(denom == 0, 1.0, denom), head_dim)
            low, high = (jnp.clip(bound - group * GROUP_Q, 0, GROUP_Q) for bound in (first, end))
            mosaic.store_wide(out_ref.at[pl.ds(base + group * GROUP_Q, GROUP_Q), head], out.astype(q.dtype), low, high, q_smem.at[group],
                              interpret=interpret)

        # A tile without tokens has nothing to write: it ends before it loads anything.
        pl.when(end > first)(lambda: lax.cond(group == FETCHER, fetch, attend))

    barrier = plgpu.Barrier
    scratch = [
        *(mosaic.tiled_rows(shape, dtype) for shape in ((2, GROUP_Q, head_dim), *[(stages, block_kv, head_dim)] * 2)),
        *[barrier(num_arrivals=block_pages, num_barriers=stages)] * 2, *[barrier(num_arrivals=2, num_barriers=stages)] * 2,
        barrier(num_arrivals=block_pages), barrier(), barrier(num_arrivals=2)]
    return mosaic.kernel(
        body, out_type=jax.ShapeDtypeStruct(q.shape, q.dtype), grid=(num_heads, num_tiles), grid_names=("head", "tile"), num_threads=3,
        thread_name="group", kernel_name="paged_prefill_attention_wgmma", scratch_types=scratch, interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=softcap is None))
