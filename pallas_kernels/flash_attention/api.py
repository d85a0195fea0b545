"""Flash attention of dense batches: contract, validation and the ordered table of implementations. It computes nothing itself."""

from collections.abc import Callable

import jax

from pallas_kernels.contract import ArrayLike, check_float, check_number, check_rank, dtype_name
from pallas_kernels.dispatch import (
    Choice,
    ContractError,
    Implementation,
    Target,
    choose,
    current_target,
    implementation_scope,
    supports_all,
    supports_unless,
    traced_once,
)
from pallas_kernels.flash_attention import kernel_xla, reference
from pallas_kernels.flash_attention.config import (
    FlashAttentionSpec,
    has_plain_rows,
    mosaic_config,
    mosaic_refusal,
    wgmma_config_dense,
    wgmma_refusal_dense,
    xla_config,
)

OP = "flash_attention"


def flash_attention(
    q: jax.Array,                               # [B, T, N, H]
    k: jax.Array,                               # [B, S, K, H]
    v: jax.Array,                               # [B, S, K, H]
    *,
    causal: bool,
    scale: float,
    q_lengths: jax.Array | None = None,         # [B]
    kv_lengths: jax.Array | None = None,        # [B]
    q_segment_ids: jax.Array | None = None,     # [B, T]
    kv_segment_ids: jax.Array | None = None,    # [B, S]
    sliding_window: int | None = None,
    softcap: float | None = None,
    implementation: str | None = None,
) -> jax.Array:                                 # [B, T, N, H]
    """Attention of a dense batch, for training and for serving stacks that keep keys and values in plain arrays; differentiable.

    Row b holds queries 0 <= t < q_lengths[b] and keys 0 <= s < kv_lengths[b]; what lies behind is padding. Key s sits at position s. The
    queries are the last ones of their row: its last query sits at the position of its last key, for each row by its own lengths,

        pos(b, t)      = kv_lengths[b] - q_lengths[b] + t                       T and S in place of lengths that are not given
        score(t, s)    = scale * q[b, t, n] . k[b, s, n // G]                   capped as softcap * tanh(score / softcap) where asked for
        out[b, t, n]   = sum over seen s of softmax_s(score(t, s)) * v[b, s, n // G],        G = N // K

        query t sees key s where        s < kv_lengths[b]
            and, if causal,             s <= pos(b, t)
            and, with a window,         s > pos(b, t) - sliding_window
            and, with segments,         q_segment_ids[b, t] == kv_segment_ids[b, s] >= 0

    Scores, softmax and accumulation are float32, whatever the dtypes.

    At the edges: T and S need not be multiples of anything. A query that sees no key gives 0 (a causal row with fewer keys than queries
    begins with such), and so does a padding query. Keys and values past a row's length or of a negative segment never reach an output or a
    gradient, NaN and infinity included; their own gradients are 0. Queries and keys of a negative segment are padding.

    Gradients with respect to q, k and v: `xla` and `reference` by JAX itself, in both modes. `wgmma` and `mosaic` are forward kernels, in
    reverse mode only: the backward pass computes the attention again through `xla`, in memory of one tile's scores, and differentiates that.

    Args:
      q: [B, T, N, H] float32, bfloat16 or float16 queries.
      k: [B, S, K, H] keys, float32, bfloat16 or float16; K divides N.
      v: [B, S, K, H] values of the same dtype.
      causal: a query sees no key past its own position.
      scale: factor of the scores, usually H ** -0.5.
      q_lengths: [B] int32 queries of each row, from 0 to T. None: T.
      kv_lengths: [B] int32 keys of each row, from 0 to S. None: S.
      q_segment_ids: [B, T] int32 segment of each query; with kv_segment_ids, or None.
      kv_segment_ids: [B, S] int32 segment of each key.
      sliding_window: keys that a query sees, itself included; needs causal=True. None: all up to itself.
      softcap: bound of the scores. None: none.
      implementation: name of the only implementation to use, which then never falls back. None: the first that can.
    Returns:
      [B, T, N, H] in q's dtype.
    Raises:
      ContractError: shapes, dtypes or static values that break the contract.
      Unsupported: the implementation asked for cannot do the case.
    Source: 'FlashAttention-2', https://arxiv.org/abs/2307.08691, section 3.1.
    """
    arrays = q, k, v, q_lengths, kv_lengths, q_segment_ids, kv_segment_ids
    spec = flash_attention_spec(*arrays, causal=causal, scale=scale, sliding_window=sliding_window, softcap=softcap)
    target = current_target()
    choice, impl = choose(OP, IMPLS, spec, target, implementation)
    with implementation_scope(OP, choice.implementation):
        return traced_once(impl.run, scale=scale, spec=spec, target=target)(*arrays)


