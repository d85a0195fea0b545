"""One quantised weight on the device: the product with it, and its columns. jaxinfer/quant.py says what the arrays mean."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxinfer.quant import FORMATS, QuantFormat
from pallas_kernels.int4_matmul import layout
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

    def matmul(self, x: jax.Array, *, bias: jax.Array | None, out_dtype: jnp.dtype, implementation: str | None,
               activation: str | None = None, leave_parts: bool = False) -> jax.Array:
        """x [T, K] times the weight, plus bias [n] -> [T, n], accumulated in float32 and rounded once, to out_dtype.

        With activation 'swiglu' [T, n / 2]: silu of the first half of the columns times the second. With leave_parts maybe float32
        [P, T, n], whose sum is the product. By the implementation of int4_matmul that is named, or by the one that it chooses.
        """
        if self.perm is not None:
            x = jnp.take(x, self.perm, axis=1, mode="clip")
        group_size = x.shape[1] // self.scales.shape[0]
        return int4_matmul(x, self.packed, self.scales, self.zeros, group_size=group_size, bits=self.format.bits, bias=bias,
                           out_dtype=out_dtype, activation=activation, leave_parts=leave_parts, implementation=implementation)

    def columns(self, indices: jax.Array, *, num_inputs: int, dtype: jnp.dtype) -> jax.Array:
        """Columns of the weight, of which alone anything is read: indices [T], at least one, -> [T, K], rounded once, to dtype.

        An index outside [0, n) gives some column.
        """
        (groups, n), (count,) = self.scales.shape, indices.shape
        indices = jnp.clip(jnp.pad(indices, (0, -count % layout.TILE_N)), 0, n - 1)
        words = self.packed[indices // layout.TILE_N, :, indices % layout.TILE_N]  # [T', tiles of K, words]
        tiles = jnp.swapaxes(words.reshape(-1, layout.TILE_N, *words.shape[1:]), 1, 2)  # as the packed layout has T' columns
        scales = jnp.take(self.scales, indices, axis=1)
        zeros = None if self.zeros is None else jnp.take(self.zeros, indices, axis=1)
        wide = jnp.asarray(layout.dequantize(tiles, scales, zeros, group_size=num_inputs // groups, bits=self.format.bits))  # [K, T']
        values = wide.T[:count].astype(dtype)
        return values if self.perm is None else jnp.zeros_like(values).at[:, self.perm].set(values, unique_indices=True)


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
