"""Ragged paged attention: contract, validation and the ordered table of implementations. It computes nothing itself."""

import dataclasses
import functools
from collections.abc import Callable

import jax

from pallas_kernels.contract import ArrayLike, check_float, check_number, check_pages, check_rank, check_rows, dtype_name
from pallas_kernels.dispatch import (
    Choice,
    ContractError,
    Implementation,
    Target,
    choose,
    current_target,
    implementation_scope,
    lowered_once,
    supports_all,
    supports_unless,
    traced_once,
)
from pallas_kernels.ragged_paged_attention import kernel_xla, reference
from pallas_kernels.ragged_paged_attention.config import (
    AttentionSpec,
    mosaic_config,
    mosaic_prefill_config,
    mosaic_refusal,
    triton_config,
    triton_refusal,
    wgmma_config,
    wgmma_refusal,
    xla_config,
)
from pallas_kernels.ragged_paged_attention.mixed import FEW_ROWS, attend_mixed

OP = "ragged_paged_attention"


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
    implementation: str | None = None,
) -> jax.Array:             # [T, N, H]
    """Causal attention of B sequences' new tokens over their paged keys and values: prefill, chunked prefill, decode or a mixture.

    Row b owns the tokens t in [cu_q_lens[b], cu_q_lens[b + 1]), and its last token sits at position kv_lens[b] - 1, so that

        pos(t)      = kv_lens[b] - cu_q_lens[b + 1] + t
        score(t, s) = scale * q[t, n] . K_b[s, n // G]        capped as softcap * tanh(score / softcap) where asked for
        out[t, n]   = sum over s of softmax_s(score(t, s)) * V_b[s, n // G],   pos(t) - sliding_window < s <= pos(t)

    where K_b[s] is slot s % Z of page page_table[b, s // Z], and G = N // K. The new tokens' keys and values are already in the
    pages (`write_kv_pages`). Scores, softmax and accumulation are float32, whatever the dtypes.

    At the edges: lengths need not be multiples of a page or of any tile. An empty row (no token) has no output, whatever its kv_len;
    padding rows are empty rows with kv_len 0. Tokens from cu_q_lens[B] on are padding, and their output is 0. Page 0 is the null
    page that unused table entries point at. Contents of the null page, of pages that no row names and of slots at or past a row's
    kv_len never reach an output, NaN and infinity included. A row's output does not depend on its neighbours, bit for bit, as long
    as the arrays' shapes stay the same.

    Args:
      q: [T, N, H] float32, bfloat16 or float16 queries, rows packed in order, padding tokens last.
      k_pages: [P, K, Z, H] key pages, float32, bfloat16 or float16; Z is a multiple of 16 from 16 to 128, K divides N.
      v_pages: [P, K, Z, H] value pages of the same dtype.
      page_table: [B, M] int32 page numbers in [0, P).
      cu_q_lens: [B + 1] int32, ascending from 0; cu_q_lens[B] <= T.
      kv_lens: [B] int32 tokens of each row, the new ones included; at least the row's new tokens and at most M * Z.
      scale: factor of the scores, usually H ** -0.5.
      max_q_len: static bound on the new tokens of any row; 1 promises decode. None: T.
      sliding_window: keys that a query sees, itself included. None: all up to itself.
      softcap: bound of the scores. None: none.
      implementation: name of the only implementation to use, which then never falls back. None: the first that can.
    Returns:
      [T, N, H] in q's dtype.
    Raises:
      ContractError: shapes, dtypes or static values that break the contract.
      Unsupported: the implementation asked for cannot do the case.
    Source: softmax over blocks as in 'FlashAttention-2', https://arxiv.org/abs/2307.08691, section 3.1; pages as in
      'Efficient Memory Management for Large Language Model Serving with PagedAttention', https://arxiv.org/abs/2309.06180, section 4.
    """
    spec = attention_spec(q, k_pages, v_pages, page_table, cu_q_lens, kv_lens, scale=scale, max_q_len=max_q_len,
                          sliding_window=sliding_window, softcap=softcap)
    target = current_target()
    choice, impl = choose(OP, IMPLS, spec, target, implementation)
    with implementation_scope(OP, choice.implementation):
        run = traced_once(impl.run, scale=scale, spec=spec, target=target)
        return run(q, k_pages, v_pages, page_table, cu_q_lens, kv_lens)


