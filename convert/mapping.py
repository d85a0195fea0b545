"""From source tensors to parameters: a checked bijection, planned whole before any weight is read. Knows no model and no file format.

A family's table (convert/families) is a list of `Entry`, one a parameter, each made of `Part`s that name a source tensor and the slice
of the parameter that it fills. `make_plan` checks table, source and model against each other and reports every disagreement at once.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from convert.formats.scheme import TensorSpec
from convert.source import Source, TensorInfo
from jaxinfer.errors import CheckpointError

Index = tuple[int | slice, ...]
IGNORABLE = tuple(map(re.compile, (
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",  # buffers that older transformers saved; derived from the config
    r"model\.rotary_emb\.inv_freq",
)))
BLOCK_BYTES = 4 << 20
MAX_PROBLEMS_SHOWN = 20


@dataclasses.dataclass(frozen=True)
class Part:
    """One source tensor and the slice of a parameter that it fills."""

    source: str
    """Name in Hugging Face's scheme."""
    layout: Literal["same", "flat", "transposed"]
    """With v the slice's shape, the source's shape is: same, v; flat, [prod(v)]; transposed, [prod(v[1:]), v[0]]."""
    index: Index = ()
    """Index of the slice in the parameter; () is all of it."""

    def view_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the slice in a parameter of this shape."""
        return np.broadcast_to(np.empty((), np.int8), shape)[self.index].shape

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape that the source tensor must have for a parameter of this shape."""
        view = self.view_shape(shape)
        return {"same": view, "flat": (math.prod(view),), "transposed": (math.prod(view[1:]), view[0])}[self.layout]

    def row_view(self, parameter: np.ndarray) -> np.ndarray:
        """The slice as a view whose axes run as the source's rows do: [axes of the rows..., rest of a row]."""
        view = parameter[self.index]
        return np.moveaxis(view, 0, -1) if self.layout == "transposed" else view

    def row_unit(self, view: np.ndarray) -> int:
        """Rows of the source that one index of the first axis of its `row_view` stands for."""
        return {"same": 1, "flat": math.prod(view.shape[1:]), "transposed": math.prod(view.shape[1:-1])}[self.layout]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One parameter and the parts that fill it, each element once."""

    target: str
    parts: tuple[Part, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A conversion that is known to be complete."""

    entries: tuple[Entry, ...]
    shapes: Mapping[str, tuple[int, ...]]
    """Target -> shape."""
    ignored: tuple[str, ...]
    """Source tensors that carry nothing."""
    zero_biases: tuple[str, ...]
    """Source tensors that must hold zeros: biases of quantised matrices that the model has not."""
    tied_copies: tuple[tuple[str, str], ...]
    """(source tensor, source tensor that it must equal): stored twice in the source, once in the result."""


def make_plan(source: Source, entries: Sequence[Entry], shapes: Mapping[str, tuple[int, ...]], *, architecture: str,
              tied: tuple[str, str] | None, packed: Mapping[str, Mapping[str, TensorSpec]] = MappingProxyType({})) -> Plan:
    """Checks that source, table and model agree, tensor by tensor and shape by shape, reading no weight.

    Args:
      source: the opened checkpoint.
      entries: the family's table.
      shapes: every parameter of the model, from its abstract parameters; of quantised weights as if they were not.
      architecture: named in messages.
      tied: for a model with tied embeddings (head, embedding), source names of which the first may be a redundant copy; else None.
      packed: weight that the source does not hold -> the tensors that it holds in its place (convert/quantized.py).

    Raises:
      CheckpointError: naming every source tensor that is missing, unknown, misshapen or used twice and every parameter that is never
        set, set twice or not filled.
    """
    problems = _check_targets(entries, shapes)
    problems += _check_sources(source.tensors, entries, shapes, tied, packed)
    used = {name for entry in entries for part in entry.parts for name in packed.get(part.source, (part.source,))}
    left = [name for name in source.tensors if name not in used]
    zero_biases = tuple(name for name in left if name.endswith(".bias") and f"{name.removesuffix('.bias')}.weight" in packed)
    ignored = tuple(name for name in left if any(pattern.fullmatch(name) for pattern in IGNORABLE))
    copies = tuple(tied for name in left if tied is not None and name == tied[0])
    for name in left:
        if name not in ignored and name not in zero_biases and (tied is None or name != tied[0]):
            problems.append(f"unknown tensor {source.tensors[name].origin}: {architecture} has no parameter for it")
    if problems:
        shown = "".join(f"\n  - {problem}" for problem in problems[:MAX_PROBLEMS_SHOWN])
        more = f"\n  - and {len(problems) - MAX_PROBLEMS_SHOWN} more" if len(problems) > MAX_PROBLEMS_SHOWN else ""
        raise CheckpointError(f"{source.path} is not a complete {architecture}, {len(problems)} problems:{shown}{more}\n"
                              "nothing was written; fetch or repair the source, or correct its config")
    return Plan(entries=tuple(entries), shapes=dict(shapes), ignored=ignored, zero_biases=zero_biases, tied_copies=copies)


