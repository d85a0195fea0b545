"""Static facts of a write of keys and values, and which cases the Mosaic kernel takes. Computes on no array."""

import dataclasses

from pallas_kernels.dispatch import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteSpec:
    """What is known of a call when it is traced."""

    num_tokens: int
    """T, new tokens, padding included."""
    num_rows: int
    """B, sequences."""
    num_kv_heads: int
    """K, KV heads."""
    head_dim: int
    """H."""
    page_size: int
    """Z, tokens a page."""
    pages_per_seq: int
    """M, page-table entries a sequence."""
    dtype: str
    """Dtype of the new keys and values."""
    kv_dtype: str
    """Dtype of the pages."""


MOSAIC_CAPABILITIES = ((8, 0), (9, 0))
MOSAIC_VECTOR = {"bfloat16": 8, "float16": 8, "float32": 4}  # values of an access, of 16 bytes; a head holds a whole number of them
MOSAIC_THREADS = 128       # of a block
MOSAIC_FEW_BLOCKS = 1024   # of one vector a thread, which the GPU holds all at once
MOSAIC_VECTORS = 2         # of k and as many of v a thread has where there are more
MOSAIC_FAN = 8             # parts that a step of the search for a token's row leaves one of


def mosaic_refusal(spec: WriteSpec, target: Target) -> str | None:
    """Why kernel_mosaic cannot do a call on a target, or None if it can."""
    width = MOSAIC_VECTOR[spec.dtype]
    reasons = (
        (target.platform != "gpu", f"needs an NVIDIA GPU, not {target.platform}"),
        (target.compute_capability not in MOSAIC_CAPABILITIES, f"is built for sm_80 and sm_90, not {target.compute_capability}"),
        (spec.dtype != spec.kv_dtype, f"copies without a cast, not {spec.dtype} into {spec.kv_dtype}"),
        (spec.head_dim % width != 0, f"needs a head dim that is a multiple of {width}, not {spec.head_dim}"),
    )
    return next((reason for refused, reason in reasons if refused), None)


def mosaic_block(num_vectors: int) -> int:
    """How many vectors of k, and as many of v, a block takes: one a thread where the GPU has room for all, and else as many as hide the
    way from memory.

    On an H200, us with 1, 2, 4 and 8 a thread (2026-12-01, bench/results/sweep-write-nvidia-h200.json): 2048 tokens of 4 KV heads 3.8 with
    any, 4096 of 4 5.7, 5.7, 5.6, 5.9; 1024 of 32 9.8, 9.5, 9.9, 9.6, 4096 of 32 34.2, 35.0, 35.7, 35.8. XLA's copy of as many bytes as 4096
    tokens of 4 KV heads have takes 4.9, and this kernel 5.3 if it need not look a token's place up.
    """
    return MOSAIC_THREADS * (MOSAIC_VECTORS if num_vectors > MOSAIC_FEW_BLOCKS * MOSAIC_THREADS else 1)
