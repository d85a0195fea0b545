"""Text files that models are calibrated and judged on: JSON Lines or plain text, and how two texts differ. Knows no tokens; host code."""

import codecs
import collections
import json
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxinfer.errors import ConfigError

EXPECTED = 'expected {"text": "..."} or {"messages": [...]}'
SCRIPTS = {"LATIN": "Latin", "CJK": "Chinese", "HIRAGANA": "Japanese", "KATAKANA": "Japanese", "HANGUL": "Korean", "CYRILLIC": "Cyrillic",
           "ARABIC": "Arabic", "GREEK": "Greek", "HEBREW": "Hebrew", "DEVANAGARI": "Devanagari", "THAI": "Thai"}
"""First word of a letter's Unicode name -> its script; other letters are of other scripts."""
LEAST_SHARE, LEAST_RATIO = 0.01, 2.0
"""Two texts differ in a kind of character where one has at least this share of it, and this many times the other's share."""


def read_bytes(path: Path) -> bytes:
    """A file's bytes. Raises ConfigError where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): give a .jsonl or text file.") from None


def decoded(path: Path, raw: bytes) -> str:
    """A file's bytes as text, without a byte order mark. Raises ConfigError with the line that is not UTF-8."""
    raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[:error.start].count(b"\n") + 1
        raise ConfigError(f"{path} line {line} is not UTF-8 (byte {raw[error.start]:#04x}): save it as UTF-8.") from None


def records(path: Path, raw: bytes) -> list[tuple[int, dict[str, Any]]]:
    """(line number, record) of every line that is not blank; each record is {"text": str} or {"messages": [dict, ...]}, nothing else.

    Data sets with columns for both leave one of them null: the one that holds something is taken, a text before messages.

    Raises:
      ConfigError: names the first line that is not such a record, or there is none.
    """
    found = []
    for number, line in enumerate(decoded(path, raw).split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} line {number} is not JSON ({error}): give one object a line, or a .txt file for plain text.") from None
        found.append((number, _record(record, f"{path} line {number}")))
    if not found:
        raise ConfigError(f"{path} holds no record: {EXPECTED} on at least one line.")
    return found


def _record(value: object, where: str) -> dict[str, Any]:
    """The one field of a line that is read. Raises ConfigError where neither is there, or a text is none."""
    text, messages = (value.get("text"), value.get("messages")) if isinstance(value, dict) else (None, None)
    if isinstance(text, str):
        return {"text": text}
    if text is None and isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        return {"messages": messages}
    what = sorted(value) if isinstance(value, dict) else type(value).__name__
    raise ConfigError(f"{where} has {what}: {EXPECTED}.")


def read_text(path: Path) -> str:
    """All text of a file: of a .jsonl file its texts and its messages' contents, one after another. Raises ConfigError as `records`."""
    raw = read_bytes(path)
    if path.suffix != ".jsonl":
        return decoded(path, raw)
    parts = []
    for _, record in records(path, raw):
        parts += [record["text"]] if "text" in record else [str(message.get("content", "")) for message in record["messages"]]
    return "\n".join(parts)


def profile(text: str) -> dict[str, float]:
    """Shares of a text's characters: digits, symbols, whitespace, and letters by script. Empty for an empty text."""
    counts: collections.Counter[str] = collections.Counter()
    for character, count in collections.Counter(text).items():
        counts[_kind(character)] += count
    return {kind: count / len(text) for kind, count in sorted(counts.items())}


def _kind(character: str) -> str:
    category = unicodedata.category(character)
    if category[0] == "N":
        return "digits"
    if category[0] in "PS":
        return "symbols"
    if character.isspace() or category[0] in "ZC":
        return "whitespace"
    return f"{SCRIPTS.get(unicodedata.name(character, '').partition(' ')[0], 'other')} letters"


def differences(calibration: Mapping[str, float], evaluation: Mapping[str, float]) -> list[str]:
    """Where two profiles differ enough to matter, in words; empty where they are alike."""
    found = []
    for kind in sorted(calibration.keys() | evaluation.keys()):
        one, other = calibration.get(kind, 0.0), evaluation.get(kind, 0.0)
        if max(one, other) >= LEAST_SHARE and max(one, other) >= LEAST_RATIO * min(one, other):
            found.append(f"{kind} are {100 * one:.1f} % of the calibration text, {100 * other:.1f} % here")
    return found
