"""GPTQ: weights are rounded one input row after another, and what each row's rounding loses is made up for in the rows after it.

With H = X^T X and U the upper Cholesky factor of its inverse (H^-1 = U^T U), rounding row i by the error e = (w_i - q_i) / U_ii
changes every later row j by -U_ij e, which is the change that keeps the output error least.

Source: arXiv 2210.17323, algorithm 1. Here the damped H is factored from its last row upwards, H = R R^T with R upper, so that
U = R^-1 and no inverse of H is formed.
"""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np

from convert.quantise.grid import GridSpec, Rounded, best_shrinks, make_grid
from jaxinfer.errors import NonFiniteError

logger = logging.getLogger(__name__)

MAX_BLOCK = 128
"""Rows between updates of all later rows, at most; where each group makes its own grid a block is a group."""


def gptq(name: str, w: jax.Array, gram: jax.Array, *, spec: GridSpec, damping: float, act_order: bool,
         clip: bool) -> tuple[Rounded, float]:
    """Rounds a matrix with error feedback.

    Args:
      name: the linear, for the error.
      w: float32 [k, n].
      gram: X^T X of its inputs, float32 [k, k].
      spec: the grid. Without `act_order` a group's grid is made when its first row is reached, from the weights as they are then.
      damping: what is added to the diagonal, as a share of its mean; inputs that were always zero get that mean. Where float32 cannot
        factor the result (tokens whose activations are thousands of times the others' leave nothing of these but rounding errors),
        float64 does; where that cannot either, damping is raised tenfold, twice at most, and that is said.
      act_order: round the rows of the largest inputs first. Groups stay where they are, on grids made beforehand, so that the result
        needs no reordered inputs.
      clip: choose each group's range for the least sum of squared errors, a row's weighed as feedback weighs it, 1 / U_ii^2. What
        clipping takes from a weight is an error like others, and made up for.

    Returns:
      (the rounded matrix, the damping used).

    Raises:
      NonFiniteError: H cannot be factored, or the result is not finite.
    """
    k = w.shape[0]
    order = jnp.argsort(-jnp.diagonal(gram), stable=True) if act_order else jnp.arange(k)
    factor, used = _damped_factor(name, gram[order][:, order] if act_order else gram, damping)
    if act_order or spec.group_size is None:
        scales, zeros = _make_grid(w, jnp.diagonal(factor)[jnp.argsort(order)], spec=spec, clip=clip)
        at = order // spec.rows(k)
        block = max(size for size in range(1, MAX_BLOCK + 1) if k % size == 0)
        q = _feedback(w[order], factor, scales[at], zeros[at], spec=spec, block=block, own_grid=False, clip=False)[0][jnp.argsort(order)]
    else:
        empty = jnp.zeros((k // spec.group_size, w.shape[1]), jnp.float32)
        q, scales, zeros = _feedback(w, factor, empty, empty, spec=spec, block=spec.group_size, own_grid=True, clip=clip)
    if not bool(jnp.isfinite(scales).all()):
        raise NonFiniteError(f"{name}: error feedback at damping = {used} grew beyond float32: nothing is saved; raise --damping.")
    return Rounded(q=q.astype(jnp.uint8), scales=scales, zeros=zeros), used


def _damped_factor(name: str, gram: jax.Array, damping: float) -> tuple[jax.Array, float]:
    """(U, the damping that it took)."""
    factor = _inverse_factor(gram, damping)
    if bool(jnp.isfinite(factor).all()):
        return factor, damping
    for used in (damping, 10 * damping, 100 * damping):
        with jax.enable_x64(True):
            wide = _inverse_factor(gram.astype(jnp.float64), used).astype(jnp.float32)
        if bool(jnp.isfinite(wide).all()):
            if used != damping:
                logger.warning("%s: its Hessian has no Cholesky factor at damping = %g; %g was taken", name, damping, used)
            return wide, used
    raise NonFiniteError(f"{name}: the Hessian of its calibration activations has no Cholesky factor even at damping = {used:g}: nothing is "
                         "saved; calibrate on more or other text, or use --method=awq.")


@jax.jit
def _inverse_factor(gram: jax.Array, damping: float) -> jax.Array:
    """U upper with U^T U the inverse of the damped Gram matrix, [k, k] in its dtype. NaN where it is not positive definite."""
    diagonal = jnp.diagonal(gram)
    mean = jnp.maximum(jnp.mean(diagonal), np.finfo(np.float32).tiny)
    damped = gram / mean + jnp.diag(jnp.where(diagonal > 0, damping, 1.0).astype(gram.dtype))
    upper = jnp.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]  # R with R R^T the damped matrix
    return jax.scipy.linalg.solve_triangular(upper, jnp.eye(gram.shape[0], dtype=gram.dtype), lower=False)


@functools.partial(jax.jit, static_argnames=("spec", "clip"))
def _make_grid(w: jax.Array, diagonal: jax.Array, *, spec: GridSpec, clip: bool) -> tuple[jax.Array, jax.Array]:
    """Grids of w [k, n]; `diagonal` [k] has each row's U_ii."""
    return make_grid(w, spec, best_shrinks(w, 1 / jnp.square(diagonal), spec) if clip else 1.0)


@functools.partial(jax.jit, static_argnames=("spec", "block", "own_grid", "clip"))
def _feedback(w: jax.Array, factor: jax.Array, scales: jax.Array, zeros: jax.Array, *, spec: GridSpec, block: int, own_grid: bool,
              clip: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The loop over blocks of rows.

    Args:
      w: [k, n] in the order of rounding.
      factor: U in that order.
      scales, zeros: one row for each row of w; with `own_grid` one for each block, and filled here.
      clip: whether grids made here are narrowed.

    Returns:
      (codes float32 [k, n], scales, zeros).
    """
    k, n = w.shape
    grid_of_block = GridSpec(bits=spec.bits, group_size=None, symmetric=spec.symmetric)

    def one_block(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        w, q, scales, zeros = state
        start = i * block
        rows = jax.lax.dynamic_slice_in_dim(w, start, block)
        corner = jax.lax.dynamic_slice(factor, (start, start), (block, block))
        if own_grid:
            scale, zero = _make_grid(rows, jnp.diagonal(corner), spec=grid_of_block, clip=clip)  # [1, n]
            scales, zeros = (jax.lax.dynamic_update_slice_in_dim(old, new, i, 0) for old, new in ((scales, scale), (zeros, zero)))
            scale, zero = jnp.broadcast_to(scale, rows.shape), jnp.broadcast_to(zero, rows.shape)
        else:
            scale, zero = (jax.lax.dynamic_slice_in_dim(x, start, block) for x in (scales, zeros))
        rounded, errors = _one_block(rows, corner, scale, zero, spec.max_code)
        later = jnp.where(jnp.arange(k) >= start + block, jax.lax.dynamic_slice_in_dim(factor, start, block), 0.0)  # [block, k]
        w = w - jnp.matmul(later.T, errors, precision="highest")
        return w, jax.lax.dynamic_update_slice_in_dim(q, rounded, start, 0), scales, zeros

    _, q, scales, zeros = jax.lax.fori_loop(0, k // block, one_block, (w, jnp.zeros((k, n), jnp.float32), scales, zeros))
    return q, scales, zeros


def _one_block(rows: jax.Array, corner: jax.Array, scale: jax.Array, zero: jax.Array, max_code: int) -> tuple[jax.Array, jax.Array]:
    """Rounds a block's rows in turn: [block, n] -> (codes, errors), each [block, n]."""
    after = jnp.triu(corner, 1)

    def one_row(j: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        rows, q, errors = state
        code = jnp.clip(jnp.round(rows[j] / scale[j]) + zero[j], 0, max_code)
        error = (rows[j] - (code - zero[j]) * scale[j]) / corner[j, j]
        return rows - after[j][:, None] * error, q.at[j].set(code), errors.at[j].set(error)

    _, q, errors = jax.lax.fori_loop(0, rows.shape[0], one_row, (rows, jnp.zeros_like(rows), jnp.zeros_like(rows)))
    return q, errors
