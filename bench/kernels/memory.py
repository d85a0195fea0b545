"""Rows of the ops that move bytes: writing keys and values into pages, with rotary embedding or without, and RMSNorm."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from bench.kernels import torch_peers
from bench.kernels.operands import draw, paged
from bench.kernels.rows import Arrays, Goal, Item, LeftOut, Row, Rows, Settings
from bench.kernels.running import supported
from pallas_kernels.rms_norm.api import IMPLS as NORM_IMPLS
from pallas_kernels.rms_norm.api import norm_spec
from pallas_kernels.rotary_kv_write.api import IMPLS as ROTARY_IMPLS
from pallas_kernels.rotary_kv_write.api import rotary_write_spec
from pallas_kernels.write_kv_pages.api import IMPLS as WRITE_IMPLS
from pallas_kernels.write_kv_pages.api import write_spec

HEAD_DIM = 128
NUM_TOKENS = (1, 32, 128, 4096)
NORM_WIDTHS = (3584, 4096)
EPS = 1e-6


def small_op_goal(num_tokens: int) -> Goal:
    """85 % of the copy bandwidth on many tokens; 2.5 us in decode, where there is little to move."""
    return Goal(must=0.85, unit="of ceiling") if num_tokens >= 4096 else Goal(must=2.5, unit="us")


def token_rows(num_tokens: int) -> Rows:
    """As many decode rows, or one whole prompt where they are many."""
    return ((1, 100),) * num_tokens if num_tokens <= 128 else ((num_tokens, num_tokens),)


def write_items(settings: Settings) -> Iterator[Item]:
    """New keys and values into pages: two tensors read and two written."""
    for num_tokens in (4,) if settings.tiny else NUM_TOKENS:
        for kv_heads in (2,) if settings.tiny else (4, 32):
            shape = f"t{num_tokens} k{kv_heads}"
            make = functools.partial(_write_operands, rows=token_rows(num_tokens), kv_heads=kv_heads, page_size=settings.page_size)
            k_pages, v_pages, k, v, *rest = jax.eval_shape(lambda make=make: make(0))
            base = functools.partial(Row, op="write", shape=shape, make=make, num_bytes=8.0 * num_tokens * kv_heads * HEAD_DIM,
                                     donated=(0, 1), goal=small_op_goal(num_tokens))
            for name in supported("write", shape, WRITE_IMPLS, write_spec(k, v, k_pages, v_pages, *rest), settings):
                yield name if isinstance(name, LeftOut) else base(implementation=name, function=functools.partial(_write, name=name))


def _write_operands(key: int, *, rows: Rows, kv_heads: int, page_size: int) -> Arrays:
    q, k_pages, v_pages, *rest = paged(key, rows, kv_heads, kv_heads, HEAD_DIM, page_size=page_size)
    return k_pages, v_pages, q, q + 1, *rest


def _write(k_pages: jax.Array, v_pages: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array, name: str) -> Arrays:
    return pallas_kernels.write_kv_pages(k, v, k_pages, v_pages, *rest, implementation=name)


def rotary_items(settings: Settings) -> Iterator[Item]:
    """Rotary embedding of new tokens and their way into pages, in one op: the whole projection is read and written once."""
    for num_tokens in (4,) if settings.tiny else NUM_TOKENS:
        for heads, kv_heads in ((4, 2),) if settings.tiny else ((28, 4), (32, 32)):
            shape = f"t{num_tokens} {heads}/{kv_heads}"
            make = functools.partial(_rotary_operands, rows=token_rows(num_tokens), heads=heads, kv_heads=kv_heads,
                                     page_size=settings.page_size)
            k_pages, v_pages, qkv, cos, sin, *places = jax.eval_shape(lambda make=make: make(0))
            spec = rotary_write_spec(qkv, cos, sin, cos, sin, k_pages, v_pages, *places)
            num_bytes = num_tokens * (4.0 * (heads + 2 * kv_heads) * HEAD_DIM + 4 * HEAD_DIM)
            base = functools.partial(Row, op="rotary", shape=shape, make=make, num_bytes=num_bytes, donated=(0, 1),
                                     goal=small_op_goal(num_tokens))
            for name in supported("rotary", shape, ROTARY_IMPLS, spec, settings):
                yield name if isinstance(name, LeftOut) else base(implementation=name, function=functools.partial(_rotary, name=name))


def _rotary_operands(key: int, *, rows: Rows, heads: int, kv_heads: int, page_size: int) -> Arrays:
    qkv, k_pages, v_pages, *rest = paged(key, rows, heads + 2 * kv_heads, kv_heads, HEAD_DIM, page_size=page_size)
    angles = jax.random.normal(jax.random.key(key), (qkv.shape[0], HEAD_DIM // 2), jnp.float32)
    return k_pages, v_pages, qkv.reshape(qkv.shape[0], kv_heads, -1, HEAD_DIM), jnp.cos(angles), jnp.sin(angles), *rest


def _rotary(k_pages: jax.Array, v_pages: jax.Array, qkv: jax.Array, cos: jax.Array, sin: jax.Array, *places: jax.Array,
            name: str) -> Arrays:
    q, *pools = pallas_kernels.rotary_kv_write(qkv, cos, sin, cos, sin, k_pages, v_pages, *places, implementation=name)
    return *pools, q


def norm_items(settings: Settings) -> Iterator[Item]:
    """RMSNorm, alone (which torch has too) and after a residual add (which gives back the sum as well)."""
    for num_tokens in (4,) if settings.tiny else NUM_TOKENS:
        for dim in (256,) if settings.tiny else NORM_WIDTHS:
            for has_residual in (False, True):
                yield from _norm_items(settings, num_tokens, dim, has_residual)


def _norm_items(settings: Settings, num_tokens: int, dim: int, has_residual: bool) -> Iterator[Item]:
    shape = f"t{num_tokens} d{dim}{' + residual' if has_residual else ''}"
    make = functools.partial(_norm_operands, num_tokens=num_tokens, dim=dim, has_residual=has_residual)
    x, weight, *residual = jax.eval_shape(lambda: make(0))
    spec = norm_spec(x, weight, residual[0] if residual else None, eps=EPS)
    base = functools.partial(Row, op="norm", shape=shape, num_bytes=(8.0 if has_residual else 4.0) * num_tokens * dim + 2 * dim)
    for name in supported("norm", shape, NORM_IMPLS, spec, settings):
        yield name if isinstance(name, LeftOut) else base(
            implementation=name, make=make, goal=small_op_goal(num_tokens),
            function=functools.partial(pallas_kernels.rms_norm, eps=EPS, implementation=name))
    if has_residual or settings.tiny:
        return
    yield base(implementation="jax's triton example", make=make, function=_triton_norm, is_peer=True)
    yield from torch_peers.peers(base, "norm", shape, torch_peers.norm_case(num_tokens, dim, EPS))


def _norm_operands(key: int, *, num_tokens: int, dim: int, has_residual: bool) -> Arrays:
    return draw(key, ((num_tokens, dim), (dim,), *(((num_tokens, dim),) if has_residual else ())))


def _triton_norm(x: jax.Array, weight: jax.Array) -> Any:
    from jax.experimental.pallas.ops.gpu import rms_norm

    return rms_norm.rms_norm(x[None], weight, jnp.zeros_like(weight), eps=EPS)[0]
