"""Perplexity of a model on token windows, one layer in memory at a time. Loads no whole model."""

import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from convert.quantise.layer import FloatModel, Params, batch_rows, forward, layer_graph, token_losses
from jaxinfer.errors import NonFiniteError


def layerwise_perplexity(name: str, model: FloatModel, tokens: np.ndarray, layer_params: Callable[[int], Params], *,
                         embed: Callable[[np.ndarray], np.ndarray], head: np.ndarray, dtype: str) -> float:
    """exp of the mean negative log-likelihood of every token but each window's first; logits are float32.

    Args:
      name: of the model that the layers make, for the error.
      model: gives the final norm.
      tokens: [S, T] int32.
      layer_params: index -> the layer's parameters, of the dtype; called once a layer, in order.
      embed: tokens [S, T] -> float32 [S, T, D].
      head: the vocabulary head, [V, D] in any dtype.
      dtype: of the activations.

    Raises:
      NonFiniteError: the mean is not finite, or too large to be a perplexity.
    """
    config = model.config
    x = embed(tokens)
    rows = batch_rows(tokens.shape[1])
    for index in range(config.num_layers):
        params, graph = layer_params(index), layer_graph(config, index)
        for start in range(0, len(x), rows):
            x[start:start + rows] = np.asarray(forward(jnp.asarray(x[start:start + rows], dtype), params, config=config, graph=graph))
    norm, head_on_device = jnp.asarray(model.read("final_norm.weight"), jnp.float32), jnp.asarray(head, jnp.float32)
    total = 0.0
    for window, ids in zip(x, tokens, strict=True):
        losses = token_losses(jnp.asarray(window[:-1]), norm, head_on_device, jnp.asarray(ids[1:]), eps=config.norm_eps)
        total += float(np.asarray(losses, np.float64).sum())
    mean = total / (tokens.shape[0] * (tokens.shape[1] - 1))
    if not mean < math.log(np.finfo(np.float64).max):
        raise NonFiniteError(f"{name}: a token of the evaluation text takes {mean:g} nats in the mean, which is no perplexity: nothing is "
                             "saved; give --compute_dtype=float32 or another --eval_text, or check the checkpoint with --verify.")
    return math.exp(mean)
