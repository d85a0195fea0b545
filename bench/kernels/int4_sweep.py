"""Tries tiles of int4_matmul on this GPU and prints the best of each shape and m as lines of config.py's tables of measured tiles.

  python -m bench.kernels.int4_sweep [--seconds=180] [--ms=8,16] [--shapes=qkv,...] [--name=NAME]

Everything is compiled first, in threads, and only then measured: a host that compiles launches late. Times are the device's, from a profile,
over operands that rotate through more memory than a cache holds; a second kernel, which adds splits of k up, counts with the gap before it.
Results are held against XLA's. The result file is written after each shape and m, so that a run that ends early keeps what it had.
"""

import concurrent.futures
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

from bench import profiling, report
from bench.kernels.int4 import GROUP_SIZE, SHAPES, operands
from bench.kernels.running import FAILURES, reason_of
from pallas_kernels import int4_matmul
from pallas_kernels.dispatch import Target, current_target
from pallas_kernels.int4_matmul import kernel_mosaic, kernel_wgmma
from pallas_kernels.int4_matmul.api import matmul_spec
from pallas_kernels.int4_matmul.config import (
    MatmulSpec,
    MosaicConfig,
    WgmmaConfig,
    mosaic_config,
    mosaic_shared_bytes,
    wgmma_config,
    wgmma_shared_bytes,
)

_SECONDS = flags.DEFINE_integer("seconds", 180, "Starts no shape or m after so many seconds.")
_MS = flags.DEFINE_list("ms", ["8", "16"], "Tokens, in the order in which they are tried.")
_SHAPES = flags.DEFINE_list("shapes", list(SHAPES), "Matrices of Qwen2-7B.")
_NAME = flags.DEFINE_string("name", "int4-sweep", "Name of the result file.")
_FOLDER = flags.DEFINE_string("folder", None, "Where the result file goes; default: bench/results.")

