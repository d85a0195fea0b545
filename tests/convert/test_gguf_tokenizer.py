"""Tokenizers built from GGUF metadata: splits, special tokens, templates; and the dequantisation of every type in blocks of rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from transformers import AutoTokenizer

from convert.converter import convert
from convert.gguf_reader import GGUFSource, dequantise, is_readable, stored_rows
from convert.gguf_tokenizer import PRE_TOKENIZERS, write_gguf_tokenizer
from jaxinfer.checkpoint import read_manifest
from jaxinfer.errors import TokenizerError
from tests.convert.checkpoints import byte_tokens, ggml_rows, gguf_vocabulary, hf_config, hf_tensors, write_gguf

TEXTS = ["the the", "12345 67", "I'm you'LL  don't", "  a\n\n b\t\r\n c   ", "你好，世界！", "def f(x):\n    return x+1\n", "😀 ÀÉ", ""]


def metadata(pre: str = "qwen2", **changes: Any) -> dict[str, Any]:
    tokens, kinds, merges = gguf_vocabulary()
    fields = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": kinds, "merges": merges, "eos_token_id": 261, **changes}
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}


def pieces(folder: Path, text: str) -> list[str]:
    """How a text is split before BPE, as plain text."""
    tokenizer = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    back = {char: byte for byte, char in enumerate(byte_tokens())}
    return [bytes(back[char] for char in piece).decode() for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_round_trips(tmp_path: Path, pre: str) -> None:
    write_gguf_tokenizer(metadata(pre), tmp_path, vocab_size=272, max_len=64)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(("pre", "text", "wanted"), [
    ("smollm", "ab 123 c", ["ab", " ", "1", "2", "3", " c"]),
    ("gpt-2", "ab 123 c", ["ab", " 123", " c"]),
    ("qwen2", "ab 123 c", ["ab", " ", "1", "2", "3", " c"]),
    ("llama-bpe", "ab 12345 c", ["ab", " ", "123", "45", " c"]),
    ("qwen2", "I'LL\n\n x", ["I", "'LL", "\n\n", " x"]),
    ("gpt-2", "I'LL you'll", ["I", "'", "LL", " you", "'ll"]),
    ("qwen2", "a  b   ", ["a", " ", " b", "   "]),
    ("qwen2", "#include<x>\n", ["#include", "<x", ">\n"]),
])
def test_splits(tmp_path: Path, pre: str, text: str, wanted: list[str]) -> None:
    write_gguf_tokenizer(metadata(pre), tmp_path, vocab_size=272, max_len=64)
    assert pieces(tmp_path, text) == wanted


def test_special_tokens_and_template(tmp_path: Path) -> None:
    config = hf_config()
    write_gguf(tmp_path / "m.gguf", config, hf_tensors(config, np.float32), pre="qwen2", metadata={"tokenizer.ggml.eot_token_id": 260})
    folder = convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert read_manifest(folder)["end_token_ids"] == [260, 261]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, max(tokenizer.get_vocab().values())) == (261, 259, 262)  # no padding row
    assert tokenizer.encode(" the<|im_end|><tool>") == [258, 261, 262]
    assert tokenizer.decode([258, 261, 262], skip_special_tokens=True) == " the<tool>"
    text = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False)
    assert text == "<|im_start|>user\nthe<|im_end|>\n"


@pytest.mark.parametrize(("changes", "first"), [
    ({"add_bos_token": True, "bos_token_id": 259}, [259, 257]), ({"bos_token_id": 259}, [257]), ({"add_bos_token": False}, [257]),
    ({"pre": "llama-bpe", "bos_token_id": 259}, [259, 257]),
    ({"add_bos_token": True, "add_eos_token": True, "bos_token_id": 259}, [259, 257, 261]),
])
def test_bos(tmp_path: Path, changes: dict[str, Any], first: list[int]) -> None:
    write_gguf_tokenizer(metadata(**changes), tmp_path, vocab_size=272, max_len=64)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("he") == first
    assert tokenizer.encode("he", add_special_tokens=False) == [257]


@pytest.mark.parametrize(("changes", "message"), [
    ({"model": "llama"}, "tokenizer model 'llama'"), ({"pre": "tekken"}, "pre-tokenizer 'tekken'"), ({"pre": None}, "pre-tokenizer None"),
    ({"tokens": None}, "no table tokenizer.ggml.tokens"), ({"merges": None}, "no table tokenizer.ggml.merges"),
    ({"token_type": [1]}, "264 tokens but 1 token types"), ({"merges": ["q z"]}, "merge 'q z'"),
    ({"eos_token_id": 264}, "eos_token_id is 264"),
    ({"tokens": [str(i) for i in range(300)], "token_type": None}, "no row in the embedding"),
    ({"token_type": [6] * 264}, "has type 6"), ({"tokens": ["a"] * 264}, "are both 'a'"),
])
def test_unusable_tokenizers(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        write_gguf_tokenizer(metadata(**changes), tmp_path, vocab_size=272, max_len=64)


def readable_types() -> list[str]:
    return [kind.name for kind in GGMLQuantizationType if is_readable(kind)]


def test_every_type_of_the_library_is_readable() -> None:
    assert {kind.name for kind in quants._type_traits} <= set(readable_types())
    assert not is_readable(GGMLQuantizationType.I32)


@pytest.mark.parametrize("name", readable_types())
def test_blocks_of_rows_equal_the_whole(name: str) -> None:
    kind = GGMLQuantizationType[name]
    block_bytes = GGML_QUANT_SIZES[kind][1]
    raw = np.random.default_rng(3).integers(0, 60, (8, 2 * block_bytes), dtype=np.uint8)  # small bytes: no NaN in any float field
    whole = dequantise(raw, kind)
    assert np.array_equal(np.concatenate([dequantise(raw[i:i + 3], kind) for i in (0, 3, 6)]), whole)
    assert whole.shape == (8, 2 * GGML_QUANT_SIZES[kind][0])


def test_rope_order_is_undone() -> None:
    weight = np.arange(128 * 3).reshape(128, 3)
    assert np.array_equal(ggml_rows(weight)[stored_rows(np.arange(128), 32)], weight)
    assert np.array_equal(ggml_rows(weight)[stored_rows(np.arange(40, 90), 32)], weight[40:90])


def test_config_from_metadata(tmp_path: Path) -> None:
    config = hf_config("LlamaForCausalLM", tied=True)
    write_gguf(tmp_path / "m.gguf", config, hf_tensors(config, np.float32), metadata={
        "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0, "llama.rope.dimension_count": 32, "llama.vocab_size": 80})
    found = GGUFSource(tmp_path / "m.gguf").config
    wanted = {**config, "attention_bias": False, "mlp_bias": False, "rope_scaling": {"rope_type": "linear", "factor": 4.0},
              "bos_token_id": 259, "eos_token_id": 261, "transformers_version": "5.0.0"}
    assert found == wanted
