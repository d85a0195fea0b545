"""Static facts of an RMSNorm call, and which cases the Mosaic kernel takes. Computes on no array."""

import dataclasses

from pallas_kernels.dispatch import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormSpec:
    """What is known of a call when it is traced."""

    num_tokens: int
    """T, rows that are normalised."""
    dim: int
    """D, values of a row."""
    dtype: str
    """Dtype of the output, and of x where it is not given in parts."""
    weight_dtype: str
    """Dtype of the weight."""
    has_residual: bool
    """A residual is added first."""
    num_parts: int = 0
    """Float32 parts whose sum is x; 0: x itself is given."""


MOSAIC_CAPABILITIES = ((8, 0), (9, 0))
MOSAIC_THREADS = 128
MOSAIC_MAX_DIM = 16384  # a row is held in registers: 128 values a thread


def mosaic_refusal(spec: NormSpec, target: Target) -> str | None:
    """Why kernel_mosaic cannot do a call on a target, or None if it can."""
    reasons = (
        (target.platform != "gpu", f"needs an NVIDIA GPU, not {target.platform}"),
        (target.compute_capability not in MOSAIC_CAPABILITIES, f"is built for sm_80 and sm_90, not {target.compute_capability}"),
        (spec.dtype not in ("bfloat16", "float16"), f"needs 16-bit values, not {spec.dtype}"),
        (spec.dim % MOSAIC_THREADS != 0, f"needs a width that is a multiple of {MOSAIC_THREADS}, not {spec.dim}"),
        (spec.dim > MOSAIC_MAX_DIM, f"holds a row of at most {MOSAIC_MAX_DIM} values, not {spec.dim}"),
    )
    return next((reason for refused, reason in reasons if refused), None)


def mosaic_loss(spec: NormSpec, target: Target) -> str | None:
    """Why XLA does a call as well or better, or None if kernel_mosaic does it better.

    On an H200, us, bfloat16, D 3584 (bench/results/kernels-attention-nvidia-h200.json): with a residual 1.4 against XLA's 2.9 at 32 rows,
    30.2 against 38.9 at 4096, for XLA takes a launch for the sum and one for the norm; without one 1.2 and 1.4, 16.0 and 17.3. Of a product
    in nine parts and 8 rows, with the norms between, 2.3 in an engine's profile (bench/results/offline-Q-int4-nvidia-h200.json), where a
    launch that added the parts up took 1.3 and the norms 2.0 before.
    """
    return None if spec.has_residual else "without a residual XLA takes one launch too, and fuses what stands around it"


def mosaic_vector(spec: NormSpec) -> int:
    """Neighbouring values that a thread reads at once: the most, up to 16 bytes, that share a row out evenly.

    Compiled ahead of time, bfloat16, no spills; registers on sm_80 and on sm_90, with a residual: 72 at D 3584, 80 at D 4096;
    in 9 parts 255. Wider rows in so many parts spill: 16 bytes at D 8192 on sm_80.
    """
    return next(vector for vector in (8, 4, 2, 1) if spec.dim % (MOSAIC_THREADS * vector) == 0)


def mosaic_asks_for_weight_first(spec: NormSpec) -> bool:
    """The weight is asked for before the sum that it waits for, where registers hold it beside the row and its parts."""
    return not spec.num_parts or spec.dim <= MOSAIC_MAX_DIM // 4
