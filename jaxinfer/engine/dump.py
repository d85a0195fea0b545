"""A step's inputs and tokens in one file, for a replay elsewhere (jaxinfer/replay.py). Writes and reads files; runs nothing.

A file is in the safetensors format; its metadata hold one JSON document, `step`:

    header   format, number and reason of the step, versions, device, model, dtypes, page size, layout, one entry a row
    buffer   [num_words] int32, the packed input, as jaxinfer/state.py:StepLayout lays it out
    tokens, finite              [rows] of the plan, what the device gave
    pages, page_table           [P'] int32 ids of the pages kept, [rows, M] int32
    k.0 ... v.0 ...             [P', K, Z, H] keys and values of each layer in those pages (bfloat16 as uint16)
    masks                       [rows, ceil(V / 32)] uint32, of rows under a grammar

Keys and values are those after the step: the step's own are in them too, and a replay makes them anew.
"""

import dataclasses
import json
import logging
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxinfer import __version__
from jaxinfer.engine.pack import pack, pick_layout
from jaxinfer.engine.resolve import ResolvedConfig, np_dtype
from jaxinfer.errors import ConfigError, DumpError
from jaxinfer.models.config import ModelConfig
from jaxinfer.scheduler.plan import ScheduledRow, SchedulePlan
from jaxinfer.state import DeviceState, StepLayout

logger = logging.getLogger(__name__)

FORMAT = "jaxinfer-step-1"
MAX_BYTES = 1 << 30
"""Of the keys and values in one file. Rows beyond it are kept without: their replay computes the whole sequence."""
MAX_FILES = 16
"""That one engine writes for steps that were not finite; those asked for by number or by LLM.dump_step are not counted."""


class StepDumper:
    """Decides which steps are kept, and writes them.

    While it is armed the engine runs one step at a time: every input is then known to the host, and no later step has touched the pages.

    Args:
      resolved: the engine's settings: dump_steps_dir and dump_step_numbers say what is kept.
      processors: names of the engine's logit processors.

    Raises:
      ConfigError: the folder cannot be written to.
    """

    def __init__(self, resolved: ResolvedConfig, processors: Sequence[str]) -> None:
        self._resolved, self._processors = resolved, list(processors)
        folder = resolved.engine.dump_steps_dir
        self._folder = None if folder is None else _made(folder)
        self._numbers = frozenset(resolved.engine.dump_step_numbers or ())
        self._next_into: Path | None = None
        self._num_applied = self._num_non_finite = 0
        self._expected: SchedulePlan | None = None
        self.last_file: Path | None = None
        """The file written last."""

    @property
    def is_armed(self) -> bool:
        return self._folder is not None or self._next_into is not None

    def keep_next(self, folder: str | os.PathLike[str]) -> None:
        """Asks for the next step, into this folder.

        Raises:
          ConfigError: it cannot be written to.
        """
        self._next_into = _made(folder)

    def expect(self, plan: SchedulePlan) -> None:
        """Told of every plan before its step is dispatched; one dispatched while armed may be kept."""
        self._expected = plan if self.is_armed else None

    def take(self, plan: SchedulePlan, state: DeviceState, tokens: Sequence[int], finite: Sequence[bool]) -> None:
        """Looks at a step whose tokens are here and not yet applied, and keeps it if it is to be kept.

        A file that cannot be written is reported in the log, and serving goes on.
        """
        number, self._num_applied = self._num_applied, self._num_applied + 1
        if plan is not self._expected:
            return  # dispatched before anyone asked, so that others may have run since
        bad = {b for b, row in enumerate(plan.rows) if row.samples and not finite[b]}
        wanted = [("asked for", self._next_into)] if self._next_into is not None else []
        if self._folder is not None and number in self._numbers:
            wanted.append(("asked for by its number", self._folder))
        if self._folder is not None and bad and self._num_non_finite < MAX_FILES:
            self._num_non_finite += 1
            wanted.append(("not finite", self._folder))
        self._next_into = None
        if not wanted:
            return
        reason, folder = wanted[-1]
        try:
            self.last_file = self._write(folder, number, reason, plan, state, tokens, finite, bad)
        except OSError as error:
            logger.error("step %d could not be written into %s: %s", number, folder, error.strerror or error)
            return
        logger.warning("step %d (%s) is in %s; python -m jaxinfer.replay --dump=... --model=... runs it again", number, reason, self.last_file)

    def _write(self, folder: Path, number: int, reason: str, plan: SchedulePlan, state: DeviceState, tokens: Sequence[int],
               finite: Sequence[bool], bad: set[int]) -> Path:
        r, n = self._resolved, len(plan.rows)
        layout = pick_layout(r.layouts, plan)
        page_table = np.asarray(state.page_table)[[row.slot for row in plan.rows]]
        kept, pages = _kept_pages(plan.rows, page_table, bad, page_size=r.page_size, limit=MAX_BYTES // r.memory.page_bytes)
        tensors = {"buffer": pack(plan, layout, plan.page_updates[:layout.num_updates]), "tokens": np.asarray(tokens[:n], np.int32),
                   "finite": np.asarray(finite[:n], bool), "pages": pages, "page_table": page_table,
                   "masks": np.asarray(state.slots.rules.masks)[[row.slot for row in plan.rows], 0]}
        for name, layers in (("k", state.cache.k), ("v", state.cache.v)):
            tensors |= {f"{name}.{i}": _as_stored(np.asarray(x[pages])) for i, x in enumerate(layers)}
        header = {
            "format": FORMAT, "number": number, "reason": reason, "layout": dataclasses.asdict(layout), "page_size": r.page_size,
            "model": _plain(r.model), "dtype": str(r.dtype), "kv_dtype": str(r.kv_dtype), "num_valid_tokens": r.num_valid_tokens,
            "settings": _plain(r.engine), "processors": self._processors, "device": r.hardware.name, "versions": _versions(),
            "rows": [_row(row, has_pages=b in kept) for b, row in enumerate(plan.rows)]}
        file = folder / f"step-{number:08d}.safetensors"
        partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
        try:
            save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, partial, metadata={"step": json.dumps(header)})
            os.replace(partial, file)
        except SafetensorError as error:
            raise OSError(str(error)) from error
        finally:
            partial.unlink(missing_ok=True)
        return file


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepDump:
    """A file's contents."""

    header: dict[str, Any]
    tensors: dict[str, np.ndarray]

    @property
    def layout(self) -> StepLayout:
        return StepLayout(**self.header["layout"])

    def cache(self, name: str, layer: int) -> np.ndarray:
        """[P', K, Z, H] keys ("k") or values ("v") of a layer in the pages kept."""
        x, dtype = self.tensors[f"{name}.{layer}"], np_dtype(self.header["kv_dtype"])
        return x.view(dtype) if x.dtype == np.uint16 else x