def _check_targets(entries: Sequence[Entry], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Every parameter is set once and filled whole."""
    counts = Counter(entry.target for entry in entries)
    problems = [f"parameter {name} is set {count} times" for name, count in counts.items() if count > 1]
    problems += [f"parameter {name} is never set" for name in shapes if name not in counts]
    problems += [f"{name} is not a parameter of the model" for name in counts if name not in shapes]
    for entry in entries:
        if entry.target in shapes:
            shape = shapes[entry.target]
            filled = sum(math.prod(part.view_shape(shape)) for part in entry.parts)
            if filled != math.prod(shape):
                problems.append(f"parameter {entry.target} has {math.prod(shape)} elements, of which {filled} are set")
    return problems


def _check_sources(tensors: Mapping[str, TensorInfo], entries: Sequence[Entry], shapes: Mapping[str, tuple[int, ...]],
                   tied: tuple[str, str] | None, packed: Mapping[str, Mapping[str, TensorSpec]]) -> list[str]:
    """Every source tensor that the table names is there, with the right shape, and used once."""
    problems, user = [], dict[str, str]()
    for entry in entries:
        for part in entry.parts:
            if part.source in user:
                problems.append(f"tensor {part.source} is used by both {user[part.source]} and {entry.target}")
            user[part.source] = entry.target
            if part.source in packed:
                problems += _check_packed(tensors, entry.target, packed[part.source])
                continue
            info = tensors.get(part.source)
            if info is None:
                problems.append(f"missing tensor {part.source}, needed for {entry.target}" + _hint(part.source, tied))
            elif not info.is_float:
                problems.append(f"tensor {info.origin} has dtype {info.dtype}; weights must be floating point")
            elif entry.target in shapes and info.shape != part.source_shape(shapes[entry.target]):
                problems.append(f"tensor {info.origin} has shape {list(info.shape)}, the config asks for "
                                f"{list(part.source_shape(shapes[entry.target]))}")
    return problems


def _check_packed(tensors: Mapping[str, TensorInfo], target: str, specs: Mapping[str, TensorSpec]) -> list[str]:
    """What stands for a quantised weight is there, with the right types and shapes."""
    problems = []
    for name, spec in specs.items():
        info = tensors.get(name)
        if info is None:
            problems.append(f"missing tensor {name}, needed for {target}, which the quantization_config says is quantised")
        elif info.dtype not in spec.dtypes:
            problems.append(f"tensor {info.origin} has dtype {info.dtype}; the quantised format needs {' or '.join(spec.dtypes)}")
        elif info.shape != spec.shape:
            problems.append(f"tensor {info.origin} has shape {list(info.shape)}, config and quantization_config ask for {list(spec.shape)}")
    return problems


def _hint(name: str, tied: tuple[str, str] | None) -> str:
    if name == "lm_head.weight" and tied is None:
        return " because the config does not say tie_word_embeddings = true"
    return ""


def check_tied_copies(source: Source, plan: Plan) -> None:
    """Compares every redundant copy with its original, bit for bit. Raises CheckpointError for one that differs."""
    for copy, original in plan.tied_copies:
        info = source.tensors[copy]
        same = info.shape == source.tensors[original].shape
        for start, stop in row_blocks(info.shape, 1):
            if not same:
                break
            same = np.array_equal(source.read_rows(copy, start, stop).astype(np.float32),
                                  source.read_rows(original, start, stop).astype(np.float32), equal_nan=True)
        if not same:
            raise CheckpointError(
                f"{source.path} says that its embeddings are tied, but {info.origin} differs from {source.tensors[original].origin}: "
                "set tie_word_embeddings to false in its config, or remove the tensor")


def check_zero_biases(source: Source, plan: Plan) -> None:
    """Raises CheckpointError for a bias that the model has not and that is not zero; quantisers write zeros there."""
    for name in plan.zero_biases:
        info = source.tensors[name]
        if not info.is_float or source.read_rows(name, 0, info.shape[0]).astype(np.float32).any():
            raise CheckpointError(f"{source.path}: {info.origin} holds a bias that this architecture has not, and that is not zero: the "
                                  "checkpoint is of another model, or damaged")


def row_blocks(shape: tuple[int, ...], unit: int) -> list[tuple[int, int]]:
    """Ranges of rows that cover a tensor, each a multiple of `unit` rows and about BLOCK_BYTES as float32."""
    row_bytes = 4 * math.prod(shape[1:])
    step = max(1, BLOCK_BYTES // (row_bytes * unit)) * unit
    return [(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


def fill(target: np.ndarray, part: Part, source: Source) -> None:
    """Reads a source tensor in blocks of rows and writes it, cast to the target's dtype, into its slice of the target.

    Raises:
      CheckpointError: the tensor holds NaN or infinity, or a value that the target's dtype cannot hold.
    """
    view, info = part.row_view(target), source.tensors[part.source]
    unit = part.row_unit(view)
    for start, stop in row_blocks(info.shape, unit):
        block = source.read_rows(part.source, start, stop)
        view[start // unit:stop // unit] = _cast(block, target.dtype, source, info).reshape(-1, *view.shape[1:])


def _all_finite(block: np.ndarray) -> bool:
    """np.isfinite over all of it; 16-bit types by their exponent bits, which is several times as fast."""
    exponent = {"bfloat16": 0x7F80, "float16": 0x7C00}.get(block.dtype.name)
    if exponent is None:
        return bool(np.isfinite(block).all())
    return not ((block.view(np.uint16) & exponent) == exponent).any()


def _cast(block: np.ndarray, dtype: np.dtype[Any], source: Source, info: TensorInfo) -> np.ndarray:
    """The block in another dtype, rounded to nearest even; refuses what would not stay finite."""
    if not _all_finite(block):
        raise CheckpointError(f"{source.path}: tensor {info.origin} holds NaN or infinity: the checkpoint is damaged")
    if block.dtype == dtype:
        return block
    with np.errstate(over="ignore"):
        cast = block.astype(dtype)
    if not _all_finite(cast):
        largest = float(np.abs(block.astype(np.float32)).max())
        raise CheckpointError(f"{source.path}: tensor {info.origin} holds {largest:g}, more than {dtype.name} can: "
                              "convert with --dtype=bfloat16 or --dtype=float32")
    return cast
