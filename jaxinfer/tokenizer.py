"""Text to token ids and back: a model folder's tokenizer, its chat template, its end tokens. Never runs a folder's own code.

The tokenizer's library is imported on first use, so that importing this module stays cheap. Detokenising one token at a
time is in jaxinfer/detokenizer.py.
"""

import functools
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from jaxinfer import tiktoken_tokenizer
from jaxinfer.detokenizer import ByteTable, IncrementalDetokenizer
from jaxinfer.errors import RequestError, TokenizerError

__all__ = ["IncrementalDetokenizer", "Message", "Tokenizer", "has_tokenizer"]

Message = Mapping[str, Any]
"""One turn of a conversation: {"role": "system" | "user" | "assistant", "content": text}, and what the template reads beside."""

_PROBE = "jaxinferprobe"
_VOCABULARIES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"), (tiktoken_tokenizer.FILE_NAME,))
"""Files that hold a vocabulary; without one of these sets a folder has no tokenizer, whatever else it says about one."""
_END_TOKEN_FILES = (("config.json", "eos_token_id"), ("generation_config.json", "eos_token_id"), ("manifest.json", "end_token_ids"))

_NEEDED = ("The folder needs tokenizer.json and tokenizer_config.json; python -m convert writes both. Qwen v1's needs "
           f"{tiktoken_tokenizer.FILE_NAME}.")

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """What turns text into ids and back; one for each library."""

    special_token_ids: frozenset[int]
    end_token_ids: frozenset[int]
    """The tokenizer's own."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def decoder_types(self) -> frozenset[str]: ...

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str: ...

    def token(self, token_id: int) -> str | None: ...

    def render_chat(self, turns: Sequence[Message], add_generation_prompt: bool) -> str: ...

    def encode_chat(self, turns: Sequence[Message], add_generation_prompt: bool) -> list[int]: ...


def has_tokenizer(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a vocabulary. A checkpoint without one takes token ids only."""
    return any(all((Path(path) / name).is_file() for name in names) for names in _VOCABULARIES)


