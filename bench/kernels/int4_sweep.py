"""Tries tiles of int4_matmul on this GPU and prints the best of each shape and m as lines of config.py's tables of measured tiles.

  python -m bench.kernels.int4_sweep [--ms=8,32] [--shapes=qkv,...] [--processes=10] [--name=NAME]

Each shape and m is a process, for tracing a kernel takes Python as long as compiling it; a lock gives the GPU to one at a time. Times are the
device's, from a profile, over operands that rotate through more memory than a cache holds; a second kernel, which adds splits of k up, counts
with the gap before it. Results are held against XLA's. The result file is written as figures come, so that a run that ends early keeps them.
"""

import concurrent.futures
import dataclasses
import functools
import math
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

from bench import profiling, report
from bench.kernels.int4 import GROUP_SIZE, operands
from bench.kernels.int4 import SHAPES as ALL_SHAPES
from bench.kernels.running import FAILURES, reason_of
from bench.kernels.turns import share_memory, turn
from pallas_kernels import int4_matmul
from pallas_kernels.dispatch import Target, current_target
from pallas_kernels.int4_matmul import kernel_dequantize, kernel_mosaic, kernel_stream, kernel_wgmma
from pallas_kernels.int4_matmul.api import matmul_spec
from pallas_kernels.int4_matmul.config import MatmulSpec, MosaicConfig, mosaic_config, mosaic_shared_bytes, xla_strip_tiles
from pallas_kernels.int4_matmul.stream_config import (
    StreamConfig,
    stream_candidates,
    stream_config,
    stream_cycles,
    stream_refusal,
    stream_shared_bytes,
)
from pallas_kernels.int4_matmul.wgmma_config import (
    WGMMA_CAPABILITIES,
    WGMMA_SIZES,
    WGMMA_WARPGROUPS,
    WgmmaConfig,
    wgmma_config,
    wgmma_shared_bytes,
)

_MS = flags.DEFINE_list("ms", ["8", "16", "32", "64", "128"], "Tokens; 16 to 64 try both kernels, 256 and more dequantising as well.")
_SHAPES = flags.DEFINE_list("shapes", list(ALL_SHAPES), "Matrices of Qwen2-7B.")
_PROCESSES = flags.DEFINE_integer("processes", 10, "Of them at a time.", lower_bound=1)
_NAME = flags.DEFINE_string("name", "int4-sweep", "Name of the result file.")
_FOLDER = flags.DEFINE_string("folder", None, "Where the result file goes; default: bench/results.")

type Tiles = MosaicConfig | StreamConfig | WgmmaConfig

ROTATE_BYTES = 192 * 2**20
ROUNDS = 2          # of all sets of operands, in a profile
LAUNCH_US = 1.5     # from the end of a kernel to the start of the next in a captured graph, which a profile's busy time leaves out
STREAM_TRIES = 14   # of kernel_stream's tiles, those that should be quickest
MOST_MOSAIC_M, LEAST_WGMMA_M, LEAST_DEQUANTIZED_M = 64, 8, 256  # where each is tried
# By m, in the order of config.py's tables: of kernel_mosaic for few tokens, of kernel_wgmma for more. What does not fit is passed over.
MOSAIC = {8: ((5, 1, 3, 1), (5, 1, 2, 1), (4, 1, 4, 1), (1, 1, 2, 5), (4, 2, 3, 1), (2, 5, 3, 1), (1, 1, 3, 5), (2, 1, 3, 1), (1, 9, 4, 4),
              (1, 9, 3, 4), (1, 11, 3, 5), (2, 1, 4, 2), (4, 1, 2, 1)),
          16: ((4, 1, 3, 1), (4, 2, 3, 1), (2, 1, 3, 1), (1, 1, 3, 4))}
