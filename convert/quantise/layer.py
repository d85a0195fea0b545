"""One decoder layer alone: its parameters, its forward pass, and what its four linears read. Decides nothing.

A layer's parameters go by their path inside the layer ("attention.qkv.weight"); linears by "attention.qkv" and so on.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.checkpoint import read_param
from jaxinfer.layers.attention import DenseContext
from jaxinfer.layers.norm import rms_norm
from jaxinfer.layers.rotary import rotary_angles
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLayer, whole

LINEARS = ("attention.qkv", "attention.output", "mlp.gate_up", "mlp.down")
"""The linears of a layer, in the order in which a token meets them."""
PANELS = 8
"""A Gram matrix is symmetric: in this many panels, 9/16 of it is computed and the rest mirrored."""
NUM_LARGE = 16
"""Tokens of a batch, those of the largest activations, that a Gram matrix sums apart from the others."""
BATCH_TOKENS = 4096
SENSITIVITY_TOKENS = 1024
"""Tokens, of the first windows, that output sensitivities are the means of, at least one window."""

Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FloatModel:
    """An unquantised converted checkpoint, read one layer at a time."""

    path: Path
    manifest: Mapping[str, Any]
    config: ModelConfig

    def read(self, name: str) -> np.ndarray:
        """A parameter as stored."""
        return read_param(self.path, self.manifest, name)

    def layer(self, index: int) -> dict[str, np.ndarray]:
        """The parameters of a layer, as stored."""
        prefix = f"layers.{index}."
        return {name.removeprefix(prefix): self.read(name) for name in self.manifest["tensors"] if name.startswith(prefix)}

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """tokens [S, T] int32 -> float32 [S, T, D]."""
        return self.read("embedding.weight")[tokens].astype(np.float32)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["gram", "magnitude", "sensitivity"], meta_fields=[])
@dataclasses.dataclass(frozen=True, kw_only=True)
class InputStatistics:
    """What a linear's calibration inputs X [tokens, k] leave behind."""

    gram: jax.Array         # X^T X, float32 [k, k]; below the panels' diagonal zero until `mirrored`
    magnitude: jax.Array    # sum over tokens of |X|, float32 [k]
    sensitivity: jax.Array  # how much the layer's output turns with each output column, float32 [n], see `sensitivities`


def zero_statistics(config: ModelConfig) -> dict[str, InputStatistics]:
    """Before any token: linear -> zeros, and every output column alike."""
    outputs = output_widths(config)
    return {name: InputStatistics(gram=jnp.zeros((k, k), jnp.float32), magnitude=jnp.zeros((k,), jnp.float32),
                                  sensitivity=jnp.ones((outputs[name],), jnp.float32)) for name, k in input_widths(config).items()}


def input_widths(config: ModelConfig) -> dict[str, int]:
    """Linear -> k."""
    return {"attention.qkv": config.dim, "attention.output": config.num_heads * config.head_dim, "mlp.gate_up": config.dim,
            "mlp.down": config.mlp_dim}


def output_widths(config: ModelConfig) -> dict[str, int]:
    """Linear -> n, all its output dimensions together."""
    return {"attention.qkv": (config.num_heads + 2 * config.num_kv_heads) * config.head_dim, "attention.output": config.dim,
            "mlp.gate_up": 2 * config.mlp_dim, "mlp.down": config.dim}


class _Recorder:
    """Stands in for a linear while a layer is traced, and keeps its input."""

    def __init__(self, linear: Callable[..., jax.Array]) -> None:
        self.linear = linear
        self.seen: jax.Array | None = None

    def __call__(self, x: jax.Array, *, implementation: str | None, leave_parts: bool = False) -> jax.Array:
        self.seen = x
        return self.linear(x, implementation=implementation, leave_parts=leave_parts)


@functools.lru_cache
def _layer_graph(config: ModelConfig, index: int) -> nnx.GraphDef[DecoderLayer]:
    return nnx.split(nnx.eval_shape(lambda: DecoderLayer(config, index, dtype=jnp.dtype(jnp.float32))))[0]


