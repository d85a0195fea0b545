"""Which implementations a model asks its ops for by name. Decides nothing: where no name is given, pallas_kernels chooses."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForcedKernels:
    """The only implementation that each op may take, which then never falls back; None lets the op choose. Static under jit."""

    attention: str | None = None
    """Of ragged_paged_attention."""
    rotary: str | None = None
    """Of rotary_kv_write."""
    norm: str | None = None
    """Of rms_norm, by which norms that add the residual first run; the others are plain jax.numpy (layers/norm.py)."""
    matmul: str | None = None
    """Of int4_matmul, by which all products with quantised weights run."""


NOTHING_FORCED = ForcedKernels()
