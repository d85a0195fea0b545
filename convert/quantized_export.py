"""Quantised modules of a converted checkpoint as another library's tensors: what an export will hold, and their data, one matrix at a time."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.formats import EXPORTS, QuantizedMatrix, Scheme, TensorSpec
from convert.mapping import Entry, Part
from convert.quantized import matrix_of, module_of
from jaxinfer.checkpoint import read_param
from jaxinfer.errors import CheckpointError, UnsupportedModelError
from jaxinfer.quant import EMBEDDING, HEAD, QuantFormat

if TYPE_CHECKING:
    from jaxinfer.models.config import ModelConfig

logger = logging.getLogger(__name__)


def export_config(model: "ModelConfig", entries: Sequence[Entry], target: str) -> dict[str, Any]:
    """The quantization_config of an export.

    Args:
      model: with its quantisation.
      entries: the family's table.
      target: a key of EXPORTS.

    Raises:
      UnsupportedModelError: modules of several formats, or one that the target cannot express, such as a quantised head in awq.
    """
    quantization = model.quantization
    assert quantization is not None
    if quantization.format_of(EMBEDDING) is not None:
        raise UnsupportedModelError(f"the embedding is quantised, which --format={target} cannot express: quantise the model with "
                                    "--embedding=none to export it")
    sources = {module_of(entry.target): [module_of(part.source) for part in entry.parts] for entry in entries}
    formats = {module: quantization.format_of(module) for module in model.projections()}
    found = [value for value in formats.values() if value is not None]
    kinds = sorted({(value.bits, value.group_size or -1) for value in found})
    if len(kinds) != 1:
        shown = ", ".join(f"{bits} bits by {'whole columns' if size == -1 else size}" for bits, size in kinds)
        raise UnsupportedModelError(f"the linears are quantised in several ways ({shown}), which --format={target} cannot express: quantise "
                                    "the model in one way (without --keep_int8, and --lm_head=none or the same bits) to export it")
    common = QuantFormat(bits=found[0].bits, group_size=found[0].group_size, scales_dtype="float16",
                         zero_point=any(value.zero_point for value in found), permuted=any(value.permuted for value in found))
    skipped = [name for module, value in formats.items() if value is None and module != HEAD for name in sources[module]]
    return EXPORTS[target].write_config(common, skipped=skipped, lm_head=quantization.format_of(HEAD) is not None)


def export_specs(scheme: Scheme, part: Part, shape: tuple[int, ...], target: str) -> dict[str, TensorSpec]:
    """The tensors that hold one source matrix in an export, by full name.

    Args:
      scheme: of the export, read from its config.
      part: of the parameter.
      shape: of the parameter when it is not quantised.
      target: a key of EXPORTS.

    Raises:
      UnsupportedModelError: a dimension that does not fill whole 32-bit words.
    """
    num_outputs, num_inputs = part.source_shape(shape)
    per_word = 32 // scheme.bits
    if num_outputs % per_word or num_inputs % per_word:
        raise UnsupportedModelError(f"{module_of(part.source)} has {num_inputs} inputs and {num_outputs} outputs; --format={target} packs "
                                    f"{per_word} into a word, so both must be multiples of that: leave this module unquantised"
                                    f"{' (--lm_head=none)' if module_of(part.source) == 'lm_head' else ''}")
    specs = EXPORTS[target].tensors(scheme, num_inputs, num_outputs)
    return {f"{module_of(part.source)}.{name}": spec for name, spec in specs.items()}


def export_parts(source: Path, manifest: Mapping[str, Any], entry: Entry, quant_format: QuantFormat, shape: tuple[int, ...],
                 target: str) -> Iterator[tuple[Part, dict[str, np.ndarray]]]:
    """The parts of one quantised parameter, in their order, each with its tensors by the last part of their name.

    Args:
      source: the converted checkpoint.
      manifest: its own.
      entry: parameter and parts.
      quant_format: of the module.
      shape: of the parameter when it is not quantised.
      target: a key of EXPORTS.

    Raises:
      CheckpointError: damaged parameters, or a scale that float16 cannot hold.
    """
    module = module_of(entry.target)
    names = [f"{module}.{name}" for name in ("packed", "scales", "zeros", "perm")]
    whole = matrix_of(module, {name: read_param(source, manifest, name) for name in names if name in manifest["tensors"]}, quant_format, shape)
    whole.check(module)
    for part in entry.parts:
        try:
            packed = EXPORTS[target].pack(_piece(whole, part, shape))
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{module_of(part.source)} has {error}") from None
        yield part, packed


def _piece(whole: QuantizedMatrix, part: Part, shape: tuple[int, ...]) -> QuantizedMatrix:
    """The columns of a fused matrix that one source matrix filled; scales in float16."""
    def cut(values: np.ndarray) -> np.ndarray:
        view = values.reshape(values.shape[0], *shape[1:])[part.index]
        return np.ascontiguousarray(view.reshape(values.shape[0], -1))

    return QuantizedMatrix(q=cut(whole.q), scales=_as_float16(cut(whole.scales), module_of(part.source)), bits=whole.bits,
                           zeros=None if whole.zeros is None else cut(whole.zeros), group_size=whole.group_size, perm=whole.perm)


def _as_float16(scales: np.ndarray, module: str) -> np.ndarray:
    """The scales as both layouts hold them; says so where that rounds, refuses where a scale is lost."""
    with np.errstate(over="ignore"):
        cast = scales.astype(np.float16)
    wide = scales.astype(np.float32)
    if not np.isfinite(cast).all() or ((cast == 0) & (wide > 0)).any():
        raise CheckpointError(f"{module}: its scales lie between {float(wide[wide > 0].min()):g} and {float(wide.max()):g}, which float16 "
                              "cannot hold: quantise it again with float16 scales")
    if (error := np.abs(cast.astype(np.float32) - wide).max(initial=0.0)) > 0:
        logger.warning("%s: its %s scales are rounded to float16, by %.1e at most", module, scales.dtype.name, error)
    return cast
