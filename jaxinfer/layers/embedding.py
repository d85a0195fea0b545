"""Token embedding and the vocabulary head. Both keep their weight as [V, D], so that one array can serve as both."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.layers.linear import vocab_matmul
from jaxinfer.sharding import is_shared, joined, part_start, summed


class Embedding(nnx.Module):
    """Holds weight [V, D]."""

    def __init__(self, vocab_size: int, dim: int, *, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.zeros((vocab_size, dim), dtype), axes=("vocab", None))

    @jax.named_scope("embedding")
    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """[T] int32 -> [T, D]. Ids outside [0, V) give some row, or zeros: the host checks them."""
        weight = self.weight[...]
        if not is_shared():
            return jnp.take(weight, token_ids, axis=0, mode="clip")
        rows = token_ids - part_start(weight.shape[0])  # of this device's part
        mine = (rows >= 0) & (rows < weight.shape[0])
        return summed(jnp.where(mine[:, None], jnp.take(weight, rows, axis=0, mode="clip"), 0))

    @jax.named_scope("lm_head")
    def logits(self, hidden: jax.Array) -> jax.Array:
        """[R, D] -> float32 [R, V]: the products with every row of the weight."""
        return joined(vocab_matmul(hidden, self.weight[...]))
