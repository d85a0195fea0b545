"""What a Hugging Face quantization_config says, read closed-world: every attribute is read, known to change nothing, or refused by name."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from jaxinfer.errors import UnsupportedModelError


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One of the tensors that stand for a weight."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    """Storage types that are read, as safetensors names them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
    """How a folder holds its quantised weights."""

    name: str
    """A key of convert.formats.FORMATS."""
    bits: int
    """4 or 8."""
    group_size: int | None
    """Inputs that share a scale; None is the whole column."""
    zero_point: bool
    """Whether zero points other than 2**(bits - 1) occur."""
    act_order: bool
    """Whether the groups of the inputs are stored (g_idx), in any order."""
    zero_offset: int
    """Added to stored zero points, modulo 2**bits: 1 in GPTQ's v1 layout."""
    skipped: tuple[re.Pattern[str], ...]
    """Modules whose name one of these finds are not quantised. SKIPS_HEAD is among them where the vocabulary head is not."""

    def __str__(self) -> str:
        group = "whole columns" if self.group_size is None else f"groups of {self.group_size}"
        return (f"{self.name}, int{self.bits}, {group}, {'zero points' if self.zero_point else 'symmetric'}"
                f"{', act-order' if self.act_order else ''}")

    def is_quantized(self, module: str) -> bool:
        """Whether the linear module of this Hugging Face name has packed weights."""
        return not any(pattern.search(module) for pattern in self.skipped)

    def num_groups(self, num_inputs: int) -> int:
        """Groups of a matrix with K inputs; rounded up, so that a wrong group size shows in shapes and not as an exception."""
        return 1 if self.group_size is None else -(-num_inputs // self.group_size)


SKIPS_HEAD = re.compile(r"^lm_head$")


class Settings:
    """Hands out the attributes of a quantization_config and, at the end, refuses those that nobody asked for."""

    def __init__(self, value: Mapping[str, Any], *, what: str, ignored: frozenset[str]):
        """what: names the object in messages; ignored: attributes that change no weight."""
        self._values, self._what = dict(value), what
        self._left = set(self._values) - ignored

    def get(self, names: tuple[str, ...], kinds: tuple[type, ...], default: Any = None) -> Any:
        """The attribute under whichever of its spellings is given, `default` where none is or it is null.

        Raises:
          UnsupportedModelError: it is of no such type (True is no integer), or two spellings disagree.
        """
        self._left -= set(names)
        given = {name: self._values[name] for name in names if self._values.get(name) is not None}
        if not given:
            return default
        name, value = next(iter(given.items()))
        if type(value) not in kinds:
            raise self.unsupported(name, f"a value of type {' or '.join(kind.__name__ for kind in kinds)} is needed")
        if any(other != value for other in given.values()):
            raise self.unsupported(name, f"another spelling of it says otherwise ({given})")
        return value

    def required(self, names: tuple[str, ...], kinds: tuple[type, ...]) -> Any:
        """As `get`, of an attribute that must be there."""
        value = self.get(names, kinds)
        if value is None:
            raise UnsupportedModelError(f"{self._what} has no {names[0]!r}, which decides what the packed weights mean: add it to config.json")
        return value

    def fixed(self, name: str, *accepted: Any) -> None:
        """The attribute may be absent, null, or one of the accepted values."""
        self._left.discard(name)
        value = self._values.get(name)
        if value is not None and not any(value == a and type(value) is type(a) for a in accepted):
            raise self.unsupported(name, f"only {' or '.join(map(repr, accepted)) or 'null'} is implemented")

    def group_size(self, names: tuple[str, ...] = ("group_size",)) -> int | None:
        """Inputs that share a scale; None for -1, the whole column."""
        value = self.required(names, (int,))
        if value != -1 and value < 1:
            raise self.unsupported(names[0], "a positive number, or -1 for the whole column, is needed")
        return None if value == -1 else int(value)

    def finish(self) -> None:
        """Refuses whatever was not read."""
        left = {name: self._values[name] for name in sorted(self._left) if self._values[name] is not None}
        if left:
            found = ", ".join(f"{name} = {value!r:.100}" for name, value in left.items())
            raise UnsupportedModelError(f"{self._what} has attributes that are not implemented: {found}. If they do not change what the packed "
                                        "weights mean, remove them from config.json")

    def unsupported(self, name: str, reason: str) -> UnsupportedModelError:
        """The error for an attribute whose value cannot be used."""
        return UnsupportedModelError(f"{self._what} says {name} = {self._values.get(name)!r:.100}: {reason}")


def name_patterns(values: list[Any] | None, what: str, *, exact: bool) -> tuple[re.Pattern[str], ...]:
    """Patterns from a list of module names. With `exact` a name is the whole module's, or a regular expression after 're:'; else a part
    of it, between dots."""
    patterns = []
    for value in values or []:
        if not isinstance(value, str):
            raise UnsupportedModelError(f"{what} holds {value!r:.100}: names of modules are needed")
        if exact and value.startswith("re:"):
            patterns.append(_compiled(value.removeprefix("re:"), what))
        elif exact:
            patterns.append(re.compile(rf"^{re.escape(value)}$"))
        else:
            patterns.append(re.compile(rf"(^|\.){re.escape(value)}(\.|$)"))
    return tuple(patterns)


def _compiled(text: str, what: str) -> re.Pattern[str]:
    try:
        return re.compile(rf"^(?:{text})")
    except re.error as error:
        raise UnsupportedModelError(f"{what} holds {text!r:.100}, which is no regular expression ({error})") from None
