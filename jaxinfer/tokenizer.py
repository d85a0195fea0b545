"""Text to token ids and back: a model folder's tokenizer, its chat template, its end tokens. Never runs a folder's own code.

The tokenizer's library is imported on first use, so that importing this module stays cheap. Detokenising one token at a
time is in jaxinfer/detokenizer.py.
"""

import functools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinfer.detokenizer import ByteTable, IncrementalDetokenizer
from jaxinfer.errors import RequestError, TokenizerError

__all__ = ["IncrementalDetokenizer", "Message", "Tokenizer"]

Message = Mapping[str, Any]
"""One turn of a conversation: {"role": "system" | "user" | "assistant", "content": text}, and what the template reads beside."""

_PROBE = "jaxinferprobe"
_END_TOKEN_FILES = (("config.json", "eos_token_id"), ("generation_config.json", "eos_token_id"), ("manifest.json", "end_token_ids"))


class Tokenizer:
    """A fast tokenizer with its folder's chat template and end tokens; made by `from_dir`."""

    def __init__(self, backend: Any, *, end_token_ids: frozenset[int] = frozenset(), name: str = "the tokenizer") -> None:
        """Wraps a transformers tokenizer.

        Args:
          backend: a transformers tokenizer that runs on the `tokenizers` library.
          end_token_ids: end tokens that the model's configs name; the tokenizer's own and the chat template's are added.
          name: what messages call this tokenizer.

        Raises:
          TokenizerError: the tokenizer does not run on the `tokenizers` library.
        """
        if getattr(backend, "backend_tokenizer", None) is None:
            raise TokenizerError(f"{name} is a {type(backend).__name__}, which has no fast form: add its tokenizer.json to the folder.")
        self._backend = backend
        self._fast = backend.backend_tokenizer
        self._config_end_token_ids = end_token_ids
        self.name = name
        self.special_token_ids: frozenset[int] = frozenset(i for i, t in backend.added_tokens_decoder.items() if t.special)
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
        transformers_log = logging.getLogger("transformers")
        was_disabled, transformers_log.disabled = transformers_log.disabled, True  # its import warns that PyTorch is absent
        try:
            from transformers import AutoTokenizer
        finally:
            transformers_log.disabled = was_disabled
        try:
            backend = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError, ImportError, RecursionError) as e:
            raise TokenizerError(
                f"no usable tokenizer in {str(folder)!r}: {_one_line(e)}. The folder needs tokenizer.json and tokenizer_config.json; "
                "python -m convert writes both.") from e
        return cls(backend, end_token_ids=_config_end_token_ids(folder), name=f"the tokenizer in {str(folder)!r}")

    @functools.cached_property
    def num_tokens(self) -> int:
        """One past the largest token id; a model's embedding may have more rows, which are padding."""
        return max(self._backend.get_vocab().values(), default=-1) + 1

    @functools.cached_property
    def end_token_ids(self) -> frozenset[int]:
        """Ids that end a generation: what config, generation config, manifest and tokenizer name, and what closes a turn of a chat."""
        ids = set(self._config_end_token_ids)
        for token_id in (self._backend.eos_token_id, self._turn_end_token_id()):
            if token_id is not None:
                ids.add(int(token_id))
        return frozenset(ids)

    @property
    def has_chat_template(self) -> bool:
        return self._backend.chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; '' gives what the tokenizer puts round every text, often nothing."""
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids, spaces left as the tokens have them; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        return self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation as the folder's chat template renders it.

        Args:
          messages: turns in order, at least one.
          add_generation_prompt: end with the opening of an assistant's turn.

        Raises:
          TokenizerError: the folder has no chat template, or one with an error in it.
          RequestError: messages of another form, or ones that the template refuses.
        """
        return self.encode(self.render_chat(messages, add_generation_prompt), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The text that `apply_chat_template` encodes. Raises as it does."""
        import jinja2

        if not self.has_chat_template:
            raise TokenizerError(f"{self.name} has no chat template, so it cannot render messages: give a plain prompt, or put the "
                                 "model's chat_template.jinja into the folder.")
        _check_messages(messages)
        try:
            turns = [dict(m) for m in messages]
            return self._backend.apply_chat_template(turns, add_generation_prompt=add_generation_prompt, tokenize=False)
        except jinja2.TemplateSyntaxError as e:
            raise TokenizerError(f"{self.name} has a chat template with an error: {_one_line(e)}. Replace chat_template.jinja.") from e
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as e:
            raise RequestError(f"the chat template refused the messages: {_one_line(e)}. Roles given: "
                               f"{', '.join(m['role'] for m in messages)}.") from e

    def token(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it; None for an id that is not in it."""
        return self._fast.id_to_token(token_id) if token_id >= 0 else None

    @functools.cached_property
    def decoder_types(self) -> frozenset[str]:
        """Names of the decoding steps, for example {'ByteLevel'} or {'Replace', 'ByteFallback', 'Fuse', 'Strip'}."""
        if self._fast.decoder is None:
            return frozenset()
        spec = json.loads(self._fast.decoder.__getstate__())
        return frozenset(step["type"] for step in spec.get("decoders", [spec]))

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


def _config_end_token_ids(folder: Path) -> frozenset[int]:
    """End tokens that the folder's JSON files name."""
    ids: set[int] = set()
    for file_name, key in _END_TOKEN_FILES:
        file = folder / file_name
        if not file.is_file():
            continue
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as e:
            raise TokenizerError(f"{str(file)!r} is not JSON: {_one_line(e)}. Restore it from the model's source.") from e
        value = content.get(key) if isinstance(content, dict) else None
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in listed):
            raise TokenizerError(f"{key} = {value!r} in {str(file)!r}: must be a token id or a list of them.")
        ids.update(listed)
    return frozenset(ids)


def _check_messages(messages: Sequence[Message]) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(f"messages = {messages!r}: must be a list of at least one {{'role': ..., 'content': ...}}.")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise RequestError(f"messages[{i}] = {message!r}: must have a 'role' (system, user or assistant) and a 'content'.")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (text[:300] + "..." if len(text) > 300 else text).rstrip(".") or type(error).__name__
