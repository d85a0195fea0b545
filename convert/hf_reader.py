"""Reads a Hugging Face folder: config.json, weights (safetensors or .bin, one file or shards with an index), tokenizer files.

Everything that names a tensor is checked on opening: shards that are missing or cut short, tensors that the index promises and no
shard holds, tensors that no index names, tensors that two shards hold. Weight data is only mapped. Needs no torch and runs no code that a
checkpoint brings.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from convert.safetensors_file import SafetensorsFile
from convert.source import TensorInfo, dominant_dtype, read_json
from convert.torch_file import TorchFile
from jaxinfer.errors import CheckpointError, TokenizerError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
                   "tokenizer.model", "chat_template.jinja", "chat_template.json", "qwen.tiktoken")
PICKLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"
QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Where older quantisers put what config.json now has as quantization_config -> its quant_method."""
CONFIG_FILES = ("config.json", "generation_config.json", *QUANTIZATION_FILES)
DTYPE_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float32"}


class TensorFile(Protocol):
    """One file of weights, its header read and checked."""

    path: Path
    tensors: dict[str, TensorInfo]

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a tensor of floating point."""


class HFSource:
    """A Hugging Face folder as a convert.source.Source."""

    kind = "hf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_json(path / "config.json")
        quantization_files = _add_quantization(path, self.config)
        generation = path / "generation_config.json"
        self.generation_config = read_json(generation) if generation.exists() else None
        shards, index_files = _open_shards(path)
        self._shard_of = {name: shard for shard in shards for name in shard.tensors}
        self.tensors: Mapping[str, TensorInfo] = {name: shard.tensors[name] for name, shard in self._shard_of.items()}
        self.natural_dtype = dominant_dtype((info for info in self.tensors.values() if info.is_float), DTYPE_NAMES, "float32")
        self.files: tuple[Path, ...] = (path / "config.json", *quantization_files, *index_files, *(shard.path for shard in shards))

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a tensor, as a view into the mapped shard."""
        return self._shard_of[name].read_rows(name, start, stop)

    def write_tokenizer(self, folder: Path) -> frozenset[int]:
        """Copies the tokenizer's files as they are. A folder without any yields a checkpoint that takes token ids only."""
        for name in TOKENIZER_FILES:
            if (self.path / name).is_file():
                shutil.copyfile(self.path / name, folder / name)
        _check_tokenizer(folder / "tokenizer.json")
        return tokenizer_end_ids(folder)


def _add_quantization(path: Path, config: dict[str, Any]) -> list[Path]:
    """Gives a config without quantization_config that of an older quantiser's own file; returns the file."""
    found = [name for name in QUANTIZATION_FILES if (path / name).is_file()]
    if config.get("quantization_config") is not None or not found:
        return []
    config["quantization_config"] = {"quant_method": QUANTIZATION_FILES[found[0]], **read_json(path / found[0])}
    return [path / found[0]]


def _check_tokenizer(path: Path) -> None:
    """Builds the tokenizer once, where tokenizer.json describes it. Raises TokenizerError when that cannot be done."""
    if path.is_file():
        from tokenizers import Tokenizer

        with _TokenizersErrors(path):
            Tokenizer.from_file(str(path))


