"""The rounding grid: a scale and a zero point for each group of input rows and each output column. Searches nothing.

A weight w [k, n] becomes codes q = clip(round(w / scale) + zero, 0, 2^bits - 1), and stands for (q - zero) * scale. Scales are numbers
that float16 holds, because that is what checkpoints of this kind store; rounding uses the stored value.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from convert.formats.matrix import QuantizedMatrix
from jaxinfer.quant import SCALE_FLOOR

SHRINKS = tuple(1.0 - i / 20 for i in range(11))
"""Factors on a group's range that searches for clipping try."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridSpec:
    """Which grids are made. Hashable, so that it can be a static argument."""

    bits: int
    """4 or 8."""
    group_size: int | None
    """Input rows that share a scale; None for the whole column."""
    symmetric: bool
    """The zero point is the middle code everywhere, instead of chosen for each group."""

    @property
    def max_code(self) -> int:
        """The largest code."""
        return 2**self.bits - 1

    def rows(self, k: int) -> int:
        """Rows of a group of a matrix with k input rows."""
        return k if self.group_size is None else self.group_size


@functools.partial(jax.tree_util.register_dataclass, data_fields=["q", "scales", "zeros"], meta_fields=[])
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounded:
    """A matrix on its grid: (q - zeros) * scales, each scale and zero holding for k // g rows."""

    q: jax.Array       # [k, n] uint8
    scales: jax.Array  # [g, n] float32, float16 values
    zeros: jax.Array   # [g, n] float32, whole numbers in [0, max_code]

    def matrix(self, spec: GridSpec) -> QuantizedMatrix:
        """On the host, as checkpoints hold it."""
        zeros = None if spec.symmetric else np.asarray(self.zeros).astype(np.uint8)
        return QuantizedMatrix(q=np.asarray(self.q), scales=np.asarray(self.scales).astype(np.float16), zeros=zeros, bits=spec.bits,
                               group_size=spec.group_size, perm=None)


def make_grid(w: jax.Array, spec: GridSpec, shrink: jax.Array | float = 1.0) -> tuple[jax.Array, jax.Array]:
    """The grid that covers every group's range, which always includes zero.

    Args:
      w: float32 [k, n], k a multiple of the group.
      spec: the kind of grid.
      shrink: factor in (0, 1] on the range, a scalar or [g, n]; what lies beyond is clipped.

    Returns:
      (scales, zeros), each float32 [g, n]. An all-zero group has scale 1.
    """
    k, n = w.shape
    groups = w.reshape(-1, spec.rows(k), n)
    low, high = jnp.minimum(groups.min(1), 0.0) * shrink, jnp.maximum(groups.max(1), 0.0) * shrink  # [g, n]
    if spec.symmetric:
        high = jnp.maximum(-low, high)
        low = -high
    scales = jnp.maximum((high - low) / spec.max_code, SCALE_FLOOR)
    scales = jnp.where(high > low, scales.astype(jnp.float16).astype(jnp.float32), 1.0)
    zeros = jnp.full_like(low, (spec.max_code + 1) // 2) if spec.symmetric else jnp.clip(jnp.round(-low / scales), 0, spec.max_code)
    return scales, zeros


def codes(w: jax.Array, scales: jax.Array, zeros: jax.Array, spec: GridSpec) -> jax.Array:
    """The nearest codes, as float32 [k, n]; ties go to even."""
    rows = spec.rows(w.shape[0])
    return jnp.clip(jnp.round(w / jnp.repeat(scales, rows, 0)) + jnp.repeat(zeros, rows, 0), 0, spec.max_code)


def on_grid(w: jax.Array, scales: jax.Array, zeros: jax.Array, spec: GridSpec) -> jax.Array:
    """The values that the nearest codes stand for: float32 [k, n]."""
    rows = spec.rows(w.shape[0])
    return (codes(w, scales, zeros, spec) - jnp.repeat(zeros, rows, 0)) * jnp.repeat(scales, rows, 0)


def best_shrinks(w: jax.Array, cost: jax.Array, spec: GridSpec) -> jax.Array:
    """The factor of SHRINKS on each group's range for which its rounding errors cost least: sum over its rows of cost * error^2.

    Args:
      w: float32 [k, n].
      cost: of a unit error in each row, float32 [k].
      spec: the kind of grid.

    Returns:
      float32 [g, n]; the widest of equally good ones.
    """
    count = w.shape[0] // spec.rows(w.shape[0])

    def step(best: tuple[jax.Array, jax.Array], shrink: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        errors = cost[:, None] * jnp.square(on_grid(w, *make_grid(w, spec, shrink), spec) - w)
        loss = errors.reshape(count, -1, w.shape[1]).sum(1)
        better = loss < best[0]
        return (jnp.where(better, loss, best[0]), jnp.where(better, shrink, best[1])), None

    start = jnp.full((count, w.shape[1]), jnp.inf), jnp.ones((count, w.shape[1]))
    return jax.lax.scan(step, start, jnp.asarray(SHRINKS, jnp.float32))[0][1]


@functools.partial(jax.jit, static_argnames=("spec",))
def round_shrunk(w: jax.Array, shrink: jax.Array | float, *, spec: GridSpec) -> Rounded:
    """w [k, n] to the nearest codes of the grid that covers its range times `shrink` (see make_grid)."""
    scales, zeros = make_grid(w, spec, shrink)
    return Rounded(q=codes(w, scales, zeros, spec).astype(jnp.uint8), scales=scales, zeros=zeros)


def round_nearest(w: jax.Array, *, spec: GridSpec) -> Rounded:
    """Round to nearest: w [k, n] on the grid that covers its range."""
    return round_shrunk(w, 1.0, spec=spec)


@jax.jit
def values(rounded: Rounded) -> jax.Array:
    """What a rounded matrix stands for: float32 [k, n]."""
    rows = rounded.q.shape[0] // rounded.scales.shape[0]
    return (rounded.q.astype(jnp.float32) - jnp.repeat(rounded.zeros, rows, 0)) * jnp.repeat(rounded.scales, rows, 0)


def column_losses(difference: jax.Array, gram: jax.Array) -> jax.Array:
    """The squared output error of every column over the calibration inputs X, from their Gram matrix alone: diag(d^T X^T X d).

    Args:
      difference: float32 [k, n], what was added to the weight.
      gram: X^T X, float32 [k, k].

    Returns:
      float32 [n]; its sum is tr(d^T gram d).
    """
    return jnp.sum(difference * jnp.matmul(gram, difference, precision="highest"), axis=0)


@jax.jit
def relative_error(approximate: jax.Array, exact: jax.Array, gram: jax.Array) -> jax.Array:
    """|X (a - e)|^2 / |X e|^2 over the calibration inputs; 0 where nothing differs."""
    wanted = jnp.sum(column_losses(exact, gram))
    found = jnp.sum(column_losses(approximate - exact, gram))
    return jnp.where(found == 0.0, 0.0, found / wanted)
