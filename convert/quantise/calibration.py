"""Text files to token windows: JSON Lines ({"text": ...} or {"messages": [...]}) or plain text. Reads and samples; computes nothing.

Records are shuffled by the seed, joined in that order, and cut into windows of equal length, so no position is padding.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.errors import ConfigError, RequestError
from jaxinfer.textfile import decoded, read_bytes, records
from jaxinfer.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenWindows:
    """Equal windows of tokens, and where they came from."""

    tokens: np.ndarray
    """[S, T] int32."""
    source: dict[str, Any]
    """For a manifest: file name, bytes, sha256, seed, number and length of the windows, tokens that the whole file has."""


def read_windows(file: str | Path, tokenizer: Tokenizer, *, num_samples: int, max_len: int, seed: int) -> TokenWindows:
    """Up to `num_samples` windows of `max_len` tokens of a file.

    A .jsonl file has one record a line; its records are shuffled. Any other file is one text, of which windows at distinct places are
    drawn. Equal arguments give equal windows.

    Args:
      file: the text.
      tokenizer: of the model.
      num_samples: S, windows wanted; fewer come back where the text is shorter.
      max_len: T, tokens a window.
      seed: of the shuffle.

    Raises:
      ConfigError: the file cannot be read, a line is not a record (named by its number), or there is not one window of text.
    """
    if num_samples < 1 or max_len < 2:
        raise ConfigError(f"num_samples = {num_samples} and max_len = {max_len}: at least 1 window of at least 2 tokens is needed.")
    path = Path(file).expanduser()
    raw = read_bytes(path)
    rng = np.random.default_rng(seed)
    if path.suffix == ".jsonl":
        stream = _joined(_encoders(path, raw, tokenizer), rng, enough=num_samples * max_len)
        chosen = list(range(len(stream) // max_len))[:num_samples]
    else:
        stream = tokenizer.encode(decoded(path, raw))
        count = len(stream) // max_len
        chosen = sorted(rng.permutation(count)[:num_samples].tolist())
    if not chosen:
        raise ConfigError(f"{path} has {len(stream)} tokens, which is not one window of {max_len}: give more text or a smaller --max_len.")
    tokens = np.array([stream[i * max_len:(i + 1) * max_len] for i in chosen], np.int32)
    return TokenWindows(tokens=tokens, source={
        "file": path.name, "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest(), "seed": seed, "num_samples": len(chosen),
        "max_len": max_len})


def _encoders(path: Path, raw: bytes, tokenizer: Tokenizer) -> list[Callable[[], list[int]]]:
    """For each record a function that tokenises it."""
    def encoder(number: int, record: dict[str, Any]) -> Callable[[], list[int]]:
        def encode() -> list[int]:
            try:
                return (tokenizer.encode(record["text"]) if "text" in record
                        else tokenizer.apply_chat_template(record["messages"], add_generation_prompt=False))
            except RequestError as error:
                raise ConfigError(f"{path} line {number}: {error}") from None
        return encode

    return [encoder(number, record) for number, record in records(path, raw)]


def _joined(encoders: Sequence[Callable[[], list[int]]], rng: np.random.Generator, *, enough: int) -> list[int]:
    """Tokens of the shuffled records, up to where there are enough."""
    stream: list[int] = []
    for i in rng.permutation(len(encoders)):
        stream += encoders[i]()
        if len(stream) >= enough:
            break
    return stream