def flash_attention_choice(spec: FlashAttentionSpec, target: Target | None = None, *, implementation: str | None = None) -> Choice:
    """Which implementation a call of these static facts takes, and why, without running or compiling anything.

    Args:
      spec: the call's facts.
      target: the device; None for the one that a call made now would use.
      implementation: as in `flash_attention`.
    Returns:
      The choice, with what was rejected before it.
    Raises:
      ContractError: no implementation has that name.
      Unsupported: the implementation asked for cannot do the case.
    """
    return choose(OP, IMPLS, spec, target or current_target(), implementation)[0]


def flash_attention_spec(
        q: ArrayLike, k: ArrayLike, v: ArrayLike, q_lengths: ArrayLike | None, kv_lengths: ArrayLike | None, q_segment_ids: ArrayLike | None,
        kv_segment_ids: ArrayLike | None, *, causal: bool, scale: float, sliding_window: int | None,
        softcap: float | None) -> FlashAttentionSpec:
    """The static facts of a call, validated.

    Raises:
      ContractError: the first fact that breaks the contract of `flash_attention`.
    """
    _check_arrays(q, k, v)
    for name, array, shape, letters in (
            ("q_lengths", q_lengths, q.shape[:1], "B"), ("kv_lengths", kv_lengths, q.shape[:1], "B"),
            ("q_segment_ids", q_segment_ids, q.shape[:2], "BT"), ("kv_segment_ids", kv_segment_ids, k.shape[:2], "BS")):
        _check_integers(name, array, tuple(shape), letters)
    if (q_segment_ids is None) != (kv_segment_ids is None):
        given, missing = ("q_segment_ids", "kv_segment_ids") if kv_segment_ids is None else ("kv_segment_ids", "q_segment_ids")
        raise ContractError(f"{OP}: {given} without {missing}: give both, or neither.")
    if not isinstance(causal, bool):
        raise ContractError(f"{OP}: causal = {causal!r}: must be True or False.")
    check_number(OP, "scale", scale, least=0, open_end=True, integer=False)
    if sliding_window is not None:
        check_number(OP, "sliding_window", sliding_window, least=1, open_end=False, integer=True)
        if not causal:
            raise ContractError(f"{OP}: sliding_window = {sliding_window} with causal = False: a window ends at the query itself; "
                                "give causal=True, or sliding_window=None.")
    if softcap is not None:
        check_number(OP, "softcap", softcap, least=0, open_end=True, integer=False)
    return FlashAttentionSpec(
        num_rows=q.shape[0], num_tokens=q.shape[1], num_keys=k.shape[1], num_heads=q.shape[2], num_kv_heads=k.shape[2], head_dim=q.shape[3],
        q_dtype=dtype_name(q), kv_dtype=dtype_name(k), causal=causal, has_q_lengths=q_lengths is not None,
        has_kv_lengths=kv_lengths is not None, has_segments=q_segment_ids is not None, sliding_window=sliding_window, softcap=softcap)


def _check_arrays(q: ArrayLike, k: ArrayLike, v: ArrayLike) -> None:
    """Requires q [B, T, N, H], and k and v of one shape [B, S, K, H] and dtype, with K a divisor of N."""
    for name, array, letters in (("q", q, "BTNH"), ("k", k, "BSKH")):
        check_rank(OP, name, array, letters)
        check_float(OP, name, array)
    if k.shape != v.shape or dtype_name(k) != dtype_name(v):
        raise ContractError(f"{OP}: k is {dtype_name(k)}{list(k.shape)} and v {dtype_name(v)}{list(v.shape)}: "
                            "both must have one shape [B, S, K, H] and one dtype.")
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ContractError(f"{OP}: q {list(q.shape)}, [B, T, N, H], and k {list(k.shape)}, [B, S, K, H], differ in B or H: "
                            "give as many rows on both sides, and pad the smaller head dim.")
    if q.shape[2] % k.shape[2]:
        raise ContractError(f"{OP}: q {list(q.shape)}, [B, T, N, H], has N = {q.shape[2]} query heads and k {list(k.shape)}, "
                            f"[B, S, K, H], K = {k.shape[2]} KV heads: N must be a multiple of K.")


