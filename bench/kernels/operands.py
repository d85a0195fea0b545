"""Operands of the timed calls: ragged pages, and dense twins of the same values."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.rows import Arrays, Rows


def paged(key: int, rows: Rows, heads: int, kv_heads: int, head_dim: int, *, page_size: int, num_padding: int = 0) -> Arrays:
    """q [T, N, H], k_pages, v_pages [P, K, Z, H], page_table [B, M], cu_q_lens, kv_lens of `rows`, on scattered pages."""
    table = page_table(key, tuple(kv for _, kv in rows), page_size)
    q_lens = [q for q, _ in rows]
    pool = (sum(-(-kv // page_size) for _, kv in rows) + 1, kv_heads, page_size, head_dim)
    drawn = draw(key, ((sum(q_lens) + num_padding, heads, head_dim), pool, pool))
    return (*drawn, jnp.asarray(table), jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32), jnp.asarray([kv for _, kv in rows], jnp.int32))


@functools.partial(jax.jit, static_argnums=1)
def draw(key: jax.Array | int, shapes: tuple[tuple[int, ...], ...]) -> Arrays:
    """Normal bfloat16 arrays. One executable for all keys, since operands are drawn many times."""
    keys = jax.random.split(jax.random.key(key), len(shapes))
    return tuple(jax.random.normal(k, shape, jnp.bfloat16) for k, shape in zip(keys, shapes, strict=True))


def page_table(key: int, kv_lens: tuple[int, ...], page_size: int) -> np.ndarray:
    """[B, M] int32: each page once, in random order; 0, the null page, behind a row's end."""
    counts = [-(-kv // page_size) for kv in kv_lens]
    table = np.zeros((len(counts), max(counts)), np.int32)
    numbers = np.random.default_rng(key).permutation(sum(counts)).astype(np.int32) + 1
    for b, (start, count) in enumerate(zip(itertools.accumulate([0, *counts]), counts, strict=False)):
        table[b, :count] = numbers[start:start + count]
    return table


def dense(operands: Arrays, num_rows: int, num_keys: int) -> Arrays:
    """q [B, T, N, H] and k, v [B, S, K, H] of `paged` operands whose rows have equal lengths."""
    q, k_pages, v_pages, table, _, _ = operands
    return q.reshape(num_rows, -1, *q.shape[1:]), _gather(k_pages, table, num_keys), _gather(v_pages, table, num_keys)


@functools.partial(jax.jit, static_argnums=2)
def _gather(pool: jax.Array, table: jax.Array, num_keys: int) -> jax.Array:
    return jnp.moveaxis(pool[table], 2, 3).reshape(table.shape[0], -1, pool.shape[1], pool.shape[3])[:, :num_keys]
