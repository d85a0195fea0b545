"""GPU kernels for language-model inference, with jax.numpy forms for CPU. Imports jax and numpy only, and touches no device at import."""

from pallas_kernels.copy_pages.api import copy_pages, copy_pages_choice, insert_pages, transfer_pages
from pallas_kernels.copy_pages.config import CopySpec
from pallas_kernels.dispatch import Choice, ContractError, KernelError, Target, Unsupported, current_target
from pallas_kernels.flash_attention.api import flash_attention, flash_attention_choice
from pallas_kernels.flash_attention.config import FlashAttentionSpec
from pallas_kernels.int4_matmul.api import int4_matmul, int4_matmul_choice
from pallas_kernels.int4_matmul.config import MatmulSpec
from pallas_kernels.int4_matmul.layout import dequantize, pack, pack_zeros, packed_shape, unpack
from pallas_kernels.paged_gather.api import paged_gather, paged_gather_choice
from pallas_kernels.paged_gather.config import GatherSpec
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
    "CopySpec",
    "FlashAttentionSpec",
    "GatherSpec",
    "KernelError",
    "MatmulSpec",
    "NormSpec",
    "RotaryWriteSpec",
    "Target",
    "Unsupported",
    "WriteSpec",
    "copy_pages",
    "copy_pages_choice",
    "current_target",
    "dequantize",
    "flash_attention",
    "flash_attention_choice",
    "insert_pages",
    "int4_matmul",
    "int4_matmul_choice",
    "pack",
    "pack_zeros",
    "packed_shape",
    "paged_gather",
    "paged_gather_choice",
    "ragged_paged_attention",
    "ragged_paged_attention_choice",
    "rms_norm",
    "rms_norm_choice",
    "unpack",
    "rotary_kv_write",
    "rotary_kv_write_choice",
    "transfer_pages",
    "write_kv_pages",
    "write_kv_pages_choice",
]
