"""Tiles of kernel_wgmma: measured, or derived by a rule. Frozen values: computes on no array."""

import dataclasses
import functools
import itertools

from pallas_kernels.dispatch import Target
from pallas_kernels.int4_matmul import layout
from pallas_kernels.int4_matmul.config import (
    SHARED_REST,
    WGMMA_MIN_M,
    WGMMA_WIDE_MIN_M,
    WIDE_N,
    MatmulSpec,
    Tiles,
    busiest_core,
    dequantize_min_m,
    first,
    is_measured,
    kernel_reasons,
    memory_refusal,
    parameter_bytes,
)

PIECE_K = 64  # values of k of a piece: one swizzled row of 16-bit values in shared memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class WgmmaConfig(Tiles):
    """Tiles of kernel_wgmma."""

    token_stages: int
    """Places in the ring of tokens that the warpgroups of the same tiles share."""
    place_k: int
    """Values of k of a place: 64 where weights are scaled, 128 or 256 where products of groups are."""

    @property
    def scales_product(self) -> bool:
        """Whether scales are applied to the products of groups, not to weights."""
        return self.place_k > PIECE_K


WGMMA_CAPABILITIES = ((9, 0),)
WGMMA_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)  # tokens of a call up to which the same tiles serve; more take those of the last
WGMMA_MOST_BLOCK_M = 256
WGMMA_WARPGROUPS = {8: 5, 16: 5, 32: 5, 64: 3, 128: 3, 256: 2}  # by block_m: as many as a core's registers hold
# Tokens of a block in which as many leave no registers for codes of 8 bits, nor for the parameters of groups of less than this.
WGMMA_FULL_MS, WGMMA_FULL_GROUP = (32, 64, 128), 128
WGMMA_RESIDENT = WGMMA_WARPGROUPS | {32: 4}  # in small blocks, which ptxas gives more registers
WGMMA_MOST_SCALED = 64    # tokens of a block up to which products are scaled, and not weights
WGMMA_WHOLE_PLACES = 32   # tokens of a block up to which a place in the ring of tokens holds a whole tile

# Where nothing is measured, the tiles of the least time by these figures, beside those of config.py, fitted to what one wave of blocks takes
# on an H200 (2026-12-01): (a, b), cycles a + b * block_m. A tile beside others, its products scaled (590 at 16 tokens, 714 at 32, 960 at 64)
# or its weights (1450 at 128, 2900 at 256: tensor cores at their rate); and alone (990 at 32, 1300 at 64, 1970 at 128, 2600 at 256).
SCALED_PRODUCT, SCALED_WEIGHT, ALONE = (480, 7.5), (0, 11.4), (800, 8)
LEAST_SCALED_WEIGHT = 900  # cycles, for few tokens

# Measured on an H200 on 2026-12-01 (bench/results/sweep-int4-nvidia-h200.json, by bench.kernels.int4_sweep, which prints such lines),
# (k, n, one of WGMMA_SIZES) -> tiles. Groups of 128, 4 bits. The device's us, the kernel that adds up splits and the gap before it included.
WGMMA_MEASURED: dict[tuple[int, int, int], tuple[int, int, int, int, int, int]] = {  # strips, warpgroups, splits, stages, token stages, place_k
    (3584, 37888, 16): (5, 1, 1, 2, 4, 256),    # 26.5
    (3584, 4608, 32): (1, 4, 1, 2, 2, 256),     # 9.1
    (3584, 3584, 32): (1, 4, 1, 2, 2, 256),     # 8.8
    (3584, 18944, 32): (3, 1, 1, 2, 4, 256),    # 19.6
    (3584, 37888, 32): (5, 1, 1, 2, 4, 256),    # 31.5
    (18944, 3584, 32): (4, 1, 9, 2, 4, 256),    # 20.9
    (3584, 4608, 64): (1, 3, 1, 2, 2, 128),     # 10.9
    (3584, 3584, 64): (1, 2, 2, 2, 2, 256),     # 10.2
    (3584, 18944, 64): (1, 1, 1, 2, 3, 128),    # 26.0
    (3584, 37888, 64): (1, 1, 1, 2, 3, 128),    # 41.7
    (18944, 3584, 64): (1, 3, 2, 2, 2, 128),    # 26.1
    (3584, 4608, 128): (1, 2, 1, 2, 4, 64),     # 15.6
    (3584, 3584, 128): (1, 2, 2, 2, 4, 64),     # 13.2
    (3584, 18944, 128): (1, 1, 1, 2, 3, 64),    # 37.5
    (3584, 37888, 128): (1, 1, 1, 2, 3, 64),    # 68.0
    (18944, 3584, 128): (1, 2, 2, 2, 4, 64),    # 37.8
    (3584, 4608, 256): (2, 1, 3, 4, 4, 64),     # 23.4
    (3584, 3584, 256): (2, 1, 4, 4, 4, 64),     # 20.8
    (3584, 18944, 256): (1, 1, 1, 3, 4, 64),    # 70.3
    (3584, 37888, 256): (1, 1, 1, 3, 4, 64),    # 118.2
    (18944, 3584, 256): (2, 1, 4, 4, 4, 64),    # 61.2
    (3584, 4608, 512): (2, 1, 1, 4, 4, 64),     # 42.6
    (3584, 3584, 512): (1, 1, 1, 3, 4, 64),     # 25.7
    (3584, 18944, 512): (1, 1, 1, 3, 4, 64),    # 116.5
    (3584, 37888, 512): (2, 1, 1, 4, 4, 64),    # 209.6
    (18944, 3584, 512): (1, 1, 1, 3, 4, 64),    # 109.7
    (3584, 4608, 1024): (1, 1, 1, 3, 4, 64),    # 70.9
    (3584, 3584, 1024): (2, 1, 1, 4, 4, 64),    # 44.3
    (3584, 18944, 1024): (2, 1, 1, 4, 4, 64),   # 208.8
    (3584, 37888, 1024): (2, 1, 1, 4, 4, 64),   # 376.9
    (18944, 3584, 1024): (1, 1, 1, 3, 4, 64),   # 212.8
}