def ragged_paged_attention_choice(spec: AttentionSpec, target: Target | None = None, *, implementation: str | None = None) -> Choice:
    """Which implementation a call of these static facts takes, and why, without running or compiling anything.

    Args:
      spec: the call's facts.
      target: the device; None for the one that a call made now would use.
      implementation: as in `ragged_paged_attention`.
    Returns:
      The choice, with what was rejected before it.
    Raises:
      ContractError: no implementation has that name.
      Unsupported: the implementation asked for cannot do the case.
    """
    return choose(OP, IMPLS, spec, target or current_target(), implementation)[0]


def attention_spec(q: ArrayLike, k_pages: ArrayLike, v_pages: ArrayLike, page_table: ArrayLike, cu_q_lens: ArrayLike, kv_lens: ArrayLike, *,
                   scale: float, max_q_len: int | None, sliding_window: int | None, softcap: float | None) -> AttentionSpec:
    """The static facts of a call, validated.

    Raises:
      ContractError: the first fact that breaks the contract of `ragged_paged_attention`.
    """
    check_rank(OP, "q", q, "TNH")
    check_float(OP, "q", q)
    check_pages(OP, k_pages, v_pages)
    check_rows(OP, page_table, cu_q_lens, kv_lens)
    if q.shape[2] != k_pages.shape[3]:
        raise ContractError(f"{OP}: q {list(q.shape)}, [T, N, H], and k_pages {list(k_pages.shape)}, [P, K, Z, H], differ in head dim H: "
                            "pad the smaller one.")
    if q.shape[1] % k_pages.shape[1]:
        raise ContractError(f"{OP}: q {list(q.shape)}, [T, N, H], has N = {q.shape[1]} query heads and k_pages {list(k_pages.shape)}, "
                            f"[P, K, Z, H], K = {k_pages.shape[1]} KV heads: N must be a multiple of K.")
    check_number(OP, "scale", scale, least=0, open_end=True, integer=False)
    for name, value in (("max_q_len", max_q_len), ("sliding_window", sliding_window)):
        if value is not None:
            check_number(OP, name, value, least=1, open_end=False, integer=True)
    if softcap is not None:
        check_number(OP, "softcap", softcap, least=0, open_end=True, integer=False)
    return AttentionSpec(
        num_tokens=q.shape[0], num_rows=page_table.shape[0], num_heads=q.shape[1], num_kv_heads=k_pages.shape[1], head_dim=q.shape[2],
        page_size=k_pages.shape[2], pages_per_seq=page_table.shape[1], q_dtype=dtype_name(q), kv_dtype=dtype_name(k_pages),
        max_q_len=max_q_len, sliding_window=sliding_window, softcap=softcap)


@lowered_once
def _run_mosaic(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, page_table: jax.Array, cu_q_lens: jax.Array, kv_lens: jax.Array, *,
                scale: float, spec: AttentionSpec, target: Target) -> jax.Array:
    from pallas_kernels.ragged_paged_attention import kernel_mosaic, kernel_mosaic_prefill  # late: Pallas takes as long as jax to import

    arrays = q, k_pages, v_pages, page_table, cu_q_lens, kv_lens
    if spec.is_decode:
        return kernel_mosaic.decode_attention(*arrays, scale=scale, sliding_window=spec.sliding_window, softcap=spec.softcap,
                                              config=mosaic_config(spec), interpret=target.interpret)
    prefill = functools.partial(
        kernel_mosaic_prefill.prefill_attention, scale=scale, max_q_len=spec.max_q_len, sliding_window=spec.sliding_window,
        softcap=spec.softcap, config=mosaic_prefill_config(spec), interpret=target.interpret)
    return _prefill_or_mixed(prefill, arrays, scale=scale, spec=spec, target=target)


