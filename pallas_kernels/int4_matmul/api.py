"""int4_matmul: contract, validation and the ordered table of implementations. It computes nothing itself."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.contract import FLOAT_DTYPES, ArrayLike, check_float, check_number, check_rank, dtype_name
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
from pallas_kernels.int4_matmul import kernel_xla, reference
from pallas_kernels.int4_matmul.config import (
    MatmulSpec,
    dequantize_loss,
    dequantize_refusal,
    mosaic_config,
    mosaic_loss,
    mosaic_refusal,
    xla_strip_tiles,
)
from pallas_kernels.int4_matmul.layout import OP, ZERO_DTYPES, check_packed
from pallas_kernels.int4_matmul.stream_config import stream_config, stream_loss, stream_refusal
from pallas_kernels.int4_matmul.wgmma_config import wgmma_config, wgmma_loss, wgmma_refusal


def int4_matmul(
    x: jax.Array,                    # [m, k]
    packed: jax.Array,               # [n / 64, k / 256, 64, J]
    scales: jax.Array,               # [k / group_size, n]
    zeros: jax.Array | None = None,  # [k / group_size, n]
    *,
    group_size: int,
    bits: int = 4,
    bias: jax.Array | None = None,   # [n]
    out_dtype: Any = None,
    activation: str | None = None,
    leave_parts: bool = False,
    implementation: str | None = None,
) -> jax.Array:                      # [m, n], [m, n / 2] or [P, m, n]
    """Product with weights of 4 or 8 bits that share a scale, and maybe a zero point, by groups along k.

        out[i, j] = bias[j] + sum over l of x[i, l] * (q[l, j] - z[g, j]) * float32(scale[g, j]),    g = l // group_size

    Accumulated in float32. Weights are exact, or rounded once to x's dtype where the product runs on dense tiles.

    At the edges: k and n need not be multiples of a tile; `pack` pads, and padding never reaches an output. NaN and infinity of a row of
    x, or of a scale, stay in that row, or that column. A zero scale gives a zero weight.

    Args:
      x: [m, k] bfloat16, float16 or float32.
      packed: codes of a [k, n] matrix in the order of `layout.pack`, int16.
      scales: [k / group_size, n] float32, bfloat16 or float16; the shape says what n is.
      zeros: [k / group_size, n] whole numbers 0 .. 2^bits, one of layout.ZERO_DTYPES; bfloat16 (`pack_zeros`) spares the kernels a
        conversion. None: symmetric, 2^(bits - 1).
      group_size: values of k that share a scale; divides k. k itself: one scale a column.
      bits: 4 or 8.
      bias: [n] in any float dtype.
      out_dtype: dtype of the output; None: x's.
      activation: None, or 'swiglu' for silu(gate) * up of the product's halves along n, gate first: in the kernel where that pays, else
        behind it, by then rounded to out_dtype.
      leave_parts: where a kernel shares k out to several blocks, give their sums as they are, P of them in float32, for whoever reads them
        to add up and round to out_dtype: `rms_norm` takes them. Not beside a bias or an activation.
      implementation: name of the only implementation to use, which then never falls back. None: the first that can.
    Returns:
      [m, n] out_dtype, with an activation [m, n / 2]; parts, if left and several, are float32 [P, m, n].
    Raises:
      ContractError: shapes, dtypes or static values that break the contract.
      Unsupported: the implementation asked for cannot do the case.
    Source: group-wise weights as in 'GPTQ', https://arxiv.org/abs/2210.17323, section 'Practical speedups', and 'AWQ',
      https://arxiv.org/abs/2306.00978, section 4.
    """
    spec = matmul_spec(x, packed, scales, zeros, bias, group_size=group_size, bits=bits, out_dtype=out_dtype, activation=activation,
                       leave_parts=leave_parts)
    target = current_target()
    choice, impl = choose(OP, IMPLS, spec, target, implementation)
    with implementation_scope(OP, choice.implementation):
        return activated(traced_once(impl.run, spec=spec, target=target)(x, packed, scales, zeros, bias), spec)


def activated(out: jax.Array, spec: MatmulSpec) -> jax.Array:
    """The result of a call from what its implementation gave, which has [m, n / 2] already where its kernel activates."""
    half = spec.n // 2
    return out if spec.activation is None or out.shape[1] == half else swiglu(out[:, :half], out[:, half:])


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up, silu in float32 and rounded to up's dtype before the product. Source: https://arxiv.org/abs/2002.05202, eq. 6."""
    return jax.nn.silu(gate.astype(jnp.float32)).astype(up.dtype) * up


