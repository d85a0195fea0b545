"""Small tokenizers made on the spot, one for each way of decoding."""

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

TEXTS = ["the quick brown fox", "Ünïcode, 日本語 and 🦊🦊", "  two  spaces\n\nlines\t", "def f(x):\n    return x + 1", "naïve café"] * 4
CHATML = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE as Qwen, Llama 3 and SmolLM have it; ids 0 to 2 are special, one added token is not and holds a space."""
    t = tokenizers.Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    t.train_from_iterator(TEXTS, trainer)
    t.add_tokens(["plain added ü", "日"])
    return t


def byte_fallback(strip: bool = True) -> tokenizers.Tokenizer:
    """A sentencepiece-like vocabulary as Llama 2 (strip) and Gemma have it: '▁' for spaces, <0xNN> tokens for rare bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁▁", "▁the", "fox", "▁a", "é", "日本", "�", "\n", "x"]
    t = tokenizers.Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    t.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    t.add_special_tokens(["<s>", "</s>"])
    return t


def metaspace() -> tokenizers.Tokenizer:
    """A unigram vocabulary with the metaspace decoder, which treats the first token apart."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -1.0), ("▁the", -2.0), ("▁▁b", -2.5), ("fox", -2.0), ("é", -3.0)]
    t = tokenizers.Tokenizer(models.Unigram(pieces, 0))
    t.pre_tokenizer = pre_tokenizers.Metaspace()
    t.decoder = decoders.Metaspace()
    t.add_special_tokens(["</s>"])
    return t


def mixed() -> tokenizers.Tokenizer:
    """Byte-level, but inside a sequence of decoders."""
    t = byte_level()
    t.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return t


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "byte_fallback_unstripped": lambda: byte_fallback(strip=False),
         "metaspace": metaspace, "mixed": mixed}


def wrap(fast: tokenizers.Tokenizer, **kwargs: Any) -> Any:
    """A transformers tokenizer round it."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=fast, **kwargs)


def save(folder: Path, **kwargs: Any) -> Path:
    """A model folder with the byte-level tokenizer in it."""
    settings = {"eos_token": "<|endoftext|>", "chat_template": CHATML, **kwargs}
    wrap(byte_level(), **settings).save_pretrained(folder)
    return folder
