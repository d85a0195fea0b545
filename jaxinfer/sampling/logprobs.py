"""Log-probabilities of tokens and of the likeliest ones, on the device. No sort of the vocabulary and, on a GPU, no loop.

They are of the model's own distribution over the valid vocabulary: before temperature, penalties, biases and bars, which is what
vLLM's default (raw_logprobs) returns.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.state import TokenLogprobs

_GROUP = 128  # tokens that share one maximum in the search for the likeliest


def token_logprobs(logits: jax.Array, tokens: jax.Array, *, num_valid_tokens: int, num_logprobs: int) -> TokenLogprobs:
    """Log-probabilities of sampled tokens, over the valid vocabulary.

    Args:
      logits: [B, V] float32.
      tokens: [B] int32.
      num_valid_tokens: ids at or above this are padding and have probability 0.
      num_logprobs: R, the likeliest tokens reported; no more than V are.
    """
    if num_valid_tokens < logits.shape[1]:
        logits = jnp.where(lax.broadcasted_iota(jnp.int32, logits.shape, 1) < num_valid_tokens, logits, -jnp.inf)
    return logprobs_of(logits, tokens, num_logprobs=min(num_logprobs, logits.shape[1]))


def logprobs_of(logits: jax.Array, tokens: jax.Array, *, num_logprobs: int) -> TokenLogprobs:
    """Log-probabilities of `tokens` [B] and of the num_logprobs likeliest under softmax(logits [B, V])."""
    with jax.named_scope("logprobs"):
        total = jax.nn.logsumexp(logits, axis=1)
        chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
        ranks = jnp.maximum(jnp.sum(logits >= chosen, axis=1, dtype=jnp.int32), 1)  # 1 also where all is NaN
        top, top_ids = lax.platform_dependent(
            cpu=lambda: tuple(lax.top_k(logits, num_logprobs)), default=lambda: top_by_groups(logits, num_logprobs))
        return TokenLogprobs(chosen=chosen[:, 0] - total, ranks=ranks, top_ids=top_ids, top=top - total[:, None])


def top_by_groups(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of each row, the lowest index first among equals: (values [B, k], indices [B, k] int32).

    One pass over the row finds the maximum of each group of 128. The k largest lie in the k groups with the largest maxima, the
    lowest group first among equals; what follows looks at those alone.
    """
    rows, width = x.shape
    padded = jnp.pad(x, ((0, 0), (0, -width % _GROUP)), constant_values=-jnp.inf).reshape(rows, -1, _GROUP)
    num_groups = padded.shape[1]
    index = lax.broadcasted_iota(jnp.int32, (rows, num_groups), 1)
    _, groups = _take_largest(jnp.max(padded, axis=2), index, min(k, num_groups))
    candidates = jnp.take_along_axis(padded, groups[:, :, None], axis=1).reshape(rows, -1)
    ids = (groups[:, :, None] * _GROUP + jnp.arange(_GROUP, dtype=jnp.int32)).reshape(rows, -1)
    return _take_largest(candidates, ids, k)


def _take_largest(x: jax.Array, ids: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest entries of each row with their ids, the lowest id first among equals; k rounds of two reductions each."""
    left = jnp.ones(x.shape, bool)
    values, found = [], []
    for _ in range(k):
        best = jnp.max(jnp.where(left, x, -jnp.inf), axis=1, keepdims=True)
        first = jnp.min(jnp.where(left & (x == best), ids, jnp.iinfo(jnp.int32).max), axis=1, keepdims=True)
        left &= ids != first
        values.append(best)
        found.append(first)
    return jnp.concatenate(values, axis=1), jnp.concatenate(found, axis=1)