def int4_matmul_choice(spec: MatmulSpec, target: Target | None = None, *, implementation: str | None = None) -> Choice:
    """Which implementation a call of these static facts takes, and why, without running or compiling anything.

    Args:
      spec: the call's facts.
      target: the device; None for the one that a call made now would use.
      implementation: as in `int4_matmul`.
    Returns:
      The choice, with what was rejected before it.
    Raises:
      ContractError: no implementation has that name.
      Unsupported: the implementation asked for cannot do the case.
    """
    return choose(OP, IMPLS, spec, target or current_target(), implementation)[0]


def matmul_spec(x: ArrayLike, packed: ArrayLike, scales: ArrayLike, zeros: ArrayLike | None, bias: ArrayLike | None, *, group_size: int,
                bits: int, out_dtype: Any, activation: str | None = None, leave_parts: bool = False) -> MatmulSpec:
    """The static facts of a call, validated.

    Raises:
      ContractError: the first fact that breaks the contract of `int4_matmul`.
    """
    check_rank(OP, "x", x, "mk")
    check_float(OP, "x", x)
    check_rank(OP, "scales", scales, "gn")
    check_float(OP, "scales", scales)
    check_number(OP, "group_size", group_size, least=1, open_end=False, integer=True)
    (m, k), n = x.shape, scales.shape[1]
    if k % group_size or scales.shape[0] != k // group_size:
        raise ContractError(f"{OP}: x {list(x.shape)}, [m, k], scales {list(scales.shape)} and group_size = {group_size}: the group size must "
                            f"divide k = {k}, and scales be [k / group_size, n]; one scale a column is group_size = {k}.")
    check_packed(packed, k=k, n=n, bits=bits)
    if zeros is not None and (tuple(zeros.shape) != tuple(scales.shape) or dtype_name(zeros) not in ZERO_DTYPES):
        raise ContractError(f"{OP}: zeros is {dtype_name(zeros)}{list(zeros.shape)}: must have the scales' shape {list(scales.shape)} and be "
                            f"one of {', '.join(ZERO_DTYPES)}; None stands for {2 ** (bits - 1)} everywhere.")
    if bias is not None:
        check_rank(OP, "bias", bias, "n")
        check_float(OP, "bias", bias)
        if bias.shape[0] != n:
            raise ContractError(f"{OP}: bias {list(bias.shape)}, [n], and scales {list(scales.shape)}, [g, n], differ in n.")
    try:
        out = dtype_name(x) if out_dtype is None else jnp.dtype(out_dtype).name
    except TypeError:
        out = repr(out_dtype)
    if out not in FLOAT_DTYPES:
        raise ContractError(f"{OP}: out_dtype = {out}: must be one of {', '.join(FLOAT_DTYPES)}, or None for x's.")
    if activation not in (None, "swiglu"):
        raise ContractError(f"{OP}: activation = {activation!r}: must be 'swiglu', or None for the product itself.")
    if leave_parts and (bias is not None or activation is not None):
        beside = "a bias" if activation is None else f"activation = {activation!r}"
        raise ContractError(f"{OP}: leave_parts = True beside {beside}, which needs the whole sum: leave one of them out.")
    if activation is not None and n % 2:
        raise ContractError(f"{OP}: activation = {activation!r} takes the halves of n = {n} columns: n must be even.")
    return MatmulSpec(m=m, k=k, n=n, group_size=group_size, bits=bits, x_dtype=dtype_name(x), scale_dtype=dtype_name(scales),
                      zero_dtype=None if zeros is None else dtype_name(zeros), has_bias=bias is not None, out_dtype=out, activation=activation,
                      leaves_parts=leave_parts)


