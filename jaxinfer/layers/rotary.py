"""Rotary position embedding: how each rope kind turns positions into angles, and the rotation. Holds no parameters and no tables.

Angles are computed in float32 from the positions, once a step, and passed down to every layer.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """One rotary embedding, as a model's config states it."""

    kind: str
    """A key of ROPE_KINDS."""
    theta: float
    """Base of the geometric series of wavelengths."""
    parameters: tuple[tuple[str, float], ...] = ()
    """The kind's own settings, sorted by name."""

    def __getitem__(self, name: str) -> float:
        """One of the kind's own settings."""
        return dict(self.parameters)[name]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeKind:
    """What a rope kind asks of a config and how it makes frequencies."""

    required: tuple[str, ...]
    """Names in the config's rope dictionary that the kind needs; any other name there is refused."""
    inverse_frequencies: Callable[[RopeConfig, int], np.ndarray]
    """(config, H) -> float32 [H // 2], radians a position."""


def _default(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """theta ** (-2i / H). Rounded where transformers rounds, which at position 8192 is worth 1e-3 radians."""
    wavelengths = (rope.theta ** (np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)
    return np.float32(1.0) / wavelengths


def _linear(rope: RopeConfig, head_dim: int) -> np.ndarray:
    return (_default(rope, head_dim) / np.float32(rope["factor"])).astype(np.float32)


def _llama3(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Wavelengths beyond the trained context are stretched by `factor`, short ones kept, those between blended linearly."""
    base = _default(rope, head_dim)
    trained_len = rope["original_max_position_embeddings"]
    turns = trained_len * base / np.float32(2 * math.pi)  # rotations within the trained context
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (base * (keep + (1.0 - keep) / rope["factor"])).astype(np.float32)


ROPE_KINDS: dict[str, RopeKind] = {
    "default": RopeKind(required=(), inverse_frequencies=_default),
    "linear": RopeKind(required=("factor",), inverse_frequencies=_linear),
    "llama3": RopeKind(
        required=("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        inverse_frequencies=_llama3),
}


@jax.named_scope("rotary_angles")
def rotary_angles(rope: RopeConfig, positions: jax.Array, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the angles position * inverse_frequency.

    Args:
      rope: the kind and its settings.
      positions: [T] int32, from 0.
      head_dim: H, even.

    Returns:
      (cos, sin), each [T, H // 2] float32.

    Source: RoFormer (arXiv 2104.09864) eq. 15; `transformers/modeling_rope_utils.py` for the scaled kinds.
    """
    frequencies = ROPE_KINDS[rope.kind].inverse_frequencies(rope, head_dim)
    angles = positions.astype(jnp.float32)[:, None] * frequencies  # [T, H // 2]
    return jnp.cos(angles), jnp.sin(angles)


@jax.named_scope("rotary")
def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (x[i], x[i + H // 2]) of every head by the token's angles.

    Args:
      x: [T, N, H].
      cos: [T, H // 2] float32.
      sin: [T, H // 2] float32.

    Returns:
      [T, N, H] in x.dtype; computed in float32.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