ROTATE_BYTES = 192 * 2**20
ROUNDS = 2          # of all sets of operands, in a profile
LAUNCH_US = 1.5     # from the end of a kernel to the start of the next in a captured graph, which a profile's busy time leaves out
THREADS = 12
# (warpgroups, splits, stages, strips) of kernel_mosaic by m and shape; (strips, splits, stages, token stages, tokens a block) of kernel_wgmma.
MOSAIC: dict[int, dict[str, tuple[tuple[int, int, int, int], ...]]] = {
    8: {"qkv": ((5, 1, 3, 1), (4, 1, 4, 1), (2, 2, 4, 1)), "o": ((5, 1, 3, 1), (4, 1, 4, 1), (2, 2, 4, 1)),
        "gate+up": ((1, 1, 3, 5), (1, 1, 3, 1), (2, 1, 3, 1)), "down": ((5, 2, 3, 1), (4, 2, 4, 1), (2, 5, 3, 1)),
        "up": ((1, 2, 3, 5), (1, 1, 3, 1), (2, 1, 3, 1))},
    16: {"qkv": ((4, 1, 3, 1), (2, 2, 3, 1)), "o": ((4, 1, 3, 1), (2, 2, 3, 1)), "gate+up": ((1, 1, 3, 1), (2, 1, 3, 1)),
         "down": ((4, 2, 3, 1), (1, 8, 3, 1)), "up": ((1, 1, 3, 1), (1, 2, 3, 1))},
}
WGMMA = {16: ((2, 1, 6, 8, 16),),
         64: ((1, 2, 6, 8, 64), (2, 2, 4, 8, 64), (3, 1, 4, 8, 64)),
         256: ((1, 1, 4, 8, 64), (2, 1, 4, 4, 128), (2, 1, 4, 4, 256), (2, 2, 4, 4, 256))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """Tiles to time on one shape and m."""

    config: MosaicConfig | WgmmaConfig | None
    """None: through XLA."""
    compiling: concurrent.futures.Future[Any]

    @property
    def tiles(self) -> tuple[int, ...]:
        """As in config.py's tables."""
        match self.config:
            case MosaicConfig(warpgroups=w, splits=p, stages=t, strips=s):
                return w, p, t, s
            case WgmmaConfig(strips=s, splits=p, stages=t, token_stages=x):
                return s, p, t, x
        return ()

    @property
    def name(self) -> str:
        """Kernel and tiles."""
        kernel = "xla" if self.config is None else "mosaic" if isinstance(self.config, MosaicConfig) else "wgmma"
        return f"{kernel} {self.tiles} {'' if self.config is None else f'block_m {self.config.block_m}'}".strip()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One shape and m, its operands and its candidates."""

    shape: str
    m: int
    sets: list[Any]
    candidates: list[Candidate]


def configs(shape: str, spec: MatmulSpec, target: Target) -> Iterator[MosaicConfig | WgmmaConfig]:
    """The tiles that fit the device, among them what the op takes by itself."""
    groups = {"group_size": spec.group_size, "group_k": spec.group_k}
    at = next(m for m in sorted(WGMMA) if spec.m <= m or m == max(WGMMA))
    narrow = [dataclasses.replace(mosaic_config(spec, target), warpgroups=w, splits=p, stages=t, strips=s)
              for w, p, t, s in MOSAIC.get(spec.m, {}).get(shape, ())]
    wide = [WgmmaConfig(strips=s, splits=p, stages=t, token_stages=x, block_m=b, **groups) for s, p, t, x, b in WGMMA[at]] if spec.m > 8 else []
    own: list[Any] = [mosaic_config(spec, target)] if spec.m <= 16 else [wgmma_config(spec, target)]
    for config in dict.fromkeys(own + narrow + wide):
        need = mosaic_shared_bytes(spec, config) if isinstance(config, MosaicConfig) else wgmma_shared_bytes(spec, config)
        if need <= target.shared_memory_bytes and config.splits <= spec.num_tiles:
            yield config


def job(shape: str, m: int, target: Target, pool: concurrent.futures.Executor) -> Job:
    """Starts compiling what one shape and m will be tried with."""
    k, n = SHAPES[shape]
    num_sets = max(4, min(24, math.ceil(ROTATE_BYTES / (k * n / 2))))
    sets = [(*operands(key, m=m, k=k, n=n), None) for key in range(num_sets)]
    spec = matmul_spec(*sets[0], group_size=GROUP_SIZE, bits=4, out_dtype=None)
    statics: dict[str, Any] = {"bits": spec.bits, "out_dtype": spec.out_dtype, "interpret": False}
    tried: list[Candidate] = []
    for config in [*configs(shape, spec, target), *([None] if m >= 256 else [])]:
        run = _through_xla if config is None else functools.partial(
            (kernel_mosaic if isinstance(config, MosaicConfig) else kernel_wgmma).int4_matmul, config=config, **statics)
        tried.append(Candidate(config=config, compiling=_compiling(run, sets[0], pool)))
    return Job(shape=shape, m=m, sets=sets, candidates=tried)


def _compiling(function: Callable[..., jax.Array], arrays: Any, pool: concurrent.futures.Executor) -> concurrent.futures.Future[Any]:
    """Traced here, compiled in a thread; a future that fails where tracing does."""
    try:
        return pool.submit(jax.jit(function).lower(*arrays).compile)
    except FAILURES as error:
        failed: concurrent.futures.Future[Any] = concurrent.futures.Future()
        failed.set_exception(error)
        return failed


def _through_xla(x: jax.Array, packed: jax.Array, scales: jax.Array, zeros: jax.Array, bias: None) -> jax.Array:
    return int4_matmul(x, packed, scales, zeros, group_size=GROUP_SIZE, bias=bias, implementation="xla")


def measure(compiled: Any, sets: list[Any], expected: jax.Array) -> dict[str, Any]:
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


def try_all(work: Job) -> list[dict[str, Any]]:
    """A line for each candidate of a shape and m, best first; those that failed last, with the reason."""
    expected = _through_xla(*work.sets[0])
    lines: list[dict[str, Any]] = []
    for candidate in work.candidates:
        line = {"shape": work.shape, "m": work.m, "candidate": candidate.name}
        try:
            lines.append(line | measure(candidate.compiling.result(), work.sets, expected))
        except FAILURES as error:
            lines.append(line | {"us": None, "reason": reason_of(error)})
    return sorted(lines, key=lambda line: math.inf if line["us"] is None else line["us"])


def table_line(work: Job, best: dict[str, Any]) -> str:
    """The best as a line of MOSAIC_MEASURED or WGMMA_MEASURED."""
    (winner,) = (candidate for candidate in work.candidates if candidate.name == best["candidate"])
    if winner.config is None or best["us"] is None:
        return f"# {work.shape} m {work.m}: {best['candidate']}, nothing to enter"
    table = "MOSAIC_MEASURED" if isinstance(winner.config, MosaicConfig) else "WGMMA_MEASURED"
    return f"    {(*SHAPES[work.shape], winner.config.block_m)}: {winner.tiles},    # {best['us']:.1f} us -> {table}"


def main(_: list[str]) -> None:
    """Console entry."""
    target, begun = current_target(), time.monotonic()
    if target.compute_capability is None:
        raise app.UsageError(f"sweeping needs an NVIDIA GPU, and this is {target.device_kind}.")
    lines: list[dict[str, Any]] = []
    entries: list[str] = []
    folder = Path(_FOLDER.value) if _FOLDER.value else None
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        jobs = [job(shape, int(m), target, pool) for m in _MS.value for shape in _SHAPES.value]
        concurrent.futures.wait([candidate.compiling for work in jobs for candidate in work.candidates])
    print(f"{time.monotonic() - begun:5.0f} s  compiled {sum(len(work.candidates) for work in jobs)} candidates", flush=True)
    for work in jobs:
        if time.monotonic() - begun > _SECONDS.value:
            print(f"left out after {_SECONDS.value} s: m {work.m}, {work.shape}")
            continue
        found = try_all(work)
        lines += found
        entries.append(table_line(work, found[0]))
        report.write(_NAME.value, {"rows": lines}, folder)
        floor = math.prod(SHAPES[work.shape]) * (0.5 + 4 / GROUP_SIZE) / 4.19e12 * 1e6
        print(f"{time.monotonic() - begun:5.0f} s  {work.shape} m {work.m}, bytes floor {floor:.2f} us")
        for line in found:
            figures = line["reason"] or (f"{line['us']:8.2f} us, busy {line['busy_us']:.2f} in {line['kernels']:g} kernels, "
                                         f"max diff {line['max_diff']:.3g}")
            print(f"    {figures}  {line['candidate']}", flush=True)
    print("\n".join(entries))
    print("wrote", report.write(_NAME.value, {"rows": lines}, folder))


if __name__ == "__main__":
    app.run(main)
