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
MOSAIC_VECTOR = 8          # values of an access, of 16 bytes; a head holds an even number of them
MOSAIC_THREADS = 128       # of a block
MOSAIC_FEW_BLOCKS = 4096   # of one pair of vectors a thread, which keep an H200 busy for about three rounds
MOSAIC_PAIRS = 2           # a thread has of them where there are more: two take 72 registers, four would take 186


def mosaic_refusal(spec: RotaryWriteSpec, target: Target) -> str | None:
    """Why kernel_mosaic cannot (or should not) do a call on a target, or None if it can."""
    reasons = (
        (target.platform != "gpu", f"needs an NVIDIA GPU, not {target.platform}"),
        (target.compute_capability not in MOSAIC_CAPABILITIES, f"is built for sm_80 and sm_90, not {target.compute_capability}"),
        (spec.dtype not in MOSAIC_DTYPES, f"is built for {' and '.join(MOSAIC_DTYPES)}, not {spec.dtype}"),
        (spec.dtype != spec.kv_dtype, f"copies without a cast, not {spec.dtype} into {spec.kv_dtype}"),
        (spec.head_dim % (2 * MOSAIC_VECTOR) != 0, f"needs a head dim that is a multiple of {2 * MOSAIC_VECTOR}, not {spec.head_dim}"),
    )
    return next((reason for refused, reason in reasons if refused), None)


def mosaic_block(num_pairs: int) -> int:
    """How many pairs of vectors, a thread's work, a block takes: one a thread where the GPU has room for all, and else as many as hide the
    way from memory."""
    return MOSAIC_THREADS * (MOSAIC_PAIRS if num_pairs > MOSAIC_FEW_BLOCKS * MOSAIC_THREADS else 1)