def layer_graph(config: ModelConfig, index: int) -> nnx.GraphDef[DecoderLayer]:
    """The structure of a layer; layers that differ only in their place share one, and so what is compiled for it."""
    return _layer_graph(config, config.sliding_windows.index(config.sliding_windows[index]))


def _bound(graph: nnx.GraphDef[DecoderLayer], params: Mapping[str, jax.Array]) -> DecoderLayer:
    tree: dict[str, Any] = {}
    for name, value in params.items():
        *parents, leaf = name.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = value
    return nnx.merge(graph, tree)


def _run(config: ModelConfig, layer: DecoderLayer, x: jax.Array) -> jax.Array:
    s, t, d = x.shape
    lengths = jnp.full((s,), t, jnp.int32)
    context = DenseContext(lengths=lengths, prompt_lens=lengths)
    positions = jnp.tile(jnp.arange(t, dtype=jnp.int32), s)
    angles = rotary_angles(config.rope, positions, context.token_prompt_lens(s * t), head_dim=config.head_dim, logn_len=config.logn_len)
    before, branch, _ = layer(x.reshape(s * t, d), None, angles, context)
    return (before + whole(branch, before.dtype)).reshape(s, t, d)


@functools.partial(jax.jit, static_argnames=("config", "graph"))
def forward(x: jax.Array, params: Params, *, config: ModelConfig, graph: nnx.GraphDef[DecoderLayer]) -> jax.Array:
    """x [S, T, D] -> [S, T, D] through one layer, in the dtype that x and the parameters have."""
    return _run(config, _bound(graph, params), x)


@functools.partial(jax.jit, static_argnames=("config", "graph"), donate_argnames=("statistics",))
def observe(x: jax.Array, params: Params, statistics: dict[str, InputStatistics], *, config: ModelConfig,
            graph: nnx.GraphDef[DecoderLayer]) -> tuple[jax.Array, dict[str, InputStatistics]]:
    """`forward`, and the statistics with this batch's inputs added. `statistics` is donated."""
    layer = _bound(graph, params)
    recorders = {name: _Recorder(_at(layer, name)) for name in LINEARS}
    for name, recorder in recorders.items():
        _put(layer, name, recorder)
    out = _run(config, layer, x)
    updated = {}
    for name, recorder in recorders.items():
        assert recorder.seen is not None, f"{name} was not called"
        old, magnitude = statistics[name], jnp.sum(jnp.abs(recorder.seen.astype(jnp.float32)), axis=0)
        updated[name] = dataclasses.replace(old, gram=add_gram(old.gram, recorder.seen), magnitude=old.magnitude + magnitude)
    return out, updated


class _Shifted:
    """Stands in for a linear while a layer is traced, and adds to its output."""

    def __init__(self, linear: Callable[..., jax.Array], shift: jax.Array) -> None:
        self.linear, self.shift = linear, shift

    def __call__(self, x: jax.Array, *, implementation: str | None, leave_parts: bool = False) -> jax.Array:
        out = self.linear(x, implementation=implementation)  # whole: a shift is added to it
        return out + self.shift.reshape(out.shape).astype(out.dtype)


