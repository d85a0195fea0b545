"""Structured output on the host: grammars compiled at admission, and the mask of each next token. No jax; schedules nothing.

The library is llguidance (the `guided` extra), which needs neither torch nor a transformers tokenizer: it is given each token's bytes.
It works on bytes and knows no end tokens of ours: it gets one of its own past the vocabulary, and where it would allow that one, the
request's stop ids are allowed instead.
"""

import collections
import functools
import json
import re
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from jaxinfer.errors import RequestError
from jaxinfer.sampling.params import SamplingParams, StructuredOutputsParams
from jaxinfer.sampling.rules import token_masks
from jaxinfer.tokenizer import Tokenizer

MAX_KEPT = 64  # compiled grammars that an engine remembers
# The library's work is bounded by counters, so that the same grammar is refused everywhere. Its figures: 50k of fuel a millisecond while
# compiling; 14k of fuel and 20k items a millisecond in the making of one mask.
LIMITS: dict[str, Any] = {"max_grammar_size": 500_000, "initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "step_max_items": 50_000,
          "max_lexer_states": 250_000, "max_items_in_row": 2_000}
_DECODERS = frozenset({"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Grammar:
    """How far one sequence has come in its grammar. Advanced by the tokens that the host has read, and by nothing else."""

    def __init__(self, matcher: Any, base: np.ndarray, ends: np.ndarray, *, num_library_tokens: int) -> None:
        """A grammar at its start.

        Args:
          matcher: an LLMatcher that this object owns.
          base: [2, W] uint32, what the request's other rules allow, before min_tokens [1] and after [0]; never written to.
          ends: [W] uint32, the ids that may end the text where the grammar does; never written to.
          num_library_tokens: in the library's vocabulary, its own end token included.
        """
        self._matcher, self._base, self._ends, self._num_library_tokens = matcher, base, ends, num_library_tokens

    def copy(self) -> "Grammar":
        """The same grammar for another sequence, as far as this one has come."""
        return Grammar(self._matcher.deep_copy(), self._base, self._ends, num_library_tokens=self._num_library_tokens)

    def accept(self, token_id: int) -> bool:
        """Takes the next token, which does not end the text by itself; says whether nothing can follow it. See `error` afterwards."""
        self._matcher.consume_token(token_id)
        return self._matcher.is_stopped()

    @property
    def error(self) -> str | None:
        """Why the grammar can go no further; None while it can."""
        if not self._matcher.is_error():
            return None
        return f"structured_outputs: the grammar stopped the text ({_one_line(self._matcher.get_error())}): give a simpler one"

    @staticmethod
    def masks(grammars: "Sequence[tuple[Grammar, bool]]") -> np.ndarray:
        """The masks of the next tokens: [len(grammars), W] uint32, bit v % 32 of word v // 32: v may be sampled.

        Args:
          grammars: at least one, all of one engine, and whether min_tokens still holds for each.
        """
        from llguidance.numpy import fill_next_token_bitmask_par

        first = grammars[0][0]
        found = np.zeros((len(grammars), -(-first._num_library_tokens // 32)), np.int32)
        fill_next_token_bitmask_par(_executor(), [(g._matcher, i) for i, (g, _) in enumerate(grammars)], found)
        masks = np.zeros((len(grammars), first._ends.shape[0]), np.uint32)
        width = min(masks.shape[1], found.shape[1])  # the library's own end token may begin a word more, padded ids add some
        masks[:, :width] = found.view(np.uint32)[:, :width]
        for mask, (grammar, is_early) in zip(masks, grammars, strict=True):
            if grammar._matcher.is_error():
                mask[:] = 0
            elif grammar._matcher.is_accepting():
                mask |= grammar._ends
            mask &= grammar._base[int(is_early)]
        return masks


class GrammarCompiler:
    """Compiles what requests ask for, for one tokenizer. The library's view of the vocabulary is made at the first request."""

    def __init__(self, tokenizer: Tokenizer | None, *, vocab_size: int, num_valid_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size, self._num_valid_tokens = vocab_size, num_valid_tokens
        self._kept: collections.OrderedDict[StructuredOutputsParams, Any] = collections.OrderedDict()

    def grammar(self, params: SamplingParams, bad_words: Sequence[Sequence[int]], stop_ids: Collection[int],
                end_ids: Collection[int]) -> Grammar | None:
        """The grammar of a request at its start; None where it wants none.

        Args:
          params: the request's.
          bad_words: its barred words as token ids.
          stop_ids: what ends it.
          end_ids: what may not be sampled before min_tokens.

        Raises:
          RequestError: a grammar that is wrong, too large or not implemented; no tokenizer; or the library is not installed.
        """
        if params.guide is None:
            return None
        matcher = self._matcher(params.guide)
        base = token_masks(params, bad_words, end_ids, vocab_size=self._vocab_size) & self._bits(range(self._num_valid_tokens))
        return Grammar(matcher.deep_copy(), base, self._bits(stop_ids), num_library_tokens=self._vocabulary.vocab_size)

    def _bits(self, ids: Collection[int]) -> np.ndarray:
        """[W] uint32 with these ids' bits set."""
        allowed = np.zeros(-(-self._vocab_size // 32) * 32, bool)
        allowed[[i for i in ids if i < self._num_valid_tokens]] = True
        return np.packbits(allowed, bitorder="little").view(np.uint32)

    def _matcher(self, guide: StructuredOutputsParams) -> Any:
        """The library's automaton at its start; to be copied."""
        if guide not in self._kept:
            self._kept[guide] = self._compile(guide)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(guide)
        return self._kept[guide]

    def _compile(self, guide: StructuredOutputsParams) -> Any:
        vocabulary = self._vocabulary
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(vocabulary, _grammar_text(guide), log_level=0, limits=LLParserLimits(verbose_errors=False, **LIMITS))
        if matcher.is_error():
            raise RequestError(f"structured_outputs.{_kind(guide)} cannot be used: {_one_line(matcher.get_error())}.")
        return matcher

    @functools.cached_property
    def _vocabulary(self) -> Any:
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError as error:
            raise RequestError("structured_outputs needs the package llguidance: install it by pip install 'jaxinfer[guided]'.") from error
        if self._tokenizer is None:
            raise RequestError("structured_outputs: grammars are about text, which needs a tokenizer, and this engine has none. Use "
                               "allowed_token_ids.")
        return LLTokenizer(TokenizerWrapper(_Vocabulary(self._tokenizer)))


class _Vocabulary:
    """A tokenizer as the library asks for one; with an end token of the library's own, one past the last id."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.tokens = [*token_bytes(tokenizer), b"<|end of text|>"]
        self.eos_token_id = len(self.tokens) - 1
        self.special_token_ids = [*sorted(tokenizer.special_token_ids), self.eos_token_id]

    def __call__(self, text: str | bytes) -> list[int]:
        """Token ids of a text: the library asks how a text that is certain would be tokenised. What a special token is called is text."""
        ids = self._tokenizer.encode(text if isinstance(text, str) else text.decode(errors="replace"), add_special_tokens=False)
        if self._tokenizer.special_token_ids.isdisjoint(ids):
            return ids
        return self._longest_first(text.encode() if isinstance(text, str) else text)

    @functools.cached_property
    def _ordinary_ids(self) -> dict[bytes, int]:
        """Token id by bytes, without special tokens."""
        return {token: i for i, token in enumerate(self.tokens) if token and i not in self.special_token_ids}

    def _longest_first(self, text: bytes) -> list[int]:
        """Ordinary tokens that spell a text, the longest that fits at each place; up to where none does."""
        ids: list[int] = []
        longest, start = max(map(len, self._ordinary_ids), default=0), 0
        while start < len(text):
            end = next((end for end in range(min(start + longest, len(text)), start, -1) if text[start:end] in self._ordinary_ids), None)
            if end is None:
                break
            ids.append(self._ordinary_ids[text[start:end]])
            start = end
        return ids


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes that each token adds to a text, by id; empty where there is none.

    Raises:
      RequestError: the tokenizer decodes in another way than by bytes or by pieces with a mark for spaces.
    """
    unknown = tokenizer.decoder_types - _DECODERS
    if unknown or not tokenizer.decoder_types:
        raise RequestError(f"structured_outputs: {tokenizer.name} decodes by {', '.join(sorted(unknown)) or 'no rule'}, which is not "
                           f"implemented: {', '.join(sorted(_DECODERS))} are.")
    return [_piece_bytes(tokenizer, i) for i in range(tokenizer.num_tokens)]


def _piece_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    if "ByteLevel" in tokenizer.decoder_types:
        return tokenizer.byte_table[token_id]
    piece = tokenizer.token(token_id) or ""
    byte = _BYTE_TOKEN.fullmatch(piece) if "ByteFallback" in tokenizer.decoder_types else None
    return bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode()


def _kind(guide: StructuredOutputsParams) -> str:
    return next(name for name in ("json", "regex", "choice", "grammar", "json_object") if getattr(guide, name) is not None)


def _grammar_text(guide: StructuredOutputsParams) -> str:
    """The grammar in the library's own form.

    Raises:
      RequestError: a schema that is no JSON, or a GBNF grammar that is none.
    """
    from llguidance import LLMatcher, grammar_from

    try:
        if guide.json is not None or guide.json_object:
            options: Any = {"whitespace_flexible": False} if guide.disable_any_whitespace else {}
            if guide.whitespace_pattern is not None:
                options = {"whitespace_pattern": guide.whitespace_pattern}
            return LLMatcher.grammar_from_json_schema(str(guide.json or '{"type": "object"}'), overrides=options)
        if guide.regex is not None:
            return LLMatcher.grammar_from_regex(guide.regex)
        if guide.choice is not None:
            texts = " | ".join(json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f") for text in guide.choice)
            return LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {texts}")  # one terminal: thousands of texts cost no parser items
        return grammar_from("grammar", guide.grammar or "")
    except ValueError as error:
        raise RequestError(f"structured_outputs.{_kind(guide)} cannot be used: {_one_line(error)}.") from error


@functools.cache
def _executor() -> Any:
    """The threads that make the masks of a batch; the library's own default number."""
    from llguidance import LLExecutor

    return LLExecutor()


def _one_line(error: object) -> str:
    text = " ".join(str(error).split())
    return (text[:300] + "..." if len(text) > 300 else text).rstrip(".")