class Tokenizer:
    """A tokenizer with its folder's chat template and end tokens; made by `from_dir`."""

    def __init__(self, backend: Any, *, end_token_ids: frozenset[int] = frozenset(), name: str = "the tokenizer") -> None:
        """Wraps a library's tokenizer.

        Args:
          backend: a transformers tokenizer that runs on the `tokenizers` library, or a TiktokenBackend.
          end_token_ids: end tokens that the model's configs name; the tokenizer's own and the chat template's are added.
          name: what messages call this tokenizer.

        Raises:
          TokenizerError: the tokenizer does not run on the `tokenizers` library.
        """
        own = isinstance(backend, tiktoken_tokenizer.TiktokenBackend)
        self._backend: Backend = backend if own else _FastBackend(backend, name=name)
        self._config_end_token_ids = end_token_ids
        self.name = name
        self.special_token_ids: frozenset[int] = self._backend.special_token_ids
        """Ids that decoding with skip_special_tokens leaves out."""

    @classmethod
    def from_dir(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """The tokenizer of a converted checkpoint or a Hugging Face folder. Code in the folder is never run, nothing is downloaded.

        Raises:
          TokenizerError: no such folder, no tokenizer in it, or one that cannot be read without running code.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise TokenizerError(f"no tokenizer at {str(folder)!r}: there is no such folder.")
        if not has_tokenizer(folder):  # transformers would make an empty one up from config.json
            raise TokenizerError(f"no usable tokenizer in {str(folder)!r}: it has none of {_names_of_vocabularies()}. {_NEEDED}")
        name = f"the tokenizer in {str(folder)!r}"
        if (folder / tiktoken_tokenizer.FILE_NAME).is_file() and not (folder / "tokenizer.json").is_file():
            own = tiktoken_tokenizer.TiktokenBackend.from_dir(folder, chat_format=_chat_format(folder), chat_template=_chat_template(folder))
            return cls(own, end_token_ids=_config_end_token_ids(folder), name=name)
        transformers_log = logging.getLogger("transformers")
        was_disabled, transformers_log.disabled = transformers_log.disabled, True  # its import warns that PyTorch is absent
        try:
            from transformers import AutoTokenizer
        finally:
            transformers_log.disabled = was_disabled
        with _LibraryErrors(folder):
            backend = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        return cls(backend, end_token_ids=_config_end_token_ids(folder), name=name)

    @property
    def num_tokens(self) -> int:
        """One past the largest token id; a model's embedding may have more rows, which are padding."""
        return self._backend.num_tokens

    @functools.cached_property
    def end_token_ids(self) -> frozenset[int]:
        """Ids that end a generation: what config, generation config, manifest and tokenizer name, and what closes a turn of a chat."""
        turn_end = self._turn_end_token_id()
        return self._config_end_token_ids | self._backend.end_token_ids | (frozenset() if turn_end is None else {turn_end})

    @property
    def has_chat_template(self) -> bool:
        return self._backend.has_chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; '' gives what the tokenizer puts round every text, often nothing.

        Raises:
          RequestError: half a character (a lone surrogate) in the text, where the library takes none.
        """
        return self._backend.encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids, spaces left as the tokens have them; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        return self._backend.decode(token_ids, skip_special_tokens)

    def apply_chat_template(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation as the folder's chat template renders it.

        Args:
          messages: turns in order, at least one.
          add_generation_prompt: end with the opening of an assistant's turn.

        Raises:
          TokenizerError: the folder has no chat template, or one with an error in it.
          RequestError: messages of another form, or ones that the template refuses.
        """
        return self._chat(messages, lambda turns: self._backend.encode_chat(turns, add_generation_prompt))

    def render_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The conversation as text. Raises as `apply_chat_template` does."""
        return self._chat(messages, lambda turns: self._backend.render_chat(turns, add_generation_prompt))

    def _chat[R](self, messages: Sequence[Message], render: Callable[[Sequence[Message]], R]) -> R:
        """Checks the messages and renders them; names what a template finds wrong with them."""
        import jinja2

        if not self.has_chat_template:
            raise TokenizerError(f"{self.name} has no chat template, so it cannot render messages: give a plain prompt, or put the "
                                 "model's chat_template.jinja into the folder.")
        _check_messages(messages)
        try:
            return render([dict(m) for m in messages])
        except jinja2.TemplateSyntaxError as e:
            raise TokenizerError(f"{self.name} has a chat template with an error: {_one_line(e)}. Replace chat_template.jinja.") from e
        except RequestError:
            raise
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as e:
            raise RequestError(f"the chat template refused the messages: {_one_line(e)}. Roles given: "
                               f"{', '.join(m['role'] for m in messages)}.") from e

    def token(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it; None for an id that is not in it."""
        return self._backend.token(token_id)

    @property
    def decoder_types(self) -> frozenset[str]:
        """Names of the decoding steps, for example {'ByteLevel'} or {'Replace', 'ByteFallback', 'Fuse', 'Strip'}."""
        return self._backend.decoder_types

    @functools.cached_property
    def byte_table(self) -> ByteTable:
        """Id -> bytes, where decoder_types is {'ByteLevel'}."""
        return ByteTable(self.token)

    def _turn_end_token_id(self) -> int | None:
        """The special token that the template itself writes right after an assistant's content, if it writes one."""
        if not self.has_chat_template:
            return None
        try:
            text = self.render_chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}], False)
        except (RequestError, TokenizerError):
            return None  # the message comes when a chat is asked for
        after = text.rpartition(_PROBE)[2].lstrip()
        names = {self.token(i): i for i in self.special_token_ids}
        found = max((n for n in names if n and after.startswith(n)), key=len, default=None)
        return None if found is None else names[found]


