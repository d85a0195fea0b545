"""Writes a checkpoint folder: parameters streamed to Orbax, manifest last, then one rename. Knows no source format and no model.

Everything is written to `<output>.partial-<pid>` beside the output, synced, and renamed. Whatever interrupts the run removes that
folder; even one that a killed process leaves behind has no manifest.json, so nothing loads it.

Parameters are one flat dict {dotted path: array} under params/, in Orbax's current format, uncompressed (bfloat16 weights hardly
compress) and in chunks of 64 MiB. They are restored with

    orbax.checkpoint.experimental.v1.load(folder / "params", {path: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)})

which jaxinfer.checkpoint.restore_params wraps. Anonymous memory: `allocate` hands out page-aligned buffers that become jax arrays on
the CPU without a copy, and a batch is written while the next is filled only as long as both are small.
"""

import concurrent.futures
import gc
import glob
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp

from jaxinfer.checkpoint import FORMAT, LAYOUT_VERSION, MANIFEST, PARAMS, file_crc32
from jaxinfer.errors import CheckpointError

logger = logging.getLogger(__name__)

BATCH_BYTES = 128 << 20
CHUNK_BYTES = 64 << 20
ALIGNMENT = 64
SPARE_BYTES = 64 << 20


class CheckpointWriter:
    """A context manager for one checkpoint. Leaving it without `commit`, by any exception, leaves nothing behind.

    Args:
      output: the folder to make. It may exist only when it is empty, or is a converted checkpoint and `overwrite` is set.
      overwrite: replace an existing checkpoint, at the moment the new one is complete.

    Raises:
      CheckpointError: the output exists, or cannot be written.
    """

    def __init__(self, output: Path, *, overwrite: bool) -> None:
        check_output(output, overwrite=overwrite)
        self.output = output
        self.folder = output.with_name(f"{output.name}.partial-{os.getpid()}")
        self._overwrite = overwrite
        self._quiet = _QuietOrbax()
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="orbax")
        self._in_flight: tuple[concurrent.futures.Future[None], int] | None = None
        self._batch: dict[str, np.ndarray] = {}
        self._tensors: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> "CheckpointWriter":
        try:
            self._pool.submit(int).result()  # starts the thread here: an interruption while one starts would leave it running for ever
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            _warn_of_leftovers(self.output)
            self.folder.mkdir()
            logging.getLogger("absl").addFilter(self._quiet)
        except BaseException as error:
            self._close()
            if isinstance(error, OSError):
                raise _write_error(self.folder, error) from None
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close()
        if isinstance(error, OSError):
            raise _write_error(self.output, error) from error

    def _close(self) -> None:
        """Ends the thread and removes what is left of the unfinished folder."""
        self._pool.shutdown(wait=True)  # the batch in flight must not write into a folder that is being removed
        logging.getLogger("absl").removeFilter(self._quiet)
        _remove_tree(self.folder)

    def require_space(self, num_bytes: int) -> None:
        """Raises CheckpointError when the disk has less room than this."""
        free = shutil.disk_usage(self.folder).free
        if free < num_bytes + SPARE_BYTES:
            raise CheckpointError(f"{self.output} needs {num_bytes / 1e6:.0f} MB, but its disk has {free / 1e6:.0f} MB free: "
                                  "free some space or choose another --output")

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """An uninitialised buffer for a parameter; `submit` takes it back, filled. Waits until memory is free for it."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._batch and _num_bytes(self._batch) + num_bytes > BATCH_BYTES:
            self._flush()
        if self._in_flight is not None and self._in_flight[1] + num_bytes > BATCH_BYTES:
            self._wait()
        raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        return raw[start:start + num_bytes].view(dtype).reshape(shape)

    def submit(self, path: str, array: np.ndarray) -> None:
        """Queues a filled buffer. The caller must not touch it afterwards."""
        assert path not in self._tensors, f"{path} is written twice"
        self._tensors[path] = {"shape": list(array.shape), "dtype": array.dtype.name}
        self._batch[path] = array

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Writes a JSON file beside the parameters."""
        (self.folder / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def commit(self, facts: Mapping[str, Any]) -> None:
        """Finishes the parameters, writes the manifest, syncs, and moves the folder to its place.

        Args:
          facts: the manifest's fields that the writer does not know: source, architecture, end_token_ids and so on.

        Raises:
          CheckpointError: the disk refused something; nothing is left behind.
        """
        self._flush()
        self._wait()
        self._run(lambda: ocp.partial.finalize(self._params), 0)
        self._wait()
        try:
            params_files = {}
            for path in sorted(file for file in (self.folder / PARAMS).rglob("*") if file.is_file()):
                params_files[str(path.relative_to(self.folder))] = {"bytes": path.stat().st_size, "crc32": file_crc32(path)}
            num_params = sum(math.prod(tensor["shape"]) for tensor in self._tensors.values())
            _sync_tree(self.folder)
            self.write_json(MANIFEST, {"format": FORMAT, "layout_version": LAYOUT_VERSION, **facts, "num_params": num_params,
                                       "tensors": self._tensors, "params_files": params_files})
            _sync(self.folder / MANIFEST)
            _sync(self.folder)
            self._publish()
        except OSError as error:
            raise _write_error(self.output, error) from error

    def _publish(self) -> None:
        """Moves the finished folder to its place; an old checkpoint there is kept until that has worked."""
        check_output(self.output, overwrite=self._overwrite)
        old = self.output.with_name(f"{self.output.name}.old-{os.getpid()}")
        replaces = self.output.exists() and any(self.output.iterdir())
        try:
            if replaces:
                self.output.rename(old)
            self.folder.rename(self.output)
            _sync(self.output.parent)
        finally:  # whatever interrupts this, one of the two stands at the output
            if replaces and old.exists():
                if self.output.exists():
                    _remove_tree(old)
                else:
                    old.rename(self.output)

    @property
    def _params(self) -> Path:
        return (self.folder / PARAMS).absolute()

    def _flush(self) -> None:
        """Hands the batch to the writing thread, after the batch before it."""
        if self._batch:
            self._wait()
            batch, self._batch = self._batch, {}
            num_bytes = _num_bytes(batch)
            self._run(lambda: _save(self._params, {path: _as_leaf(array) for path, array in batch.items()}), num_bytes)

    def _run(self, work: Any, num_bytes: int) -> None:
        def guarded() -> None:
            context = ocp.Context()
            context.array.saving.use_compression = False
            context.array.saving.storage_options.chunk_byte_size = CHUNK_BYTES
            context.array.saving.enable_pinned_host_transfer = False
            with context:
                work()

        self._in_flight = self._pool.submit(guarded), num_bytes

    def _wait(self) -> None:
        """Waits for the batch in flight, and raises what it met."""
        if self._in_flight is None:
            return
        future, self._in_flight = self._in_flight[0], None
        try:
            future.result()
        except (OSError, ValueError, RuntimeError) as error:  # tensorstore reports a full disk as any of them
            raise _write_error(self.output, error) from error


class _QuietOrbax(logging.Filter):
    """Drops Orbax's own log lines: one a batch, and three tracebacks for an error that the writer reports itself."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname


def check_output(output: Path, *, overwrite: bool) -> None:
    """Raises CheckpointError for an output that exists and may not be replaced."""
    if not output.exists() and not output.is_symlink():
        return
    if not output.is_dir() or output.is_symlink():
        raise CheckpointError(f"{output} exists and is a link or no folder: choose another --output")
    if not any(output.iterdir()):
        return
    if not (output / MANIFEST).is_file():
        raise CheckpointError(f"{output} holds files that are no converted checkpoint, so it is never replaced: choose another --output")
    if not overwrite:
        raise CheckpointError(f"{output} already holds a converted checkpoint: give --overwrite to replace it, or choose another --output")


def _save(folder: Path, arrays: Mapping[str, Any]) -> None:
    """Writes a batch and frees its memory at once.

    Orbax leaves reference cycles that hold the arrays, and jax gives memory that it borrowed from numpy back in a callback of the
    garbage collector only: so the arrays are deleted, and the youngest generation, which is cheap, is collected.
    """
    ocp.partial.save(folder, dict(arrays))
    for array in arrays.values():
        if isinstance(array, jax.Array):
            array.delete()
    gc.collect(0)


def _as_leaf(array: np.ndarray) -> Any:
    """The buffer as a jax array on the CPU that shares its memory, which Orbax writes without a copy.

    Where jax was started without its CPU platform the numpy array itself is written, which Orbax copies first.
    """
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return array
    return jax.device_put(array, device, may_alias=True)


def _num_bytes(batch: Mapping[str, np.ndarray]) -> int:
    return sum(array.nbytes for array in batch.values())


def _write_error(path: Path, error: Exception) -> CheckpointError:
    reason = str(error)
    if "No space left" in reason:
        reason = "the disk is full"
    return CheckpointError(f"{path} cannot be written ({reason:.300}): nothing was left there; choose another --output or free the disk")


def _warn_of_leftovers(output: Path) -> None:
    """Names the folders of runs that were killed outright. They are not removed: another process may own them."""
    for leftover in sorted(output.parent.glob(f"{glob.escape(output.name)}.partial-*")):
        logger.warning("%s is left from a run that was killed, or from one that still runs: remove it when none does", leftover)


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_tree(folder: Path) -> None:
    """Removes a folder, again if something still wrote into it; says so when it cannot."""
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.05)
    logger.error("%s could not be removed; it is not a checkpoint, remove it by hand", folder)
