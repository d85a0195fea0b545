"""Quantised weights on their way into a checkpoint: which tensors stand for a matrix, how parts are fused, what is packed.

The families' tables name weights (`model.layers.0.mlp.up_proj.weight`) and the slice of a parameter that each fills. A quantised folder
holds other tensors in a weight's place; groups run along the inputs, which no table splits, so integers, scales and zero points of q, k
and v, or of gate and up, are put side by side exactly as the weights would be.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from convert.formats import FORMATS, QuantizedMatrix, Scheme, TensorSpec, matrix_format
from convert.formats.gptq import input_order
from convert.mapping import Entry, Part
from convert.source import Source
from jaxinfer.errors import CheckpointError, UnsupportedModelError
from jaxinfer.quant import FORMATS as WEIGHT_FORMATS
from jaxinfer.quant import HEAD, QuantConfig, QuantFormat

WEIGHT = ".weight"
PACKED_NAMES = ("qweight", "weight_packed", "weight_scale")
"""Last parts of tensors' names, in any of the formats, that tell a packed module."""
SCALE_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}


def module_of(name: str) -> str:
    """'layers.0.mlp.down.weight' -> 'layers.0.mlp.down'."""
    return name.removesuffix(WEIGHT)


def with_quantized_head(entries: Sequence[Entry], shapes: Mapping[str, tuple[int, ...]]) -> tuple[list[Entry], dict[str, tuple[int, ...]]]:
    """(table, shapes) of a model whose vocabulary head is quantised: no longer [V, D] as the embedding, but a matrix [D, V] as every linear.

    Args:
      entries: the family's table, of a model whose embeddings are not tied.
      shapes: parameters of the unquantised model.
    """
    weight = f"{HEAD}{WEIGHT}"
    vocab_size, dim = shapes[weight]
    turned = [Entry(entry.target, tuple(Part(part.source, "transposed") for part in entry.parts)) if entry.target == weight else entry
              for entry in entries]
    return turned, {**shapes, weight: (dim, vocab_size)}


def check_head(source: Source, scheme: Scheme) -> None:
    """Raises UnsupportedModelError for a packed vocabulary head in a folder whose quantization_config does not say that it has one."""
    found = next((name for suffix in PACKED_NAMES if (name := f"{HEAD}.{suffix}") in source.tensors), None)
    if found is not None and not scheme.is_quantized(HEAD):
        remedy = ("its quantization_config does not say lm_head = true: if the head was quantised, say it there" if scheme.name == "gptq" else
                  f"a quantised vocabulary head is read in GPTQ's layout only, not in {scheme.name}: quantise the model again without it")
        raise UnsupportedModelError(f"{source.path} holds {found}, but {remedy}")


def packed_tensors(scheme: Scheme, entries: Sequence[Entry], shapes: Mapping[str, tuple[int, ...]], projections: Mapping[str, int],
                   present: Mapping[str, Any]) -> dict[str, dict[str, TensorSpec]]:
    """What stands for each quantised weight.

    Args:
      scheme: how the folder is quantised.
      entries: the family's table.
      shapes: parameters of the unquantised model.
      projections: modules that can be quantised.
      present: names of the source's tensors; an index of groups that is redundant may be absent.

    Returns:
      Source weight -> tensor name -> what it must be.

    Raises:
      UnsupportedModelError: parts of one parameter of which only some are quantised.
    """
    found: dict[str, dict[str, TensorSpec]] = {}
    for entry in entries:
        if module_of(entry.target) not in projections or not entry.target.endswith(WEIGHT):
            continue
        quantized = [scheme.is_quantized(module_of(part.source)) for part in entry.parts]
        if any(quantized) and not all(quantized):
            names = ", ".join(f"{part.source} {'is' if flag else 'is not'}" for part, flag in zip(entry.parts, quantized, strict=True))
            raise UnsupportedModelError(f"of the parts of {entry.target} some are quantised and some are not ({names}); they are multiplied as "
                                        "one matrix: quantise all of them, or none")
        for part in entry.parts if all(quantized) else ():
            num_outputs, num_inputs = part.source_shape(shapes[entry.target])
            specs = FORMATS[scheme.name].tensors(scheme, num_inputs, num_outputs)
            index = FORMATS[scheme.name].group_index
            module = module_of(part.source)
            found[part.source] = {f"{module}.{name}": spec for name, spec in specs.items()
                                  if name != index or scheme.act_order or f"{module}.{name}" in present}
    return found


def read_formats(source: Source, scheme: Scheme, entries: Sequence[Entry], packed: Mapping[str, Mapping[str, TensorSpec]],
                 projections: Mapping[str, int]) -> dict[str, QuantFormat | None]:
    """The format of every projection, once the tensors are known to be there. Reads nothing but indices of groups.

    Raises:
      UnsupportedModelError: parts of one parameter whose inputs are grouped differently.
      CheckpointError: groups that are not whole.
    """
    formats: dict[str, QuantFormat | None] = dict.fromkeys(projections)
    for entry in entries:
        if not entry.parts or entry.parts[0].source not in packed:
            continue
        module = module_of(entry.target)
        orders = [_input_order(source, scheme, module_of(part.source), packed[part.source]) for part in entry.parts]
        if any(not _same(order, orders[0]) for order in orders):
            raise UnsupportedModelError(
                f"{source.path}: the inputs of {', '.join(module_of(part.source) for part in entry.parts)} are grouped differently (g_idx), "
                "but they are multiplied as one matrix: quantise the model with desc_act = false, or all of them from the same inputs")
        dtypes = {_scales_dtype(source, module_of(part.source), packed[part.source]) for part in entry.parts}
        dtype = dtypes.pop() if len(dtypes) == 1 else "float32"  # holds both of the 16-bit types
        formats[module] = matrix_format(scheme, permuted=orders[0] is not None, scales_dtype=dtype)
    return formats


