"""Static facts of a rotation and write, and which cases the Mosaic kernel takes. Computes on no array."""

import dataclasses

from pallas_kernels.dispatch import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryWriteSpec:
    """What is known of a call when it is traced."""

    num_tokens: int
    """T, new tokens, padding included."""
    num_rows: int
    """B, sequences."""
    num_kv_heads: int
    """K, KV heads."""
    num_groups: int
    """G, query heads that share a KV head."""
    head_dim: int
    """H."""
    page_size: int
    """Z, tokens a page."""
    pages_per_seq: int
    """M, page-table entries a sequence."""
    dtype: str
    """Dtype of the projections and of the queries that come back."""
    kv_dtype: str
    """Dtype of the pages."""


MOSAIC_CAPABILITIES = ((8, 0), (9, 0))
MOSAIC_DTYPES = ("bfloat16", "float16")
MOSAIC_HALF_STEP = 32      # columns of the narrowest tile that four warps share; a tile holds half a head
MOSAIC_MAX_BLOCKS = 65536  # one block takes one token of one KV head; where there are more, XLA's wide fusions keep the GPU as busy


def mosaic_refusal(spec: RotaryWriteSpec, target: Target) -> str | None:
    """Why kernel_mosaic cannot (or should not) do a call on a target, or None if it can."""
    blocks = spec.num_tokens * spec.num_kv_heads
    reasons = (
        (target.platform != "gpu", f"needs an NVIDIA GPU, not {target.platform}"),
        (target.compute_capability not in MOSAIC_CAPABILITIES, f"is built for sm_80 and sm_90, not {target.compute_capability}"),
        (spec.dtype not in MOSAIC_DTYPES, f"is built for {' and '.join(MOSAIC_DTYPES)}, not {spec.dtype}"),
        (spec.dtype != spec.kv_dtype, f"copies without a cast, not {spec.dtype} into {spec.kv_dtype}"),
        (spec.head_dim % (2 * MOSAIC_HALF_STEP) != 0, f"needs a head dim that is a multiple of {2 * MOSAIC_HALF_STEP}, not {spec.head_dim}"),
        (blocks > MOSAIC_MAX_BLOCKS, f"is for at most {MOSAIC_MAX_BLOCKS} tokens times KV heads, not {blocks}"),
    )
    return next((reason for refused, reason in reasons if refused), None)
