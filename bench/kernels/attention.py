"""Rows of attention: paged decode, whole prompts from pages, a chunk over earlier pages."""

import functools
from collections.abc import Iterator
from typing import Any

import jax

import pallas_kernels
from bench.kernels import jax_peers, torch_peers
from bench.kernels.operands import paged
from bench.kernels.rows import Goal, Item, LeftOut, Row, Rows, Settings, attention_work
from bench.kernels.running import is_sm_80, supported
from pallas_kernels.ragged_paged_attention.api import IMPLS, attention_spec

HEAD_DIM = 128
SCALE = HEAD_DIM ** -0.5

# shape, rows, query heads, KV heads, TB/s that it must show and those to reach for
DECODE = (
    ("b1 c640 28/4", 1, 640, 28, 4, None),
    ("b8 c640 28/4", 8, 640, 28, 4, None),
    ("b32 c640 28/4", 32, 640, 28, 4, None),
    ("b128 c640 28/4", 128, 640, 28, 4, Goal(must=3.6, unit="TB/s")),
    ("b1 c32768 28/4", 1, 32768, 28, 4, Goal(must=3.0, unit="TB/s")),
    ("b32 c4096 28/4", 32, 4096, 28, 4, Goal(must=3.9, reach=4.2, unit="TB/s")),
    ("b32 c4096 64/8", 32, 4096, 64, 8, Goal(must=3.9, reach=4.2, unit="TB/s")),
    ("b32 c4096 32/32", 32, 4096, 32, 32, Goal(must=3.9, unit="TB/s")),
)
# shape, rows, length, goal of the sm_90 path, goal of the sm_80 path
PREFILL = (
    ("t8192 32/32", 1, 8192, Goal(must=500, reach=600, unit="TFLOP/s"), Goal(must=220, reach=300, unit="TFLOP/s")),
    ("t2048 32/32", 1, 2048, Goal(must=330, reach=420, unit="TFLOP/s"), None),
    ("t512 32/32", 1, 512, Goal(must=120, reach=160, unit="TFLOP/s"), None),
    ("16 x t512 32/32", 16, 512, Goal(must=300, reach=400, unit="TFLOP/s"), None),
)
MOST_XLA_TOKENS = 2048  # the blocked jnp form takes seconds on longer prompts


def attention_items(settings: Settings, op: str, shape: str, rows: Rows, heads: int, kv_heads: int, *, goal: Goal | None = None,
                    without: tuple[str, ...] = ("reference",)) -> Iterator[Item]:
    """One row an implementation of ragged_paged_attention that can do the case, and by name those that cannot."""
    is_decode = all(q == 1 for q, _ in rows)
    make = functools.partial(paged, rows=rows, heads=heads, kv_heads=kv_heads, head_dim=HEAD_DIM, page_size=settings.page_size)
    statics: dict[str, Any] = {"scale": SCALE, "max_q_len": 1 if is_decode else None}
    spec = attention_spec(*jax.eval_shape(lambda: make(0)), **statics, sliding_window=None, softcap=None)
    base = functools.partial(Row, op=op, shape=shape, unit="TB/s" if is_decode else "TFLOP/s",
                             **attention_work(rows, heads=heads, kv_heads=kv_heads, head_dim=HEAD_DIM))
    for name in supported(op, shape, IMPLS, spec, settings, without):
        if isinstance(name, LeftOut):
            yield name
        else:
            yield base(implementation=name, make=make, goal=goal,
                       function=functools.partial(pallas_kernels.ragged_paged_attention, **statics, implementation=name))
    if settings.tiny or len(set(rows)) > 1 or not (is_decode or rows[0][0] == rows[0][1]):
        return
    if is_decode:
        yield from jax_peers.decode_peers(base, make, rows, SCALE)
    else:
        yield from jax_peers.prefill_peers(base, op, shape, make, rows, SCALE, is_sm_80=is_sm_80(settings))
    yield from torch_peers.peers(base, op, shape, torch_peers.sdpa_cases(
        len(rows), rows[0][0], rows[0][1], heads, kv_heads, HEAD_DIM, SCALE, causal=not is_decode))


def decode_items(settings: Settings) -> Iterator[Item]:
    """One new token a row."""
    if settings.tiny:
        yield from attention_items(settings, "decode", "b2 c70 4/2", ((1, 70),) * 2, 4, 2, goal=Goal(must=1e-6, unit="TB/s"))
        return
    for shape, batch, context, heads, kv_heads, goal in DECODE:
        yield from attention_items(settings, "decode", shape, ((1, context),) * batch, heads, kv_heads, goal=goal, without=("reference", "xla"))


def prefill_items(settings: Settings) -> Iterator[Item]:
    """Whole prompts."""
    if settings.tiny:
        yield from attention_items(settings, "prefill", "2 x t40 4/4", ((40, 40),) * 2, 4, 4, goal=Goal(must=1e-6, unit="TFLOP/s"))
        return
    for shape, batch, length, goal, goal_80 in PREFILL:
        without = ("reference",) if batch * length <= MOST_XLA_TOKENS else ("reference", "xla")
        yield from attention_items(settings, "prefill", shape, ((length, length),) * batch, 32, 32,
                                   goal=goal_80 if is_sm_80(settings) else goal, without=without)


def chunk_items(settings: Settings) -> Iterator[Item]:
    """The last tokens of a long prompt, over its earlier pages."""
    shape, rows, heads = ("t20 of 100 4/2", (20, 100), (4, 2)) if settings.tiny else ("t2048 of 8192 28/4", (2048, 8192), (28, 4))
    without = ("reference",) if settings.tiny else ("reference", "xla")
    yield from attention_items(settings, "chunk", shape, (rows,), *heads, without=without)