def _input_order(source: Source, scheme: Scheme, module: str, specs: Mapping[str, TensorSpec]) -> np.ndarray | None:
    index = FORMATS[scheme.name].group_index
    name = f"{module}.{index}"
    if index is None or name not in specs:
        return None
    num_inputs = specs[name].shape[0]
    try:
        return input_order(source.read_rows(name, 0, num_inputs), scheme.num_groups(num_inputs))
    except CheckpointError as error:
        raise CheckpointError(f"{source.path}: {module}: {error}") from None


def _scales_dtype(source: Source, module: str, specs: Mapping[str, TensorSpec]) -> str:
    name = next(name for name in specs if name.removeprefix(f"{module}.") in ("scales", "weight_scale"))
    return SCALE_DTYPES[source.tensors[name].dtype]


def _same(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    return b is None if a is None else b is not None and np.array_equal(a, b)


def read_matrix(source: Source, scheme: Scheme, part: Part, specs: Mapping[str, TensorSpec]) -> QuantizedMatrix:
    """One source matrix, checked.

    Raises:
      CheckpointError: tensors that contradict each other, scales that are not finite, or zero points that the config denies.
    """
    module = module_of(part.source)
    found = {name.removeprefix(f"{module}."): source.read_rows(name, 0, spec.shape[0]) for name, spec in specs.items()}
    try:
        matrix = FORMATS[scheme.name].unpack(scheme, found)
        if not scheme.zero_point and matrix.zeros is not None:
            if (matrix.zeros != 2**(scheme.bits - 1)).any():
                raise CheckpointError(f"its zero points are not all {2**(scheme.bits - 1)}, but the config says that they are symmetric: "
                                      "correct the config (sym, or zero_point)")
            matrix = dataclasses.replace(matrix, zeros=None)
    except CheckpointError as error:
        raise CheckpointError(f"{source.path}: {module}: {error}") from None
    matrix.check(f"{source.path}: {module}")
    return matrix


def fuse(source: Source, scheme: Scheme, entry: Entry, shape: tuple[int, ...], packed: Mapping[str, Mapping[str, TensorSpec]],
         quant_format: QuantFormat) -> QuantizedMatrix:
    """The matrix of one parameter [K, *out], its output dimensions flattened, from its parts.

    Args:
      source: the folder.
      scheme: how it is quantised.
      entry: parameter and parts.
      shape: of the parameter when it is not quantised.
      packed: of `packed_tensors`.
      quant_format: of `read_formats`.
    """
    groups = 1 if quant_format.group_size is None else shape[0] // quant_format.group_size
    q, perm = np.empty(shape, np.uint8), None
    scales = np.empty((groups, *shape[1:]), np.dtype(_numpy_dtype(quant_format.scales_dtype)))
    zeros = np.empty(scales.shape, np.uint8) if quant_format.zero_point else None
    for part in entry.parts:
        matrix = read_matrix(source, scheme, part, packed[part.source])
        perm = matrix.perm
        for whole, piece in ((q, matrix.q), (scales, matrix.scales), (zeros, matrix.zeros)):
            if whole is not None and piece is not None:
                view = whole[part.index]
                view[...] = piece.reshape(view.shape)
    return QuantizedMatrix(q=q.reshape(shape[0], -1), scales=scales.reshape(groups, -1), bits=scheme.bits, perm=perm,
                           zeros=None if zeros is None else zeros.reshape(groups, -1), group_size=quant_format.group_size)


def _numpy_dtype(name: str) -> Any:
    import ml_dtypes

    return ml_dtypes.bfloat16 if name == "bfloat16" else name


def matrix_params(module: str, matrix: QuantizedMatrix, *, out_shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """The parameters of a quantised module, by path, checked to be fit to save.

    Args:
      module: its path.
      matrix: [K, n].
      out_shape: shape of the weight that it replaces, [K, *out].

    Raises:
      CheckpointError: of another shape, not finite, or inconsistent.
      ConfigError: its groups do not divide K.
    """
    if matrix.q.shape != (out_shape[0], math.prod(out_shape[1:])):
        raise CheckpointError(f"{module}: a matrix {list(matrix.q.shape)} for a weight {list(out_shape)}: give it as [K, n]")
    matrix.check(module)
    params = {f"{module}.packed": WEIGHT_FORMATS[matrix.format.name].pack(matrix.q), f"{module}.scales": matrix.scales}
    if matrix.zeros is not None:
        params[f"{module}.zeros"] = matrix.zeros.astype(_numpy_dtype("bfloat16"))
    if matrix.perm is not None:
        params[f"{module}.perm"] = matrix.perm
    return params


def matrix_of(module: str, params: Mapping[str, np.ndarray], quant_format: QuantFormat, shape: tuple[int, ...]) -> QuantizedMatrix:
    """The inverse of `matrix_params`; `shape` is that of the weight that it replaces."""
    packed = params[f"{module}.packed"]
    zeros, perm = params.get(f"{module}.zeros"), params.get(f"{module}.perm")
    q = WEIGHT_FORMATS[quant_format.name].unpack(packed, num_inputs=shape[0], num_outputs=math.prod(shape[1:]))
    return QuantizedMatrix(q=q, scales=params[f"{module}.scales"], zeros=None if zeros is None else zeros.astype(np.uint8),
                           bits=quant_format.bits, group_size=quant_format.group_size, perm=perm)


def quantization_facts(quantization: QuantConfig) -> dict[str, Any]:
    """What the manifest says of it: the config's own form, and how the integers are packed."""
    return {**quantization.to_json(), "layouts": quantization.layouts()}
