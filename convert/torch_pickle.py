"""The pickle inside a torch checkpoint, read by an interpreter of our own that runs nothing: it has no call, no import and no attribute.

A pickle is a program. This one's instructions build plain values only; a global is a name, and "calling" one is a row of a closed table
that makes a `Tensor` description or a dict. Any other global, and any other instruction, is refused by name.
"""

import dataclasses
import io
import math
import pickletools
from collections.abc import Callable
from typing import Any

from jaxinfer.errors import CheckpointError, UnsupportedModelError

STORAGE_DTYPES: dict[str, str] = {
    "BFloat16Storage": "BF16", "HalfStorage": "F16", "FloatStorage": "F32", "DoubleStorage": "F64", "LongStorage": "I64",
    "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8", "BoolStorage": "BOOL",
}
"""torch's storage class -> dtype code, as safetensors spells it."""
MAX_DIMS = 8
MAX_SIZE = 2**48
"""Of any length, offset or stride: far above what a file holds, far below what overflows."""


@dataclasses.dataclass(frozen=True)
class Global:
    """A name that a pickle refers to. It is never looked up."""

    name: str


@dataclasses.dataclass(frozen=True)
class Storage:
    """A flat array in the archive."""

    key: str
    """Its record is data/<key>."""
    dtype: str
    num_elements: int


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A strided view of a storage; all numbers in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Mark:
    """Where a run of items begins on the stack."""


def read_tensors(data: bytes, where: str) -> dict[str, Tensor]:
    """The tensors of a pickled state dict.

    Args:
      data: the pickle.
      where: what messages call it.

    Raises:
      CheckpointError: the pickle is damaged, names a global that is not allowed, or is no flat dict of tensors.
      UnsupportedModelError: a kind of storage or an instruction that is not supported.
    """
    value = _Machine(data, where).run()
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} holds a {type(value).__name__}, expected a dict of tensors: save the model's state_dict()")
    for name, tensor in value.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise CheckpointError(f"{where}: its entry {str(name)[:80]!r} is a {type(tensor).__name__}, expected a tensor: save the model's "
                                  "state_dict(), nothing round it")
    return value


