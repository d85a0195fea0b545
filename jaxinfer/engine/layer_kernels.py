"""Kernels of a layer beside its products, as a plan sees them: what each bucket attends by, what it rotates and writes keys by, and what it
adds and norms by. States the facts that jaxinfer/layers/ gives these ops; runs none of them."""

from typing import TYPE_CHECKING

from jaxinfer.engine.forced import choice_of
from jaxinfer.engine.matmuls import target_of
from jaxinfer.state import StepLayout
from pallas_kernels.dispatch import Choice

if TYPE_CHECKING:
    from jaxinfer.engine.resolve import ResolvedConfig


def attention_choice(resolved: "ResolvedConfig", layout: StepLayout) -> Choice:
    """Which implementation of ragged_paged_attention a bucket takes, and why.

    Raises:
      ConfigError: attention_implementation names none, or one that cannot do the bucket on this hardware.
    """
    from pallas_kernels.ragged_paged_attention.api import ragged_paged_attention_choice
    from pallas_kernels.ragged_paged_attention.config import AttentionSpec

    model = resolved.part
    spec = AttentionSpec(
        num_tokens=layout.num_tokens, num_rows=layout.num_rows, num_heads=model.num_heads, num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim, page_size=resolved.page_size, pages_per_seq=resolved.num_pages_per_seq, q_dtype=str(resolved.dtype),
        kv_dtype=str(resolved.kv_dtype), max_q_len=1 if layout.decode_only else None, sliding_window=model.sliding_windows[0], softcap=None)
    return choice_of("attention", ragged_paged_attention_choice, spec, target_of(resolved.hardware), resolved.forced,
                     where=f"bucket {layout.name}")


def rotary_choice(resolved: "ResolvedConfig", layout: StepLayout) -> Choice:
    """Which implementation of rotary_kv_write a bucket takes, and why: PagedContext calls it in every layer.

    Raises:
      ConfigError: rotary_implementation names none, or one that cannot do the bucket on this hardware.
    """
    from pallas_kernels.rotary_kv_write.api import rotary_kv_write_choice
    from pallas_kernels.rotary_kv_write.config import RotaryWriteSpec

    model = resolved.part
    spec = RotaryWriteSpec(
        num_tokens=layout.num_tokens, num_rows=layout.num_rows, num_kv_heads=model.num_kv_heads,
        num_groups=model.num_heads // model.num_kv_heads, head_dim=model.head_dim, page_size=resolved.page_size,
        pages_per_seq=resolved.num_pages_per_seq, dtype=str(resolved.dtype), kv_dtype=str(resolved.kv_dtype))
    return choice_of("rotary", rotary_kv_write_choice, spec, target_of(resolved.hardware), resolved.forced, where=f"bucket {layout.name}")


def norm_choice(resolved: "ResolvedConfig", layout: StepLayout) -> Choice:
    """Which implementation of rms_norm a bucket takes where a norm adds the residual first, and why: all but the first do. The first, and
    norms of queries and keys, are plain jax.numpy (jaxinfer/layers/norm.py).

    Raises:
      ConfigError: norm_implementation names none, or one that cannot do the bucket on this hardware.
    """
    from pallas_kernels.rms_norm.api import rms_norm_choice
    from pallas_kernels.rms_norm.config import NormSpec

    spec = NormSpec(num_tokens=layout.num_tokens, dim=resolved.part.dim, dtype=str(resolved.dtype), weight_dtype=str(resolved.dtype),
                    has_residual=True)
    return choice_of("norm", rms_norm_choice, spec, target_of(resolved.hardware), resolved.forced, where=f"bucket {layout.name}")
