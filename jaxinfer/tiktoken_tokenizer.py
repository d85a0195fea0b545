"""Qwen v1's tokenizer: a tiktoken vocabulary with its special tokens, and the ChatML that its chat models speak. Reads local files only.

What jaxinfer/tokenizer.py asks of a backend, and nothing else; folders with a tokenizer.json never come here.

    ids   [0, R) ranks of the file | R <|endoftext|> | R+1 <|im_start|> | R+2 <|im_end|> | R+3 ... R+207 <|extra_0|> ... <|extra_204|>

R is 151643 in the published vocabulary.
"""

import base64
import binascii
import unicodedata
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from jaxinfer.detokenizer import byte_alphabet
from jaxinfer.errors import RequestError, TokenizerError

FILE_NAME = "qwen.tiktoken"
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END, *(f"<|extra_{i}|>" for i in range(205)))
DEFAULT_SYSTEM = "You are a helpful assistant."
ROLES = ("system", "user", "assistant")
CHAT_FORMATS = ("chatml", "raw")

SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
"""Words, single digits, runs of punctuation, line ends and spaces. Source: PAT_STR of Qwen-7B's tokenization_qwen.py."""

_SPELLING = {byte: character for character, byte in byte_alphabet().items()}


class TiktokenBackend:
    """A tiktoken vocabulary; made by `from_dir`."""

    decoder_types = frozenset({"ByteLevel"})
    """Every token is bytes, spelled as byte-level vocabularies spell them."""

    def __init__(self, ranks: Mapping[bytes, int], *, chat_format: str, chat_template: str | None) -> None:
        """Builds the tokenizer.

        Args:
          ranks: bytes of a token -> its id, from 0 on without a gap, every single byte among them.
          chat_format: "chatml" for a chat model, "raw" for a base model.
          chat_template: a Jinja template that goes before the built-in format, where the folder has one.
        """
        import tiktoken

        specials = {token: len(ranks) + i for i, token in enumerate(SPECIAL_TOKENS)}
        self._encoding = tiktoken.Encoding("qwen", pat_str=SPLIT, mergeable_ranks=dict(ranks), special_tokens=specials)
        self._specials = specials
        self._chat_format = chat_format
        self._chat_template = chat_template
        self._num_ranks = len(ranks)
        self.special_token_ids = frozenset(specials.values())
        self.num_tokens = len(ranks) + len(specials)
        self.end_token_ids: frozenset[int] = frozenset(
            specials[token] for token in ((END_OF_TEXT, IM_START, IM_END) if chat_format == "chatml" else (END_OF_TEXT,)))
        """What the reference stops at: the end of text and, in a chat, both marks of a turn."""

    @classmethod
    def from_dir(cls, folder: Path, *, chat_format: str, chat_template: str | None) -> "TiktokenBackend":
        """The vocabulary in a folder's qwen.tiktoken.

        Raises:
          TokenizerError: the file is damaged, or the chat format is unknown.
        """
        if chat_format not in CHAT_FORMATS:
            raise TokenizerError(f"chat_format = {chat_format!r} in {str(folder)!r} is not implemented: only {' and '.join(CHAT_FORMATS)} "
                                 "are. Set it in generation_config.json.")
        return cls(read_ranks(folder / FILE_NAME), chat_format=chat_format, chat_template=chat_template)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None or self._chat_format == "chatml"

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of the text in normal form C; special tokens in it are taken as such. Nothing is ever put round a text.

        Raises:
          RequestError: the text has a run, of spaces for example, that the splitting expression cannot take in.
        """
        del add_special_tokens
        return self._ids(text, self._encoding.special_tokens_set)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        end = self._num_ranks if skip_special_tokens else self.num_tokens
        return self._encoding.decode([i for i in token_ids if 0 <= i < end], errors="replace")

    def token(self, token_id: int) -> str | None:
        """A token in the byte-level spelling, None for an id that is not in the vocabulary."""
        if not 0 <= token_id < self.num_tokens:
            return None
        return "".join(map(_SPELLING.__getitem__, self._encoding.decode_single_token_bytes(token_id)))

    def render_chat(self, turns: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """The conversation as text: the folder's template, or ChatML.

        Raises:
          ValueError, TypeError: a role or a content that the format has no place for.
        """
        if self._chat_template is not None:
            from transformers.utils.chat_template_utils import render_jinja_template

            return render_jinja_template([list(turns)], chat_template=self._chat_template, add_generation_prompt=add_generation_prompt)[0][0]
        text = "".join(f"{IM_START}{role}\n{content}{IM_END}\n" for role, content in _chatml_turns(turns))
        return text + (f"{IM_START}assistant\n" if add_generation_prompt else "")

    def encode_chat(self, turns: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> list[int]:
        """Ids of the conversation. In ChatML role and content are encoded apart, and a special token's name in a content is plain text.

        Source: `make_context` of Qwen-7B-Chat's qwen_generation_utils.py, which adds the default system prompt too. Raises as
        `render_chat`.
        """
        if self._chat_template is not None:
            return self.encode(self.render_chat(turns, add_generation_prompt), add_special_tokens=False)
        start, end, newline = self._specials[IM_START], self._specials[IM_END], self._plain("\n")
        ids: list[int] = []
        for role, content in _chatml_turns(turns):
            ids += [start, *self._plain(role), *newline, *self._plain(content), end, *newline]
        return [*ids, start, *self._plain("assistant"), *newline] if add_generation_prompt else ids

    def _plain(self, text: str) -> list[int]:
        return self._ids(text, frozenset())

    def _ids(self, text: str, specials: Set[str]) -> list[int]:
        try:
            return self._encoding.encode(unicodedata.normalize("NFC", text), allowed_special=specials, disallowed_special=())
        except ValueError as e:  # the library's expressions have a bounded stack
            raise RequestError(f"the text of {len(text)} characters cannot be split into tokens ({e}): a run of spaces or of other characters "
                               "in it is too long. Shorten it, or give token ids.") from e


def _chatml_turns(turns: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(role, content) of each turn, the default system prompt first where none is given."""
    out = [] if turns[0]["role"] == "system" else [("system", DEFAULT_SYSTEM)]
    for i, turn in enumerate(turns):
        role, content = turn["role"], turn["content"]
        if role not in ROLES or (role == "system" and i > 0):
            raise ValueError(f"role {role!r} of messages[{i}]: ChatML has {', '.join(ROLES)}, and system only as the first")
        if not isinstance(content, str):
            raise TypeError(f"content of messages[{i}] is a {type(content).__name__}, must be text")
        out.append((role, content))
    return out


def read_ranks(file: Path) -> dict[bytes, int]:
    """Reads a tiktoken file: a line a token, its bytes in base64 and its rank.

    Raises:
      TokenizerError: it cannot be read, or a line, a rank or a single byte is missing, doubled or damaged.
    """
    again = "fetch the file again"
    try:
        lines = file.read_bytes().splitlines()
    except OSError as e:
        raise TokenizerError(f"{str(file)!r} cannot be read ({e.strerror}): {again}.") from e
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            encoded, rank = line.split()
            token = base64.b64decode(encoded, validate=True)
            if not token or token in ranks or int(rank) != len(ranks):
                raise ValueError("a token twice, an empty one, or ranks out of order")
        except (ValueError, binascii.Error) as e:
            raise TokenizerError(f"line {number} of {str(file)!r} is damaged: {line[:60]!r} ({e}): {again}.") from e
        ranks[token] = len(ranks)
    missing = [b for b in range(256) if bytes([b]) not in ranks]
    if missing:
        raise TokenizerError(f"{str(file)!r} has {len(ranks)} tokens, but none for {len(missing)} single bytes, such as {missing[0]}: {again}.")
    return ranks
