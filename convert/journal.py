"""What a partial folder of `--resume` already holds: one record a batch, believed only while every file has its checksum.

Orbax keeps each partial save in a folder of its own (params.partial_save/*.pending*) until the save is finalized, in whatever process
that happens. So a batch that is complete can be taken over, and everything else in the partial folder is removed and made again.

    journal.json   {"what": what is converted from what, "batches": [{"folder", "tensors", "files": {name: [bytes, crc32]}}]}

The process that writes holds a lock on the folder, which the system releases when the process ends, however that happens.
"""

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert import staging
from jaxinfer.checkpoint import PARAMS, file_crc32
from jaxinfer.errors import CheckpointError

logger = logging.getLogger(__name__)

JOURNAL = "journal.json"


class Journal:
    """The record of one partial folder.

    Args:
      folder: the partial folder.
      what: what is converted, from what, into what: a folder that says something else is not continued.
    """

    def __init__(self, folder: Path, what: str) -> None:
        self._folder = folder
        self._what = what
        self._pending = folder / f"{PARAMS}.partial_save"
        self._batches: list[dict[str, Any]] = []
        self._lock: int | None = None

    def open(self, output: Path) -> dict[str, dict[str, Any]]:
        """Takes the folder over, or makes it; returns the parameters that need not be written again, path -> {shape, dtype}.

        Raises:
          CheckpointError: another process is writing there.
        """
        if not self._folder.exists():
            staging.make_partial(self._folder, output)
        self._lock = self._acquire()
        found = self._read()
        self._batches = [batch for batch in found if self._is_whole(batch)]
        self._clean()
        self._write()
        tensors = {path: spec for batch in self._batches for path, spec in batch["tensors"].items()}
        if found:
            logger.info("%s continues: %d tensors are there and whole, %d are made again", self._folder, len(tensors),
                        sum(len(batch["tensors"]) for batch in found) - len(tensors))
        return tensors

    @property
    def holds_batches(self) -> bool:
        """Whether there is something to continue."""
        return bool(self._batches)

    def close(self) -> None:
        """Lets the folder go. One without a complete batch holds nothing worth keeping and is removed."""
        if self._lock is None:
            return
        if self._folder.exists():
            if self.holds_batches:
                logger.warning("%s is kept: give --resume again to continue it, or remove it", self._folder)
            else:
                staging.remove_tree(self._folder)
        os.close(self._lock)
        self._lock = None

    def add_batch(self, tensors: Mapping[str, dict[str, Any]]) -> None:
        """Records the batch that was written last."""
        known = {batch["folder"] for batch in self._batches}
        new = [path for path in self._pending.iterdir() if path.name not in known]
        assert len(new) == 1, f"a batch made {len(new)} folders in {self._pending}"
        files = {str(path.relative_to(new[0])): [path.stat().st_size, file_crc32(path)] for path in sorted(new[0].rglob("*")) if path.is_file()}
        self._batches.append({"folder": new[0].name, "tensors": dict(tensors), "files": files})
        self._write()

    def finish(self) -> None:
        """Forgets the batches, which are about to be merged: from there on nothing of them can be taken over."""
        self._batches = []
        (self._folder / JOURNAL).unlink()

    def _acquire(self) -> int:
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise CheckpointError(f"{self._folder} is being written by another process: wait for it, or choose another --output") from None
        return descriptor

    def _read(self) -> list[dict[str, Any]]:
        """The batches that the journal names; none where it is absent, damaged or of another conversion."""
        try:
            journal = json.loads((self._folder / JOURNAL).read_bytes().decode("utf-8"))
        except FileNotFoundError:
            return []
        except (OSError, ValueError, RecursionError):
            journal = None
        if not isinstance(journal, dict) or journal.get("what") != self._what:
            logger.warning("%s is of another conversion, or cannot be continued: it is begun anew", self._folder)
            return []
        batches = journal.get("batches")
        return [batch for batch in batches if isinstance(batch, dict)] if isinstance(batches, list) else []

    def _is_whole(self, batch: dict[str, Any]) -> bool:
        """Whether the batch's folder holds exactly the files that were recorded, each with its size and checksum."""
        name, files = batch.get("folder"), batch.get("files")
        if not isinstance(name, str) or Path(name).name != name or not isinstance(files, dict) or not isinstance(batch.get("tensors"), dict):
            return False
        folder = self._pending / name
        paths = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
        return {str(path.relative_to(folder)): [path.stat().st_size, file_crc32(path)] for path in paths} == files

    def _clean(self) -> None:
        """Removes everything that is not a whole batch."""
        kept = {batch["folder"] for batch in self._batches}
        for path in [*self._folder.iterdir(), *(self._pending.iterdir() if self._pending.is_dir() else ())]:
            if path.name in kept or path == self._pending and kept:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _write(self) -> None:
        """Replaces the journal in one step."""
        temporary = self._folder / f"{JOURNAL}.new"
        temporary.write_text(json.dumps({"what": self._what, "batches": self._batches}), encoding="utf-8")
        os.replace(temporary, self._folder / JOURNAL)
