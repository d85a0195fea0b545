"""One safetensors file: read by rows from a map, its header checked against the file's size, or written front to back.

Layout: [header length: u64 little-endian][header: JSON {name: {dtype, shape, data_offsets}}][data].
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from convert.source import TensorInfo, unique_pairs
from jaxinfer.errors import CheckpointError, UnsupportedModelError

MAX_HEADER_BYTES = 100_000_000
FLOAT_DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
INTEGER_DTYPES: dict[str, np.dtype[Any]] = {"I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I8": np.dtype("i1")}
"""Types of packed weights and their indices, which are read as they are."""
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1,
              "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}


class SafetensorsFile:
    """Tensors of one file. Opening it reads the header and raises CheckpointError for anything that does not add up."""

    def __init__(self, path: Path) -> None:
        self.path = path
        header, self._data_start = _read_header(path)
        self.tensors: dict[str, TensorInfo] = {}
        self._offsets: dict[str, int] = {}
        spans = []
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            info, start = _parse_entry(path, name, entry)
            self.tensors[name] = info
            self._offsets[name] = start
            spans.append((start, start + info.num_bytes, name))
        _check_spans(path, spans, path.stat().st_size - self._data_start)
        self._map = np.memmap(path, mode="r", dtype=np.uint8)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) as a view into the mapped file."""
        info = self.tensors[name]
        assert info.is_float or info.dtype in INTEGER_DTYPES, f"{name} has dtype {info.dtype}"
        row_bytes = ITEM_BYTES[info.dtype] * math.prod(info.shape[1:])
        begin = self._data_start + self._offsets[name] + start * row_bytes
        raw = self._map[begin:begin + (stop - start) * row_bytes]
        return raw.view((FLOAT_DTYPES | INTEGER_DTYPES)[info.dtype]).reshape(stop - start, *info.shape[1:])


class SafetensorsWriter:
    """A context manager that writes one file front to back: the header first, then every tensor's rows in the header's order.

    Args:
      path: the file to make.
      tensors: name -> (dtype code, shape), in the order in which their data will come.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._left = 0
        for name, (code, shape) in tensors.items():
            end = self._left + ITEM_BYTES[code] * math.prod(shape)
            header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [self._left, end]}
            self._left = end
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)  # data begins at a multiple of eight bytes
        self._file = path.open("xb")
        self._head = len(text).to_bytes(8, "little") + text

    def __enter__(self) -> "SafetensorsWriter":
        self._file.write(self._head)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        assert error is not None or self._left == 0, f"{self._left} bytes of the header's tensors were never written"

    def write(self, rows: np.ndarray) -> None:
        """The next rows of the tensors, in the dtype that the header states."""
        data = np.ascontiguousarray(rows)
        self._left -= data.nbytes
        self._file.write(data.reshape(-1).view(np.uint8).data)


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The parsed header and the offset where data begins."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(f"{path} is truncated or no safetensors file: {size} bytes on disk, its header alone claims {length}")
            header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=unique_pairs)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist: fetch the missing shard") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has a damaged safetensors header ({error}): fetch the file again") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a damaged safetensors header (no JSON object): fetch the file again")
    return header, 8 + length


def _parse_entry(path: Path, name: str, entry: Any) -> tuple[TensorInfo, int]:
    """One header entry, checked: known dtype, sane shape, offsets that agree with both."""
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or not _is_size_list(shape) or not _is_size_list(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{path}: tensor {name} has a damaged header entry {entry!r:.200}: fetch the file again")
    if dtype not in ITEM_BYTES:
        raise UnsupportedModelError(f"{path}: tensor {name} has dtype {dtype}; known are {', '.join(ITEM_BYTES)}")
    num_bytes = ITEM_BYTES[dtype] * math.prod(shape)
    if offsets[1] - offsets[0] != num_bytes:
        raise CheckpointError(
            f"{path}: tensor {name} of shape {shape} and dtype {dtype} takes {num_bytes} bytes, but its header entry spans "
            f"{offsets[1] - offsets[0]}: fetch the file again")
    info = TensorInfo(name=name, origin=name, shape=tuple(shape), dtype=dtype, num_bytes=num_bytes, is_float=dtype in FLOAT_DTYPES)
    return info, offsets[0]


def _is_size_list(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_spans(path: Path, spans: list[tuple[int, int, str]], data_bytes: int) -> None:
    """The tensors must tile the data exactly: no gap, no overlap, nothing past the end."""
    position = 0
    for start, stop, name in sorted(spans):
        if stop > data_bytes:
            raise CheckpointError(
                f"{path} is truncated: tensor {name} ends at data byte {stop}, the file has {data_bytes}: fetch the file again")
        if start != position:
            what = "overlaps the tensor before it" if start < position else f"leaves {start - position} unused bytes before it"
            raise CheckpointError(f"{path}: tensor {name} at data byte {start} {what}: the header is damaged, fetch the file again")
        position = stop
    if position != data_bytes:
        raise CheckpointError(f"{path} has {data_bytes - position} bytes after its last tensor: its header is damaged, fetch it again")