WGMMA = {8: ((5, 1, 1, 2, 4, 256), (4, 1, 9, 2, 4, 256)),
         16: ((5, 1, 1, 2, 4, 256), (1, 1, 1, 2, 2, 256), (3, 1, 1, 2, 4, 256), (1, 4, 1, 2, 2, 256), (1, 4, 2, 2, 2, 256),
              (4, 1, 9, 2, 4, 256)),
         32: ((5, 1, 1, 2, 4, 256), (3, 1, 1, 2, 4, 256), (1, 1, 1, 2, 2, 256), (1, 4, 1, 2, 2, 256), (1, 4, 2, 2, 2, 128),
              (1, 2, 1, 2, 2, 256), (1, 2, 2, 2, 2, 256), (4, 1, 9, 2, 4, 256)),
         64: ((1, 1, 1, 2, 3, 128), (1, 1, 1, 4, 2, 256), (1, 2, 1, 2, 2, 256), (1, 2, 2, 2, 2, 256), (1, 3, 1, 2, 2, 128),
              (1, 3, 2, 2, 2, 128), (3, 1, 1, 2, 4, 128), (3, 1, 5, 2, 4, 128), (1, 1, 4, 2, 3, 128), (1, 1, 1, 2, 4, 64)),
         128: ((1, 1, 1, 2, 3, 64), (1, 1, 1, 2, 4, 64), (1, 2, 1, 2, 4, 64), (1, 2, 2, 2, 4, 64), (3, 1, 1, 2, 8, 64),
               (1, 1, 4, 2, 4, 64), (1, 1, 3, 2, 4, 64), (3, 1, 6, 2, 8, 64)),
         256: ((1, 1, 1, 3, 4, 64), (2, 1, 1, 4, 4, 64), (2, 1, 2, 4, 4, 64), (2, 1, 3, 4, 4, 64), (2, 1, 4, 4, 4, 64))}
WGMMA |= dict.fromkeys((512, 1024), ((1, 1, 1, 3, 4, 64), (2, 1, 1, 4, 4, 64), (2, 1, 3, 4, 4, 64)))
WGMMA |= dict.fromkeys((2048, 4096), ((1, 1, 1, 3, 4, 64), (2, 1, 1, 4, 4, 64)))


def configs(spec: MatmulSpec, target: Target) -> Iterator[tuple[str, Tiles | None]]:
    """(table, tiles) that fit the device, first what the op takes by itself. Around the crossings both sides, whichever the op takes."""
    if stream_refusal(spec, target) is None:
        def weight(config: StreamConfig) -> tuple[int, ...]:
            return stream_cycles(spec, target, config), -config.depth

        fitting = (c for c in dict.fromkeys(stream_candidates(spec)) if stream_shared_bytes(spec, c) <= target.shared_memory_bytes)
        streams = sorted(fitting, key=weight)
        for stream in dict.fromkeys((stream_config(spec, target), *streams[:STREAM_TRIES])):
            yield "STREAM_MEASURED", stream
    if spec.m <= MOST_MOSAIC_M:
        own = mosaic_config(spec, target)
        tried = [own, *(dataclasses.replace(own, warpgroups=w, splits=p, stages=t, strips=s) for w, p, t, s in MOSAIC.get(spec.m, ()))]
        for narrow in dict.fromkeys(tried):
            if mosaic_shared_bytes(spec, narrow) <= target.shared_memory_bytes and narrow.warpgroups * narrow.splits <= spec.num_tiles:
                yield "MOSAIC_MEASURED", narrow
    if spec.m >= LEAST_WGMMA_M and target.compute_capability in WGMMA_CAPABILITIES:
        mine = wgmma_config(spec, target)
        more = [mine, *(dataclasses.replace(mine, strips=s, warpgroups=w, splits=p, stages=t, token_stages=x, place_k=k)
                        for s, w, p, t, x, k in WGMMA.get(spec.m, ()))]
        for wide in dict.fromkeys(more):
            fits = wide.strips * wide.warpgroups <= WGMMA_WARPGROUPS[wide.block_m] and wide.warpgroups * wide.splits <= spec.num_tiles
            if fits and wgmma_shared_bytes(spec, wide) <= target.shared_memory_bytes:
                yield "WGMMA_MEASURED", wide
    if spec.m >= LEAST_DEQUANTIZED_M:
        yield "dequantize", None


def size_of(config: Tiles | None, m: int) -> int:
    """What stands for the tokens in config.py's tables."""
    if isinstance(config, WgmmaConfig):
        return next((size for size in WGMMA_SIZES if m <= size), WGMMA_SIZES[-1])
    return config.block_m if isinstance(config, MosaicConfig) else m


def tiles_of(config: Tiles | None) -> tuple[int, ...]:
    """As in config.py's tables."""
    if config is None:
        return ()
    if isinstance(config, StreamConfig):
        return config.columns, config.places, config.warpgroups, config.splits, config.depth
    if isinstance(config, MosaicConfig):
        return config.warpgroups, config.splits, config.stages, config.strips
    return config.strips, config.warpgroups, config.splits, config.stages, config.token_stages, config.place_k


