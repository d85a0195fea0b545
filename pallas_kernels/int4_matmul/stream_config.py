"""Tiles of kernel_stream, for one token or two: measured, or derived by a rule. Frozen values: computes on no array."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

from pallas_kernels.dispatch import Target
from pallas_kernels.int4_matmul import layout
from pallas_kernels.int4_matmul.config import (
    BLOCK_LATENCY,
    MOSAIC_CAPABILITIES,
    NUM_CORES,
    SHARED_REST,
    SPLIT_LATENCY,
    MatmulSpec,
    first,
    is_measured,
    kernel_reasons,
    memory_refusal,
    split_cycles,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """Tiles of kernel_stream."""

    columns: int
    """Columns of a warpgroup: 64, 32 or 16. Of fewer than 64, its warps share k."""
    places: int
    """Times that a block has so many columns. Above 1 a warp keeps its tiles of k and goes from place to place."""
    group_size: int
    """Values of k that share a scale."""
    group_k: int
    """Values of k of a tile of 256 that share a scale."""
    warpgroups: int
    """Warpgroups of 128 threads of a block, which share its part of k."""
    splits: int
    """Blocks that share k. Above 1 their float32 sums are added up by XLA."""
    depth: int
    """Tiles in flight in a warp; with several places a multiple of the steps that it keeps."""
    gated: bool
    """Places come in pairs, of gate and of up, and silu(gate) * up is written."""


STREAM_MOST_M = 8
STREAM_PAYS_M = 2          # beyond, kernel_mosaic reads tokens once for more columns; at 4 they are within 4 % of each other
STREAM_MOST_GROUPS = 4     # of a tile: a lane holds a scale and a zero point of each
STREAM_WARPGROUPS = 4      # of a core, at 128 registers a thread
STREAM_MOST_STEPS = 3      # tiles of k that a warp keeps while it goes from place to place,
STREAM_MOST_SUMS = 6       # and groups of theirs whose sums of tokens it keeps; with scales of 32 bits half as many: more would spill
STREAM_MOST_PLACES = 24
STREAM_DEPTHS = (2, 3, 4, 6)
STREAM_TILE_ISSUE = 220    # cycles of a core for a tile of each of four warps, counted in the machine code for sm_90
STREAM_PLACE_LATENCY = 100 # cycles in which a block adds up and writes a place

# Measured on an H200 on 2026-12-01 (bench/results/sweep-int4-nvidia-h200.json), as the tables of config.py are. The best of kernel_mosaic in
# the same run, us: 6.2, 6.1, 21.6 and 15.4 for one token. With 4 tokens 6.3, 5.6, 22.9 and 16.0 here, 6.3, 6.2, 22.1 and 15.8 there. More
# tiles in flight than two gained nothing.
STREAM_MEASURED: dict[tuple[int, int, int], tuple[int, int, int, int, int]] = {  # columns, places, warpgroups, splits, depth; by m
    (3584, 4608, 1): (16, 3, 4, 1, 2),      # 5.4
    (3584, 3584, 1): (16, 2, 4, 1, 2),      # 4.6
    (3584, 37888, 1): (32, 10, 4, 1, 2),    # 20.7
    (18944, 3584, 1): (32, 1, 4, 1, 2),     # 13.1
    (3584, 4608, 2): (16, 3, 4, 1, 2),      # 6.0
    (3584, 3584, 2): (16, 2, 4, 1, 2),      # 5.1
    (3584, 37888, 2): (32, 10, 4, 1, 2),    # 21.8
    (18944, 3584, 2): (32, 1, 4, 1, 2),     # 14.6
}


def stream_refusal(spec: MatmulSpec, target: Target) -> str | None:
    """Why kernel_stream cannot do a call on a target, or None if it can."""
    groups = layout.TILE_K // spec.group_k
    reason = first((*kernel_reasons(spec, target, MOSAIC_CAPABILITIES),
                     (spec.m > STREAM_MOST_M, f"is for at most {STREAM_MOST_M} tokens, not {spec.m}"),
                     (groups > STREAM_MOST_GROUPS, f"has registers for groups of at least {layout.TILE_K // STREAM_MOST_GROUPS}, "
                                                   f"not {spec.group_size}")))
    if reason is not None:
        return reason
    return memory_refusal(stream_shared_bytes(spec, stream_config(spec, target)), target)


def stream_loss(spec: MatmulSpec, target: Target) -> str | None:
    """Why a later row does a call better than kernel_stream, or None if it does not."""
    if spec.bits == 8:
        return "is measured for 4 bits alone"
    return None if spec.m <= STREAM_PAYS_M else f"pays for at most {STREAM_PAYS_M} tokens, not for {spec.m}"


def stream_config(spec: MatmulSpec, target: Target) -> StreamConfig:
    """Tiles of kernel_stream: those measured for the matrix, otherwise those that `stream_cycles` finds quickest."""
    measured = STREAM_MEASURED.get((spec.k, spec.n, spec.m)) if is_measured(spec, target) else None
    return stream_tiles(spec, *measured) if measured is not None else _quickest_stream(spec, target)


def stream_tiles(spec: MatmulSpec, columns: int, places: int, warpgroups: int, splits: int, depth: int) -> StreamConfig:
    """A configuration of a call's groups, which activates the product itself where its places can be pairs."""
    in_pairs = places % 2 == 0 and splits == 1 and spec.n // 2 % columns == 0
    return StreamConfig(columns=columns, places=places, group_size=spec.group_size, group_k=spec.group_k, warpgroups=warpgroups, splits=splits,
                        depth=depth, gated=spec.activation is not None and in_pairs)


