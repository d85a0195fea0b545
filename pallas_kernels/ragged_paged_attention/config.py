"""Static facts of an attention call and the tile sizes derived from them. Frozen values and heuristics: computes on no array."""

import dataclasses
from importlib.util import find_spec

from pallas_kernels.dispatch import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What is known of a call when it is traced."""

    num_tokens: int
    """T, query tokens, padding included."""
    num_rows: int
    """B, sequences."""
    num_heads: int
    """N, query heads."""
    num_kv_heads: int
    """K, KV heads."""
    head_dim: int
    """H."""
    page_size: int
    """Z, tokens a page."""
    pages_per_seq: int
    """M, page-table entries a sequence."""
    q_dtype: str
    """Dtype of the queries and of the output."""
    kv_dtype: str
    """Dtype of the pages."""
    max_q_len: int | None
    """Bound on the query tokens of any row; 1 is decode; None is T."""
    sliding_window: int | None
    """Keys that a query sees, itself included; None is all before it."""
    softcap: float | None
    """Cap c of scores, c * tanh(score / c); None is none."""

    @property
    def num_groups(self) -> int:
        """G, query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def is_decode(self) -> bool:
        """No row has more than one query token."""
        return self.max_q_len == 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class XlaConfig:
    """Tiles of kernel_xla."""

    block_q: int
    """Query tokens in one tile; 1 in decode."""
    block_pages: int
    """Pages gathered in one step of the loop over keys."""
    tile_batch: int
    """Tiles that go through that loop together, and so for as long as the longest of them."""
    widen: bool
    """Matmul operands are widened to float32 first; otherwise they stay in the pages' 16-bit dtype and only accumulate in float32."""


# CPU, measured on 2 cores at SmolLM2's shape: longer blocks lose on rows of 100 keys (180 us a layer for 8 decode rows at 128,
# 290 us at 256), shorter ones to the loop's cost of some 20 us a step. Decode rows in groups keep both cores busy.
CPU_BLOCK_KV = 128
CPU_DECODE_TILE_BATCH = 8
CPU_BLOCK_Q = 64
GPU_BLOCK_KV = 512
GPU_BLOCK_Q = 64
MIN_BLOCK_Q = 16
GPU_SCORE_BYTES = 256 * 2**20  # float32 scores of one step of a tile group, the kernel's largest temporary


