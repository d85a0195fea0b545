"""One quantised weight on the device, and the product with it. jaxinfer/quant.py says what the arrays mean; the arithmetic is the op's."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxinfer.quant import FORMATS, QuantFormat
from pallas_kernels.int4_matmul.api import int4_matmul


@functools.partial(jax.tree_util.register_dataclass, data_fields=["packed", "scales", "zeros", "perm"], meta_fields=["format"])
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantTensor:
    """One quantised weight [K, n] on the device; the arrays are those of jaxinfer/quant.py, and belong to whoever holds them."""

    packed: jax.Array
    scales: jax.Array
    zeros: jax.Array | None
    perm: jax.Array | None
    format: QuantFormat

    def matmul(self, x: jax.Array, *, bias: jax.Array | None, out_dtype: jnp.dtype) -> jax.Array:
        """x [T, K] times the weight, plus bias [n] -> [T, n], accumulated in float32 and rounded once, to out_dtype."""
        if self.perm is not None:
            x = jnp.take(x, self.perm, axis=1, mode="clip")
        group_size = x.shape[1] // self.scales.shape[0]
        return int4_matmul(x, self.packed, self.scales, self.zeros, group_size=group_size, bits=self.format.bits, bias=bias,
                           out_dtype=out_dtype)


def param_specs(quant_format: QuantFormat, *, num_inputs: int, num_outputs: int) -> dict[str, jax.ShapeDtypeStruct]:
    """What a module of this format holds in place of `weight` [K, n], by the parameter's last name. The group size must divide K."""
    groups = 1 if quant_format.group_size is None else num_inputs // quant_format.group_size
    packed = FORMATS[quant_format.name].packed_shape(num_inputs=num_inputs, num_outputs=num_outputs)
    specs = {"packed": jax.ShapeDtypeStruct(packed, jnp.int16),
             "scales": jax.ShapeDtypeStruct((groups, num_outputs), jnp.dtype(quant_format.scales_dtype))}
    if quant_format.zero_point:
        specs["zeros"] = jax.ShapeDtypeStruct((groups, num_outputs), jnp.bfloat16)
    if quant_format.permuted:
        specs["perm"] = jax.ShapeDtypeStruct((num_inputs,), jnp.int32)
    return specs
