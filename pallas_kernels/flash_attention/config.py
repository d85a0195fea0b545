"""Static facts of a flash-attention call and the tile sizes derived from them. Frozen values and heuristics: computes on no array."""

import dataclasses

from pallas_kernels.dispatch import Target
from pallas_kernels.ragged_paged_attention.config import AttentionSpec, WgmmaConfig, wgmma_config, wgmma_refusal


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashAttentionSpec:
    """What is known of a call when it is traced."""

    num_rows: int
    """B, sequences."""
    num_tokens: int
    """T, query tokens a sequence, padding included."""
    num_keys: int
    """S, keys a sequence, padding included."""
    num_heads: int
    """N, query heads."""
    num_kv_heads: int
    """K, KV heads."""
    head_dim: int
    """H."""
    q_dtype: str
    """Dtype of the queries and of the output."""
    kv_dtype: str
    """Dtype of the keys and values."""
    causal: bool
    """A query sees no key past its own position."""
    has_q_lengths: bool
    """Rows hold fewer queries than T."""
    has_kv_lengths: bool
    """Rows hold fewer keys than S."""
    has_segments: bool
    """Queries see only keys of their own segment."""
    sliding_window: int | None
    """Keys that a query sees, itself included; None is all before it."""
    softcap: float | None
    """Cap c of scores, c * tanh(score / c); None is none."""

    @property
    def num_groups(self) -> int:
        """G, query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class XlaConfig:
    """Tiles of kernel_xla."""

    block_q: int
    """Queries of every row and head that one step of the outer loop takes."""
    block_kv: int
    """Keys that one step of the inner loop takes."""
    widen: bool
    """Matmul operands are widened to float32 first; otherwise they stay in their 16-bit dtype and only accumulate in float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MosaicConfig:
    """Tiles of kernel_mosaic."""

    block_q: int
    """Query tokens of one row and head in a tile."""
    block_kv: int
    """Keys in a step of the pipeline."""
    stages: int
    """Blocks of keys and values in flight."""


CPU_BLOCK_Q, CPU_BLOCK_KV = 128, 128
GPU_BLOCK_KV = 512
GPU_BLOCK_Q = 512
MIN_BLOCK = 16
GPU_SCORE_BYTES = 256 * 2**20   # float32 scores of one step, the largest temporary of kernel_xla
MOSAIC_HEAD_DIMS = (64, 128)
MOSAIC_CAPABILITIES = ((8, 0), (9, 0))
MOSAIC_BLOCK_Q = 64             # four warps of one m-tile each
MOSAIC_STAGES = 3
WGMMA_PAGE_SIZE = 128           # keys of one step of that kernel, so that a step is one copy


def xla_config(spec: FlashAttentionSpec, target: Target) -> XlaConfig:
    """Tile sizes of kernel_xla for a call."""
    cpu = target.platform == "cpu"
    block_kv = min(CPU_BLOCK_KV if cpu else GPU_BLOCK_KV, _power_of_two(spec.num_keys))
    most = GPU_SCORE_BYTES // (4 * spec.num_rows * spec.num_heads * block_kv)
    block_q = CPU_BLOCK_Q if cpu else max(MIN_BLOCK, min(GPU_BLOCK_Q, 1 << (max(most, 1).bit_length() - 1)))
    sixteen_bit = spec.q_dtype == spec.kv_dtype and spec.q_dtype != "float32"
    return XlaConfig(block_q=min(block_q, _power_of_two(spec.num_tokens)), block_kv=block_kv, widen=cpu or not sixteen_bit)


def _power_of_two(length: int) -> int:
    """The smallest power of two that is not below a length."""
    return 1 << (length - 1).bit_length()


def mosaic_config(spec: FlashAttentionSpec) -> MosaicConfig:
    """Tile sizes of kernel_mosaic.

    Compiled ahead of time, bfloat16, no spills; (registers, bytes of shared memory) on sm_80 and sm_90, the most over causal, full, windowed,
    capped and segmented calls: H 128, 64 x 32: (226, 67585) and (216, 67609); H 64, 64 x 64: (250, 59393) and (238, 59417).
    """
    return MosaicConfig(block_q=MOSAIC_BLOCK_Q, block_kv=64 if spec.head_dim == 64 else 32, stages=MOSAIC_STAGES)


def mosaic_shared_bytes(spec: FlashAttentionSpec) -> int:
    """Shared memory of one block: keys and values in flight, queries or output, and 4 KiB for reductions and barriers."""
    config = mosaic_config(spec)
    return (config.stages * 2 * config.block_kv + config.block_q) * spec.head_dim * 2 + 4096


def mosaic_refusal(spec: FlashAttentionSpec, target: Target) -> str | None:
    """Why kernel_mosaic cannot do a call on a target, or None if it can."""
    reasons = (
        (target.platform != "gpu", f"needs an NVIDIA GPU, not {target.platform}"),
        (target.compute_capability not in MOSAIC_CAPABILITIES, f"is built for sm_80 and sm_90, not {target.compute_capability}"),
        (spec.kv_dtype not in ("bfloat16", "float16"), f"needs 16-bit keys and values, not {spec.kv_dtype}"),
        (spec.q_dtype != spec.kv_dtype, f"needs queries in the keys' dtype, not {spec.q_dtype} over {spec.kv_dtype}"),
        (spec.head_dim not in MOSAIC_HEAD_DIMS, f"has no tiles for head dim {spec.head_dim}, only {MOSAIC_HEAD_DIMS}"),
        (mosaic_shared_bytes(spec) > target.shared_memory_bytes,
         f"needs {mosaic_shared_bytes(spec)} bytes of shared memory of {target.shared_memory_bytes}"),
    )
    return next((reason for refused, reason in reasons if refused), None)


def paged_spec(spec: FlashAttentionSpec) -> AttentionSpec:
    """The call as ragged paged attention over pages of WGMMA_PAGE_SIZE keys, as kernel_wgmma makes it."""
    rows = spec.num_rows if has_plain_rows(spec) else 3 * spec.num_rows
    return AttentionSpec(
        num_tokens=spec.num_rows * spec.num_tokens, num_rows=rows, num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim, page_size=WGMMA_PAGE_SIZE, pages_per_seq=-(-spec.num_keys // WGMMA_PAGE_SIZE), q_dtype=spec.q_dtype,
        kv_dtype=spec.kv_dtype, max_q_len=spec.num_tokens, sliding_window=spec.sliding_window, softcap=spec.softcap)


def has_plain_rows(spec: FlashAttentionSpec) -> bool:
    """Every query of every row has a key, its own."""
    return not spec.has_q_lengths and not spec.has_kv_lengths and spec.num_keys >= spec.num_tokens


def wgmma_refusal_dense(spec: FlashAttentionSpec, target: Target) -> str | None:
    """Why kernel_wgmma cannot do a call on a target, or None if it can."""
    if not spec.causal or spec.has_segments:
        return "is causal and knows no segments" if spec.has_segments else "is causal"
    return wgmma_refusal(paged_spec(spec), target)


def wgmma_config_dense(spec: FlashAttentionSpec) -> WgmmaConfig:
    """Tile sizes of kernel_wgmma: those of the paged kernel."""
    return wgmma_config(paged_spec(spec))
