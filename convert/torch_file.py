"""One torch checkpoint file (.bin), mapped: its zip directory read here, its pickle by convert/torch_pickle.py, its tensors by rows.

An archive <name>/ holds data.pkl, byteorder, and a record data/<key> for each storage, all stored without compression; so a tensor is
a strided view of the mapped file. Needs no torch and runs nothing. A storage's checksum is compared before its first use.
"""

import math
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from convert.safetensors_file import FLOAT_DTYPES, ITEM_BYTES
from convert.source import TensorInfo
from convert.torch_pickle import Storage, Tensor, read_tensors
from jaxinfer.errors import CheckpointError, UnsupportedModelError

MAX_PICKLE_BYTES = 256 << 20
CHUNK_BYTES = 1 << 24
LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Signature, length of the name, length of the extra field."""


class TorchFile:
    """Tensors of one file. Opening it reads the directory and the pickle, and raises CheckpointError for anything that does not add up."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records = _read_directory(path)
        self._map = np.memmap(path, mode="r", dtype=np.uint8)
        pickles = [name for name in self._records if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise CheckpointError(f"{path} holds {len(pickles)} records data.pkl, expected one: it is no torch checkpoint")
        self._root = pickles[0].removesuffix("data.pkl")
        self._check_byte_order()
        data = self._record("data.pkl", MAX_PICKLE_BYTES)
        self._check_sum("data.pkl", data)
        self._views = read_tensors(data.tobytes(), str(path))
        self._checked: set[str] = set()
        self._storages = {view.storage.key: self._place(view.storage) for view in self._views.values()}
        self.tensors = {name: _info(name, view) for name, view in self._views.items()}

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) as a view into the mapped file, strided as the tensor is."""
        view = self._views[name]
        dtype = FLOAT_DTYPES[view.storage.dtype]
        raw = self._storages[view.storage.key]
        if view.storage.key not in self._checked:
            self._check_sum(f"data/{view.storage.key}", raw)
            self._checked.add(view.storage.key)
        flat = raw.view(dtype)[view.offset:]
        strides = tuple(stride * dtype.itemsize for stride in view.strides)
        return np.lib.stride_tricks.as_strided(flat, view.shape, strides, writeable=False)[start:stop]

    def _record(self, name: str, limit: int | None = None) -> np.ndarray:
        """The bytes of a record, as a view into the mapped file."""
        info = self._records.get(self._root + name)
        if info is None:
            raise CheckpointError(f"{self.path} has no record {self._root + name}: it is truncated or damaged, fetch it again")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
            raise UnsupportedModelError(f"{self.path}: record {info.filename} is compressed or encrypted, which torch never writes: unpack it "
                                        "and save the model again")
        if limit is not None and info.file_size > limit:
            raise CheckpointError(f"{self.path}: record {info.filename} has {info.file_size} bytes, more than the {limit} that are believable")
        head = self._map[info.header_offset:info.header_offset + LOCAL_HEADER.size].tobytes()
        if len(head) < LOCAL_HEADER.size or head[:4] != b"PK\3\4":
            raise CheckpointError(f"{self.path}: record {info.filename} does not begin where the directory says: the file is damaged")
        _, name_len, extra_len = LOCAL_HEADER.unpack(head)
        start = info.header_offset + LOCAL_HEADER.size + name_len + extra_len
        if start + info.file_size > len(self._map):
            raise CheckpointError(f"{self.path} is truncated: record {info.filename} ends at byte {start + info.file_size}, the file has "
                                  f"{len(self._map)}: fetch it again")
        return self._map[start:start + info.file_size]

    def _check_sum(self, name: str, data: np.ndarray) -> None:
        """Compares a record's CRC-32 with the directory's, where torch wrote one."""
        wanted, found = self._records[self._root + name].CRC, 0
        if wanted == 0:
            return
        for start in range(0, len(data), CHUNK_BYTES):
            found = zlib.crc32(data[start:start + CHUNK_BYTES], found)
        if found != wanted:
            raise CheckpointError(f"{self.path} is damaged: record {name} has the checksum {found:08x}, its directory says {wanted:08x}: "
                                  "fetch it again")

    def _check_byte_order(self) -> None:
        """Archives before torch 2.1 do not say; all were little-endian in practice, as this reader needs."""
        if self._root + "byteorder" in self._records:
            order = self._record("byteorder", 16).tobytes()
            if order != b"little":
                raise UnsupportedModelError(f"{self.path} was saved with byte order {order!r}; only little-endian is read: save it again on "
                                            "such a machine, or as safetensors")

    def _place(self, storage: Storage) -> np.ndarray:
        raw = self._record(f"data/{storage.key}")
        if len(raw) != storage.num_elements * ITEM_BYTES[storage.dtype]:
            raise CheckpointError(f"{self.path}: record data/{storage.key} has {len(raw)} bytes, its {storage.num_elements} elements of "
                                  f"{storage.dtype} take {storage.num_elements * ITEM_BYTES[storage.dtype]}: the file is damaged")
        return raw


def _info(name: str, view: Tensor) -> TensorInfo:
    num_bytes = ITEM_BYTES[view.storage.dtype] * math.prod(view.shape)
    return TensorInfo(name=name, origin=name, shape=view.shape, dtype=view.storage.dtype, num_bytes=num_bytes,
                      is_float=view.storage.dtype in FLOAT_DTYPES)


def _read_directory(path: Path) -> dict[str, Any]:
    """The zip directory, name -> record; the standard library parses it, and none of its data."""
    try:
        with path.open("rb") as file:
            head = file.read(2)
            if head == b"\x80\x02":
                raise UnsupportedModelError(f"{path} is in torch's old format (before 1.6, no zip archive), which is not read: load it in "
                                            "torch and save it again, best as safetensors")
            if head != b"PK":
                raise CheckpointError(f"{path} is no torch checkpoint: it begins with {head!r}, not with a zip archive's b'PK'")
            with zipfile.ZipFile(file) as archive:
                infos = archive.infolist()
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist: fetch the missing shard") from None
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, struct.error) as error:
        raise CheckpointError(f"{path} is truncated or no whole zip archive ({str(error)[:200]}): fetch it again") from None
    records = {info.filename: info for info in infos}
    if len(records) != len(infos):
        raise CheckpointError(f"{path} holds two records of the same name: the file is damaged")
    return records
