"""The prefix cache in one file: its tree, its pages' contents, and what they are the contents of. Knows no device and no engine.

The file is in the safetensors format, so that other tools can look into it:

    header   __metadata__: format, version, model, architecture, kv_dtype, page_size, state, state_crc32
             pages        [E, 2, L, K, Z, H], the engine's KV dtype: row e is entry e of the state; keys, then values
             checksums    [E] U32: crc32 of each row
    data     rows one after the other, then the checksums

`model` is a digest of the configuration and of the weights themselves, so that a file is never taken for another model's, nor for
the same model's before an update of its weights. `state` is HashedPrefixCache.dump_state() as JSON.
"""

import dataclasses
import errno
import json
import os
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from jaxinfer.errors import PrefixCacheError

FORMAT, VERSION = "jaxinfer prefix cache", 1
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # numpy's names -> safetensors'
_MAX_HEADER_BYTES = 1 << 31


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheIdentity:
    """What two engines must have alike to read each other's pages."""

    model: str
    """Digest of the model's configuration and weights."""
    architecture: str
    """For messages."""
    kv_dtype: np.dtype
    page_size: int
    row_shape: tuple[int, ...]
    """(2, L, K, Z, H): one page over all layers, keys and values."""

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.row_shape)) * self.kv_dtype.itemsize

    def metadata(self) -> dict[str, str]:
        return {"format": FORMAT, "version": str(VERSION), "architecture": self.architecture, "page_size": str(self.page_size),
                "kv_dtype": str(self.kv_dtype), "model": self.model}


def read_path(given: Any) -> Path:
    """A file's path from what a caller gives.

    Raises:
      PrefixCacheError: it is none, or names no file.
    """
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    try:
        if not isinstance(text, str) or b"\0" in os.fsencode(text) or not Path(text).name:
            raise ValueError
    except ValueError:  # half a character is one, too
        raise PrefixCacheError(f"path = {given!r:.100}: must name a file, as a text or a pathlib.Path.") from None
    return Path(text)