class _FastBackend:
    """A transformers tokenizer that runs on the `tokenizers` library."""

    def __init__(self, backend: Any, *, name: str) -> None:
        if getattr(backend, "backend_tokenizer", None) is None:
            raise TokenizerError(f"{name} is a {type(backend).__name__}, which has no fast form: add its tokenizer.json to the folder.")
        self._backend = backend
        self._fast = backend.backend_tokenizer
        self.special_token_ids: frozenset[int] = frozenset(i for i, t in backend.added_tokens_decoder.items() if t.special)
        eos = backend.eos_token_id
        self.end_token_ids: frozenset[int] = frozenset() if eos is None else frozenset({int(eos)})

    @property
    def has_chat_template(self) -> bool:
        return self._backend.chat_template is not None

    @functools.cached_property
    def num_tokens(self) -> int:
        return max(self._backend.get_vocab().values(), default=-1) + 1

    @functools.cached_property
    def decoder_types(self) -> frozenset[str]:
        if self._fast.decoder is None:
            return frozenset()
        spec = json.loads(self._fast.decoder.__getstate__())
        return frozenset(step["type"] for step in spec.get("decoders", [spec]))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        _check_text(text)
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        return self._fast.id_to_token(token_id) if token_id >= 0 else None

    def render_chat(self, turns: Sequence[Message], add_generation_prompt: bool) -> str:
        return self._backend.apply_chat_template(turns, add_generation_prompt=add_generation_prompt, tokenize=False)

    def encode_chat(self, turns: Sequence[Message], add_generation_prompt: bool) -> list[int]:
        return self.encode(self.render_chat(turns, add_generation_prompt), add_special_tokens=False)


class _LibraryErrors:
    """Turns what the libraries raise over a damaged folder into a TokenizerError; `tokenizers` raises a plain Exception, or panics."""

    _KINDS = (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError, RecursionError)

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and (isinstance(error, self._KINDS) or type(error) is Exception or type(error).__name__ == "PanicException"):
            raise TokenizerError(f"no usable tokenizer in {str(self._folder)!r}: {_one_line(error)}. {_NEEDED}") from error


def _names_of_vocabularies() -> str:
    return ", ".join(" with ".join(names) for names in _VOCABULARIES)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise RequestError(f"the text has half a character, {text[e.start]!r}, at position {e.start} of {len(text)}, which is no text: "
                           "remove it, or decode the text's source with errors='replace'.") from None


def _read_object(file: Path) -> dict[str, Any]:
    """A JSON object of the folder; empty where the file is absent or holds something else."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise TokenizerError(f"{str(file)!r} is not JSON: {_one_line(e)}. Restore it from the model's source.") from e
    return content if isinstance(content, dict) else {}


def _chat_format(folder: Path) -> str:
    """Qwen v1's chat format: "chatml" for a chat model; a folder that names none is a base model's, "raw"."""
    for file_name in ("generation_config.json", "config.json"):
        value = _read_object(folder / file_name).get("chat_format")
        if value is not None:
            return str(value)
    return "raw"


def _chat_template(folder: Path) -> str | None:
    """The Jinja template that a folder brings beside a tiktoken vocabulary, if any."""
    file = folder / "chat_template.jinja"
    template = file.read_text(encoding="utf-8") if file.is_file() else _read_object(folder / "tokenizer_config.json").get("chat_template")
    if template is not None and not isinstance(template, str):
        raise TokenizerError(f"chat_template in {str(folder / 'tokenizer_config.json')!r} is a {type(template).__name__}, must be text.")
    return template


def _config_end_token_ids(folder: Path) -> frozenset[int]:
    """End tokens that the folder's JSON files name."""
    ids: set[int] = set()
    for file_name, key in _END_TOKEN_FILES:
        value = _read_object(folder / file_name).get(key)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(map(_is_token_id, listed)):
            raise TokenizerError(f"{key} = {value!r} in {str(folder / file_name)!r}: must be a token id or a list of them.")
        ids.update(listed)
    return frozenset(ids | _stop_word_ids(folder))


def _stop_word_ids(folder: Path) -> set[int]:
    """Single tokens among Qwen v1's stop_words_ids, each word of which is a list of ids."""
    file = folder / "generation_config.json"
    words = _read_object(file).get("stop_words_ids") or []
    if not isinstance(words, list) or not all(isinstance(word, list) and word and all(map(_is_token_id, word)) for word in words):
        raise TokenizerError(f"stop_words_ids = {words!r} in {str(file)!r}: must be a list of lists of token ids.")
    longer = [word for word in words if len(word) > 1]
    if longer:
        logger.warning("%s: stop_words_ids of several tokens are not end tokens: %s. Give their text as `stop`.", file, longer)
    return {word[0] for word in words if len(word) == 1}


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_messages(messages: Sequence[Message]) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(f"messages = {messages!r}: must be a list of at least one {{'role': ..., 'content': ...}}.")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise RequestError(f"messages[{i}] = {message!r}: must have a 'role' (system, user or assistant) and a 'content'.")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (text[:300] + "..." if len(text) > 300 else text).rstrip(".") or type(error).__name__
