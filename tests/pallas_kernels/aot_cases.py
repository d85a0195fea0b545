"""Calls of the kernels beyond the named shapes, to be compiled for an absent GPU. Holds no test.

Each function gives {name: (function, abstract arguments)} for one op; which implementation is compiled is decided by jax's default
device, as in a real call, so that one file serves every target.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import ragged_paged_attention, rms_norm

type Cases = dict[str, tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]]


def attention(*, num_tokens: int, num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int = 64, pages: int = 64,
              dtype: Any = jnp.bfloat16, **statics: Any) -> tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]:
    """A call of ragged_paged_attention."""
    struct = jax.ShapeDtypeStruct
    pool = struct((num_rows * pages + 1, num_kv_heads, page_size, head_dim), dtype)
    rows = (struct((num_rows, pages), jnp.int32), struct((num_rows + 1,), jnp.int32), struct((num_rows,), jnp.int32))
    run = functools.partial(ragged_paged_attention, scale=head_dim ** -0.5, **statics)
    return run, (struct((num_tokens, num_heads, head_dim), dtype), pool, pool, *rows)


def decode() -> Cases:
    """Splits from none to many, both head dims, every page size, window and cap."""
    shape = functools.partial(attention, max_q_len=1)
    return {
        "splits": shape(num_tokens=8, num_rows=8, num_heads=28, num_kv_heads=4, head_dim=128),
        "one_split": shape(num_tokens=128, num_rows=128, num_heads=28, num_kv_heads=4, head_dim=128),
        "many_splits": shape(num_tokens=1, num_rows=1, num_heads=28, num_kv_heads=4, head_dim=128, pages=512),
        "h64": shape(num_tokens=8, num_rows=8, num_heads=9, num_kv_heads=3, head_dim=64),
        "page32": shape(num_tokens=8, num_rows=8, num_heads=8, num_kv_heads=8, head_dim=128, page_size=32),
        "page96": shape(num_tokens=8, num_rows=8, num_heads=8, num_kv_heads=8, head_dim=128, page_size=96),
        "page128": shape(num_tokens=8, num_rows=8, num_heads=8, num_kv_heads=8, head_dim=128, page_size=128),
        "window": shape(num_tokens=8, num_rows=8, num_heads=28, num_kv_heads=4, head_dim=128, sliding_window=1000),
        "softcap": shape(num_tokens=8, num_rows=8, num_heads=28, num_kv_heads=4, head_dim=128, softcap=30.0),
    }


def prefill() -> Cases:
    """Both head dims, every page size, window and cap, float16."""
    shape = functools.partial(attention, num_tokens=512, num_rows=4, num_heads=8, num_kv_heads=2)
    return {
        "h128": shape(head_dim=128),
        "h64": shape(head_dim=64),
        "page32": shape(head_dim=128, page_size=32),
        "page96": shape(head_dim=128, page_size=96),
        "page128": shape(head_dim=128, page_size=128),
        "window": shape(head_dim=128, sliding_window=1000),
        "softcap": shape(head_dim=128, softcap=30.0),
        "f16_few_tokens": shape(head_dim=128, num_tokens=48, dtype=jnp.float16),
    }


def prefill_mosaic() -> Cases:
    """The sm_80 prefill kernel, on sm_90 too."""
    shape = functools.partial(attention, num_tokens=512, num_rows=4, num_heads=8, num_kv_heads=2, implementation="mosaic")
    return {"h128": shape(head_dim=128), "h64": shape(head_dim=64), "window": shape(head_dim=64, sliding_window=1000)}


def norm() -> Cases:
    """rms_norm with and without a residual, at a width of 128 lanes and at one of 64."""
    struct = jax.ShapeDtypeStruct

    def case(width: int, num_tokens: int, residual: bool) -> tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]:
        x = struct((num_tokens, width), jnp.bfloat16)
        run = functools.partial(rms_norm, eps=1e-6, implementation="mosaic")
        return run, (x, struct((width,), jnp.bfloat16), *([x] if residual else []))

    return {"d3584": case(3584, 128, False), "d3584_residual": case(3584, 128, True), "d4096_residual": case(4096, 4096, True),
            "d896": case(896, 8, True)}