def _check_integers(name: str, array: ArrayLike | None, shape: tuple[int, ...], letters: str) -> None:
    """Requires int32 of the shape, or None."""
    if array is not None and (tuple(array.shape) != shape or dtype_name(array) != "int32"):
        raise ContractError(f"{OP}: {name} is {dtype_name(array)}{list(array.shape)}: must be int32{list(shape)}, [{', '.join(letters)}]; "
                            "cast or pad it.")


type Arrays = tuple[jax.Array | None, ...]


def _with_gradients(kernel: Callable[..., jax.Array], *, scale: float, spec: FlashAttentionSpec, target: Target) -> Callable[..., jax.Array]:
    """A forward kernel whose backward pass recomputes through kernel_xla."""

    def forward(*arrays: jax.Array | None) -> tuple[jax.Array, Arrays]:
        return kernel(*arrays), arrays

    def backward(arrays: Arrays, cotangent: jax.Array) -> Arrays:
        _, pull_back = jax.vjp(lambda q, k, v: _run_xla(q, k, v, *arrays[3:], scale=scale, spec=spec, target=target), *arrays[:3])
        return (*pull_back(cotangent), *(None,) * len(arrays[3:]))

    attend = jax.custom_vjp(kernel)
    attend.defvjp(forward, backward)
    return attend


def _run_mosaic(*arrays: jax.Array | None, scale: float, spec: FlashAttentionSpec, target: Target) -> jax.Array:
    from pallas_kernels.flash_attention import kernel_mosaic  # late: Pallas takes as long as jax to import

    def kernel(*arrays: jax.Array) -> jax.Array:
        return kernel_mosaic.flash_attention(*arrays, causal=spec.causal, scale=scale, sliding_window=spec.sliding_window,
                                             softcap=spec.softcap, config=mosaic_config(spec), interpret=target.interpret)

    return _with_gradients(kernel, scale=scale, spec=spec, target=target)(*arrays)


def _run_wgmma(*arrays: jax.Array | None, scale: float, spec: FlashAttentionSpec, target: Target) -> jax.Array:
    from pallas_kernels.flash_attention import kernel_wgmma  # late, as above

    def kernel(*arrays: jax.Array) -> jax.Array:
        return kernel_wgmma.flash_attention(*arrays[:5], scale=scale, sliding_window=spec.sliding_window, softcap=spec.softcap,
                                            plain_rows=has_plain_rows(spec), config=wgmma_config_dense(spec), interpret=target.interpret)

    return _with_gradients(kernel, scale=scale, spec=spec, target=target)(*arrays)


def _run_xla(*arrays: jax.Array | None, scale: float, spec: FlashAttentionSpec, target: Target) -> jax.Array:
    return kernel_xla.flash_attention(*arrays, causal=spec.causal, scale=scale, sliding_window=spec.sliding_window,  # type: ignore[arg-type]
                                      softcap=spec.softcap, config=xla_config(spec, target))


def _run_reference(*arrays: jax.Array | None, scale: float, spec: FlashAttentionSpec, target: Target) -> jax.Array:
    return reference.flash_attention(*arrays, causal=spec.causal, scale=scale, sliding_window=spec.sliding_window,  # type: ignore[arg-type]
                                     softcap=spec.softcap)


IMPLS: tuple[Implementation[FlashAttentionSpec], ...] = (
    Implementation(name="wgmma", reason="causal, by warpgroup mma over pages, sm_90",
                   supports=supports_unless(wgmma_refusal_dense), run=_run_wgmma),
    Implementation(name="mosaic", reason="any mask, by mma, sm_80 and sm_90", supports=supports_unless(mosaic_refusal), run=_run_mosaic),
    Implementation(name="xla", reason="blocked online softmax, any shape, CPU and GPU", supports=supports_all, run=_run_xla),
    Implementation(name="reference", reason="the oracle: float32, all scores at once", supports=supports_all, run=_run_reference),
)
