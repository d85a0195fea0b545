"""Token embedding and the vocabulary head. Both keep their weight as [V, D], so that one array can serve as both; quantised, as [D, V]."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.layers.linear import Linear, vocab_matmul
from jaxinfer.quant import QuantFormat
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
    def logits(self, hidden: jax.Array, *, implementation: str | None = None) -> jax.Array:
        """[R, D] -> float32 [R, V]: the products with every row of the weight, for which a name of an implementation means nothing."""
        return joined(vocab_matmul(hidden, self.weight[...]))


class QuantizedEmbedding(Linear):
    """Holds the packed integers of a matrix [D, V], a token a column, in groups along D. V may be any number: the packed layout pads, and
    the padding reaches no logit."""

    def __init__(self, vocab_size: int, dim: int, *, dtype: jnp.dtype, quant: QuantFormat):
        super().__init__(dim, (vocab_size,), axes=(None, "vocab"), bias=False, dtype=dtype, quant=quant)
        self.dim, self.dtype = dim, jnp.dtype(dtype)

    @jax.named_scope("embedding")
    def __call__(self, token_ids: jax.Array) -> jax.Array:  # type: ignore[override]  # columns are taken out, nothing is multiplied
        """[T] int32 with T at least 1 -> [T, D] in the model's dtype. Ids outside [0, V) give some row: the host checks them."""
        return self.quantized_weight().columns(token_ids, num_inputs=self.dim, dtype=self.dtype)

    @jax.named_scope("lm_head")
    def logits(self, hidden: jax.Array, *, implementation: str | None = None) -> jax.Array:
        """[R, D] with R at least 1 -> float32 [R, V], accumulated in float32 and not rounded, as a plain head's; by the implementation of
        int4_matmul that is named, None for its choice."""
        assert not is_shared(), "quantised weights run on one device"
        return self.quantized_weight().matmul(hidden, bias=None, out_dtype=jnp.float32, implementation=implementation)
