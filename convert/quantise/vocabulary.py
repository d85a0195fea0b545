"""The vocabulary head and the embedding, each a matrix [D, V] with a token a column: what the head reads, and their rounding.

Columns are rounded independently of each other, a strip at a time, so that memory does not grow with the vocabulary. No scale is folded
in: the norm before the head stays as it is. The head is rounded by the settings' method. The embedding is rounded to nearest always, as a
head that is tied to it then is too: what a token looks up is its own column, and no other can make up for the errors.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from convert.formats.matrix import QuantizedMatrix
from convert.quantise.grid import GridSpec, Rounded, column_losses, round_nearest, values
from convert.quantise.layer import FloatModel, add_gram, batch_rows, mirror
from convert.quantise.methods import QuantiseConfig, round_alone
from jaxinfer.errors import NonFiniteError
from jaxinfer.layers.norm import rms_norm
from jaxinfer.models.config import ModelConfig
from jaxinfer.quant import EMBEDDING, HEAD

STRIP = 8192
"""Tokens of the vocabulary that are rounded together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A rounded head or embedding, on the host."""

    matrix: QuantizedMatrix
    """[D, V]."""
    error: float
    """|X dW|^2 / |X W|^2 over the head's calibration inputs, as for every linear; |dW|^2 / |W|^2 of an embedding."""

    def weight(self) -> np.ndarray:
        """What it stands for: float32 [V, D]."""
        weight = np.empty(self.matrix.q.shape[::-1], np.float32)
        for strip in strips(len(weight)):
            weight[strip] = self._columns(strip)
        return weight

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """tokens [S, T] int32 -> float32 [S, T, D]."""
        distinct, places = np.unique(tokens, return_inverse=True)
        return self._columns(distinct)[places.reshape(tokens.shape)]

    def _columns(self, chosen: slice | np.ndarray) -> np.ndarray:
        zeros = None if self.matrix.zeros is None else self.matrix.zeros[:, chosen]
        part = dataclasses.replace(self.matrix, q=self.matrix.q[:, chosen], scales=self.matrix.scales[:, chosen], zeros=zeros)
        return part.dequantized().T


def head_weight(model: FloatModel) -> np.ndarray:
    """The head [V, D] as stored: the embedding itself where they are tied."""
    return model.read(f"{EMBEDDING if model.config.tie_embeddings else HEAD}.weight")


def quantise_head(model: FloatModel, settings: QuantiseConfig, x: np.ndarray | None) -> Table:
    """Rounds the vocabulary head by the settings' method to `settings.lm_head_bits`.

    Args:
      model: the original.
      settings: how.
      x: [S, T, D] float32, the last layer's output over the calibration windows; None, for rtn alone, counts all inputs alike.

    Raises:
      NonFiniteError: weights, activations or a result that are not finite.
    """
    assert settings.lm_head_bits is not None, "no head is to be quantised"
    gram = jnp.eye(model.config.dim) if x is None else head_gram(model.config, model.read("final_norm.weight"), x)
    if not bool(jnp.isfinite(gram).all()):
        raise NonFiniteError(f"{HEAD}: its calibration activations are NaN or infinite: nothing is saved; check the checkpoint with python -m "
                             "convert --verify, or calibrate on other text.")
    spec = dataclasses.replace(settings.grid, bits=settings.lm_head_bits)
    return _rounded(HEAD, head_weight(model), gram, spec, lambda w: round_alone(HEAD, w, gram, settings, spec))


def quantise_embedding(model: FloatModel, settings: QuantiseConfig) -> Table:
    """Rounds the embedding to nearest, to `settings.embedding_bits`. Raises NonFiniteError for weights that are not finite."""
    assert settings.embedding_bits is not None, "no embedding is to be quantised"
    spec = dataclasses.replace(settings.grid, bits=settings.embedding_bits)
    return _rounded(EMBEDDING, model.read(f"{EMBEDDING}.weight"), jnp.eye(model.config.dim), spec, lambda w: round_nearest(w, spec=spec))


def head_gram(config: ModelConfig, norm: np.ndarray, x: np.ndarray) -> jax.Array:
    """The Gram matrix, float32 [D, D], of what the head reads: the last layer's output [S, T, D] after the final norm."""
    gram, rows = jnp.zeros((config.dim, config.dim), jnp.float32), batch_rows(x.shape[1])
    for start in range(0, len(x), rows):
        gram = _observed(gram, jnp.asarray(x[start:start + rows]).reshape(-1, config.dim), jnp.asarray(norm, jnp.float32), eps=config.norm_eps)
    return mirror(gram)


def strips(length: int) -> Iterator[slice]:
    """The vocabulary in parts."""
    return (slice(start, min(start + STRIP, length)) for start in range(0, length, STRIP))


def _rounded(name: str, weight: np.ndarray, gram: jax.Array, spec: GridSpec, round_strip: Callable[[jax.Array], Rounded]) -> Table:
    """A table [V, D] rounded strip by strip; `round_strip` takes float32 [D, tokens]."""
    found, lost, whole = [], 0.0, 0.0
    for strip in strips(len(weight)):
        w = jnp.asarray(weight[strip], jnp.float32).T
        if not bool(jnp.isfinite(w).all()):
            raise NonFiniteError(f"{name}: its weights are not finite: nothing is saved; convert the model again.")
        rounded = round_strip(w)
        lost += float(_energy(values(rounded) - w, gram))
        whole += float(_energy(w, gram))
        found.append(rounded.matrix(spec))
    matrix = dataclasses.replace(
        found[0], q=np.concatenate([part.q for part in found], 1), scales=np.concatenate([part.scales for part in found], 1),
        zeros=None if spec.symmetric else np.concatenate([part.zeros for part in found if part.zeros is not None], 1))
    matrix.check(name)
    error = lost / whole if lost else 0.0
    if not np.isfinite(error):
        raise NonFiniteError(f"{name}: its output error is {error}: nothing is saved; calibrate on other text.")
    return Table(matrix=matrix, error=error)


@functools.partial(jax.jit, static_argnames=("eps",), donate_argnames=("gram",))
def _observed(gram: jax.Array, x: jax.Array, norm: jax.Array, *, eps: float) -> jax.Array:
    return add_gram(gram, rms_norm(x, norm, eps=eps))


@jax.jit
def _energy(weight: jax.Array, gram: jax.Array) -> jax.Array:
    """|X W|^2 over the inputs X of the Gram matrix."""
    return jnp.sum(column_losses(weight, gram))
