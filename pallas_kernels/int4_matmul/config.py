"""Static facts of an int4_matmul call, and the tile sizes: measured, or derived by a rule. Frozen values: computes on no array."""

import dataclasses
import itertools

from pallas_kernels.dispatch import Target
from pallas_kernels.int4_matmul import layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulSpec:
    """What is known of a call when it is traced."""

    m: int
    """Rows of x: tokens."""
    k: int
    """Values of a row of x."""
    n: int
    """Columns of the weights and of the output."""
    group_size: int
    """Values of k that share a scale; k itself is one scale a column."""
    bits: int
    """Bits of a code: 4 or 8."""
    x_dtype: str
    """Dtype of x."""
    scale_dtype: str
    """Dtype of the scales."""
    zero_dtype: str | None
    """Dtype of the zero points; None: symmetric codes, all zero points 2^(bits - 1)."""
    has_bias: bool
    """A bias is added."""
    out_dtype: str
    """Dtype of the output."""
    activation: str | None = None
    """None, or 'swiglu': of the product's halves along n, silu(first) * second comes out."""
    leaves_parts: bool = False
    """Where a kernel splits k, its float32 sums come out as they are."""

    @property
    def num_strips(self) -> int:
        """Strips of 64 columns."""
        return -(-self.n // layout.TILE_N)

    @property
    def num_tiles(self) -> int:
        """Tiles of 256 values of k."""
        return -(-self.k // layout.TILE_K)

    @property
    def group_k(self) -> int:
        """Values of k of a tile that share a scale; a group of several tiles, or of the whole column, is one of a tile."""
        return min(self.group_size, layout.TILE_K) if self.group_size < self.k else layout.TILE_K


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """Tiles of kernel_mosaic, and what those of kernel_wgmma have in common with them."""

    block_m: int
    """Tokens of a block: 8, 16, 32 or 64; of kernel_wgmma any multiple of 8 up to 256."""
    strips: int
    """Strips of 64 columns of a block."""
    group_size: int
    """Values of k that share a scale."""
    group_k: int
    """Values of k of a tile of 256 that share a scale."""
    warpgroups: int
    """Warpgroups of 128 threads of each strip, which share the block's part of k."""
    splits: int
    """Blocks that share k. Above 1 their float32 sums are added up by XLA."""
    stages: int
    """Tiles of weights in flight in a warpgroup."""


class MosaicConfig(Tiles):
    """Tiles of kernel_mosaic."""


CPU_STRIP_BYTES = 64 * 2**20   # dequantised weights that exist at a time
GPU_STRIP_BYTES = 512 * 2**20  # the widest of Qwen2-7B, 3584 x 37888 in 16 bits, is 259 MiB: one strip
MOSAIC_CAPABILITIES = ((8, 0), (9, 0))
NUM_CORES = {(8, 0): 108, (9, 0): 132}  # streaming multiprocessors of an A100 and of an H100 or H200
MOSAIC_BLOCK_MS = (8, 16, 32, 64)
MOSAIC_WARPGROUPS = {8: 5, 16: 4, 32: 2, 64: 2}  # by block_m: as many as a core's registers hold, at 96, 128, 255 and 255 a thread
MOSAIC_MOST_GROUPS = 4  # of a tile that leave it so; the parameters of more would spill, so that fewer warpgroups and tokens fit
MOSAIC_STAGES = 3
SHARED_REST = 3072  # bytes of shared memory for barriers and alignment
# Where a kernel hands over to the next. On an H200 measured by bench.kernels.int4_sweep, which tries both sides (us at 16, 32, 512, 1024 and
# 2048 tokens, in bench/results/sweep-int4-nvidia-h200.json): kernel_wgmma beats kernel_mosaic from 17 tokens on, since 16 fill mosaic's tiles,
# and many columns from 9 on (26.5 against 28.7 for 3584 x 37888 and 16 tokens; 17.2 and 17.1 for 3584 x 18944). Dequantising costs a pass
# over the weights, which many columns earn back late: kernel_wgmma multiplies by them at 700 to 740 TFLOP/s. The crossings that are measured
# stand in DEQUANTIZE_MEASURED: 36.6 against 42.6 at 512 tokens of 3584 x 4608; 45.6 and 44.3 at 1024, 81 and 85 at 2048 of 3584 x 3584; 221
# and 213, 403 and 433 of 18944 x 3584; 775 against 746 at 2048 of 3584 x 37888, and 784 against 756 in bench.kernels (as 1497 against
# 1637 at 4096). An A100's is an estimate from its rates.
WGMMA_MIN_M, WGMMA_WIDE_MIN_M = 17, 9
WIDE_N, SMALL_CODES = 16384, 2**25
DEQUANTIZE_MEASURED = {(3584, 4608): 512, (3584, 3584): 2048, (18944, 3584): 2048, (3584, 18944): 4096, (3584, 37888): 4096}  # by k, n


def dequantize_min_m(spec: MatmulSpec, target: Target) -> int:
    """Tokens from which dequantising is the quickest way."""
    if target.compute_capability != (9, 0):
        return 257
    measured = DEQUANTIZE_MEASURED.get((spec.k, spec.n)) if is_measured(spec, target) else None
    return measured or (4096 if spec.n >= WIDE_N else 512 if spec.k * spec.n < SMALL_CODES else 2048)


# Where nothing is measured, kernel_mosaic's tiles are those of the least time by these figures, in cycles. A tile's instructions are counted
# in the machine code for sm_90 at 8 tokens (296, a warp on each of a core's four schedulers); its latency is what a warpgroup alone takes,
# from the depth of its chain of products; a block begins by waiting for memory, 1 us; splitting costs a launch that adds the parts up, 2 us,
# and their way to memory and back, 2000 bytes a cycle.
TILE_ISSUE, TILE_LATENCY, BLOCK_LATENCY, SPLIT_LATENCY, BYTES_A_CYCLE = 300, 1200, 1800, 3500, 2000

# Measured on an H200 on 2026-11-30 (bench/results/sweep-int4-nvidia-h200.json, by bench.kernels.int4_sweep, which prints such lines),
# (k, n, block_m) -> tiles. Groups of 128, 4 bits. The device's us, the kernel that adds up splits and the gap before it included.
MOSAIC_MEASURED: dict[tuple[int, int, int], tuple[int, int, int, int]] = {  # warpgroups, splits, stages, strips
    (3584, 4608, 8): (4, 1, 4, 1),      # 6.3
    (3584, 3584, 8): (4, 1, 4, 1),      # 6.2
    (3584, 37888, 8): (1, 1, 2, 5),     # 21.6
    (18944, 3584, 8): (1, 9, 3, 4),     # 15.7
    (3584, 4608, 16): (4, 1, 3, 1),     # 7.7
    (3584, 3584, 16): (4, 1, 3, 1),     # 7.6
    (3584, 37888, 16): (2, 1, 3, 1),    # 28.5
    (18944, 3584, 16): (4, 2, 3, 1),    # 17.9
}


def dequantize_refusal(spec: MatmulSpec, target: Target) -> str | None:
    """Why kernel_dequantize cannot do a call on a target, or None if it can."""
    # Eight neighbouring values of k are written at a time, with one scale; their weights in x's dtype are 16 bytes.
    return first((*kernel_reasons(spec, target, MOSAIC_CAPABILITIES), (spec.k % 8 > 0, f"needs k that is a multiple of 8, not {spec.k}")))


def dequantize_loss(spec: MatmulSpec, target: Target) -> str | None:
    """Why a later row does a call better than dequantising, or None if it does not."""
    least = dequantize_min_m(spec, target)
    return None if spec.m >= least else f"pays from {least} tokens on, not for {spec.m}"


def xla_strip_tiles(spec: MatmulSpec, target: Target) -> int:
    """Tiles of 64 columns that kernel_xla dequantises at a time: a bound on its largest temporary."""
    limit = CPU_STRIP_BYTES if target.platform == "cpu" else GPU_STRIP_BYTES
    width = 4 if spec.x_dtype == "float32" else 2
    return max(1, limit // (width * spec.k * layout.TILE_N))


def kernel_reasons(spec: MatmulSpec, target: Target, capabilities: tuple[tuple[int, int], ...]) -> tuple[tuple[bool, str], ...]:
    """(refused, reason) of what both Mosaic kernels need."""
    built_for = " and ".join(f"sm_{major}{minor}" for major, minor in capabilities)
    fits = spec.group_size in (32, 64, 128) or spec.group_size % layout.TILE_K == 0 or spec.group_size == spec.k
    return (
        (target.platform != "gpu", f"needs an NVIDIA GPU, not {target.platform}"),
        (target.compute_capability not in capabilities, f"is built for {built_for}, not {target.compute_capability}"),
        (spec.x_dtype not in ("bfloat16", "float16"), f"needs x in 16 bits, not {spec.x_dtype}"),
        (not fits, f"needs groups of 32, 64, 128, a multiple of {layout.TILE_K} or the whole column, not {spec.group_size}"),
    )


def first(reasons: tuple[tuple[bool, str], ...]) -> str | None:
    return next((reason for refused, reason in reasons if refused), None)


def memory_refusal(need: int, target: Target) -> str | None:
    """Why a block of so many bytes of shared memory cannot run on a target, or None if it can."""
    return None if need <= target.shared_memory_bytes else f"needs {need} bytes of shared memory of {target.shared_memory_bytes}"


def mosaic_refusal(spec: MatmulSpec, target: Target) -> str | None:
    """Why kernel_mosaic cannot do a call on a target, or None if it can."""
    reason = first(kernel_reasons(spec, target, MOSAIC_CAPABILITIES))
    if reason is not None:
        return reason
    return memory_refusal(mosaic_shared_bytes(spec, mosaic_config(spec, target)), target)


def mosaic_loss(spec: MatmulSpec, target: Target) -> str | None:
    """Why a later row does a call better than kernel_mosaic, or None if it does not."""
    end = dequantize_min_m(spec, target)
    return None if spec.m < end else f"pays for fewer than {end} tokens, not for {spec.m}"


def mosaic_config(spec: MatmulSpec, target: Target) -> MosaicConfig:
    """Tile sizes of kernel_mosaic: those measured for the matrix, otherwise those that `_cycles` finds quickest."""
    sizes = MOSAIC_BLOCK_MS if layout.TILE_K // spec.group_k <= MOSAIC_MOST_GROUPS else MOSAIC_BLOCK_MS[:2]
    block_m = next((size for size in sizes if spec.m <= size), sizes[-1])
    measured = MOSAIC_MEASURED.get((spec.k, spec.n, block_m)) if is_measured(spec, target) else None
    tried = itertools.product((1, 2, 4, 5), range(1, 10), (MOSAIC_STAGES, 2), (1, 2, 4, 5)) if measured is None else [measured]
    configs = [MosaicConfig(block_m=block_m, group_size=spec.group_size, group_k=spec.group_k, warpgroups=w, splits=p, stages=t, strips=s)
               for w, p, t, s in tried]
    most = _most_warpgroups(spec, target, block_m)
    fitting = [c for c in configs if c.warpgroups * c.strips <= most and c.warpgroups * c.splits <= spec.num_tiles
               and mosaic_shared_bytes(spec, c) <= target.shared_memory_bytes]
    return min(fitting or configs[:1], key=lambda config: _cycles(spec, target, config))


def _most_warpgroups(spec: MatmulSpec, target: Target, block_m: int) -> int:
    """Warpgroups that a core has registers for. Addresses of cp.async take some that copies by TMA do not."""
    most = 2 if layout.TILE_K // spec.group_k > MOSAIC_MOST_GROUPS else 4 if spec.bits == 8 or target.compute_capability == (8, 0) else 5
    return min(most, MOSAIC_WARPGROUPS[block_m])


def is_measured(spec: MatmulSpec, target: Target) -> bool:
    """Whether the tables of measured tiles speak of such a call. Scales of 32 bits take twice the shared memory and registers."""
    return (target.compute_capability, spec.bits, spec.group_size) == ((9, 0), 4, 128) and spec.scale_dtype != "float32"


def _cycles(spec: MatmulSpec, target: Target, config: MosaicConfig) -> int:
    """What a call of kernel_mosaic takes, roughly."""
    most = min(4, _most_warpgroups(spec, target, config.block_m))
    return busiest_core(spec, target, config, need=mosaic_shared_bytes(spec, config), most=most, tile=TILE_ISSUE)


def busiest_core(spec: MatmulSpec, target: Target, config: Tiles, *, need: int, most: int, tile: int,
                 latency: int = TILE_LATENCY) -> int:
    """Cycles: waves of blocks, of each the busiest core's instructions or the longest chain, whichever is more; then what splits cost.

    Args:
      spec: the call's facts.
      target: the device.
      config: the tiles.
      need: shared memory of a block.
      most: warpgroups that a core has registers for. A fifth finds some only in a block that ptxas knows to have five: small blocks of
        kernel_mosaic are compiled to some 110 a thread.
      tile: cycles of a core that a tile of weights takes.
      latency: cycles of a tile of a warpgroup that has a core to itself.
    """
    cores = NUM_CORES.get(target.compute_capability or (0, 0), 132)
    blocks = -(-spec.num_strips // config.strips) * config.splits * -(-spec.m // config.block_m)
    warpgroups = config.warpgroups * config.strips
    resident = max(1, min(most // warpgroups, target.shared_memory_bytes // need))
    steps = -(-spec.num_tiles // (config.warpgroups * config.splits))
    waves, rest = divmod(blocks, cores * resident)

    def wave(each: int) -> int:
        """Cycles of as many blocks on each core."""
        return BLOCK_LATENCY + steps * max(each * warpgroups * tile, latency) if each else 0

    return waves * wave(resident) + wave(-(-rest // cores)) + split_cycles(spec, config.splits)


def split_cycles(spec: MatmulSpec, splits: int) -> int:
    """What it takes to add up splits."""
    return SPLIT_LATENCY + 8 * splits * spec.m * spec.n // BYTES_A_CYCLE if splits > 1 else 0


def parameter_rows(config: Tiles, num_tiles: int, num_groups: int) -> int:
    """Groups that the tiles of one warpgroup touch at most."""
    tiles = -(-num_tiles // (config.splits * config.warpgroups))
    unaligned = layout.TILE_K % config.group_size > 0
    return min(num_groups, -(-tiles * layout.TILE_K // config.group_size) + unaligned)


def parameter_bytes(spec: MatmulSpec, config: Tiles) -> int:
    """Shared memory of a block's scales and zero points."""
    width = (4 if spec.scale_dtype == "float32" else 2) + 2 * (spec.zero_dtype is not None)
    rows = parameter_rows(config, spec.num_tiles, spec.k // spec.group_size)
    return config.strips * config.warpgroups * rows * layout.TILE_N * width


def mosaic_shared_bytes(spec: MatmulSpec, config: MosaicConfig) -> int:
    """Shared memory of one block: tiles and tokens in flight, parameters, the warpgroups' sums, and the rest."""
    step = 2 * layout.TILE_N * layout.tile_words(spec.bits) + 2 * config.block_m * layout.TILE_K
    sums = 4 * (config.warpgroups - 1) * layout.TILE_N * config.block_m
    return config.strips * (config.warpgroups * config.stages * step + sums) + parameter_bytes(spec, config) + SHARED_REST
