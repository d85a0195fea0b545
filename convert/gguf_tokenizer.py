"""Builds a Hugging Face tokenizer (tokenizer.json, tokenizer_config.json) from GGUF metadata. Byte-level BPE only; imports no transformers.

`tokenizer.ggml.pre` names how text is split before BPE. The names are llama.cpp's; a name that is not in PRE_TOKENIZERS is refused,
since a wrong split gives wrong ids without any error.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxinfer.errors import TokenizerError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2_SPLIT = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + TAIL
LLAMA3_SPLIT = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + TAIL


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """One way of splitting text, and what goes with it."""

    build: Callable[[], Any]
    normalizer: Callable[[], Any] | None = None
    ignore_merges: bool = False
    """Whether a word that is a token as a whole is taken without merging."""
    add_bos: bool = False
    """Whether a text begins with the bos token where the file does not say."""


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_LLAMA3 = PreTokenizer(build=lambda: _split(LLAMA3_SPLIT), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer(build=lambda: _split(QWEN2_SPLIT), normalizer=normalizers.NFC)
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": PreTokenizer(build=_gpt2),
    "smollm": PreTokenizer(build=_single_digits),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}


def write_gguf_tokenizer(metadata: Mapping[str, Any], folder: Path, *, vocab_size: int, max_len: int) -> frozenset[int]:
    """Writes tokenizer.json and tokenizer_config.json (with the chat template, where there is one).

    Args:
      metadata: the GGUF file's metadata.
      folder: where the files go.
      vocab_size: rows of the embedding; every token that text can become must have one.
      max_len: the model's context, tokens.

    Returns:
      The end tokens that the metadata declares: `eos` and, where given, `eot` and `eom`.

    Raises:
      TokenizerError: no byte-level BPE, an unknown pre-tokenizer, or tables that do not fit each other.
    """
    tokens = _table(metadata, "tokens", str)
    kinds = _table(metadata, "token_type", int) if "tokenizer.ggml.token_type" in metadata else [NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise TokenizerError(f"GGUF has {len(tokens)} tokens but {len(kinds)} token types: the file is damaged")
    last = max((token_id for token_id, kind in enumerate(kinds) if kind != UNUSED), default=-1)
    if last >= vocab_size:
        raise TokenizerError(f"GGUF token {last} ({tokens[last]!r}) has no row in the embedding of {vocab_size}: the file is damaged")
    tokenizer = _build(metadata, tokens, kinds)
    named = {name: _special(metadata, name, tokens) for name in ("bos", "eos", "unknown", "padding")}
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", _pre_tokenizer(metadata).add_bos)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    _add_template(tokenizer, named["bos"] if add_bos else None, named["eos"] if add_eos else None)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_len,
        "add_bos_token": bool(add_bos),
        "add_eos_token": bool(add_eos),
    }
    for name, key in (("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token"), ("padding", "pad_token")):
        token = named[name]
        config[key] = None if token is None else token[1]  # None, not absent: some classes have defaults of their own
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    ends = (_special(metadata, name, tokens) for name in ("eos", "eot", "eom"))
    return frozenset(token[0] for token in ends if token is not None)


def _build(metadata: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> Tokenizer:
    """The tokenizer without its template: vocabulary, merges, splits, added tokens. Unused entries (padding rows) are left out."""
    pre = _pre_tokenizer(metadata)
    vocab: dict[str, int] = {}
    for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind not in (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED):
            raise TokenizerError(f"GGUF token {token_id} ({token!r}) has type {kind}, which byte-level BPE does not have")
        if kind == UNUSED:
            continue
        if token in vocab:
            raise TokenizerError(f"GGUF tokens {vocab[token]} and {token_id} are both {token!r}: the file is damaged")
        vocab[token] = token_id
    merges = [_merge(text, vocab) for text in _table(metadata, "merges", str)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    if pre.normalizer is not None:
        tokenizer.normalizer = pre.normalizer()
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(tokens[i], special=kinds[i] != USER_DEFINED, normalized=False)
             for i in range(len(tokens)) if kinds[i] in (UNKNOWN, CONTROL, USER_DEFINED)]
    tokenizer.add_tokens(added)
    return tokenizer


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise TokenizerError(f"GGUF tokenizer model {model!r} is not supported, only byte-level BPE ('gpt2'): convert the Hugging Face "
                             "folder of the model instead")
    if pre not in PRE_TOKENIZERS:
        raise TokenizerError(f"GGUF pre-tokenizer {pre!r} is not supported; known are {', '.join(PRE_TOKENIZERS)}: convert the "
                             "Hugging Face folder of the model instead")
    return PRE_TOKENIZERS[pre]


def _table(metadata: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    table = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(table, list) or not all(type(item) is kind for item in table):
        raise TokenizerError(f"GGUF metadata has no table tokenizer.ggml.{name} of {kind.__name__}: the file has no usable tokenizer")
    return table


def _merge(text: str, vocab: Mapping[str, int]) -> tuple[str, str]:
    """'left right' -> (left, right), all of it in the vocabulary."""
    left, _, right = text.partition(" ")
    if left not in vocab or right not in vocab or left + right not in vocab:
        raise TokenizerError(f"GGUF merge {text!r} uses tokens that the vocabulary lacks: the file is damaged")
    return left, right


def _special(metadata: Mapping[str, Any], name: str, tokens: list[str]) -> tuple[int, str] | None:
    """(id, text) of a named token, None where the file names none."""
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if token_id is None:
        return None
    if type(token_id) is not int or not 0 <= token_id < len(tokens):
        raise TokenizerError(f"GGUF {name}_token_id is {token_id!r}, but the vocabulary has {len(tokens)} tokens: the file is damaged")
    return token_id, tokens[token_id]


def _add_template(tokenizer: Tokenizer, bos: tuple[int, str] | None, eos: tuple[int, str] | None) -> None:
    """What is put round a text: byte-level offsets always, bos and eos where asked for."""
    byte_level = processors.ByteLevel(trim_offsets=False)
    if bos is None and eos is None:
        tokenizer.post_processor = byte_level
        return
    single = [*([bos[1]] if bos else []), "$A", *([eos[1]] if eos else [])]
    special = [(token[1], token[0]) for token in (bos, eos) if token is not None]
    template = processors.TemplateProcessing(single=single, pair=[*single, *(piece.replace("$A", "$B") + ":1" for piece in single)],
                                             special_tokens=list(dict.fromkeys(special)))
    tokenizer.post_processor = processors.Sequence([byte_level, template])