def xla_config(spec: AttentionSpec, target: Target) -> XlaConfig:
    """Tile sizes of kernel_xla for a call."""
    cpu = target.platform == "cpu"
    block_pages = max(1, min((CPU_BLOCK_KV if cpu else GPU_BLOCK_KV) // spec.page_size, spec.pages_per_seq))
    block_q = 1 if spec.is_decode else _block_q(spec, CPU_BLOCK_Q if cpu else GPU_BLOCK_Q)
    # CPU prefill: every tile runs its own loop, so that a short row does not pay for a long one and an empty tile costs nothing.
    # GPU: as many tiles as the scores' memory allows run side by side.
    score_bytes = 4 * block_q * spec.num_heads * block_pages * spec.page_size
    cpu_batch = CPU_DECODE_TILE_BATCH if spec.is_decode else 1
    tile_batch = cpu_batch if cpu else max(1, GPU_SCORE_BYTES // score_bytes)
    sixteen_bit = spec.q_dtype == spec.kv_dtype and spec.q_dtype != "float32"
    return XlaConfig(block_q=block_q, block_pages=block_pages, tile_batch=tile_batch, widen=cpu or not sixteen_bit)


def _block_q(spec: AttentionSpec, most: int) -> int:
    """About the mean row length, as a power of two: a tile that is longer than its row computes queries that nobody reads."""
    longest = min(spec.num_tokens, spec.max_q_len or spec.num_tokens)
    mean = max(1, spec.num_tokens // spec.num_rows)
    return min(most, max(MIN_BLOCK_Q, 1 << (mean.bit_length() - 1)), 1 << (longest - 1).bit_length())


@dataclasses.dataclass(frozen=True, kw_only=True)
class MosaicConfig:
    """Tiles of kernel_mosaic, which decodes."""

    splits: int
    """Blocks that share one row and KV head."""
    min_pages: int
    """Pages that a block takes at least, so that short rows leave splits empty instead of writing many partial results."""
    stages: int
    """Pages in flight in a block."""
    swizzle_bytes: int
    """Width of a tile of keys or values in shared memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillConfig:
    """Tiles of kernel_mosaic_prefill."""

    block_q: int
    """Query tokens of one row and head in a tile."""
    block_kv: int
    """Keys in a step of the pipeline: a page or an equal part of one."""
    stages: int
    """Blocks of keys and values in flight."""
    swizzle_bytes: int
    """Width of a tile of keys or values in shared memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WgmmaConfig:
    """Tiles of kernel_wgmma."""

    block_kv: int
    """Keys in a step: whole pages."""
    stages: int
    """Blocks of keys and values in flight."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TritonConfig:
    """Tiles of kernel_jax_triton, which decodes."""

    splits: int
    """Programs that share one row and KV head."""
    min_keys: int
    """Keys that a program takes at least; whole blocks."""
    block_kv: int
    """Keys in a step."""
    group_rows: int
    """Rows of the tile that holds the query heads of a KV head."""
    num_warps: int
    """Warps of a program."""
    stages: int
    """Blocks in flight."""


MOSAIC_GROUP_ROWS = 16      # the smallest tensor-core tile; a group of fewer query heads is padded to it
MOSAIC_HEAD_DIMS = (64, 128)
MOSAIC_CAPABILITIES = ((8, 0), (9, 0))
MOSAIC_STAGE_BYTES = 64 * 1024  # pages in flight, where two stages allow it: two blocks then share an sm_80 core, three an sm_90 one
MOSAIC_MAX_STAGES = 4           # the sm_80 pipeline is unrolled once a stage
MOSAIC_MAX_SPLITS = 64
MOSAIC_BLOCKS = 256             # two a core of an H200 (132) or an A100 (108): more split rows finer for no gain and cost a combination
MOSAIC_LONG_BLOCKS = 512        # the same where sequences can be long: a block then takes at most MOSAIC_LONG_PAGES pages
MOSAIC_LONG_PAGES = 32          # or twice as many where blocks are enough without: halves of 4096 keys cost more than they even out
MOSAIC_PREFILL_BLOCK_Q = 64     # four warps of one m-tile each
MOSAIC_PREFILL_STAGES = 3
TRITON_HEAD_DIMS = (64, 128)
TRITON_MAX_GROUPS = 64
TRITON_BLOCK_KV = 64
TRITON_STAGES = 3
WGMMA_CAPABILITIES = ((9, 0),)
WGMMA_BLOCK_Q = 128         # two warpgroups of 64 tokens
WGMMA_BLOCK_KV = 128
WGMMA_STAGES = 2


def mosaic_refusal(spec: AttentionSpec, target: Target) -> str | None:
    """Why kernel_mosaic and kernel_mosaic_prefill cannot do a call on a target, or None if they can."""
    reasons = (
        *_tensor_core_reasons(spec, target, MOSAIC_CAPABILITIES),
        (spec.is_decode and spec.num_groups > MOSAIC_GROUP_ROWS,
         f"packs at most {MOSAIC_GROUP_ROWS} query heads a KV head, not {spec.num_groups}"),
        (spec.page_size % 16 != 0, f"needs pages of a multiple of 16 tokens, not {spec.page_size}"),
    )
    reason = next((reason for refused, reason in reasons if refused), None)
    return reason or _memory_refusal(mosaic_shared_bytes(spec), target)


def _tensor_core_reasons(spec: AttentionSpec, target: Target, capabilities: tuple[tuple[int, int], ...]) -> tuple[tuple[bool, str], ...]:
    """(refused, reason) of what every tensor-core kernel needs."""
    built_for = " and ".join(f"sm_{major}{minor}" for major, minor in capabilities)
    return (
        (target.platform != "gpu", f"needs an NVIDIA GPU, not {target.platform}"),
        (target.compute_capability not in capabilities, f"is built for {built_for}, not {target.compute_capability}"),
        (spec.kv_dtype not in ("bfloat16", "float16"), f"needs 16-bit pages, not {spec.kv_dtype}"),
        (spec.q_dtype != spec.kv_dtype, f"needs queries in the pages' dtype, not {spec.q_dtype} over {spec.kv_dtype}"),
        (spec.head_dim not in MOSAIC_HEAD_DIMS, f"has no tiles for head dim {spec.head_dim}, only {MOSAIC_HEAD_DIMS}"),
    )


def _memory_refusal(need: int, target: Target) -> str | None:
    return None if need <= target.shared_memory_bytes else f"needs {need} bytes of shared memory of {target.shared_memory_bytes}"


def mosaic_config(spec: AttentionSpec) -> MosaicConfig:
    """Tile sizes of kernel_mosaic for a decode call.

    Compiled ahead of time, bfloat16, no spills; (registers, bytes of shared memory) on sm_80 and sm_90: H 128, pages of 16: (147, 35841),
    (121, 35873); of 32: (143, 68609), (114, 68641); of 64: (191, 69633), (161, 69649); of 96: (219, 103425), (189, 103441); of 128:
    (239, 137217), (215, 137233). H 64, pages of 16: (118, 19457), (94, 19489); of 48: (152, 54273), (126, 54305). The combination
    takes at most 32 registers for up to 16 splits and 114 for 64.

    Splits, H200, context 640 unless said, 28/4 heads, us: 8 rows 9.9 with 5 or 10, 10.7 with 16, 13.6 with 32; 32 rows 17.9 with 2, 19.5
    with 4; 128 rows 46.6 with 1, 52.7 with 2. One row of 32768 keys among 8: 32.9 with 16, 27.9 with 64. 32 rows of 4096, 64/8 heads:
    125.5 with 1, 138.9 with 2, 133.2 with 3: one split, then, up to 4096 keys where blocks are enough. A third or fourth stage gains
    nothing beyond 1 %, and loses up to 5.
    """
    blocks = spec.num_tokens * spec.num_kv_heads
    most_pages = MOSAIC_LONG_PAGES * (1 if blocks < MOSAIC_BLOCKS else 2)
    long = min(-(-spec.pages_per_seq // most_pages), MOSAIC_LONG_BLOCKS // blocks)
    splits = max(1, min(MOSAIC_MAX_SPLITS, spec.pages_per_seq, max(-(-MOSAIC_BLOCKS // blocks), long)))
    stages = max(2, min(MOSAIC_MAX_STAGES, MOSAIC_STAGE_BYTES // _page_bytes(spec)))
    return MosaicConfig(splits=splits, min_pages=max(1, 128 // spec.page_size), stages=stages,
                        swizzle_bytes=_swizzle_bytes(spec.page_size, spec.head_dim))


def mosaic_prefill_config(spec: AttentionSpec) -> PrefillConfig:
    """Tile sizes of kernel_mosaic_prefill.

    Compiled ahead of time, bfloat16, no spills; (registers, bytes of shared memory) on sm_80 and sm_90:
    H 128, 64 x 32: (224, 67585) and (200, 67609); H 64, 64 x 64: (242, 59393) and (206, 59417); H 64, 64 x 16: (143, 22529) and
    (126, 22553). At H 128, 64 x 64 spills on both.
    """
    block_kv = 64 if spec.head_dim == 64 and spec.page_size % 64 == 0 else 32 if spec.page_size % 32 == 0 else 16
    return PrefillConfig(block_q=MOSAIC_PREFILL_BLOCK_Q, block_kv=block_kv, stages=MOSAIC_PREFILL_STAGES,
                         swizzle_bytes=_swizzle_bytes(block_kv, spec.head_dim))


def _swizzle_bytes(num_rows: int, head_dim: int) -> int:
    """Width of the tiles, of 8 rows each, in which [num_rows, head_dim] 16-bit values are copied to shared memory.

    cp.async deals whole tiles to the four warps as 4 x 1 or 2 x 2: where neither comes out even, tiles of half the width do.
    """
    return 128 if num_rows % 32 == 0 or head_dim % 128 == 0 else 64


def triton_refusal(spec: AttentionSpec, target: Target) -> str | None:
    """Why kernel_jax_triton cannot do a call on a target, or None if it can."""
    missing = [package for package in ("jax_triton", "triton") if find_spec(package) is None]
    reasons = (
        (target.platform != "gpu", f"needs an NVIDIA GPU, not {target.platform}"),
        (target.interpret, "has no interpreter"),
        (bool(missing), f"needs the package {' and '.join(missing)}: pip install 'jaxinfer[triton]'"),
        (target.compute_capability is None or target.compute_capability < (8, 0), f"needs sm_80 or newer, not {target.compute_capability}"),
        (not spec.is_decode, "decodes only (max_q_len 1)"),
        (spec.kv_dtype not in ("bfloat16", "float16"), f"needs 16-bit pages, not {spec.kv_dtype}"),
        (spec.q_dtype != spec.kv_dtype, f"needs queries in the pages' dtype, not {spec.q_dtype} over {spec.kv_dtype}"),
        (spec.head_dim not in TRITON_HEAD_DIMS, f"has no tiles for head dim {spec.head_dim}, only {TRITON_HEAD_DIMS}"),
        (spec.num_groups > TRITON_MAX_GROUPS, f"packs at most {TRITON_MAX_GROUPS} query heads a KV head, not {spec.num_groups}"),
    )
    return next((reason for refused, reason in reasons if refused), None)


def triton_config(spec: AttentionSpec) -> TritonConfig:
    """Tile sizes of kernel_jax_triton for a decode call; as many programs as kernel_mosaic has blocks."""
    blocks_per_row = -(-spec.pages_per_seq * spec.page_size // TRITON_BLOCK_KV)
    splits = max(1, min(MOSAIC_MAX_SPLITS, blocks_per_row, -(-MOSAIC_BLOCKS // (spec.num_tokens * spec.num_kv_heads))))
    group_rows = max(16, 1 << (spec.num_groups - 1).bit_length())
    return TritonConfig(splits=splits, min_keys=2 * TRITON_BLOCK_KV, block_kv=TRITON_BLOCK_KV, group_rows=group_rows, num_warps=4,
                        stages=TRITON_STAGES)


def wgmma_refusal(spec: AttentionSpec, target: Target) -> str | None:
    """Why kernel_wgmma cannot do a call on a target, or None if it can."""
    reasons = (
        *_tensor_core_reasons(spec, target, WGMMA_CAPABILITIES),
        (spec.is_decode, "is for prefill, not decode (max_q_len 1)"),
        (WGMMA_BLOCK_KV % spec.page_size != 0 or spec.page_size % 16 != 0, f"needs pages of 16, 32, 64 or 128 tokens, not {spec.page_size}"),
    )
    reason = next((reason for refused, reason in reasons if refused), None)
    return reason or _memory_refusal(wgmma_shared_bytes(spec, wgmma_config(spec)), target)


def wgmma_config(spec: AttentionSpec) -> WgmmaConfig:
    """Tile sizes of kernel_wgmma.

    Compiled ahead of time on sm_90, no spills; bytes of shared memory: 165977 at H 128, 84057 at H 64. 168 registers a thread at entry;
    the attending warpgroups then take 232 and leave the fetcher 40.
    """
    return WgmmaConfig(block_kv=WGMMA_BLOCK_KV, stages=WGMMA_STAGES)


def wgmma_shared_bytes(spec: AttentionSpec, config: WgmmaConfig) -> int:
    """Shared memory of one block: queries, keys and values in flight, and 4 KiB for reductions and barriers."""
    return 2 * spec.head_dim * (WGMMA_BLOCK_Q + 2 * config.stages * config.block_kv) + 4096


def mosaic_shared_bytes(spec: AttentionSpec) -> int:
    """Shared memory of one block: keys and values in flight, in decode the probabilities' tile, in prefill queries or output, and 4 KiB for
    reductions and barriers."""
    if spec.is_decode:
        return mosaic_config(spec).stages * _page_bytes(spec) + 2 * MOSAIC_GROUP_ROWS * spec.page_size * 2 + 4096
    config = mosaic_prefill_config(spec)
    return config.stages * _page_bytes(spec) * config.block_kv // spec.page_size + config.block_q * spec.head_dim * 2 + 4096


def _page_bytes(spec: AttentionSpec) -> int:
    """Bytes of one KV head's keys and values in a page, at 16 bits."""
    return 2 * spec.page_size * spec.head_dim * 2
