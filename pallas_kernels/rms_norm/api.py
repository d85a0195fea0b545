"""RMSNorm: contract, validation and the ordered table of implementations. It computes nothing itself."""

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
    lowered_once,
    supports_all,
    supports_unless,
    traced_once,
)
from pallas_kernels.rms_norm import kernel_xla, reference
from pallas_kernels.rms_norm.config import NormSpec, mosaic_asks_for_weight_first, mosaic_loss, mosaic_refusal, mosaic_vector

OP = "rms_norm"


def rms_norm(
    x: jax.Array,                       # [T, D] or [P, T, D]
    weight: jax.Array,                  # [D]
    residual: jax.Array | None = None,  # [T, D]
    *,
    eps: float,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Root-mean-square normalisation of rows, after adding a residual where there is one.

        h[t]   = x[t] + residual[t]                                     rounded to x's dtype
        out[t] = h[t] / sqrt(mean over d of h[t, d]^2 + eps) * weight   the quotient rounded to x's dtype first

    Statistics are float32. A row of zeros stays zero; NaN and infinity stay in their row.

    Args:
      x: [T, D] float32, bfloat16 or float16; or, with a residual, float32 [P, T, D]: at least one part of what, added up and rounded to
        the residual's dtype, is x. So a product whose k is split leaves its sums (`int4_matmul(..., leave_parts=True)`).
      weight: [D], any float dtype.
      residual: [T, D] of x's dtype, or None.
      eps: added to the mean square.
      implementation: name of the only implementation to use, which then never falls back. None: the first that can.
    Returns:
      out [T, D] in x's dtype, the residual's where x comes in parts; with a residual (out, h).
    Raises:
      ContractError: shapes, dtypes or eps that break the contract.
      Unsupported: the implementation asked for cannot do the case.
    Source: 'Root Mean Square Layer Normalization', https://arxiv.org/abs/1910.07467, equation 4; the order of rounding is that of
      `LlamaRMSNorm` in transformers.
    """
    spec = norm_spec(x, weight, residual, eps=eps)
    target = current_target()
    choice, impl = choose(OP, IMPLS, spec, target, implementation)
    with implementation_scope(OP, choice.implementation):
        return traced_once(impl.run, eps=eps, spec=spec, target=target)(x, weight, residual)


def rms_norm_choice(spec: NormSpec, target: Target | None = None, *, implementation: str | None = None) -> Choice:
    """Which implementation a call of these static facts takes, and why, without running or compiling anything.

    Args:
      spec: the call's facts.
      target: the device; None for the one that a call made now would use.
      implementation: as in `rms_norm`.
    Returns:
      The choice, with what was rejected before it.
    Raises:
      ContractError: no implementation has that name.
      Unsupported: the implementation asked for cannot do the case.
    """
    return choose(OP, IMPLS, spec, target or current_target(), implementation)[0]


def norm_spec(x: ArrayLike, weight: ArrayLike, residual: ArrayLike | None, *, eps: float) -> NormSpec:
    """The static facts of a call, validated.

    Raises:
      ContractError: the first fact that breaks the contract of `rms_norm`.
    """
    num_parts = x.shape[0] if len(x.shape) == len("PTD") else 0
    check_rank(OP, "x", x, "PTD" if num_parts else "TD")
    check_float(OP, "x", x)
    check_rank(OP, "weight", weight, "D")
    check_float(OP, "weight", weight)
    if num_parts and (residual is None or dtype_name(x) != "float32"):
        raise ContractError(f"{OP}: x is {dtype_name(x)}{list(x.shape)}: parts [P, T, D] must be float32 and come with a residual, whose "
                            "dtype their sum takes; add them up, or give a residual.")
    if weight.shape[0] != x.shape[-1]:
        raise ContractError(f"{OP}: weight {list(weight.shape)}, [D], and x {list(x.shape)}, [T, D], differ in D: give this layer's weight.")
    if residual is not None:
        check_float(OP, "residual", residual)
    if residual is not None and (residual.shape != x.shape[-2:] or not num_parts and dtype_name(residual) != dtype_name(x)):
        raise ContractError(f"{OP}: residual is {dtype_name(residual)}{list(residual.shape)} and x {dtype_name(x)}{list(x.shape)}: "
                            "both must have one shape [T, D] and one dtype.")
    check_number(OP, "eps", eps, least=0, open_end=False, integer=False)
    return NormSpec(num_tokens=x.shape[-2], dim=x.shape[-1], dtype=dtype_name(x if residual is None else residual),
                    weight_dtype=dtype_name(weight), has_residual=residual is not None, num_parts=num_parts)


@lowered_once
def _run_mosaic(x: jax.Array, weight: jax.Array, residual: jax.Array | None = None, *, eps: float, spec: NormSpec,
                target: Target) -> jax.Array | tuple[jax.Array, jax.Array]:
    from pallas_kernels.rms_norm import kernel_mosaic  # imported late: Pallas takes as long as jax to import

    return kernel_mosaic.rms_norm(x, weight, residual, eps=eps, vector=mosaic_vector(spec),
                                 asks_for_weight_first=mosaic_asks_for_weight_first(spec), interpret=target.interpret)


def _run_xla(x: jax.Array, weight: jax.Array, residual: jax.Array | None = None, *, eps: float, spec: NormSpec,
             target: Target) -> jax.Array | tuple[jax.Array, jax.Array]:
    return kernel_xla.rms_norm(x, weight, residual, eps=eps)


def _run_reference(x: jax.Array, weight: jax.Array, residual: jax.Array | None = None, *, eps: float, spec: NormSpec,
                   target: Target) -> jax.Array | tuple[jax.Array, jax.Array]:
    return reference.rms_norm(x, weight, residual, eps=eps)


IMPLS: tuple[Implementation[NormSpec], ...] = (
    Implementation(name="mosaic", reason="sum and norm in one launch, sm_80 and sm_90", supports=supports_unless(mosaic_refusal),
                   pays=mosaic_loss, run=_run_mosaic),
    Implementation(name="xla", reason="fused with its neighbours, any shape, CPU and GPU", supports=supports_all, run=_run_xla),
    Implementation(name="reference", reason="the oracle: float32", supports=supports_all, run=_run_reference),
)
