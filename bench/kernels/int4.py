"""Rows of int4_matmul: the projections of Qwen2-7B from one token to many, beside XLA and torch, on 4 bits and on bfloat16."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

import pallas_kernels
from bench.kernels import torch_peers
from bench.kernels.rows import Arrays, Goal, Item, LeftOut, Row, Settings
from bench.kernels.running import is_sm_80, supported
from pallas_kernels.int4_matmul.api import IMPLS, matmul_spec

OP = "int4"
GROUP_SIZE = 128
SHAPES = {"up": (3584, 18944), "qkv": (3584, 4608), "o": (3584, 3584), "gate+up": (3584, 37888), "down": (18944, 3584)}  # k, n
NUM_TOKENS = (1, 16, 64, 256, 2048, 4096)
GOALS = {  # us on an H200
    ("up", 1): (12, 10), ("up", 16): (13, 11), ("up", 64): (18, None), ("up", 256): (50, None), ("qkv", 1): (5, 4), ("o", 1): (5, 4)}
MOST_TINY = {"tiny": (512, 192)}


def int4_items(settings: Settings) -> Iterator[Item]:
    """Our implementations, then the same product by others."""
    for shape, (k, n) in (MOST_TINY if settings.tiny else SHAPES).items():
        for m in (1, 20) if settings.tiny else NUM_TOKENS:
            yield from _items(settings, shape, m, k, n)


def _items(settings: Settings, shape: str, m: int, k: int, n: int) -> Iterator[Item]:
    name = f"{shape} {k}x{n} m{m}"
    make = functools.partial(operands, m=m, k=k, n=n)
    many = m > 512
    base = functools.partial(Row, op=OP, shape=name, num_bytes=k * n * (0.5 + 4 / GROUP_SIZE) + 2.0 * m * (k + n), num_flops=2.0 * m * k * n,
                             unit="TFLOP/s" if many else "TB/s")
    goal = None if is_sm_80(settings) or (shape, m) not in GOALS else Goal(must=GOALS[shape, m][0], reach=GOALS[shape, m][1], unit="us")
    x, packed, scales, zeros = jax.eval_shape(lambda: make(0))
    spec = matmul_spec(x, packed, scales, zeros, None, group_size=GROUP_SIZE, bits=4, out_dtype=None)
    far = [impl for impl, is_far in (("xla", m not in (1, 64, 2048)), ("wgmma", m < 16), ("mosaic", m > 256), ("dequantize", m < 256),
                                     ("stream", m > 1)) if is_far]
    for impl in supported(OP, name, IMPLS, spec, settings, ("reference",) if settings.tiny else ("reference", *far)):
        yield impl if isinstance(impl, LeftOut) else base(implementation=impl, make=make, goal=None if impl == "xla" else goal,
                                                          function=functools.partial(_matmul, name=impl))
    if is_sm_80(settings):  # peers take no architecture: their rows are those of the other run
        return
    yield base(implementation="XLA int4", make=functools.partial(_native, make=make, k=k, n=n), function=_native_matmul, is_peer=True)
    yield base(implementation="XLA bfloat16", make=functools.partial(_dense, make=make), function=jnp.dot, is_peer=True)
    if not settings.tiny:
        yield from torch_peers.peers(base, OP, name, torch_peers.int4_cases(m, k, n, GROUP_SIZE))


@functools.partial(jax.jit, static_argnames=("m", "k", "n"))
def operands(key: jax.Array | int, *, m: int, k: int, n: int) -> Arrays:
    """x bfloat16, packed random codes, float16 scales that keep the product near 1, zero points. One executable for all keys."""
    keys = jax.random.split(jax.random.key(key), 4)
    packed = jax.random.bits(keys[1], pallas_kernels.packed_shape(k, n, bits=4), jnp.uint16)
    groups = (k // GROUP_SIZE, n)
    scales = jax.random.uniform(keys[2], groups, jnp.float32, 0.5, 1.5) / (4.6 * k ** 0.5)
    zeros = jax.random.randint(keys[3], groups, 6, 11).astype(jnp.bfloat16)
    return (jax.random.normal(keys[0], (m, k), jnp.bfloat16), jax.lax.bitcast_convert_type(packed, jnp.int16),
            scales.astype(jnp.float16), zeros)


def _matmul(x: jax.Array, packed: jax.Array, scales: jax.Array, zeros: jax.Array, *, name: str) -> jax.Array:
    return pallas_kernels.int4_matmul(x, packed, scales, zeros, group_size=GROUP_SIZE, implementation=name)


@functools.partial(jax.jit, static_argnames=("make", "k", "n"))
def _native(key: jax.Array | int, *, make: functools.partial[Arrays], k: int, n: int) -> Arrays:
    """x, codes as jnp.int4 [k, n] less eight, scales, zero points less eight."""
    x, packed, scales, zeros = make(key)
    return x, (pallas_kernels.unpack(packed, k=k, n=n).astype(jnp.int8) - 8).astype(jnp.int4), scales, zeros - 8


def _native_matmul(x: jax.Array, codes: jax.Array, scales: jax.Array, zeros: jax.Array) -> jax.Array:
    weights = (codes.astype(x.dtype).reshape(scales.shape[0], -1, scales.shape[1]) - zeros[:, None]) * scales[:, None].astype(x.dtype)
    return jnp.dot(x, weights.reshape(codes.shape), preferred_element_type=jnp.float32).astype(x.dtype)


@functools.partial(jax.jit, static_argnames="make")
def _dense(key: jax.Array | int, *, make: functools.partial[Arrays]) -> Arrays:
    """x and the weights in bfloat16 [k, n]."""
    x, packed, scales, zeros = make(key)
    return x, pallas_kernels.dequantize(packed, scales, zeros, group_size=GROUP_SIZE).astype(x.dtype)
