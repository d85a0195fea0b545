"""Token ids to text one token at a time, never showing half a character. Constant work a token on average; no model, no jax.

    push(t1) -> 'Hel'   push(t2) -> 'lo '   push(first half of a character) -> ''   push(second half) -> the character

What all pushes and the flush return, joined, is what decoding all tokens at once returns.
"""

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_MAX_HELD = 64


class Vocabulary(Protocol):
    """What is needed of a tokenizer; jaxinfer/tokenizer.py's has it."""

    special_token_ids: frozenset[int]

    @property
    def decoder_types(self) -> frozenset[str]: ...

    @property
    def byte_table(self) -> Mapping[int, bytes]: ...

    def token(self, token_id: int) -> str | None: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class IncrementalDetokenizer:
    """Text of one growing sequence of output tokens."""

    def __init__(self, tokenizer: Vocabulary, skip_special_tokens: bool = True) -> None:
        """A detokenizer at the start of its sequence.

        Args:
          tokenizer: whose tokens are pushed.
          skip_special_tokens: leave special tokens out of the text.
        """
        self._skipped: frozenset[int] = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder: _Decoder = _Utf8Decoder(tokenizer) if tokenizer.decoder_types == {"ByteLevel"} else _WindowDecoder(tokenizer)

    def push(self, token_id: int) -> str:
        """Takes the next token. Returns the text that it makes certain; '' while a character is incomplete."""
        return "" if token_id in self._skipped else self._decoder.push(token_id)

    def flush(self) -> str:
        """The text still held back, once no token follows; an incomplete character becomes U+FFFD. Ends the sequence."""
        return self._decoder.flush()


class _Decoder(Protocol):
    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of the byte-level alphabet (GPT-2's): printable Latin-1 stands for itself, the 68 others for U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = byte_alphabet()


class _Utf8Decoder:
    """Byte-level vocabularies: every token is bytes, and the text is those bytes as UTF-8. No look back at all."""

    def __init__(self, tokenizer: Vocabulary) -> None:
        self._bytes = tokenizer.byte_table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._bytes[token_id])

    def flush(self) -> str:
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


class ByteTable(dict[int, bytes]):
    """Token id -> the bytes that a byte-level token stands for, b'' for an unknown id. Filled as ids are asked for."""

    def __init__(self, token: Callable[[int], str | None]) -> None:
        """`token` gives an id's spelling in the vocabulary."""
        super().__init__()
        self._token = token

    def __missing__(self, token_id: int) -> bytes:
        token = self._token(token_id)
        try:
            found = b"" if token is None else bytes(map(_BYTE_OF.__getitem__, token))
        except KeyError:
            found = str(token).encode()  # an added token is spelled in plain text
        self[token_id] = found
        return found


class _WindowDecoder:
    """Any other vocabulary: decodes a short window of the last tokens and returns what is new at its end.

    A decoder may treat the first token apart (it drops a leading space), so the window opens with tokens whose text is
    already out. Bytes that stand as <0xNN> tokens are held until a token of another kind: only then is it known whether
    their run is UTF-8 as a whole.

        ids    ... [ context | held ]      text of context is out, text of held is not
    """

    def __init__(self, tokenizer: Vocabulary) -> None:
        self._tokenizer = tokenizer
        self._may_split_characters = "ByteLevel" in tokenizer.decoder_types
        self._holds_bytes = "ByteFallback" in tokenizer.decoder_types
        self._window: list[int] = []
        self._num_context = 0
        self._context_text = ""

    def push(self, token_id: int) -> str:
        token = self._tokenizer.token(token_id)
        if token is None:
            return ""
        self._window.append(token_id)
        if self._holds_bytes and _BYTE_TOKEN.fullmatch(token):
            return ""
        text = self._decode(self._window)
        if self._may_split_characters and text.endswith("\ufffd") and len(self._window) - self._num_context < _MAX_HELD:
            return ""
        return self._release(text)

    def flush(self) -> str:
        return self._release(self._decode(self._window))

    def _release(self, text: str) -> str:
        new = text[len(self._context_text):]
        if new:
            del self._window[:self._num_context]
            self._num_context = len(self._window)
            self._context_text = self._decode(self._window)
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
