"""Hashes the source's files in a background thread while they are converted, so that both share one read. Interruptible."""

import concurrent.futures
import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from jaxinfer.errors import CheckpointError

CHUNK_BYTES = 1 << 22


class FileHasher:
    """A context manager: hashing begins on entry, `result` waits for it, leaving stops it."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._stop = threading.Event()
        self._files = files
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="hash")

    def __enter__(self) -> "FileHasher":
        try:
            self._future = self._pool.submit(lambda: [self._hash(path) for path in self._files])
        except BaseException:  # Ctrl-C while the thread starts: without this it would wait for work for ever
            self._stop.set()
            self._pool.shutdown(wait=False)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True)

    def result(self) -> list[dict[str, Any]]:
        """[{name, bytes, sha256}], one a file. Raises CheckpointError when a file could not be read."""
        return self._future.result()

    def _hash(self, path: Path) -> dict[str, Any]:
        digest, num_bytes = hashlib.sha256(), 0
        try:
            with path.open("rb", buffering=0) as file:
                while not self._stop.is_set() and (chunk := file.read(CHUNK_BYTES)):
                    digest.update(chunk)
                    num_bytes += len(chunk)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
        return {"name": path.name, "bytes": num_bytes, "sha256": digest.hexdigest()}
