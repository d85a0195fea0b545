"""Writes a checkpoint folder: parameters streamed to Orbax, manifest last, then one rename. Knows no source format and no model.

Everything is written to `<output>.partial-<pid>` beside the output, synced, and renamed. Whatever interrupts the run removes that
folder; even one that a killed process leaves behind has no manifest.json, so nothing loads it. With `resume` the folder is
`<output>.partial-resume`, an interruption leaves it, and a later run continues it (convert/journal.py).

Parameters are one flat dict {dotted path: array} under params/, in Orbax's current format, uncompressed (bfloat16 weights hardly
compress) and in chunks of 64 MiB. They are restored with

    orbax.checkpoint.experimental.v1.load(folder / "params", {path: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)})

which jaxinfer.checkpoint.restore_params wraps. Anonymous memory: `allocate` hands out page-aligned buffers that become jax arrays on
the CPU without a copy, and a batch is written while the next is filled only as long as both are small.
"""

import concurrent.futures
import gc
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp

from convert import staging
from convert.journal import Journal
from jaxinfer.checkpoint import FORMAT, LAYOUT_VERSION, MANIFEST, PARAMS, file_crc32
from jaxinfer.errors import CheckpointError

BATCH_BYTES = 128 << 20
CHUNK_BYTES = 64 << 20
ALIGNMENT = 64
ASYNCIO_SECONDS = 1.0


