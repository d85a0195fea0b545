"""Times the kernels beside their peers and the device's ceilings, each call on operands that are not in the cache.

  python -m bench.kernels [--ops=decode,prefill,ragged,write,norm] [--arch=80] [--name=NAME]
Rows are device time: of short calls by profiler (gaps between launches do not count), of long ones by the wall clock over calls queued one
behind the other. --arch=80 runs the path that an A100 takes on a newer GPU. --tiny shrinks every shape, to try the program on a CPU.
"""

import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import pallas_kernels
from bench import profiling, report
from pallas_kernels.ragged_paged_attention.api import attention_spec
from pallas_kernels.rms_norm.api import norm_spec
from pallas_kernels.write_kv_pages.api import write_spec

_OPS = flags.DEFINE_list("ops", ["decode", "prefill", "ragged", "write", "norm"], "What to time.")
_ARCH = flags.DEFINE_enum("arch", None, ["80"], "Lower the Mosaic kernels as for this architecture.")
_TINY = flags.DEFINE_bool("tiny", False, "Small shapes, for a try on a CPU.")
_PAGE_SIZE = flags.DEFINE_integer("page_size", 64, "Tokens a page.")
_NAME = flags.DEFINE_string("name", None, "Name of the JSON file; default: kernels-<device>.")

CEILINGS = {"NVIDIA H200": (4.19e12, 756e12)}  # measured: bytes/s of a device-to-device copy, bf16 FLOP/s of an 8192^3 matmul
CACHE_BYTES = 128 * 2**20   # more than any second-level cache: operands rotate over at least this much
LONG_CALL_S = 150e-6        # from here on launching costs nothing that the device would see
CALLS = 16

type Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A call to time."""

    op: str
    shape: str
    implementation: str
    function: Callable[..., Any]
    make: Callable[[int], Arrays]
    """Operands number i; the same i gives the same values to every implementation."""
    num_bytes: float = 0
    """Bytes that must be moved."""
    num_flops: float = 0
    target: float | None = None
    """TB/s or TFLOP/s to reach."""
    donated: tuple[int, ...] = ()
    """Operands written in place; the function returns them first and they go into the next call."""


def paged(key: int, rows: tuple[tuple[int, int], ...], heads: int, kv_heads: int, head_dim: int, *, num_padding: int = 0) -> Arrays:
    """q, k_pages, v_pages, page_table, cu_q_lens, kv_lens of rows of (new tokens, keys), on scattered pages."""
    page_size = _PAGE_SIZE.value
    counts = [-(-kv // page_size) for _, kv in rows]
    table = np.zeros((len(rows), max(counts)), np.int32)
    numbers = np.random.default_rng(key).permutation(sum(counts)).astype(np.int32) + 1
    for b, (start, count) in enumerate(zip(itertools.accumulate([0, *counts]), counts, strict=False)):
        table[b, :count] = numbers[start:start + count]
    q_lens = [q for q, _ in rows]

    @jax.jit
    def draw() -> Arrays:
        keys = jax.random.split(jax.random.key(key), 3)
        pool = (sum(counts) + 1, kv_heads, page_size, head_dim)
        return (jax.random.normal(keys[0], (sum(q_lens) + num_padding, heads, head_dim), jnp.bfloat16),
                jax.random.normal(keys[1], pool, jnp.bfloat16), jax.random.normal(keys[2], pool, jnp.bfloat16))

    return (*draw(), jnp.asarray(table), jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32), jnp.asarray([kv for _, kv in rows], jnp.int32))


def attention_rows(op: str, shape: str, rows: tuple[tuple[int, int], ...], heads: int, kv_heads: int, *, target: float | None,
                   names: tuple[str, ...]) -> Iterator[Row]:
    """One row an implementation that can do the case; after them cuDNN where the rows are equal whole prompts."""
    head_dim, decode = 128, all(q == 1 for q, _ in rows)
    make = functools.partial(paged, rows=rows, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    keys = sum(kv for _, kv in rows)
    pairs = sum(q * kv - q * (q - 1) / 2 for q, kv in rows)
    row = functools.partial(Row, op=op, shape=shape, num_bytes=4.0 * keys * kv_heads * head_dim,
                            num_flops=0 if decode else 4.0 * pairs * heads * head_dim)
    statics = {"scale": head_dim ** -0.5, "max_q_len": 1 if decode else None}
    spec = attention_spec(*jax.eval_shape(lambda: make(0)), **statics, sliding_window=None, softcap=None)
    for name in names:
        if supported(lambda name=name: pallas_kernels.ragged_paged_attention_choice(spec, implementation=name)):  # type: ignore[misc]
            yield row(implementation=name, make=make, target=target,
                      function=functools.partial(pallas_kernels.ragged_paged_attention, **statics, implementation=name))
    if not decode and jax.default_backend() == "gpu" and len(set(rows)) == 1 and rows[0][0] == rows[0][1]:
        yield row(implementation="cudnn (dense)", make=functools.partial(dense, rows=rows, make=make),
                  function=functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"))


def dense(key: int, rows: tuple[tuple[int, int], ...], make: Callable[[int], Arrays]) -> Arrays:
    """q, k, v [B, T, heads, H] with the values of `make`."""
    q, k_pages, v_pages, table, _, _ = make(key)

    def gather(pool: jax.Array) -> jax.Array:
        return jnp.moveaxis(pool[table], 2, 3).reshape(len(rows), -1, pool.shape[1], pool.shape[3])[:, :rows[0][1]]

    return q.reshape(len(rows), -1, *q.shape[1:]), *jax.jit(lambda *pools: tuple(map(gather, pools)))(k_pages, v_pages)


def supported(choice: Callable[[], Any]) -> bool:
    """Whether a forced choice is possible here; says why not."""
    try:
        choice()
    except pallas_kernels.Unsupported as refusal:
        print(f"skipped: {refusal}", flush=True)
        return False
    return True


def decode_rows() -> Iterator[Row]:
    """Paged decode."""
    cases = [("b1 c640 28/4", 1, 640, 28, 4, None), ("b8 c640 28/4", 8, 640, 28, 4, None), ("b32 c640 28/4", 32, 640, 28, 4, None),
             ("b128 c640 28/4", 128, 640, 28, 4, 3.6), ("b1 c32768 28/4", 1, 32768, 28, 4, 3.0), ("b32 c4096 64/8", 32, 4096, 64, 8, 3.9),
             ("b32 c4096 32/32", 32, 4096, 32, 32, 3.9)]
    for shape, batch, context, heads, kv_heads, target in [("b2 c70 4/2", 2, 70, 4, 2, 1.0)] if _TINY.value else cases:
        yield from attention_rows("decode", shape, ((1, context),) * batch, heads, kv_heads, target=target, names=("mosaic",))
    if _TINY.value:
        yield from attention_rows("decode", "b2 c70 4/2", ((1, 70),) * 2, 4, 2, target=None, names=("xla",))


def prefill_rows() -> Iterator[Row]:
    """Whole prompts."""
    cases = [("t8192 32/32", 1, 8192, 500.0), ("t2048 32/32", 1, 2048, 330.0), ("t512 32/32", 1, 512, 120.0),
             ("16 x t512 32/32", 16, 512, 300.0)]
    for shape, batch, length, target in [("2 x t40 4/4", 2, 40, 1.0)] if _TINY.value else cases:
        heads = 4 if _TINY.value else 32
        names = ("wgmma", "mosaic", *(("xla",) if _TINY.value or length * batch == 2048 else ()))
        yield from attention_rows("prefill", shape, ((length, length),) * batch, heads, heads, target=target, names=names)


def ragged_rows() -> Iterator[Row]:
    """A mixed batch, its two parts apart, and a chunk over earlier pages."""
    decodes = tuple((1, n) for n in ((1, 9, 33) if _TINY.value else (1, 100, 777, 1500, 2600, 4000, 5000)))
    prompts = tuple((n, n) for n in ((5, 17) if _TINY.value else (1, 17, 511, 512, 513, 2049)))
    chunk = ((20, 100),) if _TINY.value else ((2048, 8192),)
    for shape, rows in (("mixed", decodes + prompts), ("its decodes", decodes), ("its prompts", prompts), ("chunk", chunk)):
        names = ("xla",) if _TINY.value else ("mosaic",) if rows is decodes else ("wgmma", "mosaic")
        yield from attention_rows("ragged", f"{shape} 28/4", rows, 28, 4, target=None, names=names)


def write_rows() -> Iterator[Row]:
    """New keys and values into pages."""
    for num_tokens in (4,) if _TINY.value else (1, 32, 128, 4096):
        for kv_heads in (2,) if _TINY.value else (4, 32):
            rows = ((1, 100),) * num_tokens if num_tokens <= 128 else ((num_tokens, num_tokens),)

            def make(key: int, rows: tuple[tuple[int, int], ...] = rows, kv_heads: int = kv_heads) -> Arrays:
                q, k_pages, v_pages, *rest = paged(key, rows, kv_heads, kv_heads, 128)
                return k_pages, v_pages, q, q + 1, *rest

            def write(k_pages: jax.Array, v_pages: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array, name: str) -> Arrays:
                return pallas_kernels.write_kv_pages(k, v, k_pages, v_pages, *rest, implementation=name)

            k_pages, v_pages, k, v, *rest = jax.eval_shape(lambda: make(0))
            spec = write_spec(k, v, k_pages, v_pages, *rest)
            for name in ("mosaic", "xla"):
                if supported(lambda name=name, spec=spec: pallas_kernels.write_kv_pages_choice(spec, implementation=name)):  # type: ignore[misc]
                    yield Row(op="write", shape=f"t{num_tokens} k{kv_heads}", implementation=name, function=functools.partial(write, name=name),
                              make=make, num_bytes=8.0 * num_tokens * kv_heads * 128, donated=(0, 1))


def norm_rows() -> Iterator[Row]:
    """RMSNorm with a residual add."""
    for num_tokens in (4,) if _TINY.value else (1, 32, 128, 4096):
        dim = 256 if _TINY.value else 3584

        def make(key: int, num_tokens: int = num_tokens, dim: int = dim) -> Arrays:
            keys = jax.random.split(jax.random.key(key), 3)
            x, residual = (jax.random.normal(k, (num_tokens, dim), jnp.bfloat16) for k in keys[:2])
            return x, jax.random.normal(keys[2], (dim,), jnp.bfloat16), residual

        spec = norm_spec(*jax.eval_shape(lambda: make(0)), eps=1e-6)
        for name in ("mosaic", "xla"):
            if supported(lambda name=name, spec=spec: pallas_kernels.rms_norm_choice(spec, implementation=name)):  # type: ignore[misc]
                yield Row(op="norm", shape=f"t{num_tokens} d{dim}", implementation=name, make=make, num_bytes=8.0 * num_tokens * dim,
                          function=functools.partial(pallas_kernels.rms_norm, eps=1e-6, implementation=name),
                          target=0.85 * CEILINGS["NVIDIA H200"][0] / 1e12 if num_tokens >= 4096 else None)


GROUPS: dict[str, Callable[[], Iterator[Row]]] = {
    "decode": decode_rows, "prefill": prefill_rows, "ragged": ragged_rows, "write": write_rows, "norm": norm_rows}


def device_seconds(row: Row) -> tuple[float, str, jax.Array]:
    """Seconds a call, how they were taken, and the first result."""
    first = row.make(0)
    sets = 1 if _TINY.value else max(1, min(CALLS, math.ceil(CACHE_BYTES / sum(x.nbytes for x in first)) + 1))
    operands = [first, *[row.make(i) for i in range(1, sets)]]
    run = jax.jit(row.function, donate_argnums=row.donated)

    def calls(count: int) -> Any:
        out = None
        for i in range(count):
            arrays = operands[i % sets]
            out = run(*arrays)
            if row.donated:  # in place: what came back is the next call's operand
                operands[i % sets] = (*out, *arrays[len(out):])
        return jax.block_until_ready(out)

    result = jax.tree.leaves(calls(1))[0] + 0  # a copy: the next call may donate it
    calls(sets)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        calls(CALLS)
        times.append((time.perf_counter() - start) / CALLS)
    seconds = statistics.median(times)
    if seconds < LONG_CALL_S and jax.default_backend() == "gpu":
        return profiling.profile(lambda: calls(CALLS))["busy_ms"] / CALLS / 1e3, "profiler", result
    return seconds, "wall", result


def measure(row: Row, results: dict[tuple[str, str], jax.Array]) -> dict[str, Any]:
    """The table's line of one row; `results` holds the first implementation's output of each shape, to compare with."""
    seconds, method, result = device_seconds(row)
    bandwidth, flops = CEILINGS.get(jax.local_devices()[0].device_kind, (math.nan, math.nan))
    ceiling, amount = (flops, row.num_flops) if row.num_flops else (bandwidth, row.num_bytes)
    other = results.setdefault((row.op, row.shape), result)
    difference = float(jnp.max(jnp.abs(result.reshape(other.shape).astype(jnp.float32) - other.astype(jnp.float32))))
    rate = amount / seconds / 1e12
    return {"op": row.op, "shape": row.shape, "implementation": row.implementation, "us": seconds * 1e6, "by": method, "rate": rate,
            "unit": "TFLOP/s" if row.num_flops else "TB/s", "of_ceiling": None if math.isnan(ceiling) else rate * 1e12 / ceiling,
            "target": row.target, "max_diff": difference}


def main(_: list[str]) -> None:
    unknown = sorted(set(_OPS.value) - set(GROUPS))
    if unknown:
        raise app.UsageError(f"--ops={','.join(unknown)}: must be among {', '.join(GROUPS)}.")
    if _ARCH.value:
        from jax.experimental.mosaic.gpu import utils

        utils._infer_arch = lambda: (8, 0)
    lines: list[dict[str, Any]] = []
    results: dict[tuple[str, str], jax.Array] = {}
    for row in itertools.chain.from_iterable(GROUPS[op]() for op in _OPS.value):
        if _ARCH.value and row.implementation == "wgmma":
            continue
        lines.append(measure(row, results))
        print(report.table(lines[-1:]).splitlines()[-1], flush=True)
    print(report.table(lines))
    device = jax.local_devices()[0].device_kind.lower().replace(" ", "-")
    name = _NAME.value or f"kernels-{device}{'-as-sm' + _ARCH.value if _ARCH.value else ''}{'-tiny' if _TINY.value else ''}"
    print("wrote", report.write(name, {"arch": _ARCH.value, "page_size": _PAGE_SIZE.value, "rows": lines}))


if __name__ == "__main__":
    app.run(main)
