"""Attention that comes with jax: cuDNN's, and the Pallas examples of jax.experimental.pallas.ops.gpu. Imported late, each by itself.

Their layouts are theirs, and making them is not timed. The examples apply no scale where they take none: queries are scaled before.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from bench.kernels.operands import dense
from bench.kernels.rows import Arrays, LeftOut, Row, Rows

type Make = Callable[[int], Arrays]


def prefill_peers(base: Callable[..., Row], op: str, shape: str, make: Make, rows: Rows, scale: float, *,
                  is_sm_80: bool) -> Iterator[Row | LeftOut]:
    """Peers for equal whole prompts, dense [B, T, N, H]."""
    for name, (function, operands) in PREFILL.items():
        if function is _mosaic_prefill and is_sm_80:
            yield LeftOut(op=op, shape=shape, implementation=name, reason="is written for sm_90; lowering it for sm_80 ends the process")
            continue
        yield base(implementation=name, make=functools.partial(operands, make=make, rows=rows), is_peer=True,
                   function=functools.partial(function, scale=scale))


def decode_peers(base: Callable[..., Row], make: Make, rows: Rows, scale: float) -> Iterator[Row]:
    """Peers for decode rows of equal contexts."""
    for name, (function, operands) in DECODE.items():
        yield base(implementation=name, make=functools.partial(operands, make=make, rows=rows), is_peer=True,
                   function=functools.partial(function, scale=scale))


def _dense(key: int, *, make: Make, rows: Rows) -> Arrays:
    return dense(make(key), len(rows), rows[0][1])


def _dense_float16(key: int, *, make: Make, rows: Rows) -> Arrays:
    """The same in float16, the only dtype that the Mosaic example takes."""
    return tuple(x.astype(jnp.float16) for x in _dense(key, make=make, rows=rows))


def _dense_by_head(key: int, *, make: Make, rows: Rows) -> Arrays:
    """q [B, N, H] and k, v [B, K, S, H], as the decode example reads them."""
    q, k, v = _dense(key, make=make, rows=rows)
    return q[:, 0], jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)


def _pages_by_head(key: int, *, make: Make, rows: Rows) -> Arrays:
    """q [B, N, H], pages [K, P, Z, H], page_table [B, M] and lengths [B]."""
    q, k_pages, v_pages, table, _, kv_lens = make(key)
    return q, jnp.swapaxes(k_pages, 0, 1), jnp.swapaxes(v_pages, 0, 1), table, kv_lens


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, is_causal: bool) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=is_causal, implementation="cudnn")


def _mosaic_prefill(q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float) -> Any:
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    num_tokens = q.shape[1]
    config = attention_mgpu.TuningConfig(block_q=64, block_kv=min(128, num_tokens), max_concurrent_steps=2, causal=True)
    return attention_mgpu.attention(q * jnp.asarray(scale, q.dtype), k, v, config)


def _triton_prefill(q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float) -> Any:
    from jax.experimental.pallas.ops.gpu import attention

    return attention.mha(q, k, v, None, sm_scale=scale, causal=True, num_warps=8)


def _triton_paged(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, table: jax.Array, kv_lens: jax.Array, *, scale: float) -> Any:
    from jax.experimental.pallas.ops.gpu import paged_attention

    num_pages = table.shape[1]
    splits = next(n for n in (16, 8, 4, 2, 1) if num_pages % n == 0)
    return paged_attention.paged_attention(
        q * jnp.asarray(scale, q.dtype), k_pages, v_pages, table, kv_lens, k_splits=splits,
        pages_per_compute_block=math.gcd(2, num_pages // splits), num_warps=4)


def _triton_decode(q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float) -> Any:
    from jax.experimental.pallas.ops.gpu import decode_attention

    # The example's gqa would first transpose k and v from [B, S, K, H], which costs more than the attention; this is what it calls then.
    splits = next(n for n in (16, 8, 5, 4, 2, 1) if k.shape[2] % (128 * n) == 0 or n == 1)
    one = functools.partial(
        decode_attention.decode_attn_unbatched, start_idx=None, kv_seq_len=None, sm_scale=scale, block_h=16, block_k=128, k_splits=splits,
        num_warps=4, num_stages=2, grid=None, interpret=False, debug=False, return_residuals=False, normalize_output=True)
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[2])
    return jax.vmap(jax.vmap(one))(grouped, k, v)


PREFILL: dict[str, tuple[Callable[..., Any], Callable[..., Arrays]]] = {
    "cudnn (dense)": (functools.partial(cudnn, is_causal=True), _dense),
    "jax's mosaic example (dense, f16)": (_mosaic_prefill, _dense_float16),
    "jax's triton example (dense)": (_triton_prefill, _dense),
}
DECODE: dict[str, tuple[Callable[..., Any], Callable[..., Arrays]]] = {
    "cudnn (dense)": (functools.partial(cudnn, is_causal=False), _dense),
    "jax's triton example (paged)": (_triton_paged, _pages_by_head),
    "jax's triton example (dense)": (_triton_decode, _dense_by_head),
}
