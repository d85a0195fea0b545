"""A folder that appears whole or not at all: made beside its place, synced, renamed. Knows nothing of what is in it.

Whatever interrupts the making of a folder removes what was made so far, unless its owner means to continue later.
"""

import glob
import json
import logging
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxinfer.errors import CheckpointError

logger = logging.getLogger(__name__)

SPARE_BYTES = 64 << 20
RESUME_SUFFIX = ".partial-resume"


def partial_folder(output: Path, *, resumable: bool = False) -> Path:
    """Where `output` is made: named by this process, or by nothing when a later process is to continue it."""
    return output.with_name(output.name + (RESUME_SUFFIX if resumable else f".partial-{os.getpid()}"))


def make_partial(folder: Path, output: Path) -> None:
    """Makes the empty partial folder and names those that earlier runs left."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for leftover in sorted(output.parent.glob(f"{glob.escape(output.name)}.partial-*")):
        if leftover.name == output.name + RESUME_SUFFIX:
            logger.warning("%s is left from a run with --resume: give --resume to continue it, or remove it", leftover)
        else:  # it is not removed here: another process may own it
            logger.warning("%s is left from a run that was killed, or from one that still runs: remove it when none does", leftover)
    folder.mkdir()


def require_space(folder: Path, output: Path, num_bytes: int) -> None:
    """Raises CheckpointError when the folder's disk has less room than this."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes + SPARE_BYTES:
        raise CheckpointError(f"{output} needs {num_bytes / 1e6:.0f} MB, but its disk has {free / 1e6:.0f} MB free: "
                              "free some space or choose another --output")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON object, readable, with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def publish(folder: Path, output: Path) -> None:
    """Moves the finished folder to its place; what stood there is kept until that has worked, then removed."""
    old = output.with_name(f"{output.name}.old-{os.getpid()}")
    replaces = output.exists() and any(output.iterdir())
    try:
        if replaces:
            output.rename(old)
        folder.rename(output)
        sync(output.parent)
    finally:  # whatever interrupts this, one of the two stands at the output
        if replaces and old.exists():
            if output.exists():
                remove_tree(old)
            else:
                old.rename(output)


def write_error(path: Path, error: Exception, *, kept: Path | None = None) -> CheckpointError:
    """The typed error for a disk that refused something; `kept` is a folder that stays to be continued."""
    reason = str(error)
    if "No space left" in reason:
        reason = "the disk is full"
    left = "nothing was left there; choose another --output or free the disk" if kept is None else f"free the disk and continue {kept}"
    return CheckpointError(f"{path} cannot be written ({reason:.300}): {left}")


def sync_tree(folder: Path) -> None:
    """Flushes a folder and everything below it to the disk."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Flushes one file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(folder: Path) -> None:
    """Removes a folder, again if something still wrote into it; says so when it cannot."""
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.05)
    logger.error("%s could not be removed; it is not a checkpoint, remove it by hand", folder)
