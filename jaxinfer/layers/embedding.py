"""Token embedding and the vocabulary head. Both keep their weight as [V, D], so that one array can serve as both."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.layers.linear import vocab_matmul


class Embedding(nnx.Module):
    """Holds weight [V, D]."""

    def __init__(self, vocab_size: int, dim: int, *, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.zeros((vocab_size, dim), dtype), axes=("vocab", None))

    @jax.named_scope("embedding")
    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """[T] int32 -> [T, D]. Ids outside [0, V) are clipped into it: the host checks them."""
        return jnp.take(self.weight[...], token_ids, axis=0, mode="clip")

    @jax.named_scope("lm_head")
    def logits(self, hidden: jax.Array) -> jax.Array:
        """[R, D] -> float32 [R, V]: the products with every row of the weight."""
        return vocab_matmul(hidden, self.weight[...])