def _check_ordinary(path: Path) -> None:
    """Raises OSError for a folder, a device, a pipe: none is to be read, and the move to its place would take it away."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "no ordinary file")


def write(path: Path, identity: CacheIdentity, state: Mapping[str, Any], rows: Iterable[np.ndarray]) -> int:
    """Writes a file, or leaves what was there untouched: it is written beside its place and moved there when whole.

    Args:
      path: the file; its folder must exist.
      identity: of the engine.
      state: HashedPrefixCache.dump_state().
      rows: for each of the state's entries in order its page [*identity.row_shape], in blocks [n, *identity.row_shape].

    Returns:
      Bytes written.

    Raises:
      PrefixCacheError: the file cannot be written.
    """
    num_rows, text = len(state["entries"]), json.dumps(state)
    metadata = identity.metadata() | {"state": text, "state_crc32": f"{zlib.crc32(text.encode()):08x}"}
    end = num_rows * identity.row_bytes
    header = json.dumps({
        "__metadata__": metadata,
        "pages": {"dtype": _DTYPES[str(identity.kv_dtype)], "shape": [num_rows, *identity.row_shape], "data_offsets": [0, end]},
        "checksums": {"dtype": "U32", "shape": [num_rows], "data_offsets": [end, end + 4 * num_rows]}}).encode()
    header += b" " * (-len(header) % 8)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")  # no writer has another's, on whatever machine or thread
    try:
        _check_ordinary(path)
        try:
            with open(partial, "xb") as file:
                file.write(len(header).to_bytes(8, "little") + header)
                checksums = [_write_row(file, row) for block in rows for row in block]
                assert len(checksums) == num_rows, f"{len(checksums)} rows for {num_rows} entries"
                file.write(np.asarray(checksums, "<u4").tobytes())
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise PrefixCacheError(f"{path} cannot be written ({error.strerror or error}): give a file in a folder that exists and has "
                               f"{(end + len(header)) / 1e9:.2f} GB free.") from error
    return size


def _write_row(file: IO[bytes], row: np.ndarray) -> int:
    data = np.ascontiguousarray(row).tobytes()
    file.write(data)
    return zlib.crc32(data)


class CacheFile:
    """A file open for reading, its header checked. A context.

    Args:
      path: the file.
      identity: of the engine that wants its pages.

    Raises:
      PrefixCacheError: absent, no such file, damaged, or of another model, dtype or page size.
    """

    def __init__(self, path: Path, identity: CacheIdentity) -> None:
        self._path = path
        self._identity = identity
        try:
            _check_ordinary(path)
            self._file: IO[bytes] = open(path, "rb")  # noqa: SIM115  closed by __exit__
        except OSError as error:
            raise PrefixCacheError(f"{path} cannot be read ({error.strerror}): give a file that save_prefix_cache wrote.") from error
        try:
            self.state: dict[str, Any] = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "CacheFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def num_rows(self) -> int:
        return len(self.state["entries"])

    def check(self, num_rows: int) -> None:
        """Reads the first rows and compares their checksums.

        Raises:
          PrefixCacheError: a row is not what was written.
        """
        checksums = np.frombuffer(self._read(self._data_start + self.num_rows * self._identity.row_bytes, 4 * self.num_rows), "<u4")
        for row in range(num_rows):
            if zlib.crc32(self._row_bytes(row)) != checksums[row]:
                raise self._damaged(f"page {row} of {self.num_rows} does not match its checksum")

    def rows(self, indices: Iterable[int]) -> Iterator[np.ndarray]:
        """The pages of these entries, each [*identity.row_shape]."""
        for row in indices:
            yield np.frombuffer(self._row_bytes(row), self._identity.kv_dtype).reshape(self._identity.row_shape)

    def _row_bytes(self, row: int) -> bytes:
        return self._read(self._data_start + row * self._identity.row_bytes, self._identity.row_bytes)

    def _read(self, start: int, length: int) -> bytes:
        try:
            self._file.seek(start)
            data = self._file.read(length)
        except OSError as error:
            raise PrefixCacheError(f"{self._path} cannot be read ({error.strerror}): start without it.") from error
        if len(data) != length:
            raise self._damaged(f"it ends {length - len(data)} bytes early")
        return data

    def _read_header(self) -> dict[str, Any]:
        size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._read(0, 8), "little") if size >= 8 else _MAX_HEADER_BYTES
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise self._damaged(f"a header of {length} bytes in a file of {size}")
        self._data_start = 8 + length
        try:
            header = json.loads(self._read(8, length))
            metadata, shape = dict(header["__metadata__"]), tuple(header["pages"]["shape"])
            text, crc32 = str(metadata["state"]), metadata["state_crc32"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._damaged(f"its header cannot be understood: {type(error).__name__} {error}") from error
        self._check_identity(metadata)
        if f"{zlib.crc32(text.encode()):08x}" != crc32:
            raise self._damaged("its table of entries does not match its checksum")
        state = json.loads(text)
        num_rows = len(state["entries"])
        if shape != (num_rows, *self._identity.row_shape):
            raise self._damaged(f"pages {list(shape)} for {num_rows} entries of {list(self._identity.row_shape)}")
        if size != self._data_start + num_rows * (self._identity.row_bytes + 4):
            raise self._damaged(f"{size} bytes, and {self._data_start + num_rows * (self._identity.row_bytes + 4)} were written")
        return state

    def _check_identity(self, metadata: Mapping[str, str]) -> None:
        remedies = {"format": "give a file that save_prefix_cache wrote", "version": "save it anew with this jaxinfer",
                    "page_size": "start the engine with that page_size, or without the file",
                    "kv_dtype": "start the engine with that kv_dtype, or without the file"}
        for name, here in self._identity.metadata().items():
            there = metadata.get(name)
            if there != here:
                raise PrefixCacheError(f"{self._path}: {name} is {there!r} in the file and {here!r} here: "
                                       f"{remedies.get(name, 'its pages are of other weights or another configuration; start without it')}.")

    def _damaged(self, what: str) -> PrefixCacheError:
        return PrefixCacheError(f"{self._path} is damaged ({what}): start without it and save it anew.")
