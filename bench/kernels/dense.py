"""Rows of flash_attention: dense [B, T, N, H] attention, causal and not, whole prompts and a query block over longer keys."""

import functools
from collections.abc import Iterator
from typing import Any

import jax

import pallas_kernels
from bench.kernels import jax_peers, torch_peers
from bench.kernels.attention import HEAD_DIM, MOST_XLA_TOKENS, SCALE
from bench.kernels.operands import draw
from bench.kernels.rows import Arrays, Item, LeftOut, Row, Settings, attention_work
from bench.kernels.running import supported
from pallas_kernels.flash_attention.api import IMPLS, flash_attention_spec

OP = "flash"
# shape, B, T, S, query heads, KV heads, causal
CASES = (
    ("t8192 32/32", 1, 8192, 8192, 32, 32, True),
    ("t2048 32/32", 1, 2048, 2048, 32, 32, True),
    ("t512 32/32", 1, 512, 512, 32, 32, True),
    ("16 x t512 32/32", 16, 512, 512, 32, 32, True),
    ("t4096 28/4", 1, 4096, 4096, 28, 4, True),
    ("t2048 of 8192 28/4", 1, 2048, 8192, 28, 4, True),
    ("full t2048 32/32", 1, 2048, 2048, 32, 32, False),
)
TINY = (("2 x t40 4/2", 2, 40, 40, 4, 2, True), ("full t40 4/2", 1, 40, 40, 4, 2, False))


def flash_items(settings: Settings) -> Iterator[Item]:
    """An implementation a row; peers where the queries are the whole prompt."""
    for shape, batch, num_queries, num_keys, heads, kv_heads, causal in TINY if settings.tiny else CASES:
        make = functools.partial(operands, batch=batch, num_queries=num_queries, num_keys=num_keys, heads=heads, kv_heads=kv_heads)
        statics: dict[str, Any] = {"causal": causal, "scale": SCALE}
        q, k, v = jax.eval_shape(lambda make=make: make(0))
        spec = flash_attention_spec(q, k, v, None, None, None, None, **statics, sliding_window=None, softcap=None)
        work = attention_work(((num_queries, num_keys),) * batch, heads=heads, kv_heads=kv_heads, head_dim=HEAD_DIM)
        if not causal:
            work["num_flops"] = 4.0 * batch * num_queries * num_keys * heads * HEAD_DIM
        base = functools.partial(Row, op=OP, shape=shape, unit="TFLOP/s", make=make, **work)
        without = ("reference",) if batch * num_queries <= MOST_XLA_TOKENS else ("reference", "xla")
        for name in supported(OP, shape, IMPLS, spec, settings, without):
            yield name if isinstance(name, LeftOut) else base(
                implementation=name, function=functools.partial(pallas_kernels.flash_attention, **statics, implementation=name))
        if not settings.tiny and num_queries == num_keys:
            yield base(implementation="cudnn (dense)", is_peer=True,
                       function=functools.partial(jax_peers.cudnn, scale=SCALE, is_causal=causal))
            cases = torch_peers.sdpa_cases(batch, num_queries, num_keys, heads, kv_heads, HEAD_DIM, SCALE, causal=causal)
            yield from torch_peers.peers(base, OP, shape, cases)


def operands(key: int, *, batch: int, num_queries: int, num_keys: int, heads: int, kv_heads: int) -> Arrays:
    """q [B, T, N, H], k and v [B, S, K, H]."""
    shapes = ((batch, num_queries, heads, HEAD_DIM), *[(batch, num_keys, kv_heads, HEAD_DIM)] * 2)
    return draw(key, shapes)
