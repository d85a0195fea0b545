"""Finished layers and the next layer's inputs on disk: what bounds memory, and what an interrupted run continues from.

    <output>.quantise-<pid>, or <output>.quantise-resume with --resume:
        layer-<i>.npz       a LayerResult
        inputs-<i>.npy      float32 [S, T, D], what layer i reads; only the next layer's, and only with --resume
        state.json          {"what": what is quantised and how, "files": {name: crc32}, "next": i}; replaced in one step
"""

import fcntl
import json
import logging
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from convert import staging
from convert.formats.matrix import QuantizedMatrix
from convert.quantise.methods import LayerResult
from jaxinfer.checkpoint import file_crc32
from jaxinfer.errors import CheckpointError

logger = logging.getLogger(__name__)

STATE = "state.json"


class LayerStore:
    """A context manager for the folder. It is removed on leaving, unless it can be continued and `finish` was not called.

    Args:
      output: beside which the folder is made.
      what: everything that decides the result, in words that change when any of it does.
      resume: continue what an earlier run with the same words left, and leave something to continue.
    """

    def __init__(self, output: Path, *, what: str, resume: bool) -> None:
        self._folder = output.with_name(output.name + (".quantise-resume" if resume else f".quantise-{os.getpid()}"))
        self._what, self._resume = what, resume
        self._files: dict[str, int] = {}
        self._finished = False
        self._lock: int | None = None
        self.next_layer = 0
        """The first layer that is not there."""

    def __enter__(self) -> "LayerStore":
        try:
            self._folder.mkdir(parents=True, exist_ok=self._resume)
            self._lock = os.open(self._folder, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._take_over()
        except OSError as error:
            if self._lock is not None:
                os.close(self._lock)
            if isinstance(error, BlockingIOError):
                raise CheckpointError(f"{self._folder} is being written by another process: wait for it, or choose another "
                                      "--output") from None
            raise staging.write_error(self._folder, error) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._resume and not self._finished and self.next_layer:
            logger.warning("%s is kept with %d layers: give --resume again to continue it, or remove it", self._folder, self.next_layer)
        else:
            staging.remove_tree(self._folder)
        assert self._lock is not None
        os.close(self._lock)
        if isinstance(error, OSError):
            raise staging.write_error(self._folder, error, kept=self._folder if self._folder.exists() else None) from error

    def finish(self) -> None:
        """The result stands elsewhere; leaving removes the folder."""
        self._finished = True

    def inputs(self) -> np.ndarray | None:
        """What the next layer reads, where an earlier run left it; a run without calibration text leaves none."""
        name = f"inputs-{self.next_layer}.npy"
        return np.load(self._folder / name) if name in self._files else None

    def add(self, result: LayerResult, inputs: np.ndarray | None) -> None:
        """Stores the next layer's result and, with `resume`, the inputs of the layer after it."""
        i = self.next_layer
        self._save(f"layer-{i}.npz", lambda file: np.savez(file, **_arrays(result)))  # type: ignore[arg-type]
        if self._resume and inputs is not None:
            self._save(f"inputs-{i + 1}.npy", lambda file: np.save(file, inputs))
        old = f"inputs-{i}.npy"
        self._files.pop(old, None)
        self.next_layer = i + 1
        if self._resume:
            self._write_state()
            (self._folder / old).unlink(missing_ok=True)

    def layer(self, index: int) -> LayerResult:
        """A stored layer."""
        with np.load(self._folder / f"layer-{index}.npz") as file:
            return _result(dict(file))

    def _save(self, name: str, write: Any) -> None:
        temporary = self._folder / f"{name}.new"
        with temporary.open("wb") as file:
            write(file)
        os.replace(temporary, self._folder / name)
        self._files[name] = file_crc32(self._folder / name) if self._resume else 0

    def _write_state(self) -> None:
        temporary = self._folder / f"{STATE}.new"
        temporary.write_text(json.dumps({"what": self._what, "files": self._files, "next": self.next_layer}), encoding="utf-8")
        os.replace(temporary, self._folder / STATE)

    def _take_over(self) -> None:
        """Believes an earlier run's files only where all of them have their checksums; otherwise begins anew."""
        if not (self._folder / STATE).is_file():
            return
        try:
            state = json.loads((self._folder / STATE).read_text(encoding="utf-8"))
            whole = state["what"] == self._what and {f"layer-{i}.npz" for i in range(state["next"])} <= state["files"].keys() and all(
                file_crc32(self._folder / name) == crc for name, crc in state["files"].items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, CheckpointError):
            whole = False
        if not whole:
            logger.warning("%s is of another run, or damaged: it is begun anew", self._folder)
            for path in self._folder.iterdir():
                if path.is_dir() and not path.is_symlink():
                    staging.remove_tree(path)
                else:
                    path.unlink()
            return
        self._files, self.next_layer = state["files"], state["next"]
        logger.info("%s continues: %d layers are there", self._folder, self.next_layer)


def _arrays(result: LayerResult) -> dict[str, np.ndarray]:
    """A result as named arrays; what is no array goes into one of JSON."""
    arrays = {f"others/{path}": value for path, value in result.others.items()} | {f"scales/{name}": s for name, s in result.scales.items()}
    for name, matrix in result.matrices.items():
        arrays |= {f"q/{name}": matrix.q, f"grid/{name}": matrix.scales}
        if matrix.zeros is not None:
            arrays[f"zeros/{name}"] = matrix.zeros
    formats = {name: {"bits": matrix.bits, "group_size": matrix.group_size} for name, matrix in result.matrices.items()}
    arrays["json"] = np.frombuffer(json.dumps({"errors": result.errors, "facts": result.facts, "formats": formats}).encode(), np.uint8)
    return arrays


def _result(arrays: dict[str, np.ndarray]) -> LayerResult:
    def under(prefix: str) -> dict[str, np.ndarray]:
        return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}

    told = json.loads(arrays["json"].tobytes())
    zeros, grids = under("zeros/"), under("grid/")
    matrices = {name: QuantizedMatrix(q=q, scales=grids[name], zeros=zeros.get(name), perm=None, **told["formats"][name])
                for name, q in under("q/").items()}
    return LayerResult(matrices=matrices, others=under("others/"), scales=under("scales/"), errors=told["errors"], facts=told["facts"])
