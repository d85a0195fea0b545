"""GPU kernels for language-model inference, with jax.numpy forms for CPU. Imports jax and numpy only, and touches no device at import."""

from pallas_kernels.dispatch import Choice, ContractError, KernelError, Target, Unsupported, current_target
from pallas_kernels.ragged_paged_attention.api import ragged_paged_attention, ragged_paged_attention_choice
from pallas_kernels.ragged_paged_attention.config import AttentionSpec
from pallas_kernels.rms_norm.api import rms_norm, rms_norm_choice
from pallas_kernels.rms_norm.config import NormSpec
from pallas_kernels.rotary_kv_write.api import rotary_kv_write, rotary_kv_write_choice
from pallas_kernels.rotary_kv_write.config import RotaryWriteSpec
from pallas_kernels.write_kv_pages.api import write_kv_pages, write_kv_pages_choice
from pallas_kernels.write_kv_pages.config import WriteSpec

__all__ = [
    "AttentionSpec",
    "Choice",
    "ContractError",
    "KernelError",
    "NormSpec",
    "RotaryWriteSpec",
    "Target",
    "Unsupported",
    "WriteSpec",
    "current_target",
    "ragged_paged_attention",
    "ragged_paged_attention_choice",
    "rms_norm",
    "rms_norm_choice",
    "rotary_kv_write",
    "rotary_kv_write_choice",
    "write_kv_pages",
    "write_kv_pages_choice",
]
