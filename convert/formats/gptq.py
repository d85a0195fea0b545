"""AutoGPTQ's layout, v1 and v2: 4 or 8 bits, consecutive rows of a column in a word.

    qweight [K * bits / 32, n] int32        word w of column j holds q[32 / bits * w + s, j] at bits [bits * s, bits * (s + 1))
    qzeros  [groups, n * bits / 32]         zero points of consecutive columns, stored minus one in v1, modulo 2**bits
    scales  [groups, n] float16
    g_idx   [K] int32                       the group of each input; i // group_size unless desc_act, and may then be absent

With desc_act the inputs of a group lie anywhere: they are brought together here, and `perm` says where each came from. With lm_head the
vocabulary head is stored so too, in the same bits and groups.
Source: qlinear_cuda_old.py and qlinear_cuda.py of AutoGPTQ 0.7.1; the v2 layout is GPTQModel's.
"""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from convert.formats.bits import pack_columns, pack_rows, unpack_columns, unpack_rows
from convert.formats.matrix import QuantizedMatrix
from convert.formats.scheme import SKIPS_HEAD, Scheme, Settings, TensorSpec
from jaxinfer.errors import CheckpointError, UnsupportedModelError
from jaxinfer.quant import QuantFormat

logger = logging.getLogger(__name__)

IGNORED = frozenset({
    "quant_method", "damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "model_name_or_path", "model_file_base_name",
    "dataset", "tokenizer", "batch_size", "block_name_to_quantize", "module_name_preceding_first_block", "use_exllama", "disable_exllama",
    "exllama_config", "max_input_length", "use_cuda_fp16", "model_seqlen", "pad_token_id", "cache_block_outputs", "meta", "backend", "mse",
    "act_group_aware", "uncertainty"})
"""How it was made, and how others would run it."""
VERSIONS = {"gptq": 1, "gptq_v2": 0}
"""checkpoint_format -> what is to be added to stored zero points."""


def read_config(value: Mapping[str, Any]) -> Scheme:
    """The scheme of a quantization_config with quant_method gptq. Raises UnsupportedModelError for a variant that is not read."""
    settings = Settings(value, what="quantization_config (gptq)", ignored=IGNORED)
    bits = settings.required(("bits",), (int,))
    if bits not in (4, 8):
        raise settings.unsupported("bits", "4 and 8 are read; quantise the model again with one of them")
    group_size = settings.group_size()
    act_order, symmetric = settings.required(("desc_act",), (bool,)), settings.required(("sym",), (bool,))
    version = settings.get(("checkpoint_format", "format"), (str,), "gptq").lower()
    if version not in VERSIONS:
        raise settings.unsupported("checkpoint_format", f"only {' and '.join(map(repr, VERSIONS))} are read; save the model again as one of "
                                   "them")
    settings.fixed("is_marlin_format", False)
    lm_head = settings.get(("lm_head",), (bool,), False)
    settings.fixed("dynamic", {})
    settings.fixed("modules_in_block_to_quantize")
    settings.fixed("pack_dtype", "int32")
    settings.finish()
    return Scheme(name="gptq", bits=bits, group_size=group_size, zero_point=not symmetric, act_order=act_order,
                  zero_offset=VERSIONS[version], skipped=() if lm_head else (SKIPS_HEAD,))