def read_dump(file: str | os.PathLike[str]) -> StepDump:
    """Reads a file that StepDumper wrote.

    Raises:
      DumpError: it cannot be read, is cut short, or is of another kind or version.
    """
    try:
        with safe_open(os.fspath(file), framework="numpy") as content:
            header = json.loads((content.metadata() or {}).get("step", "{}"))
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError, ValueError) as error:
        raise DumpError(f"{os.fspath(file)!r} cannot be read as a step ({error}): give a file that --dump_step wrote.") from error
    if "format" not in header:
        raise DumpError(f"{os.fspath(file)!r} holds no step, but something else in safetensors: give a file that --dump_step wrote.")
    if header["format"] != FORMAT:
        raise DumpError(f"{os.fspath(file)!r} has the format {header['format']!r}: this version reads {FORMAT!r}. Replay it with the "
                        "version of jaxinfer that wrote it.")
    return StepDump(header=header, tensors=tensors)


def config_differences(header: dict[str, Any], model: ModelConfig) -> list[str]:
    """Fields in which a model is not the one that the step ran, as texts for a person."""
    dumped, given = header["model"], _plain(model)
    return [f"{name} = {given.get(name)!r} instead of {dumped.get(name)!r}" for name in sorted(dumped.keys() | given.keys())
            if dumped.get(name) != given.get(name)]


def _kept_pages(rows: Sequence[ScheduledRow], page_table: np.ndarray, bad: set[int], *, page_size: int,
                limit: int) -> tuple[set[int], np.ndarray]:
    """The rows whose pages fit in `limit` pages together, those that were not finite first, and these pages: [P'] int32."""
    kept: set[int] = set()
    pages: dict[int, None] = {}
    for b in sorted(range(len(rows)), key=lambda b: b not in bad):
        own = page_table[b, :-(-rows[b].kv_len // page_size)].tolist()
        if len(pages | dict.fromkeys(own)) <= limit:
            pages |= dict.fromkeys(own)
            kept.add(b)
    return kept, np.asarray(sorted(pages), np.int32)


def _row(row: ScheduledRow, *, has_pages: bool) -> dict[str, Any]:
    request = row.request
    params = {f.name: _plain(getattr(request.params, f.name)) for f in dataclasses.fields(request.params)}
    return {"request_id": request.request_id, "start": row.start, "num_tokens": row.num_tokens, "samples": row.samples,
            "has_pages": has_pages, "has_grammar": request.grammar is not None, "prompt_token_ids": list(request.prompt_token_ids),
            "output_token_ids": list(request.output_token_ids), "bad_word_ids": [list(ids) for ids in request.bad_word_ids],
            "end_token_ids": sorted(request.end_token_ids | request.stop_token_ids), "params": params}


def _plain(value: Any) -> Any:
    """Dataclasses, mappings and tuples as JSON has them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _as_stored(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint16) if x.dtype == np_dtype("bfloat16") else x


def _versions() -> dict[str, str]:
    return {"jaxinfer": __version__, "jax": jax.__version__, "jaxlib": version("jaxlib"), "numpy": np.__version__,
            "python": platform.python_version()}


def _made(folder: str | os.PathLike[str]) -> Path:
    """The folder, made where it is not there."""
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        problem = None if os.access(path, os.W_OK | os.X_OK) else "no permission to write"
    except OSError as error:
        problem = error.strerror
    if problem:
        raise ConfigError(f"dump_step: the folder {os.fspath(folder)!r} cannot be written to ({problem}): name another.")
    return path
