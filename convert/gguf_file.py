"""One GGUF container, mapped: metadata and tensor table parsed with every length checked. Knows no model and dequantises nothing.

The gguf library's own reader keeps a numpy array for every token of the vocabulary (hundreds of megabytes, seconds); this one keeps
plain Python values. Types and block sizes come from the library.
"""

import dataclasses
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxinfer.errors import CheckpointError, UnsupportedModelError

SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
STRING, ARRAY = 8, 9
VERSIONS = (2, 3)
MAX_DIMS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class GGUFTensor:
    """One row of the tensor table, in numpy's axis order (GGUF's own is reversed)."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    """First byte, from the start of the file."""
    num_bytes: int


class GGUFFile:
    """A parsed GGUF file: `metadata`, `tensors`, and raw rows. Raises CheckpointError for a file that is cut short or damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._map = np.memmap(path, mode="r", dtype=np.uint8)
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
        cursor = _Cursor(path, self._map)
        num_tensors, num_fields = _read_head(cursor)
        self.metadata = _read_metadata(cursor, num_fields)
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
            raise CheckpointError(f"{path}: general.alignment is {alignment!r}, expected a power of two >= 8: the file is damaged")
        rows = _read_tensor_table(cursor, num_tensors)
        data_start = -(-cursor.position // alignment) * alignment
        self.tensors = {name: _place(path, row, data_start, len(self._map)) for name, row in rows.items()}

    def raw_rows(self, name: str) -> np.ndarray:
        """A tensor's bytes as stored, [rows, bytes of a row], as a view into the mapped file."""
        tensor = self.tensors[name]
        rows = math.prod(tensor.shape[:-1])
        return self._map[tensor.offset:tensor.offset + tensor.num_bytes].reshape(rows, -1)


class _Cursor:
    """Reads the header front to back; every read is checked against the file's end first."""

    def __init__(self, path: Path, data: np.ndarray) -> None:
        self.path, self.position = path, 0
        self._data = memoryview(data)
        self.size = len(self._data)

    def take(self, num_bytes: int) -> memoryview:
        if num_bytes > self.size - self.position:
            raise CheckpointError(f"{self.path} is truncated or damaged: its header needs {num_bytes} bytes at offset {self.position}, "
                                  f"the file has {self.size}: fetch it again")
        self.position += num_bytes
        return self._data[self.position - num_bytes:self.position]

    def u32(self) -> int:
        return int(struct.unpack("<I", self.take(4))[0])

    def u64(self) -> int:
        return int(struct.unpack("<Q", self.take(8))[0])

    def string(self) -> str:
        raw = self.take(self.u64())
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self.path}: the string before offset {self.position} is not UTF-8 ({error}): the file is damaged") from None

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self._array()
        if kind not in SCALARS:
            raise CheckpointError(f"{self.path}: value type {kind} at offset {self.position} is unknown: the file is damaged")
        dtype = np.dtype(SCALARS[kind])
        item = np.frombuffer(self.take(dtype.itemsize), dtype)[0]
        return float(str(item)) if dtype == np.dtype("<f4") else item.item()  # float32's shortest decimal: 1e-05, not 9.99e-06

    def _array(self) -> list[Any]:
        kind, count = self.u32(), self.u64()
        if kind in SCALARS:
            dtype = np.dtype(SCALARS[kind])
            values: list[Any] = np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
            return values
        if kind != STRING:
            raise UnsupportedModelError(f"{self.path}: an array of value type {kind} at offset {self.position} is not supported")
        if count * 8 > self.size - self.position:
            self.take(count * 8)
        return [self.string() for _ in range(count)]


def _read_head(cursor: _Cursor) -> tuple[int, int]:
    """Magic and version; returns the number of tensors and of metadata fields."""
    magic = bytes(cursor.take(4))
    if magic != b"GGUF":
        raise CheckpointError(f"{cursor.path} is no GGUF file: it begins with {magic!r}, not b'GGUF'")
    version = cursor.u32()
    if version not in VERSIONS:
        remedy = "it is big-endian" if version & 0xFFFF == 0 else f"known are {VERSIONS}"
        raise UnsupportedModelError(f"{cursor.path} has GGUF version {version}; {remedy}: convert it with a current gguf tool")
    return cursor.u64(), cursor.u64()


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.string()
        if key in metadata:
            raise CheckpointError(f"{cursor.path}: metadata key {key!r} appears twice: the file is damaged")
        metadata[key] = cursor.value(cursor.u32())
    return metadata


def _read_tensor_table(cursor: _Cursor, count: int) -> dict[str, GGUFTensor]:
    """The tensor table, with offsets still counted from the start of the data."""
    tensors: dict[str, GGUFTensor] = {}
    for _ in range(count):
        name, num_dims = cursor.string(), cursor.u32()
        if not 1 <= num_dims <= MAX_DIMS:
            raise CheckpointError(f"{cursor.path}: tensor {name} has {num_dims} dimensions, expected 1 to {MAX_DIMS}: the file is damaged")
        shape = tuple(reversed([cursor.u64() for _ in range(num_dims)]))
        number, offset = cursor.u32(), cursor.u64()
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise UnsupportedModelError(
                f"{cursor.path}: tensor {name} has GGML type {number}, which the gguf library does not know") from None
        if name in tensors:
            raise CheckpointError(f"{cursor.path}: tensor {name} appears twice: the file is damaged")
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if math.prod(shape) == 0 or shape[-1] % block:
            raise CheckpointError(f"{cursor.path}: tensor {name} of shape {list(shape)} is not made of {kind.name} blocks of {block}: "
                                  "the file is damaged")
        num_bytes = math.prod(shape) // block * block_bytes
        tensors[name] = GGUFTensor(name=name, shape=shape, type=kind, offset=offset, num_bytes=num_bytes)
    return tensors


def _place(path: Path, tensor: GGUFTensor, data_start: int, file_bytes: int) -> GGUFTensor:
    """The tensor with its offset counted from the start of the file, checked to lie inside it."""
    offset = data_start + tensor.offset
    if offset + tensor.num_bytes > file_bytes:
        raise CheckpointError(
            f"{path} is truncated: tensor {tensor.name} ends at byte {offset + tensor.num_bytes}, the file has {file_bytes}: "
            "fetch it again")
    return dataclasses.replace(tensor, offset=offset)