@functools.lru_cache(maxsize=256)
def _quickest_stream(spec: MatmulSpec, target: Target) -> StreamConfig:
    configs = list(stream_candidates(spec))
    fitting = [c for c in configs if stream_shared_bytes(spec, c) <= target.shared_memory_bytes]
    return min(fitting or configs[:1], key=lambda config: (stream_cycles(spec, target, config), config.depth, -config.warpgroups))


def stream_candidates(spec: MatmulSpec) -> Iterator[StreamConfig]:
    """All tiles of kernel_stream that hold to its rules."""
    most_sums = STREAM_MOST_SUMS // (2 if spec.scale_dtype == "float32" else 1)
    for columns, warpgroups, splits in itertools.product((64, 32, 16), (1, 2, 4), (1, 2, 3)):
        steps = stream_steps(spec.num_tiles, columns, warpgroups, splits)
        stays = steps <= STREAM_MOST_STEPS and steps * (layout.TILE_K // spec.group_k) <= most_sums
        for places in range(1, STREAM_MOST_PLACES + 1) if stays else (1,):
            for depth in STREAM_DEPTHS if splits <= spec.num_tiles else ():
                if places == 1 or depth % steps == 0:
                    yield stream_tiles(spec, columns, places, warpgroups, splits, depth)


def stream_steps(num_tiles: int, columns: int, warpgroups: int, splits: int) -> int:
    """Tiles of k that one warp of kernel_stream takes."""
    return -(-num_tiles // (splits * warpgroups * (layout.TILE_N // columns)))


def stream_cycles(spec: MatmulSpec, target: Target, config: StreamConfig) -> int:
    """What a call of kernel_stream takes, roughly: waves of blocks, of each the busiest core's instructions; then what splits cost."""
    cores = NUM_CORES.get(target.compute_capability or (0, 0), 132)
    blocks = -(-spec.n // (config.columns * config.places)) * config.splits
    resident = max(1, min(STREAM_WARPGROUPS // config.warpgroups, target.shared_memory_bytes // stream_shared_bytes(spec, config)))
    waves, busiest = -(-blocks // (cores * resident)), min(resident, -(-blocks // cores))
    items = config.places * stream_steps(spec.num_tiles, config.columns, config.warpgroups, config.splits)
    wave = BLOCK_LATENCY + busiest * config.warpgroups * items * STREAM_TILE_ISSUE + config.places * STREAM_PLACE_LATENCY
    launch = 0 if spec.activation is None or config.gated else SPLIT_LATENCY
    return waves * wave + launch + split_cycles(spec, config.splits)


def stream_shared_bytes(spec: MatmulSpec, config: StreamConfig) -> int:
    """Shared memory of one block: a split's tokens, the warpgroups' sums, and the rest."""
    width = (4 if spec.scale_dtype == "float32" else 2) + 2 * (spec.zero_dtype is not None)
    item = 16 * (2 * layout.tile_words(spec.bits) + width * layout.TILE_K // spec.group_k)  # of 16 columns
    tokens = 2 * spec.m * (-(-spec.num_tiles // config.splits) * layout.TILE_K + 64)
    sums = 4 * config.warpgroups * config.places * layout.TILE_N * spec.m
    return tokens + 4 * config.warpgroups * config.depth * item + sums + SHARED_REST