def function_of(table: str, spec: MatmulSpec, config: Tiles | None, target: Target) -> Callable[..., jax.Array]:
    """The product with these tiles."""
    if config is None:
        return functools.partial(kernel_dequantize.int4_matmul, bits=spec.bits, out_dtype=spec.out_dtype,
                                 strip_tiles=xla_strip_tiles(spec, target), interpret=False)
    kernel: Any = {"STREAM_MEASURED": kernel_stream, "MOSAIC_MEASURED": kernel_mosaic, "WGMMA_MEASURED": kernel_wgmma}[table]
    return functools.partial(kernel.int4_matmul, bits=spec.bits, out_dtype=spec.out_dtype, config=config, interpret=False)


def try_all(shape: str, m: int, lock: str) -> list[dict[str, Any]]:
    """A line for each candidate of a shape and m, best first; those that failed last, with the reason. Runs in a process of its own."""
    k, n = ALL_SHAPES[shape]
    sets: list[Any] = [(*operands(key, m=m, k=k, n=n), None) for key in range(max(4, min(16, math.ceil(ROTATE_BYTES / (k * n / 2)))))]
    spec = matmul_spec(*sets[0], group_size=GROUP_SIZE, bits=4, out_dtype=None)
    expected = int4_matmul(*sets[0][:4], group_size=GROUP_SIZE, implementation="xla")
    lines: list[dict[str, Any]] = []
    for table, config in configs(spec, current_target()):
        line = {"shape": shape, "m": m, "table": table, "key": [k, n, size_of(config, m)], "tiles": list(tiles_of(config))}
        try:
            compiled = jax.jit(function_of(table, spec, config, current_target())).lower(*sets[0]).compile()
            with turn(lock):
                lines.append(line | measure(compiled, sets, expected))
        except FAILURES as error:
            lines.append(line | {"us": None, "reason": reason_of(error)})
    return sorted(lines, key=lambda line: math.inf if line["us"] is None else line["us"])


def measure(compiled: Any, sets: list[Any], expected: Any) -> dict[str, Any]:
    """Microseconds of one call, and the largest difference from XLA's result.

    Raises:
      RuntimeError: the profile holds no kernel.
    """
    first = jax.block_until_ready(compiled(*sets[0]))
    figures = profiling.profile(lambda: jax.block_until_ready([compiled(*arrays) for _ in range(ROUNDS) for arrays in sets]))
    if not figures:
        raise RuntimeError("the profile holds no kernel of a GPU: is CUPTI installed?")
    calls = ROUNDS * len(sets)
    busy, kernels = figures["busy_ms"] / calls * 1e3, figures["num_kernels"] / calls
    return {"us": busy + LAUNCH_US * (kernels - 1), "busy_us": busy, "kernels": kernels,
            "max_diff": float(jnp.max(jnp.abs((first - expected).astype(jnp.float32)))), "reason": None}


def main(_: list[str]) -> None:
    """Console entry. The processes share one GPU, each with what memory it needs."""
    share_memory()
    target = current_target()
    if target.compute_capability is None:
        raise app.UsageError(f"sweeping needs an NVIDIA GPU, and this is {target.device_kind}.")
    begun, rows = time.monotonic(), []
    folder = Path(_FOLDER.value) if _FOLDER.value else None
    with tempfile.NamedTemporaryFile() as lock, concurrent.futures.ProcessPoolExecutor(
            _PROCESSES.value, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        jobs = [pool.submit(try_all, shape, int(m), lock.name) for m in _MS.value for shape in _SHAPES.value]
        for done in concurrent.futures.as_completed(jobs):
            lines = done.result()
            rows += lines
            report.write(_NAME.value, {"rows": rows}, folder)
            if not lines:
                continue
            k, n, *_ = lines[0]["key"]
            print(f"{time.monotonic() - begun:5.0f} s  {lines[0]['shape']} m {lines[0]['m']}, bytes floor "
                  f"{k * n * (0.5 + 4 / 128) / 4.19e12 * 1e6:.2f} us", flush=True)
            for line in lines:
                figures = line["reason"] or (f"{line['us']:8.2f} us, busy {line['busy_us']:.2f} in {line['kernels']:g} kernels, "
                                             f"max diff {line['max_diff']:.3g}")
                print(f"    {figures}  {line['table']} {tuple(line['key'])}: {tuple(line['tiles'])}", flush=True)
    print("wrote", report.write(_NAME.value, {"rows": rows}, folder))


if __name__ == "__main__":
    app.run(main)