def tensors(scheme: Scheme, num_inputs: int, num_outputs: int) -> dict[str, TensorSpec]:
    """The tensors of one matrix, by the last part of their name."""
    groups, per_word = scheme.num_groups(num_inputs), 32 // scheme.bits
    return {"qweight": TensorSpec(shape=(-(-num_inputs // per_word), num_outputs), dtypes=("I32",)),
            "qzeros": TensorSpec(shape=(groups, -(-num_outputs // per_word)), dtypes=("I32",)),
            "scales": TensorSpec(shape=(groups, num_outputs), dtypes=("F16", "BF16", "F32")),
            "g_idx": TensorSpec(shape=(num_inputs,), dtypes=("I32",))}


def unpack(scheme: Scheme, found: Mapping[str, np.ndarray]) -> QuantizedMatrix:
    """The matrix that the tensors hold. Raises CheckpointError for groups that are not whole."""
    q, scales = unpack_rows(found["qweight"], scheme.bits), found["scales"]
    perm = input_order(found["g_idx"], scales.shape[0]) if "g_idx" in found else None
    zeros = unpack_columns(found["qzeros"], scheme.bits) + np.uint8(scheme.zero_offset) & np.uint8(2**scheme.bits - 1)
    return QuantizedMatrix(q=q if perm is None else q[perm], scales=scales, zeros=zeros, bits=scheme.bits,
                           group_size=scheme.group_size, perm=perm)


def input_order(group_of_input: np.ndarray, num_groups: int) -> np.ndarray | None:
    """The inputs [K] int32 sorted by their group, each group's in the model's order; None where they already are.

    Raises:
      CheckpointError: a group that does not exist, or groups of different sizes.
    """
    num_inputs = group_of_input.shape[0]
    if group_of_input.min(initial=0) < 0 or group_of_input.max(initial=0) >= num_groups:
        raise CheckpointError(f"g_idx names group {int(group_of_input.max(initial=0))} (least {int(group_of_input.min(initial=0))}) of "
                              f"{num_groups}: the checkpoint is damaged, fetch it again")
    counts = np.bincount(group_of_input, minlength=num_groups)
    if (counts * num_groups != num_inputs).any():
        raise CheckpointError(f"g_idx puts {int(counts.min())} to {int(counts.max())} inputs in a group, {num_inputs} inputs in {num_groups} "
                              "groups must be the same number in each: quantise the model again with a group size that divides its inputs")
    perm = np.argsort(group_of_input, kind="stable").astype(np.int32)
    return None if np.array_equal(perm, np.arange(num_inputs)) else perm


def pack(matrix: QuantizedMatrix, *, version: str) -> dict[str, np.ndarray]:
    """The inverse of `unpack`: rows back in the model's order; symmetric weights get zero points of 2**(bits - 1).

    Args:
      matrix: both dimensions multiples of 32 / bits.
      version: a key of VERSIONS.

    Raises:
      UnsupportedModelError: v1 and a zero point of 0. It would be stored as 2**bits - 1, which readers take for 0 (here, and one of
        AutoGPTQ's kernels) or for 2**bits (another of its kernels).
    """
    num_inputs, bits = matrix.q.shape[0], matrix.bits
    order = np.arange(num_inputs) if matrix.perm is None else matrix.perm
    q, groups = np.empty_like(matrix.q), np.empty(num_inputs, np.int32)
    q[order], groups[order] = matrix.q, np.arange(num_inputs) // (matrix.group_size or num_inputs)
    zeros = np.full(matrix.scales.shape, 2**(bits - 1), np.uint8) if matrix.zeros is None else matrix.zeros
    if VERSIONS[version] > zeros.min(initial=2**bits - 1):
        raise UnsupportedModelError("a zero point of 0, which GPTQ's v1 layout cannot hold so that every engine reads it: use --format=gptq_v2 "
                                    "or --format=awq, or quantise with --symmetric")
    stored = zeros - np.uint8(VERSIONS[version])
    return {"qweight": pack_rows(q, bits), "qzeros": pack_columns(stored, bits), "scales": matrix.scales, "g_idx": groups}


def write_config(weights: QuantFormat, *, skipped: list[str], lm_head: bool, version: str) -> dict[str, Any]:
    """The quantization_config of an export.

    Args:
      weights: the format of every quantised matrix.
      skipped: Hugging Face names of the layers' linear modules that are not quantised.
      lm_head: whether the vocabulary head is quantised.
      version: a key of VERSIONS.

    Raises:
      UnsupportedModelError: a format that AutoGPTQ's layout cannot express.
    """
    if skipped:
        raise UnsupportedModelError(f"AutoGPTQ's layout has no list of unquantised modules, and {skipped[0]} is one of {len(skipped)}: use "
                                    "--format=awq, or quantise every layer")
    return {"quant_method": "gptq", "bits": weights.bits, "group_size": weights.group_size or -1, "desc_act": weights.permuted,
            "sym": not weights.zero_point, "checkpoint_format": version, "true_sequential": True, "static_groups": False,
            **({"lm_head": True} if lm_head else {})}
