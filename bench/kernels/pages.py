"""Rows of the ops that move whole pages: out of pages into plain arrays, and from page to page."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from bench.kernels.operands import draw, paged
from bench.kernels.rows import Arrays, Item, LeftOut, Row, Settings
from bench.kernels.running import supported
from pallas_kernels.copy_pages.api import IMPLS as COPY_IMPLS
from pallas_kernels.copy_pages.api import copy_spec
from pallas_kernels.paged_gather.api import IMPLS as GATHER_IMPLS
from pallas_kernels.paged_gather.api import gather_spec

HEAD_DIM = 128
POOL_PAGES = 4096


def gather_items(settings: Settings) -> Iterator[Item]:
    """Keys and values of whole sequences: every byte read and written once."""
    for batch, num_keys, kv_heads in ((2, 70, 2),) if settings.tiny else ((1, 8192, 4), (32, 4096, 4), (8, 2048, 32)):
        shape = f"b{batch} s{num_keys} k{kv_heads}"
        make = functools.partial(_gather_operands, batch=batch, num_keys=num_keys, kv_heads=kv_heads, page_size=settings.page_size)
        k_pages, v_pages, table, kv_lens = jax.eval_shape(lambda make=make: make(0))
        spec = gather_spec(k_pages, v_pages, table, kv_lens, max_len=num_keys)
        for name in supported("gather", shape, GATHER_IMPLS, spec, settings):
            yield name if isinstance(name, LeftOut) else Row(
                op="gather", shape=shape, implementation=name, make=make, num_bytes=8.0 * batch * num_keys * kv_heads * HEAD_DIM,
                function=functools.partial(pallas_kernels.paged_gather, max_len=num_keys, implementation=name))


def _gather_operands(key: int, *, batch: int, num_keys: int, kv_heads: int, page_size: int) -> Arrays:
    _, k_pages, v_pages, table, _, kv_lens = paged(key, ((1, num_keys),) * batch, kv_heads, kv_heads, HEAD_DIM, page_size=page_size)
    return k_pages, v_pages, table, kv_lens


def copy_items(settings: Settings) -> Iterator[Item]:
    """Pages over other pages of two pools, in place: every byte read and written once."""
    num_pages = 16 if settings.tiny else POOL_PAGES
    for num_copies, kv_heads in ((3, 2),) if settings.tiny else ((1, 4), (64, 4), (1024, 4), (64, 32)):
        shape = f"u{num_copies} k{kv_heads}"
        make = functools.partial(_copy_operands, num_copies=num_copies, pool=(num_pages, kv_heads, settings.page_size, HEAD_DIM))
        k_pages, v_pages, src, dst = jax.eval_shape(lambda make=make: make(0))
        for name in supported("copy", shape, COPY_IMPLS, copy_spec((k_pages, v_pages), src, dst), settings):
            yield name if isinstance(name, LeftOut) else Row(
                op="copy", shape=shape, implementation=name, make=make, donated=(0, 1), function=functools.partial(_copy, name=name),
                num_bytes=8.0 * num_copies * kv_heads * settings.page_size * HEAD_DIM)


def _copy_operands(key: int, *, num_copies: int, pool: tuple[int, ...]) -> Arrays:
    pages = np.random.default_rng(key).permutation(np.arange(1, pool[0], dtype=np.int32))[:2 * num_copies]
    return *draw(key, (pool, pool)), jnp.asarray(pages[:num_copies]), jnp.asarray(pages[num_copies:])


def _copy(k_pages: jax.Array, v_pages: jax.Array, src: jax.Array, dst: jax.Array, *, name: str) -> Arrays:
    return pallas_kernels.copy_pages((k_pages, v_pages), src, dst, implementation=name)