class _Machine:
    """One run over one pickle."""

    def __init__(self, data: bytes, where: str) -> None:
        self._data, self._where = data, where
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        try:
            for opcode, argument, _ in pickletools.genops(io.BytesIO(self._data)):
                if opcode.name == "STOP":
                    return self._pop()
                if opcode.name in LITERALS:
                    self._stack.append(argument)
                elif opcode.name in INSTRUCTIONS:
                    INSTRUCTIONS[opcode.name](self, argument)
                else:
                    raise UnsupportedModelError(f"{self._where} uses the pickle instruction {opcode.name}, which no state dict needs: it is "
                                                "refused; save the model as safetensors")
        except (ValueError, IndexError, KeyError, OverflowError) as error:  # UnicodeDecodeError is a ValueError
            raise self._damaged(str(error)[:200]) from None
        raise self._damaged("it has no end")  # genops has said so before

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._where} has a damaged pickle ({why}): fetch the file again")

    def _pop(self) -> Any:
        if not self._stack or isinstance(self._stack[-1], _Mark):
            raise self._damaged("its stack is empty")
        return self._stack.pop()

    def _pop_marked(self) -> list[Any]:
        """The items above the last mark."""
        for i in range(len(self._stack) - 1, -1, -1):
            if isinstance(self._stack[i], _Mark):
                items = self._stack[i + 1:]
                del self._stack[i:]
                return items
        raise self._damaged("a mark is missing")

    def _top(self, kind: type) -> Any:
        if not self._stack or type(self._stack[-1]) is not kind:
            raise self._damaged(f"its stack holds no {kind.__name__} where one is filled")
        return self._stack[-1]

    def _mark(self, _: Any) -> None:
        self._stack.append(_Mark())

    def _pop_top(self, _: Any) -> None:
        self._pop()

    def _tuple(self, size: int) -> None:
        items = [self._pop() for _ in range(size)]
        self._stack.append(tuple(reversed(items)))

    def _marked_tuple(self, _: Any) -> None:
        self._stack.append(tuple(self._pop_marked()))

    def _set_items(self, items: list[Any]) -> None:
        target = self._top(dict)
        if len(items) % 2 or not all(type(key) in (str, int) for key in items[::2]):
            raise self._damaged("a dict's keys are not all texts or integers")
        target.update(zip(items[::2], items[1::2], strict=True))

    def _set_item(self, _: Any) -> None:
        value, key = self._pop(), self._pop()
        self._set_items([key, value])

    def _append(self, _: Any) -> None:
        value = self._pop()
        self._top(list).append(value)

    def _appends(self, _: Any) -> None:
        items = self._pop_marked()
        self._top(list).extend(items)

    def _memoize(self, index: int | None) -> None:
        value = self._pop()
        self._memo[len(self._memo) if index is None else index] = value
        self._stack.append(value)

    def _global(self, name: str) -> None:
        """`argument` of GLOBAL is 'module name'."""
        name = name.replace(" ", ".")
        if name not in ALLOWED:
            raise CheckpointError(f"{self._where} refers to {name[:200]}, which weights do not need and which could run code when torch loads "
                                  "it: it is refused, and nothing was run; get the model as safetensors")
        self._stack.append(Global(name))

    def _stack_global(self, _: Any) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise self._damaged("a global's name is no text")
        self._global(f"{module}.{name}")

    def _persistent(self, _: Any) -> None:
        """('storage', storage class, key, device, number of elements)."""
        value = self._pop()
        if not isinstance(value, tuple) or len(value) != 5 or value[0] != "storage" or not isinstance(value[1], Global):
            raise self._damaged("a persistent id names no storage")
        kind = value[1].name.rpartition(".")[2]
        if kind not in STORAGE_DTYPES:
            raise UnsupportedModelError(f"{self._where} holds a {value[1].name}; known are {', '.join(STORAGE_DTYPES)}: save the model as "
                                        "safetensors")
        if not isinstance(value[2], str) or not _is_size(value[4]):
            raise self._damaged("a storage has no key or no length")
        self._stack.append(Storage(key=value[2], dtype=STORAGE_DTYPES[kind], num_elements=value[4]))

    def _reduce(self, _: Any) -> None:
        arguments, function = self._pop(), self._pop()
        if not isinstance(function, Global) or function.name not in CALLS or not isinstance(arguments, tuple):
            raise self._damaged("something is called that is no constructor of tensors")
        self._stack.append(CALLS[function.name](self, arguments))

    def _build(self, _: Any) -> None:
        """State on an object: torch puts `_metadata` on the dict, which carries versions of layers. Dropped."""
        self._pop()
        self._top(dict)

    def tensor(self, arguments: tuple[Any, ...]) -> Tensor:
        """_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks[, metadata])."""
        if len(arguments) < 4 or not isinstance(arguments[0], Storage):
            raise self._damaged("a tensor is built from no storage")
        storage, offset, shape, strides = arguments[:4]
        if not _is_size(offset) or not _is_shape(shape) or not _is_shape(strides) or len(shape) != len(strides):
            raise self._damaged("a tensor's offset, shape or strides are no sizes")
        if math.prod(shape) > MAX_SIZE:
            raise self._damaged(f"a tensor has {math.prod(shape)} elements")
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if 0 not in shape and last >= storage.num_elements:
            raise self._damaged(f"a tensor reaches element {last} of a storage of {storage.num_elements}")
        return Tensor(storage=storage, offset=offset, shape=shape, strides=strides)

    def parameter(self, arguments: tuple[Any, ...]) -> Tensor:
        """_rebuild_parameter(tensor, requires_grad, hooks)."""
        if not arguments or not isinstance(arguments[0], Tensor):
            raise self._damaged("a parameter is built from no tensor")
        return arguments[0]

    def ordered_dict(self, arguments: tuple[Any, ...]) -> dict[Any, Any]:
        """OrderedDict(), empty; it is filled later."""
        if arguments:
            raise self._damaged("an OrderedDict is built from arguments")
        return {}


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_SIZE


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) <= MAX_DIMS and all(map(_is_size, value))


CALLS: dict[str, Callable[[_Machine, tuple[Any, ...]], Any]] = {
    "torch._utils._rebuild_tensor_v2": _Machine.tensor,
    "torch._utils._rebuild_parameter": _Machine.parameter,
    "collections.OrderedDict": _Machine.ordered_dict,
}
ALLOWED = frozenset({*CALLS, *(f"torch.{name}" for name in STORAGE_DTYPES)})
LITERALS = frozenset({"NONE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"})
INSTRUCTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda machine, _: None, "FRAME": lambda machine, _: None,
    "NEWTRUE": lambda machine, _: machine._stack.append(True), "NEWFALSE": lambda machine, _: machine._stack.append(False),
    "EMPTY_DICT": lambda machine, _: machine._stack.append({}), "EMPTY_LIST": lambda machine, _: machine._stack.append([]),
    "EMPTY_TUPLE": lambda machine, _: machine._stack.append(()),
    "TUPLE1": lambda machine, _: machine._tuple(1), "TUPLE2": lambda machine, _: machine._tuple(2),
    "TUPLE3": lambda machine, _: machine._tuple(3), "TUPLE": _Machine._marked_tuple,
    "MARK": _Machine._mark, "POP": _Machine._pop_top,
    "SETITEM": _Machine._set_item, "SETITEMS": lambda machine, _: machine._set_items(machine._pop_marked()),
    "APPEND": _Machine._append, "APPENDS": _Machine._appends,
    "BINPUT": _Machine._memoize, "LONG_BINPUT": _Machine._memoize, "MEMOIZE": _Machine._memoize,
    "BINGET": lambda machine, index: machine._stack.append(machine._memo[index]),
    "LONG_BINGET": lambda machine, index: machine._stack.append(machine._memo[index]),
    "GLOBAL": _Machine._global, "STACK_GLOBAL": _Machine._stack_global,
    "BINPERSID": _Machine._persistent, "REDUCE": _Machine._reduce, "BUILD": _Machine._build,
}
