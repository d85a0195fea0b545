"""Static facts of an int4_matmul call, and the tile sizes derived from them. Frozen values and heuristics: computes on no array."""

import dataclasses

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
class MosaicConfig:
    """Tiles of kernel_mosaic."""

    block_m: int
    """Tokens of a block: 8, 16, 32 or 64."""
    group_size: int
    """Values of k that share a scale."""
    group_k: int
    """Values of k of a tile of 256 that share a scale."""
    warpgroups: int
    """Warpgroups of 128 threads in a block, which share its part of k."""
    splits: int
    """Blocks that share k. Above 1 their float32 sums are added up by XLA."""
    stages: int
    """Tiles in flight in a warpgroup."""
    strips: int = 1
    """Strips of 64 columns of a block."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WgmmaConfig:
    """Tiles of kernel_wgmma."""

    block_m: int
    """Tokens of a block: a multiple of 8 up to 256."""
    group_size: int
    """Values of k that share a scale."""
    group_k: int
    """Values of k of a tile of 256 that share a scale."""
    strips: int
    """Strips of 64 columns of a block: one a warpgroup."""
    splits: int
    """Blocks that share k. Above 1 their float32 sums are added up by XLA."""
    stages: int
    """Tiles of weights in flight in a warpgroup."""
    token_stages: int
    """Pieces of 64 values of k of the tokens in flight in a block; 4 or 8."""


CPU_STRIP_BYTES = 64 * 2**20   # dequantised weights that exist at a time
GPU_STRIP_BYTES = 512 * 2**20  # the widest of Qwen2-7B, 3584 x 37888 in 16 bits, is 259 MiB: one strip
MOSAIC_CAPABILITIES = ((8, 0), (9, 0))
WGMMA_CAPABILITIES = ((9, 0),)
NUM_CORES = {(8, 0): 108, (9, 0): 132}  # streaming multiprocessors of an A100 and of an H100 or H200
MOSAIC_BLOCK_MS = (8, 16, 32, 64)
MOSAIC_STAGES = 4
WGMMA_BLOCK_MS = (16, 32, 64, 128, 256)

# Where a kernel hands over to the next. Estimates from tensor-core and memory rates: dequantising costs 2.5 k n bytes of traffic, after which
# cuBLAS computes at some 700 TFLOP/s (an A100: 250) where the kernels reach some 450 (125).
WGMMA_MIN_M = 17
DEQUANTIZE_MIN_M = {(8, 0): 257, (9, 0): 513}


def dequantize_refusal(spec: MatmulSpec, target: Target) -> str | None:
    """Why dequantising before XLA's dot is not the way to do a call on a target, or None if it is."""
    least = DEQUANTIZE_MIN_M.get(target.compute_capability or (0, 0), 1)
    return _first(((target.platform != "gpu", f"needs a GPU, not {target.platform}"),
                   (spec.x_dtype == "float32", "is for x in 16 bits, not float32"),
                   (spec.m < least, f"pays from {least} tokens on, not for {spec.m}")))


