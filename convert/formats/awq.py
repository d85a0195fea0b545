"""AutoAWQ's gemm layout: 4 bits, eight columns of a row in a word. Other versions (gemv, gemv_fast, marlin, exllama) are refused. AutoAWQ
quantises the layers' linears only, never the vocabulary head.

    qweight [K, n / 8] int32     word w of row i holds q[i, 8 w + ORDER[s]] at bits [4 s, 4 s + 4)
    qzeros  [groups, n / 8]      zero points, packed the same way
    scales  [groups, n] float16

Source: WQLinear_GEMM of AutoAWQ 0.2.9 (awq/modules/linear/gemm.py).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from convert.formats.bits import pack_columns, unpack_columns
from convert.formats.matrix import QuantizedMatrix
from convert.formats.scheme import SKIPS_HEAD, Scheme, Settings, TensorSpec, name_patterns
from jaxinfer.errors import UnsupportedModelError
from jaxinfer.quant import QuantFormat

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column, among the eight of a word, of each nibble from the lowest up; of weights and of zero points alike."""
IGNORED = frozenset({"quant_method", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config", "backend"})
"""How others would run it."""


def read_config(value: Mapping[str, Any]) -> Scheme:
    """The scheme of a quantization_config with quant_method awq. Raises UnsupportedModelError for any other version."""
    settings = Settings(value, what="quantization_config (awq)", ignored=IGNORED)
    bits = settings.required(("bits", "w_bit"), (int,))
    if bits != 4:
        raise settings.unsupported("bits", "AWQ's layout holds 4; use a GPTQ or compressed-tensors checkpoint for others")
    version = str(settings.get(("version", "format"), (str,), "gemm"))
    if version.lower() != "gemm":
        raise settings.unsupported("version" if "version" in value else "format", "only 'gemm' is read; save the model again with AutoAWQ as "
                                   "version GEMM")
    group_size = settings.group_size(("group_size", "q_group_size"))
    zero_point = settings.required(("zero_point",), (bool,))
    skipped = name_patterns(settings.get(("modules_to_not_convert",), (list,)), "modules_to_not_convert", exact=False)
    settings.finish()
    return Scheme(name="awq", bits=4, group_size=group_size, zero_point=zero_point, act_order=False, zero_offset=0,
                  skipped=(*skipped, SKIPS_HEAD))


def tensors(scheme: Scheme, num_inputs: int, num_outputs: int) -> dict[str, TensorSpec]:
    """The tensors of one matrix, by the last part of their name."""
    groups, words = scheme.num_groups(num_inputs), -(-num_outputs // 8)
    return {"qweight": TensorSpec(shape=(num_inputs, words), dtypes=("I32",)), "qzeros": TensorSpec(shape=(groups, words), dtypes=("I32",)),
            "scales": TensorSpec(shape=(groups, num_outputs), dtypes=("F16", "BF16"))}


def unpack(scheme: Scheme, found: Mapping[str, np.ndarray]) -> QuantizedMatrix:
    """The matrix that the tensors hold."""
    zeros = unpack_columns(found["qzeros"], 4, ORDER)
    return QuantizedMatrix(q=unpack_columns(found["qweight"], 4, ORDER), scales=found["scales"], zeros=zeros, bits=4,
                           group_size=scheme.group_size, perm=None)


def pack(matrix: QuantizedMatrix) -> dict[str, np.ndarray]:
    """The inverse of `unpack`; symmetric weights get zero points of 8."""
    zeros = np.full(matrix.scales.shape, 8, np.uint8) if matrix.zeros is None else matrix.zeros
    return {"qweight": pack_columns(matrix.q, 4, ORDER), "qzeros": pack_columns(zeros, 4, ORDER), "scales": matrix.scales}


def write_config(weights: QuantFormat, *, skipped: list[str], lm_head: bool) -> dict[str, Any]:
    """The quantization_config of an export.

    Args:
      weights: the format of every quantised matrix.
      skipped: Hugging Face names of the layers' linear modules that are not quantised.
      lm_head: whether the vocabulary head is quantised.

    Raises:
      UnsupportedModelError: a format that AutoAWQ's layout cannot express, or a quantised head.
    """
    if lm_head:
        raise UnsupportedModelError("AutoAWQ knows no quantised lm_head, and this model has one: use --format=gptq, or quantise with "
                                    "--lm_head=none")
    if weights.bits != 4 or weights.permuted:
        raise UnsupportedModelError(f"AutoAWQ's layout holds 4 bits and no act-order, these weights are {weights}: use --format=gptq")
    return {"quant_method": "awq", "bits": 4, "group_size": weights.group_size or -1, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": skipped or None}