class _TokenizersErrors:
    """Turns what the tokenizers library raises, which is a plain Exception or a panic of its Rust code, into a TokenizerError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is Exception or kind is not None and kind.__name__ == "PanicException":
            raise TokenizerError(f"{self._path} describes no tokenizer ({str(error)[:200]}): fetch the file again") from None


def tokenizer_end_ids(folder: Path) -> frozenset[int]:
    """The id of the eos_token that tokenizer_config.json names, empty when it names none or no file tells its id."""
    config_path = folder / "tokenizer_config.json"
    if not config_path.is_file():
        return frozenset()
    config = read_json(config_path)
    token = config.get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        return frozenset()
    ids = {_added_id(entry) for entry in _added_tokens(folder, config) if entry.get("content") == content}
    if not ids:
        vocab = _vocabulary(folder)
        ids = {vocab.get(content)}
    return frozenset(token_id for token_id in ids if isinstance(token_id, int))


def _added_tokens(folder: Path, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Added tokens as [{id, content}], from whichever of the tokenizer's files lists them."""
    found: list[dict[str, Any]] = []
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        found += [{**entry, "id": token_id} for token_id, entry in decoder.items() if isinstance(entry, dict)]
    if (folder / "tokenizer.json").is_file():
        added = read_json(folder / "tokenizer.json").get("added_tokens")
        found += [entry for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
    if (folder / "added_tokens.json").is_file():
        found += [{"content": content, "id": token_id} for content, token_id in read_json(folder / "added_tokens.json").items()]
    return found


def _added_id(entry: dict[str, Any]) -> int | None:
    text = str(entry.get("id"))
    return int(text) if text.isdecimal() else None


def _vocabulary(folder: Path) -> dict[str, Any]:
    """The plain vocabulary, token to id; empty when it is kept in a form that holds no such table."""
    if (folder / "vocab.json").is_file():
        return read_json(folder / "vocab.json")
    if not (folder / "tokenizer.json").is_file():
        return {}
    model = read_json(folder / "tokenizer.json").get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    return vocab if isinstance(vocab, dict) else {}


def _open_shards(path: Path) -> tuple[Sequence[TensorFile], list[Path]]:
    """The folder's files of weights, opened and cross-checked, and the index file where there is one. safetensors go before .bin."""
    for single, index, opener in ((SINGLE, INDEX, SafetensorsFile), (PICKLE, PICKLE_INDEX, TorchFile)):
        if (path / single).is_file():
            return [opener(path / single)], []
        if (path / index).is_file():
            weight_map = _read_weight_map(path / index, Path(single).suffix)
            return _open_indexed(path, index, weight_map, opener), [path / index]
    stray = sorted(file.name for file in path.iterdir() if file.suffix in (".safetensors", ".bin"))
    if stray:
        raise CheckpointError(f"{path} has {', '.join(stray[:4])} but none of {SINGLE}, {INDEX}, {PICKLE} and {PICKLE_INDEX}: fetch the "
                              "missing index")
    raise CheckpointError(f"{path} has no weights: expected {SINGLE}, {INDEX}, {PICKLE} or {PICKLE_INDEX}")


def _read_weight_map(path: Path, suffix: str) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map from tensor names to shards: fetch the file again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(suffix):
            raise CheckpointError(f"{path} maps {name} to {json.dumps(shard)}, which is no {suffix} file of this folder")
    return weight_map


def _open_indexed(path: Path, index: str, weight_map: dict[str, str], opener: Callable[[Path], TensorFile]) -> list[TensorFile]:
    """Opens every shard of an index and checks that the index and the shards name the same tensors, each once."""
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise CheckpointError(f"{path} lacks {len(missing)} of {len(names)} shards that {index} names: {', '.join(missing)}")
    shards = [opener(path / name) for name in names]
    problems, holder = [], dict[str, str]()
    for shard in shards:
        for name in shard.tensors:
            if name in holder:
                problems.append(f"{name} is in both {holder[name]} and {shard.path.name}")
            elif name not in weight_map:
                problems.append(f"{name} is in {shard.path.name} but not in the index")
            holder.setdefault(name, shard.path.name)
    for name, shard_name in weight_map.items():
        if holder.get(name) is None:
            problems.append(f"{name} should be in {shard_name} but no shard holds it")
        elif holder[name] != shard_name:
            problems.append(f"{name} should be in {shard_name} but is in {holder[name]}")
    if problems:
        raise CheckpointError(f"{path}: {index} and its shards disagree on {len(problems)} tensors: " + "; ".join(problems[:10]))
    return shards
