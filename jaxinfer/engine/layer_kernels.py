"""Kernels of a layer beside attention and products, as a plan sees them: what each bucket rotates and writes keys by, and what it adds and
norms by. States the facts that jaxinfer/layers/ gives these ops; runs none of them."""

from jaxinfer.engine.matmuls import target_of
from jaxinfer.engine.resolve import ResolvedConfig
from jaxinfer.state import StepLayout
from pallas_kernels.dispatch import Choice


def rotary_choice(resolved: ResolvedConfig, layout: StepLayout) -> Choice:
    """Which implementation of rotary_kv_write a bucket takes, and why: PagedContext calls it in every layer."""
    from pallas_kernels.rotary_kv_write.api import rotary_kv_write_choice
    from pallas_kernels.rotary_kv_write.config import RotaryWriteSpec

    model = resolved.part
    spec = RotaryWriteSpec(
        num_tokens=layout.num_tokens, num_rows=layout.num_rows, num_kv_heads=model.num_kv_heads,
        num_groups=model.num_heads // model.num_kv_heads, head_dim=model.head_dim, page_size=resolved.page_size,
        pages_per_seq=resolved.num_pages_per_seq, dtype=str(resolved.dtype), kv_dtype=str(resolved.kv_dtype))
    return rotary_kv_write_choice(spec, target_of(resolved.hardware))


def norm_choice(resolved: ResolvedConfig, layout: StepLayout) -> Choice:
    """Which implementation of rms_norm a bucket takes where a norm adds the residual first, and why: all but the first do. The first, and
    norms of queries and keys, are plain jax.numpy (jaxinfer/layers/norm.py)."""
    from pallas_kernels.rms_norm.api import rms_norm_choice
    from pallas_kernels.rms_norm.config import NormSpec

    spec = NormSpec(num_tokens=layout.num_tokens, dim=resolved.part.dim, dtype=str(resolved.dtype), weight_dtype=str(resolved.dtype),
                    has_residual=True)
    return rms_norm_choice(spec, target_of(resolved.hardware))