@lowered_once
def _run_mosaic(*arrays: jax.Array | None, spec: MatmulSpec, target: Target) -> jax.Array:
    from pallas_kernels.int4_matmul import kernel_mosaic  # late: Pallas takes as long as jax to import

    return kernel_mosaic.int4_matmul(*arrays, bits=spec.bits, out_dtype=spec.out_dtype, config=mosaic_config(spec, target),
                                     leaves_parts=spec.leaves_parts, interpret=target.interpret)


@lowered_once
def _run_stream(*arrays: Any, spec: MatmulSpec, target: Target) -> jax.Array:
    from pallas_kernels.int4_matmul import kernel_stream  # late, as above

    return kernel_stream.int4_matmul(*arrays, bits=spec.bits, out_dtype=spec.out_dtype, config=stream_config(spec, target),
                                     interpret=target.interpret)


@lowered_once
def _run_wgmma(*arrays: jax.Array | None, spec: MatmulSpec, target: Target) -> jax.Array:
    from pallas_kernels.int4_matmul import kernel_wgmma  # late, as above

    return kernel_wgmma.int4_matmul(*arrays, bits=spec.bits, out_dtype=spec.out_dtype, config=wgmma_config(spec, target),
                                    leaves_parts=spec.leaves_parts, interpret=target.interpret)


@lowered_once
def _run_dequantize(*arrays: jax.Array | None, spec: MatmulSpec, target: Target) -> jax.Array:
    from pallas_kernels.int4_matmul import kernel_dequantize  # late, as above

    x, packed, scales, zeros, bias = arrays
    assert x is not None and packed is not None and scales is not None
    return kernel_dequantize.int4_matmul(x, packed, scales, zeros, bias, bits=spec.bits, out_dtype=spec.out_dtype,
                                         strip_tiles=xla_strip_tiles(spec, target), interpret=target.interpret)


def _run_xla(x: jax.Array, packed: jax.Array, scales: jax.Array, zeros: jax.Array | None, bias: jax.Array | None, *, spec: MatmulSpec,
             target: Target) -> jax.Array:
    return kernel_xla.int4_matmul(x, packed, scales, zeros, bias, bits=spec.bits, out_dtype=spec.out_dtype,
                                  strip_tiles=xla_strip_tiles(spec, target))


def _run_reference(x: jax.Array, packed: jax.Array, scales: jax.Array, zeros: jax.Array | None, bias: jax.Array | None, *, spec: MatmulSpec,
                   target: Target) -> jax.Array:
    return reference.int4_matmul(x, packed, scales, zeros, bias, bits=spec.bits, out_dtype=spec.out_dtype)


IMPLS: tuple[Implementation[MatmulSpec], ...] = (
    Implementation(name="wgmma", reason="middle m by warpgroup mma, sm_90", supports=supports_unless(wgmma_refusal),
                   pays=wgmma_loss, run=_run_wgmma),
    Implementation(name="dequantize", reason="many tokens: weights dequantised whole, then XLA's dot",
                   supports=supports_unless(dequantize_refusal), pays=dequantize_loss, run=_run_dequantize),
    Implementation(name="stream", reason="one or two tokens by mma, each warp at its own pace, sm_80 and sm_90",
                   supports=supports_unless(stream_refusal), pays=stream_loss, run=_run_stream),
    Implementation(name="mosaic", reason="few tokens by mma, sm_80 and sm_90", supports=supports_unless(mosaic_refusal), pays=mosaic_loss,
                   run=_run_mosaic),
    Implementation(name="xla", reason="dequantised by strips, then XLA's dot; any shape, CPU and GPU", supports=supports_all, run=_run_xla),
    Implementation(name="reference", reason="the oracle: float32, the whole matrix", supports=supports_all, run=_run_reference),
)
