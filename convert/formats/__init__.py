"""Formats in which other libraries store quantised weights: one file each, a row of FORMATS, and of EXPORTS where it is written too.

A format is pure: `tensors` says what stands for a matrix, `unpack` reads those arrays, `pack` makes them. No file is touched here.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from convert.formats import awq, compressed_tensors, gptq
from convert.formats.matrix import QuantizedMatrix
from convert.formats.scheme import Scheme, TensorSpec
from jaxinfer.errors import UnsupportedModelError
from jaxinfer.quant import QUANT_METHOD, QuantFormat

__all__ = ["EXPORTS", "FORMATS", "READERS", "Export", "Format", "QuantizedMatrix", "Scheme", "TensorSpec", "read_scheme"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """How one format's tensors are named and read."""

    tensors: Callable[[Scheme, int, int], dict[str, TensorSpec]]
    """(scheme, K, n) -> last part of a tensor's name -> what it must be."""
    unpack: Callable[[Scheme, Mapping[str, np.ndarray]], QuantizedMatrix]
    group_index: str | None
    """Name of the tensor with each input's group, where the format has one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """How a format is written."""

    pack: Callable[[QuantizedMatrix], dict[str, np.ndarray]]
    tensors: Callable[[Scheme, int, int], dict[str, TensorSpec]]
    write_config: Callable[..., dict[str, Any]]
    read_config: Callable[[Mapping[str, Any]], Scheme]


FORMATS: dict[str, Format] = {
    "awq": Format(tensors=awq.tensors, unpack=awq.unpack, group_index=None),
    "gptq": Format(tensors=gptq.tensors, unpack=gptq.unpack, group_index="g_idx"),
    "compressed-tensors": Format(tensors=compressed_tensors.tensors, unpack=compressed_tensors.unpack, group_index="weight_g_idx"),
    "compressed-tensors-int8": Format(tensors=compressed_tensors.tensors, unpack=compressed_tensors.unpack, group_index="weight_g_idx"),
}
"""Scheme.name -> its format."""

EXPORTS: dict[str, Export] = {
    "awq": Export(pack=awq.pack, tensors=awq.tensors, write_config=awq.write_config, read_config=awq.read_config),
} | {
    version: Export(pack=functools.partial(gptq.pack, version=version), tensors=gptq.tensors, read_config=gptq.read_config,
                    write_config=functools.partial(gptq.write_config, version=version)) for version in gptq.VERSIONS
}
"""What `python -m convert.export --format` writes of quantised weights."""

READERS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "awq": awq.read_config, "gptq": gptq.read_config, "compressed-tensors": compressed_tensors.read_config,
}
"""quant_method of a Hugging Face config -> how it is read."""


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """How a Hugging Face folder's weights are quantised; None where its config.json does not say that they are.

    Raises:
      UnsupportedModelError: a method, version or attribute that is not read.
    """
    value = config.get("quantization_config")
    if value is None:
        return None
    method = value.get("quant_method") if isinstance(value, dict) else value
    if method == QUANT_METHOD:
        raise UnsupportedModelError("quantization_config says quant_method = 'jaxinfer': this is the config of a converted checkpoint, and no "
                                    "Hugging Face folder; use the checkpoint as it is")
    if not isinstance(value, dict) or method not in list(READERS):
        raise UnsupportedModelError(f"quantization_config says quant_method = {method!r:.100}: {', '.join(READERS)} are read; use such a "
                                    "checkpoint of this model, or the unquantised one")
    return READERS[method](value)


def matrix_format(scheme: Scheme, *, permuted: bool, scales_dtype: str) -> QuantFormat:
    """How a matrix of this scheme is held once it is converted."""
    return QuantFormat(bits=scheme.bits, group_size=scheme.group_size, zero_point=scheme.zero_point, permuted=permuted,
                       scales_dtype=scales_dtype)
