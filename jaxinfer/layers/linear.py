"""Matrix products with weights: the one function through which every projection goes, and its module.

Nothing else in the model multiplies by a weight matrix, so a new weight format is served here (through layers/quantized.py) and nowhere
else.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.layers.quantized import QuantTensor, param_specs
from jaxinfer.quant import QuantFormat
from jaxinfer.sharding import is_shared, summed

CPU_LEAST_ROWS = 2
"""XLA's CPU backend multiplies one bfloat16 row 8 to 10 times slower than two (896 x 9728: 18 ms against 2.3 ms)."""
GPU_LEAST_ROWS = 8
"""On an H200 a layer of Qwen2-7B takes 132 us of matrix products at one row and 118 us at eight, where XLA finds better tiles."""


def matmul(x: jax.Array, weight: jax.Array, *, bias: jax.Array | None = None) -> jax.Array:
    """x @ weight + bias, accumulated in float32 and rounded once, to x.dtype.

    Args:
      x: [T, D].
      weight: [D, *out].
      bias: [*out] or None.

    Returns:
      [T, *out] in x.dtype. T = 0 gives an empty array.
    """
    if bias is None:
        return _product(x, weight, weight_dim=0, out_dtype=x.dtype)
    return (_product(x, weight, weight_dim=0, out_dtype=jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def vocab_matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [R, D] times the transpose of weight [V, D] -> float32 [R, V], not rounded."""
    return _product(x, weight, weight_dim=1, out_dtype=jnp.float32)


def _product(x: jax.Array, weight: jax.Array, *, weight_dim: int, out_dtype: jnp.dtype) -> jax.Array:
    """Contracts x [T, D] with dimension `weight_dim` of the weight; sums are float32, rounded once to out_dtype.

    Float32 operands are multiplied at full precision on every device (an H200 would otherwise use TF32).
    """
    def dot(x: jax.Array, weight: jax.Array, least_rows: int, kernel_dtype: jnp.dtype) -> jax.Array:
        rows = x.shape[0]
        padded = jnp.pad(x, ((0, max(least_rows - rows, 0)), (0, 0))) if rows else x
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
        out = jax.lax.dot_general(padded, weight, (((1,), (weight_dim,)), ((), ())), precision=precision, preferred_element_type=kernel_dtype)
        return out[:rows].astype(out_dtype)

    if x.dtype == jnp.float32:
        return dot(x, weight, 1, jnp.float32)
    cpu_rows = CPU_LEAST_ROWS if x.dtype == jnp.bfloat16 else 1
    # A GPU's products sum in float32 and round by themselves; asked for float32, XLA rounds in a second pass over what they wrote, which
    # costs an H200 7 % of a prefill. A CPU's round where they are told to.
    return jax.lax.platform_dependent(
        x, weight, cpu=functools.partial(dot, least_rows=cpu_rows, kernel_dtype=jnp.float32),
        default=functools.partial(dot, least_rows=GPU_LEAST_ROWS, kernel_dtype=out_dtype))


class Linear(nnx.Module):
    """Holds weight [in, *out], or what stands for it where it is quantised, and, where the family has one, bias [*out]."""

    packed: nnx.Param[jax.Array]
    scales: nnx.Param[jax.Array]
    zeros: nnx.Param[jax.Array]
    perm: nnx.Param[jax.Array]

    def __init__(self, in_dim: int, out_dims: tuple[int, ...], *, axes: tuple[str | None, ...], bias: bool, dtype: jnp.dtype,
                 quant: QuantFormat | None = None):
        """Makes the parameters, zero.

        Args:
          in_dim: inputs.
          out_dims: dimensions of an output.
          axes: logical axes of (in, *out), see jaxinfer/sharding.py.
          bias: whether there is one.
          dtype: of weight and bias.
          quant: the weight's format; None is a plain array.
        """
        assert len(axes) == 1 + len(out_dims), (axes, out_dims)
        self.weight = nnx.Param(jnp.zeros((in_dim, *out_dims), dtype), axes=axes) if quant is None else None
        self.bias = nnx.Param(jnp.zeros(out_dims, dtype), axes=axes[1:]) if bias else None
        self.out_dims = out_dims
        self.splits_inputs = axes[0] is not None
        self.quant = quant
        if quant is not None:
            self._add_quantized(quant, in_dim, axes)

    def _add_quantized(self, quant: QuantFormat, in_dim: int, axes: tuple[str | None, ...]) -> None:
        """The parameters of jaxinfer/quant.py. Outputs lie flat, so they are split over devices only by their first dimension."""
        specs = param_specs(quant, num_inputs=in_dim, num_outputs=math.prod(self.out_dims))
        groups_axis = None if quant.group_size is None else axes[0]
        layouts = {"packed": (axes[1], axes[0], None, None), "scales": (groups_axis, axes[1]), "zeros": (groups_axis, axes[1]),
                   "perm": (None,)}
        for name, spec in specs.items():
            setattr(self, name, nnx.Param(jnp.zeros(spec.shape, spec.dtype), axes=layouts[name]))

    def __call__(self, x: jax.Array, *, implementation: str | None = None, leave_parts: bool = False) -> jax.Array:
        """[T, in] -> [T, *out]; a quantised weight's product by the implementation of int4_matmul that is named, None for its choice.

        With leave_parts maybe [P, T, *out] instead, float32 parts for RMSNorm.of_sum to add up.
        """
        bias = None if self.bias is None else self.bias[...]
        if self.quant is None:
            assert self.weight is not None
            if self.splits_inputs and is_shared():  # the devices' parts are rounded to x.dtype before they are summed
                out = summed(matmul(x, self.weight[...]))
                return out if bias is None else out + bias.astype(out.dtype)
            return matmul(x, self.weight[...], bias=bias)
        out = self.quantized_weight().matmul(x, bias=None if bias is None else bias.reshape(-1), out_dtype=x.dtype,
                                             implementation=implementation, leave_parts=leave_parts and bias is None)
        return out.reshape(*out.shape[:-1], *self.out_dims)

    def quantized_weight(self) -> QuantTensor:
        """The weight of a linear that has a format, its outputs flat."""
        assert self.quant is not None, "the weight is a plain array"
        return QuantTensor(packed=self.packed[...], scales=self.scales[...], zeros=self.zeros[...] if self.quant.zero_point else None,
                           perm=self.perm[...] if self.quant.permuted else None, format=self.quant)
