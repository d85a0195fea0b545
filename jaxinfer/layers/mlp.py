"""The gated feed-forward block (SwiGLU)."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.layers.linear import Linear
from jaxinfer.quant import FormatOf, not_quantised
from pallas_kernels.int4_matmul.api import swiglu


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)), gate and up held as one weight [D, 2, F].

    Source: arXiv 2002.05202 eq. 6; `LlamaMLP` in transformers.
    """

    def __init__(self, dim: int, mlp_dim: int, *, dtype: jnp.dtype, quant: FormatOf = not_quantised):
        self.gate_up = Linear(dim, (2, mlp_dim), axes=(None, None, "mlp"), bias=False, dtype=dtype, quant=quant("gate_up"))
        self.down = Linear(mlp_dim, (dim,), axes=("mlp", None), bias=False, dtype=dtype, quant=quant("down"))

    @jax.named_scope("mlp")
    def __call__(self, x: jax.Array, *, implementation: str | None = None) -> jax.Array:
        """[T, D] -> [T, D], or parts of it as Linear leaves them; products as Linear's."""
        with jax.named_scope("gate_up"):
            linear = self.gate_up  # or what calibration has put there, whose product is asked for as such
            if isinstance(linear, Linear) and linear.quant is not None:  # activated by the product's own kernel where that pays
                hidden = linear.quantized_weight().matmul(x, bias=None, out_dtype=x.dtype, implementation=implementation,
                                                          activation="swiglu")
            else:
                gate_up = linear(x, implementation=implementation)  # [T, 2, F]
                hidden = swiglu(gate_up[:, 0], gate_up[:, 1])
        with jax.named_scope("down"):
            return self.down(hidden, implementation=implementation, leave_parts=True)
