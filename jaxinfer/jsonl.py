"""Prompts from a JSON Lines file, results into one. Reads and checks; generates nothing.

A line holds one of {"prompt": text}, {"messages": [...]} or {"prompt_token_ids": [...]}, beside it any fields of SamplingParams
for this line alone, its "priority" and "deadline_s" as LLM.generate takes them, and an "id" that comes back with the result.
"""

import dataclasses
import json
import math
import os
import stat
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinfer.errors import JaxInferError, RequestError
from jaxinfer.request import CompletionOutput, PositionLogprobs, RequestOutput, read_deadline_s, read_priority
from jaxinfer.sampling.params import SamplingParams

SOURCES = ("prompt", "messages", "prompt_token_ids")
_BESIDE = ("id", "priority", "deadline_s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One prompt to complete, and where it came from."""

    name: str
    """What messages call it: 'line 3' or 'prompt 2'."""
    prompt: Mapping[str, Any]
    """One of the SOURCES and its value, as LLM.generate takes it."""
    params: SamplingParams
    tags: Mapping[str, Any]
    """Fields that its result begins with: the line, and the id where one was given."""
    priority: int = 0
    """Smaller is more urgent."""
    deadline_s: float | None = None
    """Seconds from arrival until it ends wherever it stands."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BadLine:
    """A line that holds no prompt, and why."""

    line: int
    message: str


def read_prompts(path: Path, params: SamplingParams) -> list[Entry | BadLine]:
    """The lines of a JSON Lines file in order; empty lines are skipped, and a bad line stops no other.

    Args:
      path: UTF-8, one object a line.
      params: for what a line does not set itself.

    Raises:
      OSError: the file cannot be read.
    """
    items: list[Entry | BadLine] = []
    for number, raw in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not raw.strip():
            continue
        try:
            items.append(_entry(raw, number, params))
        except RequestError as e:
            items.append(BadLine(line=number, message=str(e)))
    return items


def _entry(raw: bytes, number: int, params: SamplingParams) -> Entry:
    try:
        line = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as e:
        raise RequestError(f"not UTF-8: byte {raw[e.start]:#04x} at column {e.start + 1}.") from e
    except (ValueError, RecursionError) as e:
        raise RequestError(f"not JSON: {e}.") from e
    if not isinstance(line, dict):
        raise RequestError(f"holds a {type(line).__name__}: must be an object with one of {', '.join(SOURCES)}.")
    given = [key for key in SOURCES if key in line]
    if len(given) != 1:
        raise RequestError(f"has {' and '.join(given) or 'no prompt'}: must have exactly one of {', '.join(SOURCES)}.")
    overrides = {key: value for key, value in line.items() if key not in (*SOURCES, *_BESIDE)}
    prompt = {given[0]: _checked_source(given[0], line[given[0]])}
    tags = {"line": number} | ({"id": line["id"]} if "id" in line else {})
    return Entry(name=f"line {number}", prompt=prompt, params=_overridden(params, overrides), tags=tags,
                 priority=read_priority(line.get("priority", 0)), deadline_s=read_deadline_s(line.get("deadline_s")))


def _checked_source(key: str, value: Any) -> Any:
    if key == "prompt":
        ok, form = isinstance(value, str), "a text"
    elif key == "messages":
        ok = isinstance(value, list) and len(value) > 0 and all(isinstance(m, dict) for m in value)
        form = "a list of at least one {\"role\": ..., \"content\": ...}"
    else:
        ok = isinstance(value, list) and all(isinstance(t, int) and not isinstance(t, bool) for t in value)
        form = "a list of integers"
    if not ok:
        raise RequestError(f"{key} = {json.dumps(value)[:80]}: must be {form}.")
    return value


def _overridden(params: SamplingParams, overrides: Mapping[str, Any]) -> SamplingParams:
    hints = typing.get_type_hints(SamplingParams)
    for name, value in overrides.items():
        if name not in hints:
            raise RequestError(f"unknown field {name!r}: known are {', '.join((*SOURCES, *_BESIDE, *hints))}.")
        if not _fits(value, hints[name]):
            raise RequestError(f"{name} = {json.dumps(value)[:80]}: has the wrong type.")
    return dataclasses.replace(params, **overrides)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value has the type of a SamplingParams field."""
    if isinstance(hint, types.UnionType):
        return any(_fits(value, h) for h in typing.get_args(hint))
    if typing.get_origin(hint) is Mapping:
        return isinstance(value, dict)  # SamplingParams checks what it holds
    if typing.get_origin(hint) is Sequence:
        return isinstance(value, list) and all(_fits(v, typing.get_args(hint)[0]) for v in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def failure(item: Entry | BadLine, error: str) -> dict[str, Any]:
    """What is written for a prompt that gave no text."""
    return {"line": item.line, "error": error} if isinstance(item, BadLine) else {**item.tags, **item.prompt, "error": error}


def result(entry: Entry, output: RequestOutput) -> dict[str, Any]:
    """What is written for a prompt."""
    if output.error is not None:
        return failure(entry, output.error)
    ms = {"ttft_ms": output.metrics.ttft_s, "latency_ms": output.metrics.latency_s}
    scores = {} if output.prompt_logprobs is None else {"prompt_logprobs": [p and _logprobs(p) for p in output.prompt_logprobs]}
    return {
        **entry.tags, **entry.prompt, "num_prompt_tokens": len(output.prompt_token_ids), "num_cached_tokens": output.num_cached_tokens,
        "outputs": [_completion(o) for o in output.outputs], **scores,
        **{name: None if seconds is None else round(1e3 * seconds, 3) for name, seconds in ms.items()},
    }


def _completion(completion: CompletionOutput) -> dict[str, Any]:
    """A completion's fields; log-probabilities only where they were asked for."""
    fields = {f.name: getattr(completion, f.name) for f in dataclasses.fields(completion)}
    if completion.logprobs is None:
        del fields["logprobs"], fields["cumulative_logprob"]
        return fields
    return {**fields, "logprobs": [_logprobs(position) for position in completion.logprobs]}


def _logprobs(position: PositionLogprobs) -> dict[str, Any]:
    """Token id -> log-probability, rank and text, as JSON can hold it: the logarithm of zero is null."""
    return {str(token_id): {**dataclasses.asdict(p), "logprob": p.logprob if math.isfinite(p.logprob) else None}
            for token_id, p in position.items()}


class ResultFile:
    """A JSON Lines file under way. Every line goes out whole and at once, so what a reader or a crash finds are whole lines."""

    def __init__(self, path: Path) -> None:
        """Opens the file; what it holds stays until the first line is written.

        Raises:
          OSError: it cannot be written.
        """
        self._path = path
        self._is_new = not path.exists()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self.num_lines = 0

    def __enter__(self) -> "ResultFile":
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the file, and removes it if it is new and nothing was written."""
        os.close(self._fd)
        if self._is_new and self.num_lines == 0:
            self._path.unlink(missing_ok=True)

    def write(self, record: Mapping[str, Any]) -> None:
        """Writes one line.

        Raises:
          JaxInferError: the disk is full, or the file has become unwritable.
        """
        text = json.dumps(record, ensure_ascii=False) + "\n"
        line = memoryview(text.encode(errors="backslashreplace"))  # a lone surrogate becomes JSON's own escape
        try:
            if self.num_lines == 0 and stat.S_ISREG(os.fstat(self._fd).st_mode):
                os.ftruncate(self._fd, 0)
            while line:
                line = line[os.write(self._fd, line):]
        except OSError as e:
            raise JaxInferError(f"cannot write to {str(self._path)!r}: {e.strerror}. The {self.num_lines} lines before are whole.") from e
        self.num_lines += 1
