"""The gated feed-forward block (SwiGLU)."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.layers.linear import Linear
from jaxinfer.quant import FormatOf, not_quantised


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)), gate and up held as one weight [D, 2, F].

    Source: arXiv 2002.05202 eq. 6; `LlamaMLP` in transformers.
    """

    def __init__(self, dim: int, mlp_dim: int, *, dtype: jnp.dtype, quant: FormatOf = not_quantised):
        self.gate_up = Linear(dim, (2, mlp_dim), axes=(None, None, "mlp"), bias=False, dtype=dtype, quant=quant("gate_up"))
        self.down = Linear(mlp_dim, (dim,), axes=("mlp", None), bias=False, dtype=dtype, quant=quant("down"))

    @jax.named_scope("mlp")
    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, D] -> [T, D]."""
        with jax.named_scope("gate_up"):
            gate_up = self.gate_up(x)  # [T, 2, F]
        # A launch of its own, in a decode step of Qwen2-7B in int4 1.6 of a layer's 72 us (H200). To be fused, a block would need the same
        # columns of gate and of up: 296 pairs of strips on 132 cores leave three pairs, 84 tiles, to the busiest, which now has 70.
        with jax.named_scope("silu"):
            gate, up = gate_up[:, 0].astype(jnp.float32), gate_up[:, 1]
            hidden = jax.nn.silu(gate).astype(up.dtype) * up
        with jax.named_scope("down"):
            return self.down(hidden)
