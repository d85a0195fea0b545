"""Device time of a call without the cost of launching it, and the ceilings of the device, measured the same way.

A call runs many times, on operands that rotate over more memory than any cache holds. Short calls are read from a profile: the time in
which kernels of theirs ran, so that gaps between launches do not count. Long calls are queued one behind the other and timed by the wall
clock, since launching them is hidden behind the call before.
"""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bench import profiling
from bench.kernels.operands import draw
from bench.kernels.rows import Ceilings, Row

CACHE_BYTES = 128 * 2**20   # more than any second-level cache: operands rotate over at least this much
LONG_CALL_S = 2e-3          # below, the profiler: at 160 us a queue of calls still spends 35 us of each on launching (H200, paged decode)
CALLS = 16
COPY_BYTES = 2**30
MATMUL_SIZE = 8192


class Timing(NamedTuple):
    """Of one row."""

    seconds: float
    by: str
    num_kernels: float | None
    """Device kernels a call; None where the wall clock measured."""
    result: Any
    """The first leaf of what the first call gave."""


def device_seconds(row: Row, *, rotate: bool = True, run: Callable[..., Any] | None = None) -> Timing:
    """Times a row.

    Args:
      rotate: off takes one set of operands, for a try on small shapes.
      run: what `compiled` gave; None compiles as the first call comes.
    """
    first = row.make(0)
    sets = max(1, min(CALLS, math.ceil(CACHE_BYTES / sum(x.nbytes for x in jax.tree.leaves(first))) + 1)) if rotate else 1
    operands = jax.block_until_ready([first, *[row.make(i) for i in range(1, sets)]])
    run = run or _jitted(row)

    def calls(count: int) -> Any:
        out = None
        for i in range(count):
            arrays = operands[i % sets]
            out = run(*arrays)
            if row.donated:  # in place: what came back is the next call's operand
                operands[i % sets] = (*out[:len(row.donated)], *arrays[len(row.donated):])
        return jax.block_until_ready(out)

    result = jax.tree.leaves(calls(1))[0] + 0  # a copy: the next call may donate it
    calls(sets)
    seconds = wall_seconds(lambda: calls(CALLS)) / CALLS
    if seconds < LONG_CALL_S and (figures := profiling.profile(lambda: calls(CALLS))):
        return Timing(figures["busy_ms"] / CALLS / 1e3, "profiler", figures["num_kernels"] / CALLS, result)
    return Timing(seconds, "wall", None, result)


def compiled(row: Row) -> Callable[..., Any]:
    """A row's executable, for device_seconds. Makes no operands and calls nothing."""
    return _jitted(row).lower(*jax.eval_shape(lambda: row.make(0))).compile()


def _jitted(row: Row) -> Any:
    return jax.jit(row.function, donate_argnums=row.donated)


def wall_seconds(work: Callable[[], Any], repeats: int = 3) -> float:
    """Median over `repeats` of what `work` takes, which must wait for the device."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_ceilings(*, tiny: bool) -> Ceilings:
    """Copy bandwidth and bfloat16 matmul rate of the device."""
    num_bytes, size = (2**20, 128) if tiny else (COPY_BYTES, MATMUL_SIZE)

    copy = Row(op="ceiling", shape="", implementation="copy", function=jnp.copy, make=lambda i: (jnp.full(num_bytes // 4, i, jnp.int32),))
    matmul = Row(op="ceiling", shape="", implementation="matmul", function=jnp.matmul, make=lambda i: draw(i, ((size, size),) * 2))
    return Ceilings(bytes_per_s=2 * num_bytes / device_seconds(copy, rotate=False).seconds,
                    flops_per_s=2 * size**3 / device_seconds(matmul, rotate=False).seconds)