class CheckpointWriter:
    """A context manager for one checkpoint. Leaving it without `commit`, by any exception, leaves nothing behind.

    Args:
      output: the folder to make. It may exist only when it is empty, or is a converted checkpoint and `overwrite` is set.
      overwrite: replace an existing checkpoint, at the moment the new one is complete.
      resume: what is converted, and from what, in words that change when any of it does; then an interruption leaves the partial
        folder once a batch is complete, and a later writer with the same words continues it: see `done`. None leaves nothing.

    Raises:
      CheckpointError: the output exists, or cannot be written.
    """

    def __init__(self, output: Path, *, overwrite: bool, resume: str | None = None) -> None:
        check_output(output, overwrite=overwrite)
        self.output = output
        self.folder = staging.partial_folder(output, resumable=resume is not None)
        self._overwrite = overwrite
        self._quiet = _QuietOrbax()
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="orbax")
        self._journal = None if resume is None else Journal(self.folder, resume)
        self._in_flight: tuple[concurrent.futures.Future[None], int] | None = None
        self._batch: dict[str, np.ndarray] = {}
        self._tensors: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> "CheckpointWriter":
        try:
            self._pool.submit(int).result()  # starts the thread here: an interruption while one starts would leave it running for ever
            if self._journal is not None:
                self._tensors.update(self._journal.open(self.output))
            else:
                staging.make_partial(self.folder, self.output)
            self._quiet.begin()
        except BaseException as error:
            self._close()
            if isinstance(error, OSError):
                raise staging.write_error(self.folder, error) from None
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close()
        if isinstance(error, OSError):
            raise self._write_error(error) from error

    def _write_error(self, error: Exception) -> CheckpointError:
        return staging.write_error(self.output, error, kept=self.folder if self._journal is not None and self._journal.holds_batches else None)

    def _close(self) -> None:
        """Ends the thread and removes what is left of the unfinished folder, unless it can be continued."""
        self._pool.shutdown(wait=True)  # the batch in flight must not write into a folder that is being removed
        self._quiet.end()
        if self._journal is None:
            staging.remove_tree(self.folder)
        else:
            self._journal.close()

    @property
    def done(self) -> frozenset[str]:
        """Parameters that are queued or written, by this run or by the one that it continues."""
        return frozenset(self._tensors)

    def require_space(self, num_bytes: int) -> None:
        """Raises CheckpointError when the disk has less room than this."""
        staging.require_space(self.folder, self.output, num_bytes)

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
        self._tensors[path] = _spec(array)
        self._batch[path] = array

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Writes a JSON file beside the parameters."""
        staging.write_json(self.folder / name, value)

    def commit(self, facts: Mapping[str, Any], verify: Callable[[Path], dict[str, Any]] | None = None) -> None:
        """Finishes the parameters, writes the manifest, syncs, and moves the folder to its place.

        Args:
          facts: the manifest's fields that the writer does not know: source, architecture, end_token_ids and so on.
          verify: called with the finished folder, before it is moved; returns the manifest's `verification`, or raises.

        Raises:
          CheckpointError: the disk refused something; nothing is left behind.
        """
        self._flush()
        self._wait()
        try:
            if self._journal is not None:
                self._journal.finish()
            self._run(lambda: ocp.partial.finalize(self._params), 0)
            self._wait()
            params_files = {}
            for path in sorted(file for file in (self.folder / PARAMS).rglob("*") if file.is_file()):
                params_files[str(path.relative_to(self.folder))] = {"bytes": path.stat().st_size, "crc32": file_crc32(path)}
            num_params = sum(math.prod(tensor["shape"]) for tensor in self._tensors.values())
            manifest = {"format": FORMAT, "layout_version": LAYOUT_VERSION, "num_params": num_params, **facts, "tensors": self._tensors,
                        "params_files": params_files}
            if verify is not None:
                self.write_json(MANIFEST, manifest)
                manifest["verification"] = verify(self.folder)
                (self.folder / MANIFEST).unlink()
            staging.sync_tree(self.folder)
            self.write_json(MANIFEST, manifest)
            staging.sync(self.folder / MANIFEST)
            staging.sync(self.folder)
            check_output(self.output, overwrite=self._overwrite)
            staging.publish(self.folder, self.output)
        except OSError as error:
            raise self._write_error(error) from error

    @property
    def _params(self) -> Path:
        return (self.folder / PARAMS).absolute()

    def _flush(self) -> None:
        """Hands the batch to the writing thread, after the batch before it."""
        if self._batch:
            self._wait()
            batch, self._batch = self._batch, {}
            specs = {path: _spec(array) for path, array in batch.items()}
            num_bytes = _num_bytes(batch)
            leaves = {path: _as_leaf(array) for path, array in batch.items()}
            del batch
            self._run(lambda: self._save(leaves, specs), num_bytes)

    def _save(self, leaves: dict[str, Any], specs: Mapping[str, dict[str, Any]]) -> None:
        """Writes a batch, frees its memory at once, and records it where the run can be continued.

        Orbax leaves reference cycles that hold the arrays, and jax gives memory that it borrowed from numpy back in a callback of the
        garbage collector only: so the arrays are deleted, and the youngest generation, which is cheap, is collected.
        """
        ocp.partial.save(self._params, leaves)
        for array in leaves.values():
            if isinstance(array, jax.Array):
                array.delete()
        leaves.clear()
        gc.collect(0)
        if self._journal is not None:
            self._journal.add_batch(specs)

    def _run(self, work: Callable[[], None], num_bytes: int) -> None:
        def guarded() -> None:
            context = ocp.Context()
            context.array.saving.use_compression = False
            context.array.saving.storage_options.chunk_byte_size = CHUNK_BYTES
            context.array.saving.enable_pinned_host_transfer = False
            before = set(threading.enumerate())
            try:
                with context:
                    work()
            except BaseException:
                _await_orbax(before)
                raise

        self._in_flight = self._pool.submit(guarded), num_bytes

    def _wait(self) -> None:
        """Waits for the batch in flight, and raises what it met."""
        if self._in_flight is None:
            return
        future, self._in_flight = self._in_flight[0], None
        try:
            future.result()
        except (OSError, ValueError, RuntimeError) as error:  # tensorstore reports a full disk as any of them
            raise self._write_error(error) from error


class _QuietOrbax(logging.Filter):
    """Drops what Orbax says beside the error that it raises, which the writer reports itself.

    That is its own log lines, one a batch and a traceback for every thread that met the error, and the complaints of what still ran in
    an event loop that it closed over an error: of tasks through asyncio's log, of TensorStore's callbacks through the unraisable hook.
    """

    _hook: Callable[["sys.UnraisableHookArgs"], object] | None = None

    def begin(self) -> None:
        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(self)
        self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable

    def end(self) -> None:
        for name in ("absl", "asyncio"):
            logging.getLogger(name).removeFilter(self)
        if self._hook is not None:
            sys.unraisablehook, self._hook = self._hook, None

    def filter(self, record: logging.LogRecord) -> bool:
        return "orbax" not in (record.getMessage() if record.name == "asyncio" else record.pathname)

    def _unraisable(self, dropped: "sys.UnraisableHookArgs") -> None:
        hook = self._hook or sys.__unraisablehook__  # a callback may still come in while `end` runs
        if not (isinstance(dropped.exc_value, RuntimeError) and str(dropped.exc_value) == "Event loop is closed"):
            hook(dropped)


def _await_orbax(before: set[threading.Thread]) -> None:
    """Waits until the threads that Orbax started since `before` have ended.

    A save raises what its first thread met, while the others still write: into a folder that is about to be removed, which they would
    make again, and with tracebacks for what they miss there. Orbax's own threads end when their work does. Those of asyncio are waited
    for briefly: they hold one file operation at most, and where Orbax leaves their event loop open they never end.
    """
    for thread in set(threading.enumerate()) - before:
        if type(thread).__module__.startswith("orbax."):
            threading.Thread.join(thread)  # its own `join` raises what the thread met
    deadline = time.monotonic() + ASYNCIO_SECONDS
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("asyncio_"):
            thread.join(max(0.0, deadline - time.monotonic()))


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


def _as_leaf(array: np.ndarray) -> Any:
    """The buffer as a jax array on the CPU that shares its memory, which Orbax writes without a copy.

    Where jax was started without its CPU platform the numpy array itself is written, which Orbax copies first.
    """
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return array
    return jax.device_put(array, device, may_alias=True)


def _spec(array: np.ndarray) -> dict[str, Any]:
    return {"shape": list(array.shape), "dtype": array.dtype.name}


def _num_bytes(batch: Mapping[str, np.ndarray]) -> int:
    return sum(array.nbytes for array in batch.values())