@lowered_once
def _run_wgmma(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, page_table: jax.Array, cu_q_lens: jax.Array, kv_lens: jax.Array, *,
               scale: float, spec: AttentionSpec, target: Target) -> jax.Array:
    from pallas_kernels.ragged_paged_attention import kernel_wgmma  # late, as above

    prefill = functools.partial(
        kernel_wgmma.prefill_attention, scale=scale, max_q_len=spec.max_q_len, sliding_window=spec.sliding_window, softcap=spec.softcap,
        config=wgmma_config(spec), interpret=target.interpret)
    return _prefill_or_mixed(prefill, (q, k_pages, v_pages, page_table, cu_q_lens, kv_lens), scale=scale, spec=spec, target=target)


def _prefill_or_mixed(prefill: Callable[..., jax.Array], arrays: tuple[jax.Array, ...], *, scale: float, spec: AttentionSpec,
                      target: Target) -> jax.Array:
    """`prefill` for all rows, or where there are many of them and kernel_mosaic can, its decode for those of one token."""
    one_each = dataclasses.replace(spec, num_tokens=spec.num_rows, max_q_len=1)
    if spec.num_rows <= FEW_ROWS or mosaic_refusal(one_each, target) is not None:
        return prefill(*arrays, skip_single=False)
    decode = traced_once(_run_mosaic, scale=scale, spec=one_each, target=target)  # as a batch of so many decoding rows has it
    return attend_mixed(*arrays, prefill=functools.partial(prefill, skip_single=True), decode=decode)


def _run_jax_triton(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, page_table: jax.Array, cu_q_lens: jax.Array,
                    kv_lens: jax.Array, *, scale: float, spec: AttentionSpec, target: Target) -> jax.Array:
    from pallas_kernels.ragged_paged_attention import kernel_jax_triton  # late: an optional package

    assert target.compute_capability is not None, "triton_refusal lets none without through"
    return kernel_jax_triton.decode_attention(
        q, k_pages, v_pages, page_table, cu_q_lens, kv_lens, scale=scale, sliding_window=spec.sliding_window, softcap=spec.softcap,
        config=triton_config(spec), compute_capability=target.compute_capability)


def _run_xla(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, page_table: jax.Array, cu_q_lens: jax.Array, kv_lens: jax.Array, *,
             scale: float, spec: AttentionSpec, target: Target) -> jax.Array:
    return kernel_xla.ragged_paged_attention(
        q, k_pages, v_pages, page_table, cu_q_lens, kv_lens, scale=scale, max_q_len=spec.max_q_len, sliding_window=spec.sliding_window,
        softcap=spec.softcap, config=xla_config(spec, target))


def _run_reference(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, page_table: jax.Array, cu_q_lens: jax.Array, kv_lens: jax.Array, *,
                   scale: float, spec: AttentionSpec, target: Target) -> jax.Array:
    return reference.ragged_paged_attention(q, k_pages, v_pages, page_table, cu_q_lens, kv_lens, scale=scale,
                                            sliding_window=spec.sliding_window, softcap=spec.softcap)


IMPLS: tuple[Implementation[AttentionSpec], ...] = (
    Implementation(name="wgmma", reason="prefill by warpgroup mma, sm_90", supports=supports_unless(wgmma_refusal), run=_run_wgmma),
    Implementation(name="mosaic", reason="paged decode and prefill by mma, sm_80 and sm_90",
                   supports=supports_unless(mosaic_refusal), run=_run_mosaic),
    # Behind mosaic, since jax-triton 0.3's calls are not captured in CUDA graphs; before the jnp form, which copies every page it reads.
    Implementation(name="jax_triton", reason="paged decode in Triton, any page size, where jax-triton is installed",
                   supports=supports_unless(triton_refusal), run=_run_jax_triton),
    Implementation(name="xla", reason="blocked online softmax, any shape, CPU and GPU", supports=supports_all, run=_run_xla),
    Implementation(name="reference", reason="the oracle: float32, whole tables", supports=supports_all, run=_run_reference),
)
