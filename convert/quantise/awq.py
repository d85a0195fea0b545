"""Activation-aware scales and clipping, searched on Gram matrices: no forward pass is run for a candidate.

Rows of a weight that meet large activations are scaled up before rounding and down again in what feeds them, so their rounding error
shrinks at the cost of the others'. For a candidate s the rounding changes the output by X d with d = Q(w s) / s - w, and the squared
error over all calibration tokens is tr(d^T G d), G = X^T X. Columns count by their sensitivity (layer.py): a bare sum over q, k and v
follows the query columns, which are many and large, at the cost of the values, an error in which does up to a thousand times more.

Source: AWQ, arXiv 2306.00978, section 3.2; the clipping search is that of its released code.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from convert.quantise.grid import SHRINKS, GridSpec, column_losses, make_grid, on_grid
from convert.quantise.layer import InputStatistics
from jaxinfer.errors import NonFiniteError

NUM_RATIOS = 20
SCALINGS = {"auto": ("duo", "norms"), "duo": ("duo",), "activation": ("activation",), "norms": ("norms",)}
"""Choice of --awq_scaling -> the rules whose candidates are searched, beside no scaling.

With a the mean absolute activation of a row's input, w the mean size of its weights within their groups, and r = 0, 1/20, ... 19/20:
duo is s = a^r / w^(1 - r), activation is s = a^r, and norms is s = ||x|| / ||w||, the input's norm over the row's, with no ratio.
"""
SCALE_LIMIT = 2.0**10
"""Scales stay between its inverse and itself, their geometric mean being 1."""
SEARCH_WORK = 2e9
"""k * k * columns that a candidate's loss may take: wide inputs are judged by evenly spaced output columns, at least 128."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleChoice:
    """The scale found for the input of one linear."""

    scale: jax.Array
    """float32 [k]."""
    rule: str
    """none, duo, activation or norms."""
    ratio: float | None
    """r of a rule that has one."""
    loss: float
    """Relative squared output error with it, by rounding to nearest, over the columns searched."""
    plain_loss: float
    """The same without scaling."""


def search_scale(name: str, w: jax.Array, statistics: InputStatistics, spec: GridSpec, scaling: str,
                 tie: tuple[int, int, int] | None = None) -> ScaleChoice:
    """The candidate of least output error.

    Args:
      name: the linear, for the error.
      w: float32 [k, n].
      statistics: of its inputs.
      spec: the grid.
      scaling: a key of SCALINGS.
      tie: (K, G, H) where rows are [K, G, H] and those of one K and H must share a scale: it comes from their means. None: all apart.

    Returns:
      The choice; "none" where no candidate is better than no scaling.

    Raises:
      NonFiniteError: no candidate has a finite loss, or the error without scaling is not finite.
    """
    candidates, labels = _candidates(w, statistics, spec=spec, scaling=scaling, tie=tie), _labels(scaling)
    columns = _columns(*w.shape)
    losses = np.asarray(_losses(candidates, w[:, columns], statistics.gram, statistics.sensitivity[columns], spec=spec))
    if not np.isfinite(losses[0]):
        raise NonFiniteError(f"{name}: the loss without scaling is {losses[0]}, so its weights or calibration activations are not finite: "
                             "nothing is saved; check the checkpoint with --verify, or calibrate on other text.")
    best = int(np.nanargmin(losses))
    rule, ratio = labels[best]
    return ScaleChoice(scale=candidates[best], rule=rule, ratio=ratio, loss=float(losses[best]), plain_loss=float(losses[0]))


def _columns(k: int, n: int) -> np.ndarray:
    """Evenly spaced output columns to judge by."""
    count = min(n, max(128, int(SEARCH_WORK / (k * k))))
    return np.arange(count) * n // count


def _labels(scaling: str) -> list[tuple[str, float | None]]:
    """(rule, ratio) of every candidate; the first is no scaling."""
    found: list[tuple[str, float | None]] = [("none", None)]
    for rule in SCALINGS[scaling]:
        found += [(rule, None)] if rule == "norms" else [(rule, i / NUM_RATIOS) for i in range(NUM_RATIOS)]
    return found


