"""Which scales may move between neighbouring operations without changing the model, and the moving. Searches nothing.

    attention_norm -> qkv       a norm's weight divided by s, the rows of what reads it multiplied by s
    value          -> output    a value's columns and bias divided by s, output's rows multiplied; the G query heads of a KV head
                                read the same value, so they share its H scales
    mlp_norm       -> gate_up
    up             -> down      silu(gate) * up is linear in up

Afterwards the model is a plain one, with the same layers and no scale to apply at run time.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from convert.quantise.layer import LINEARS, Params
from jaxinfer.models.config import ModelConfig

NORMS = {"attention.qkv": "attention_norm.weight", "mlp.gate_up": "mlp_norm.weight"}
"""Linear -> the norm that feeds it."""

Scales = dict[str, jax.Array]
"""Linear -> the factor on each of its input rows, float32 [k]."""


def tie(name: str, config: ModelConfig) -> tuple[int, int, int] | None:
    """(K, G, H) where a linear's input rows must share scales over G, see awq.search_scale; None elsewhere."""
    return (config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim) if name == "attention.output" else None


@functools.partial(jax.jit, static_argnames=("dtype",))
def representable(params: Params, scales: Scales, dtype: np.dtype) -> tuple[Params, Scales]:
    """Scales for which the divided norms are numbers of the checkpoint's dtype, so that storing them loses nothing.

    Returns:
      (the norms divided and rounded, float32, by parameter path; all scales, those that a norm feeds adjusted). Where a norm's weight
      is zero, or rounds to zero or infinity, the scale is 1.
    """
    norms, adjusted = Params(), dict(scales)
    for linear, path in NORMS.items():
        norm = params[path]
        stored = (norm / scales[linear]).astype(dtype).astype(jnp.float32)
        usable = (stored != 0) & jnp.isfinite(stored)
        norms[path] = jnp.where(usable, stored, norm)
        adjusted[linear] = jnp.where(usable, norm / jnp.where(usable, stored, 1.0), 1.0)
    return norms, adjusted


@functools.partial(jax.jit, static_argnames=("config",))
def fold(params: Params, norms: Params, scales: Scales, *, config: ModelConfig) -> Params:
    """A layer's parameters with the scales moved: float32, the shapes of `params`.

    Args:
      params: float32, the layer's own.
      norms: the two norms' new weights, each the old one divided by its linear's scale.
      scales: for every linear; those of attention.output are equal for the query heads of a KV head.
      config: the model's.
    """
    out = {**params, **norms}
    for name in LINEARS:
        weight = out[f"{name}.weight"]
        out[f"{name}.weight"] = weight * scales[name].reshape(-1, *[1] * (weight.ndim - 1))
    value_scale = scales["attention.output"].reshape(config.num_kv_heads, -1, config.head_dim)[:, 0]  # [K, H]
    out["attention.qkv.weight"] = _on_value(out["attention.qkv.weight"], lambda x: x / value_scale, config)
    if "attention.qkv.bias" in out:
        out["attention.qkv.bias"] = _on_value(out["attention.qkv.bias"], lambda x: x / value_scale, config)
    gate_up = out["mlp.gate_up.weight"]
    out["mlp.gate_up.weight"] = gate_up.at[:, 1].divide(scales["mlp.down"])
    return out


def _on_value(qkv: jax.Array, change: Callable[[jax.Array], jax.Array], config: ModelConfig) -> jax.Array:
    """Changes the values' part [..., K, H] of a qkv weight or bias, in either layout."""
    if config.stacked_qkv:
        return qkv.at[..., 2, :, :].set(change(qkv[..., 2, :, :]))
    return qkv.at[..., -1, :].set(change(qkv[..., -1, :]))


def clippable_columns(name: str, config: ModelConfig) -> np.ndarray | None:
    """Which output columns may be clipped, bool [n]; None for all.

    Queries and keys are left out: attention's scores multiply two of them and forgive clipping less (AWQ leaves them out too).
    """
    if name != "attention.qkv":
        return None
    if config.stacked_qkv:
        mask = np.zeros((3, config.num_heads, config.head_dim), bool)
        mask[2] = True
    else:
        mask = np.zeros((config.num_kv_heads, config.num_heads // config.num_kv_heads + 2, config.head_dim), bool)
        mask[:, -1] = True
    return mask.reshape(-1)
