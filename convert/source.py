"""What a checkpoint must offer to be converted: tensors by Hugging Face name, read by rows. Holds no format and no model."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from jaxinfer.errors import CheckpointError

DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor of a source, known without reading its data."""

    name: str
    """Name in Hugging Face's scheme, which the family tables use."""
    origin: str
    """Name in the file, used in messages."""
    shape: tuple[int, ...]
    dtype: str
    """Storage type as the file names it, such as BF16 or Q5_0."""
    num_bytes: int
    """Bytes that the data takes in the file."""
    is_float: bool
    """Whether `read_rows` can give it as floating point."""


class Source(Protocol):
    """A checkpoint on disk. Opening one reads headers only, and raises CheckpointError for any that is damaged."""

    kind: str
    """'hf' or 'gguf', as the manifest records it."""
    path: Path
    files: tuple[Path, ...]
    """Every file that the conversion depends on; their hashes go into the manifest."""
    config: dict[str, Any]
    """config.json in Hugging Face's form."""
    generation_config: dict[str, Any] | None
    tensors: Mapping[str, TensorInfo]
    natural_dtype: str
    """The dtype of `--dtype=auto`."""

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) along the first axis, as an array of shape [stop - start, *shape[1:]]: floating point, or the integers of
        a quantised weight where the format holds them (safetensors does).

        The result may be a view into a mapped file: it must not be written to.
        """

    def write_tokenizer(self, folder: Path) -> frozenset[int]:
        """Writes the tokenizer's files in Hugging Face's form; returns the end tokens that the tokenizer itself declares."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError when the file is absent, not UTF-8 JSON, not an object or repeats a key."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=unique_pairs)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist: the folder is not a complete checkpoint") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}): fetch the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, expected an object: fetch the file again")
    return value


def unique_pairs(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` that refuses a repeated key, which json would silently drop."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"duplicate key {key!r}")
        result[key] = value
    return result


def dominant_dtype(tensors: Iterable[TensorInfo], names: Mapping[str, str], default: str) -> str:
    """The dtype that most elements have. `names` maps the file's types to ours; a type it lacks counts as `default`."""
    counts: dict[str, int] = {}
    for info in tensors:
        dtype = names.get(info.dtype, default)
        counts[dtype] = counts.get(dtype, 0) + int(np.prod(info.shape))
    return max(counts, key=lambda dtype: counts[dtype]) if counts else default