@functools.partial(jax.jit, static_argnames=("spec", "scaling", "tie"))
def _candidates(w: jax.Array, statistics: InputStatistics, *, spec: GridSpec, scaling: str, tie: tuple[int, int, int] | None) -> jax.Array:
    """The scales of `_labels`: [C, k]."""
    activation = _positive(tied(statistics.magnitude, tie))
    weight = _positive(tied(_relative_size(w, spec), tie))
    norms = _positive(tied(jnp.sqrt(jnp.diagonal(statistics.gram)), tie)) / _positive(tied(jnp.linalg.norm(w, axis=1), tie))
    ratios = jnp.arange(NUM_RATIOS, dtype=jnp.float32)[:, None] / NUM_RATIOS
    rules = {"norms": norms[None], "activation": activation**ratios, "duo": activation**ratios / weight**(1 - ratios)}
    scales = jnp.concatenate([jnp.ones_like(norms)[None], *(rules[rule] for rule in SCALINGS[scaling])])
    scales = scales / jnp.exp(jnp.mean(jnp.log(scales), axis=1, keepdims=True))
    return jnp.clip(scales, 1 / SCALE_LIMIT, SCALE_LIMIT)


def tied(values: jax.Array, tie: tuple[int, int, int] | None) -> jax.Array:
    """The mean of a per-row quantity over the rows that share a scale, spread over them again; [k] -> [k]."""
    if tie is None:
        return values
    heads = values.reshape(tie)
    return jnp.broadcast_to(heads.mean(1, keepdims=True), heads.shape).reshape(-1)


def _positive(values: jax.Array) -> jax.Array:
    """With a floor far below the mean, for rows that calibration never reached and for weights that are zero."""
    return jnp.maximum(values, jnp.maximum(1e-5 * values.mean(), 1e-30))


def _relative_size(w: jax.Array, spec: GridSpec) -> jax.Array:
    """[k]: mean over the columns of |w|, each divided by the largest of its group."""
    groups = jnp.abs(w).reshape(-1, spec.rows(w.shape[0]), w.shape[1])
    largest = groups.max(1, keepdims=True)
    return (groups / jnp.where(largest > 0, largest, 1.0)).mean(2).reshape(-1)


@functools.partial(jax.jit, static_argnames=("spec",))
def _losses(candidates: jax.Array, w: jax.Array, gram: jax.Array, sensitivity: jax.Array, *, spec: GridSpec) -> jax.Array:
    """Relative squared output error of every candidate, columns counting by their sensitivity [n]: [C]."""
    wanted = jnp.sum(sensitivity * column_losses(w, gram))

    def loss(scale: jax.Array) -> jax.Array:
        scaled = w * scale[:, None]
        difference = on_grid(scaled, *make_grid(scaled, spec), spec) / scale[:, None] - w
        return jnp.sum(sensitivity * column_losses(difference, gram))

    losses = jax.lax.map(loss, candidates)
    return jnp.where(losses == 0.0, 0.0, losses / wanted)


@functools.partial(jax.jit, static_argnames=("spec",))
def search_clip(w: jax.Array, gram: jax.Array, *, spec: GridSpec) -> jax.Array:
    """How far each group's range shrinks: large weights are clipped where finer steps for the others are worth more.

    Every group is judged alone, by its own block of the Gram matrix; then each column keeps its clipping only where the whole
    matrix says that its output error fell.

    Args:
      w: float32 [k, n], scales folded in.
      gram: of the inputs that such a weight reads, [k, k].
      spec: the grid.

    Returns:
      float32 [g, n] in [0.5, 1].
    """
    rows = spec.rows(w.shape[0])
    count = w.shape[0] // rows
    at = jnp.arange(count)
    blocks = gram.reshape(count, rows, count, rows)[at, :, at, :]  # [g, rows, rows]

    def step(best: tuple[jax.Array, jax.Array], shrink: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        d = (on_grid(w, *make_grid(w, spec, shrink), spec) - w).reshape(count, rows, -1)
        loss = jnp.sum(d * jnp.einsum("gkl,gln->gkn", blocks, d, precision="highest"), axis=1)
        better = loss < best[0]
        return (jnp.where(better, loss, best[0]), jnp.where(better, shrink, best[1])), None

    start = jnp.full((count, w.shape[1]), jnp.inf), jnp.ones((count, w.shape[1]))
    shrinks = jax.lax.scan(step, start, jnp.asarray(SHRINKS, jnp.float32))[0][1]
    plain, clipped = (column_losses(on_grid(w, *make_grid(w, spec, s), spec) - w, gram) for s in (jnp.float32(1.0), shrinks))
    return jnp.where(clipped < plain, shrinks, 1.0)