def wgmma_loss(spec: MatmulSpec, target: Target) -> str | None:
    """Why another row does a call better than kernel_wgmma, or None if it does not."""
    least, end = WGMMA_WIDE_MIN_M if spec.n >= WIDE_N else WGMMA_MIN_M, dequantize_min_m(spec, target)
    return None if least <= spec.m < end else f"pays for {least} to {end - 1} tokens, not for {spec.m}"


def wgmma_refusal(spec: MatmulSpec, target: Target) -> str | None:
    """Why kernel_wgmma cannot do a call on a target, or None if it can."""
    reason = first(kernel_reasons(spec, target, WGMMA_CAPABILITIES))
    if reason is not None:
        return reason
    return memory_refusal(wgmma_shared_bytes(spec, wgmma_config(spec, target)), target)


def wgmma_config(spec: MatmulSpec, target: Target) -> WgmmaConfig:
    """Tile sizes of kernel_wgmma: those measured for the matrix, otherwise those that `_wgmma_cycles` finds quickest."""
    size = next((size for size in WGMMA_SIZES if spec.m <= size), WGMMA_SIZES[-1])
    measured, block_m = WGMMA_MEASURED.get((spec.k, spec.n, size)), min(size, WGMMA_MOST_BLOCK_M)
    if measured is not None and is_measured(spec, target):
        return _wgmma_tiles(spec, block_m, *measured)
    return _quickest_wgmma(spec, target, block_m)


def _wgmma_tiles(spec: MatmulSpec, block_m: int, strips: int, warpgroups: int, splits: int, stages: int, token_stages: int,
                 place_k: int) -> WgmmaConfig:
    return WgmmaConfig(block_m=block_m, group_size=spec.group_size, group_k=spec.group_k, strips=strips, warpgroups=warpgroups, splits=splits,
                       stages=stages, token_stages=token_stages, place_k=place_k)


def _scales_product(spec: MatmulSpec, block_m: int) -> bool:
    return block_m <= WGMMA_MOST_SCALED and spec.group_k % PIECE_K == 0


@functools.lru_cache(maxsize=256)  # a model asks for each of its layers
def _quickest_wgmma(spec: MatmulSpec, target: Target, block_m: int) -> WgmmaConfig:
    place_k = PIECE_K if not _scales_product(spec, block_m) else layout.TILE_K if block_m <= WGMMA_WHOLE_PLACES else 128
    configs = [_wgmma_tiles(spec, block_m, *tiles, place_k)
               for tiles in itertools.product(range(1, 6), range(1, 6), range(1, 10), (4, 3, 2), (8, 4, 3, 2))]
    # A place is let go of a piece late, and where strips share it, fetched a place late: two leave no time for it, but of whole tiles.
    most = WGMMA_WARPGROUPS[block_m] - (block_m in WGMMA_FULL_MS and (spec.bits == 8 or spec.group_k < WGMMA_FULL_GROUP))
    fitting = [c for c in configs if c.strips * c.warpgroups <= most and c.warpgroups * c.splits <= spec.num_tiles
               and (c.token_stages > 2 or c.strips == 1 and c.place_k == layout.TILE_K)
               and wgmma_shared_bytes(spec, c) <= target.shared_memory_bytes]
    return min(fitting or configs[:1], key=lambda config: _wgmma_cycles(spec, target, config))


def wgmma_shared_bytes(spec: MatmulSpec, config: WgmmaConfig) -> int:
    """Shared memory of one block: tiles and tokens in flight, parameters, the warpgroups' sums, and the rest."""
    tile = 2 * layout.TILE_N * layout.tile_words(spec.bits)
    place = 2 * config.block_m * config.place_k
    sums = 4 * layout.TILE_N * config.strips * (config.warpgroups - 1) * config.block_m
    rings = config.warpgroups * (config.strips * config.stages * tile + config.token_stages * place)
    return rings + parameter_bytes(spec, config) + sums + SHARED_REST


def _wgmma_cycles(spec: MatmulSpec, target: Target, config: WgmmaConfig) -> int:
    """What a call of kernel_wgmma takes, roughly."""
    def cycles(figures: tuple[float, float]) -> int:
        return int(figures[0] + figures[1] * config.block_m)

    tile = cycles(SCALED_PRODUCT) if config.scales_product else max(LEAST_SCALED_WEIGHT, cycles(SCALED_WEIGHT))
    return busiest_core(spec, target, config, need=wgmma_shared_bytes(spec, config), most=WGMMA_RESIDENT[config.block_m], tile=tile,
                        latency=cycles(ALONE))