def xla_strip_tiles(spec: MatmulSpec, target: Target) -> int:
    """Tiles of 64 columns that kernel_xla dequantises at a time: a bound on its largest temporary."""
    limit = CPU_STRIP_BYTES if target.platform == "cpu" else GPU_STRIP_BYTES
    width = 4 if spec.x_dtype == "float32" else 2
    return max(1, limit // (width * spec.k * layout.TILE_N))


def _kernel_reasons(spec: MatmulSpec, target: Target, capabilities: tuple[tuple[int, int], ...]) -> tuple[tuple[bool, str], ...]:
    """(refused, reason) of what both Mosaic kernels need."""
    built_for = " and ".join(f"sm_{major}{minor}" for major, minor in capabilities)
    fits = spec.group_size in (32, 64, 128) or spec.group_size % layout.TILE_K == 0 or spec.group_size == spec.k
    return (
        (target.platform != "gpu", f"needs an NVIDIA GPU, not {target.platform}"),
        (target.compute_capability not in capabilities, f"is built for {built_for}, not {target.compute_capability}"),
        (spec.x_dtype not in ("bfloat16", "float16"), f"needs x in 16 bits, not {spec.x_dtype}"),
        (not fits, f"needs groups of 32, 64, 128, a multiple of {layout.TILE_K} or the whole column, not {spec.group_size}"),
    )


def _first(reasons: tuple[tuple[bool, str], ...]) -> str | None:
    return next((reason for refused, reason in reasons if refused), None)


def mosaic_refusal(spec: MatmulSpec, target: Target) -> str | None:
    """Why kernel_mosaic cannot do a call on a target, or None if it can."""
    reason = _first(_kernel_reasons(spec, target, MOSAIC_CAPABILITIES))
    if reason is not None:
        return reason
    need = mosaic_shared_bytes(spec, mosaic_config(spec, target))
    return None if need <= target.shared_memory_bytes else f"needs {need} bytes of shared memory of {target.shared_memory_bytes}"


def mosaic_config(spec: MatmulSpec, target: Target) -> MosaicConfig:
    """Tile sizes of kernel_mosaic: enough warpgroups, and splits of k, to keep every core's share of the memory bandwidth in flight."""
    block_m = next((size for size in MOSAIC_BLOCK_MS if spec.m <= size), MOSAIC_BLOCK_MS[-1])
    cores = NUM_CORES.get(target.compute_capability or (0, 0), 132)
    blocks = spec.num_strips * -(-spec.m // block_m)
    wanted = 4 if block_m <= 16 and blocks < 2 * cores else 2 if block_m <= 32 else 1
    warpgroups = next(size for size in (4, 2, 1) if size <= min(wanted, spec.num_tiles))
    splits = max(1, min(4, (2 * cores) // blocks, spec.num_tiles // (2 * warpgroups)))
    config = MosaicConfig(block_m=block_m, group_size=spec.group_size, group_k=spec.group_k, warpgroups=warpgroups, splits=splits,
                          stages=MOSAIC_STAGES)
    while mosaic_shared_bytes(spec, config) > target.shared_memory_bytes and config.stages > 2:
        fewer = {"warpgroups": config.warpgroups // 2} if config.stages == 3 and config.warpgroups > 1 else {"stages": config.stages - 1}
        config = dataclasses.replace(config, **fewer)
    return config


def mosaic_shared_bytes(spec: MatmulSpec, config: MosaicConfig) -> int:
    """Shared memory of one block: tiles and tokens in flight, the warpgroups' sums, and 1 KiB for barriers and alignment."""
    tile = 2 * layout.TILE_N * layout.tile_words(spec.bits) + 2 * config.block_m * layout.TILE_K
    return config.warpgroups * config.stages * tile + 4 * max(1, config.warpgroups - 1) * layout.TILE_N * config.block_m + 1024


def wgmma_refusal(spec: MatmulSpec, target: Target) -> str | None:
    """Why kernel_wgmma cannot, or should not, do a call on a target, or None if it can."""
    most = DEQUANTIZE_MIN_M[9, 0] - 1
    reason = _first((*_kernel_reasons(spec, target, WGMMA_CAPABILITIES),
                     (not WGMMA_MIN_M <= spec.m <= most, f"is for {WGMMA_MIN_M} to {most} tokens, not {spec.m}")))
    if reason is not None:
        return reason
    need = wgmma_shared_bytes(spec, wgmma_config(spec, target))
    return None if need <= target.shared_memory_bytes else f"needs {need} bytes of shared memory of {target.shared_memory_bytes}"


def wgmma_config(spec: MatmulSpec, target: Target) -> WgmmaConfig:
    """Tile sizes of kernel_wgmma: as many strips a block as leave every core one."""
    block_m = next((size for size in WGMMA_BLOCK_MS if spec.m <= size), WGMMA_BLOCK_MS[-1])
    cores = NUM_CORES.get(target.compute_capability or (0, 0), 132)
    tasks = spec.num_strips * -(-spec.m // block_m)
    most = 2 if block_m > 64 else 4
    strips = max(1, min(most, -(-tasks // cores)))
    splits = max(1, min(4, cores // -(-tasks // strips), spec.num_tiles // 4))
    config = WgmmaConfig(block_m=block_m, group_size=spec.group_size, group_k=spec.group_k, strips=strips, splits=splits, stages=4,
                         token_stages=8 if block_m <= 64 else 4)
    while wgmma_shared_bytes(spec, config) > target.shared_memory_bytes and config.stages > 2:
        fewer = {"strips": config.strips // 2} if config.stages == 3 and config.strips > 1 else {"stages": config.stages - 1}
        config = dataclasses.replace(config, **fewer)
    return config


def wgmma_shared_bytes(spec: MatmulSpec, config: WgmmaConfig) -> int:
    """Shared memory of one block: tiles and tokens in flight, and 1 KiB for barriers and alignment."""
    tile = 2 * layout.TILE_N * layout.tile_words(spec.bits)
    return config.strips * config.stages * tile + config.token_stages * config.block_m * 128 + 1024