@functools.partial(jax.jit, static_argnames=("config", "graph"))
def sensitivities(x: jax.Array, params: Params, *, config: ModelConfig, graph: nnx.GraphDef[DecoderLayer]) -> dict[str, jax.Array]:
    """What an error in each output column of each linear does to the layer's output, to first order.

    With y the layer's output at a token over its root mean square (the next norm divides by that) and z the output of a linear, column
    j has the sensitivity mean over tokens of sum_i (dy_i / dz_j)^2: the squared derivative of r . y, whose mean over random signs r it is,
    for one draw of r. A query counts by the keys that it meets, a value by the output matrix, a gate by the up that it multiplies.

    Args:
      x: [S, T, D], the layer's input.
      params: the layer's, in x's dtype.

    Returns:
      Linear -> float32 [n].
    """
    def normalised(shifts: dict[str, jax.Array]) -> jax.Array:
        layer = _bound(graph, params)
        for name, shift in shifts.items():
            _put(layer, name, _Shifted(_at(layer, name), shift))
        out = _run(config, layer, x).astype(jnp.float32)
        return out / jax.lax.stop_gradient(jnp.sqrt(jnp.mean(jnp.square(out), axis=-1, keepdims=True) + config.norm_eps))

    shifts = {name: jnp.zeros((x.shape[0] * x.shape[1], n), jnp.float32) for name, n in output_widths(config).items()}
    y, pull_back = jax.vjp(normalised, shifts)
    derivatives, = pull_back(jax.random.rademacher(jax.random.key(0), y.shape, jnp.float32))
    return {name: jnp.mean(jnp.square(derivative), axis=0) for name, derivative in derivatives.items()}


def _put(layer: DecoderLayer, name: str, linear: Callable[..., jax.Array]) -> None:
    parent, leaf = name.split(".")
    setattr(getattr(layer, parent), leaf, linear)


def _at(layer: DecoderLayer, name: str) -> Callable[..., jax.Array]:
    parent, leaf = name.split(".")
    return getattr(getattr(layer, parent), leaf)


def add_gram(gram: jax.Array, x: jax.Array) -> jax.Array:
    """Adds x^T x in the panels on and right of the diagonal, summed in float32; x [tokens, k].

    The largest tokens are summed apart: the first token of a text has activations thousands of times the others' in some layers, and
    a float32 sum that has reached their square loses what ordinary tokens add to it.
    """
    k = x.shape[1]
    sizes = jnp.sum(jnp.square(x.astype(jnp.float32)), axis=1)
    largest = jax.lax.top_k(sizes, min(NUM_LARGE, x.shape[0]))[1]
    large, x = x[largest], x.at[largest].set(0)
    width = -(-k // PANELS) if k >= 64 * PANELS else k
    for start in range(0, k, width):
        panel = sum(jnp.matmul(part[:, start:start + width].T, part[:, start:], precision="highest", preferred_element_type=jnp.float32)
                    for part in (x, large))
        gram = gram.at[start:start + width, start:].add(panel)
    return gram


@jax.jit
def mirrored(statistics: InputStatistics) -> InputStatistics:
    """With the whole Gram matrix."""
    return dataclasses.replace(statistics, gram=mirror(statistics.gram))


@jax.jit
def mirror(gram: jax.Array) -> jax.Array:
    """The whole of a Gram matrix that `add_gram` made: the upper triangle, and its mirror image below."""
    return jnp.triu(gram) + jnp.triu(gram, 1).T


def on_device(params: Mapping[str, Any], dtype: str) -> Params:
    """A layer's parameters on the default device, in a dtype."""
    return {name: jnp.asarray(value, dtype) for name, value in params.items()}


def batch_rows(max_len: int, tokens: int = BATCH_TOKENS) -> int:
    """Windows that go through a layer together."""
    return max(1, tokens // max_len)


@functools.partial(jax.jit, static_argnames=("eps",))
def token_losses(x: jax.Array, norm: jax.Array, head: jax.Array, targets: jax.Array, *, eps: float) -> jax.Array:
    """Negative log-likelihoods of the next tokens.

    Args:
      x: [T, D] float32, after the last layer.
      norm: [D], the final norm's weight.
      head: [V, D] in the checkpoint's dtype; products are accumulated in float32.
      targets: [T] int32.
      eps: the final norm's.

    Returns:
      [T] float32.
    """
    hidden = rms_norm(x, norm.astype(jnp.float32), eps=eps)
    logits = jax.lax.dot_general(hidden, head.astype(jnp.float32), (((1,), (1,)), ((), ())), precision="highest")
    return jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
