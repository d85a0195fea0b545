"""Reads a GGUF model as a Hugging Face one: names, row order and config translated, tensors dequantised in blocks of rows.

Every type that the gguf library dequantises is read. Its llama files hold query and key rows in GGML's rope order; they come out in
Hugging Face's. Quantised data is mapped, never held whole.
"""

import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from convert.gguf_config import architecture_of, synthesise_config
from convert.gguf_file import GGUFFile, GGUFTensor
from convert.gguf_tokenizer import write_gguf_tokenizer
from convert.source import TensorInfo, dominant_dtype
from jaxinfer.errors import CheckpointError, UnsupportedModelError

GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QUERY_OR_KEY = re.compile(r"\.self_attn\.[qk]_proj\.")
PLAIN = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16), "F64": np.dtype("<f8")}
DTYPE_NAMES = {"F32": "float32", "F64": "float32", "F16": "float16", "BF16": "bfloat16"}


class GGUFSource:
    """A GGUF file as a convert.source.Source."""

    kind = "gguf"
    generation_config: dict[str, Any] | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: tuple[Path, ...] = (path,)
        self._file = GGUFFile(path)
        self.metadata: Mapping[str, Any] = self._file.metadata
        architecture = architecture_of(self._file.metadata)
        self._stored: dict[str, GGUFTensor] = {}
        for name, tensor in self._file.tensors.items():
            other = self._stored.setdefault(hf_name(name), tensor)
            if other is not tensor:
                raise CheckpointError(f"{path}: tensors {other.name} and {name} are both {hf_name(name)}: the file is damaged")
        self.tensors: Mapping[str, TensorInfo] = {name: _info(path, name, tensor) for name, tensor in self._stored.items()}
        embedding = self.tensors.get("model.embed_tokens.weight")
        if embedding is None:
            raise CheckpointError(f"{path} has no tensor token_embd.weight: it is no complete language model")
        self.config = synthesise_config(self._file.metadata, self.tensors, embedding.shape)
        self._permuted, self._head_dim = architecture.permuted, int(self.config["head_dim"])
        matrices = [info for info in self.tensors.values() if len(info.shape) > 1]  # norms and biases are always F32
        self.natural_dtype = dominant_dtype(matrices, DTYPE_NAMES, "bfloat16")

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a tensor; float32 for a quantised one, else the stored dtype."""
        tensor = self._stored[name]
        raw = self._file.raw_rows(tensor.name)
        if len(tensor.shape) == 1:  # a vector's rows are its elements
            raw = raw.reshape(tensor.shape[0], -1)
        permuted = self._permuted and QUERY_OR_KEY.search(name) is not None
        picked = raw[stored_rows(np.arange(start, stop), self._head_dim)] if permuted else raw[start:stop]
        return dequantise(picked, tensor.type).reshape(stop - start, *tensor.shape[1:])

    def write_tokenizer(self, folder: Path) -> frozenset[int]:
        """Builds the tokenizer from the metadata."""
        vocab_size, max_len = int(self.config["vocab_size"]), int(self.config["max_position_embeddings"])
        return write_gguf_tokenizer(self._file.metadata, folder, vocab_size=vocab_size, max_len=max_len)


def hf_name(name: str) -> str:
    """A GGUF tensor's Hugging Face name; a name that the tables lack stays as it is, and the bijection then refuses it."""
    stem, _, suffix = name.rpartition(".")
    if stem in GLOBAL_NAMES:
        return f"{GLOBAL_NAMES[stem]}.{suffix}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in LAYER_NAMES:
        return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{suffix}"
    return name


def stored_rows(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Where GGML's rope order keeps these rows: row h of a head, in halves (i, half), lies at 2 * i + half."""
    head, within = np.divmod(rows, head_dim)
    half, pair = np.divmod(within, head_dim // 2)
    return head * head_dim + 2 * pair + half


def dequantise(raw: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Rows of stored bytes, [rows, bytes], as floating-point rows [rows, elements]."""
    if kind.name in PLAIN:
        return np.ascontiguousarray(raw).view(PLAIN[kind.name])
    with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale; whoever reads the rows refuses NaN and infinity
        return quants.dequantize(np.ascontiguousarray(raw), kind)


@functools.cache
def is_readable(kind: GGMLQuantizationType) -> bool:
    """Whether the type is plain floating point or the gguf library dequantises it."""
    if kind.name in PLAIN:
        return True
    try:
        quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _info(path: Path, name: str, tensor: GGUFTensor) -> TensorInfo:
    if not is_readable(tensor.type):
        raise UnsupportedModelError(f"{path}: tensor {tensor.name} has type {tensor.type.name}, which the gguf library cannot dequantise")
    if len(tensor.shape) == 1 and tensor.type.name not in PLAIN:
        raise UnsupportedModelError(f"{path}: tensor {tensor.name} of shape {list(tensor.shape)} is quantised ({tensor.type.name}); "
                                    "only matrices may be")
    assert tensor.num_bytes % math.prod(tensor.shape[:-1]) == 0
    return TensorInfo(name=name, origin=tensor.name, shape=tensor.shape, dtype=tensor.type.name, num_bytes=tensor.num_bytes,
                      is_float=True)
