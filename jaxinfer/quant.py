"""Quantised weights: which modules have them (QuantConfig), in what form (QuantFormat), and how their integers are packed (FORMATS).

A module whose format is F holds, in place of `weight` [K, *out], flat parameters with n = prod(out):

    packed   integers of F.bits in the layout of pallas_kernels/int4_matmul/layout.py
    scales   [groups, n] F.scales_dtype
    zeros    [groups, n] bfloat16, where F.zero_point: whole numbers, which it holds up to 256, as the kernels read them
    perm     [K] int32, where F.permuted: row i of the packed matrix multiplies input perm[i]

and its weight is exactly (q - z) * float32(scale). Reads no file and multiplies nothing (layers/quantized.py does); importing it imports
no jax.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from jaxinfer.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    import numpy as np

QUANT_METHOD = "jaxinfer"
"""`quant_method` of the quantization_config that a converted checkpoint's config.json has."""
GROUP_SIZES = (32, 64, 128)
"""Inputs that share a scale; beside them the whole column."""
HEAD, EMBEDDING = "lm_head", "embedding"
"""Paths of the vocabulary head and the embedding table, which are quantised only where a config names them. Both are then held as a matrix
[D, V] in groups along D, a token a column: the head multiplies by it, the embedding takes columns out of it, and one array serves as both
where embeddings are tied. A head that is named has an array of its own: a model with a quantised lm_head is not tied."""
type FormatOf = Callable[[str], QuantFormat | None]
"""The last part of a module's path -> its format; None is not quantised."""
METHODS_OF: Mapping[str, tuple[str, ...]] = {
    "awq_scaling": ("awq",), "awq_rounding": ("awq",), "clip": ("awq",), "act_order": ("gptq",), "damping": ("awq", "gptq")}
"""Flags of python -m convert.quantize that mean something to some methods only -> these. It refuses them elsewhere, and advice names them
nowhere else."""
SCALE_DTYPES = ("float16", "bfloat16", "float32")
SCALE_FLOOR = 2.0**-24
"""The smallest scale of a group that is not zero: float16's smallest number, so that no scale is rounded to zero."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantFormat:
    """How one module's weight is held."""

    bits: int
    """4 or 8."""
    group_size: int | None
    """Inputs that share a scale and a zero point; None is all of them (whole column)."""
    zero_point: bool
    """Whether zero points are stored; otherwise 2**(bits - 1) is everywhere the value that stands for 0."""
    permuted: bool
    """Whether inputs are reordered before the product, as GPTQ's act-order needs it."""
    scales_dtype: str
    """Dtype of the scales as stored and multiplied with; it does not follow the model's dtype."""

    def __post_init__(self) -> None:
        _require(self.bits in (4, 8) and type(self.bits) is int, "bits", self.bits, "4 or 8")
        _require(self.group_size is None or type(self.group_size) is int and self.group_size in GROUP_SIZES, "group_size", self.group_size,
                 f"one of {', '.join(map(str, GROUP_SIZES))}, or null for the whole column")
        _require(type(self.zero_point) is bool, "zero_point", self.zero_point, "true or false")
        _require(type(self.permuted) is bool, "permuted", self.permuted, "true or false")
        _require(self.scales_dtype in SCALE_DTYPES, "scales_dtype", self.scales_dtype, f"one of {', '.join(SCALE_DTYPES)}")

    @property
    def name(self) -> str:
        """A key of FORMATS."""
        return f"int{self.bits}"

    def __str__(self) -> str:
        group = "whole columns" if self.group_size is None else f"groups of {self.group_size}"
        return f"{self.name}, {group}, {'zero points' if self.zero_point else 'symmetric'}{', permuted inputs' if self.permuted else ''}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """Which modules of a model are quantised, and how: every projection, unless an exception says otherwise; vocabulary head and embedding
    only where an exception says how."""

    method: str
    """What made the weights: awq, gptq, rtn, compressed-tensors or random. Changes no arithmetic."""
    weights: QuantFormat
    """The format of every projection: layers.<i>.attention.qkv and .output, layers.<i>.mlp.gate_up and .down."""
    exceptions: tuple[tuple[str, QuantFormat | None], ...] = ()
    """(module path, its own format; None is not quantised), sorted by path."""

    def format_of(self, module: str) -> QuantFormat | None:
        """The format of a module, by its path such as layers.3.mlp.down or lm_head; None where its weight is not quantised."""
        return dict(self.exceptions).get(module, None if module in (HEAD, EMBEDDING) else self.weights)

    def layouts(self) -> dict[str, str]:
        """Name of every format that occurs -> how its integers are packed; a checkpoint's manifest records it."""
        formats = [self.weights, *(value for _, value in self.exceptions if value is not None)]
        return {name: FORMATS[name].layout for name in sorted({value.name for value in formats})}

    def to_json(self) -> dict[str, Any]:
        """The quantization_config of a converted checkpoint's config.json."""
        exceptions = {module: None if value is None else dataclasses.asdict(value) for module, value in self.exceptions}
        return {"quant_method": QUANT_METHOD, "method": self.method, **dataclasses.asdict(self.weights), "exceptions": exceptions}

    @classmethod
    def of(cls, method: str, formats: Mapping[str, QuantFormat | None]) -> "QuantConfig":
        """The config of a model whose every module has the format given: the commonest one, and exceptions from it.

        Raises:
          ConfigError: none of the modules is quantised.
        """
        counts: dict[QuantFormat, int] = {}
        for value in formats.values():
            if value is not None:
                counts[value] = counts.get(value, 0) + 1
        if not counts:
            raise ConfigError(f"none of {len(formats)} modules is quantised: write an unquantised checkpoint, or quantise at least one.")
        common = max(counts, key=lambda value: counts[value])
        bare = cls(method=method, weights=common)
        exceptions = tuple(sorted((module, value) for module, value in formats.items() if value != bare.format_of(module)))
        return dataclasses.replace(bare, exceptions=exceptions)


def read_quant_config(value: Any) -> QuantConfig:
    """Reads `QuantConfig.to_json` back, closed-world.

    Raises:
      UnsupportedModelError: another quantiser's config, an attribute that is missing, unknown, or has a value that is not implemented.
    """
    if not isinstance(value, dict) or value.get("quant_method") != QUANT_METHOD:
        method = value.get("quant_method") if isinstance(value, dict) else value
        raise UnsupportedModelError(f"quantization_config says quant_method = {method!r}: only a checkpoint converted by python -m convert "
                                    "can be run; convert the model, or use an unquantised one.")
    fields = {field.name for field in dataclasses.fields(QuantFormat)}
    wanted = {"quant_method", "method", "exceptions"} | fields
    exceptions = value.get("exceptions")
    if set(value) != wanted or not isinstance(value["method"], str) or not isinstance(exceptions, dict) or not all(
            entry is None or isinstance(entry, dict) and set(entry) == fields for entry in exceptions.values()):
        raise UnsupportedModelError(f"quantization_config = {value!r:.300}: exactly {', '.join(sorted(wanted))} are needed; convert the "
                                    "model again.")
    return QuantConfig(
        method=value["method"], weights=QuantFormat(**{name: value[name] for name in fields}),
        exceptions=tuple(sorted((module, None if entry is None else QuantFormat(**entry)) for module, entry in exceptions.items())))


def not_quantised(name: str) -> None:
    """The FormatOf of plain weights."""


def format_of(config: QuantConfig | None, parent: str) -> FormatOf:
    """The formats of the modules below `parent`, by their last name; None for all of them in a model that is not quantised."""
    return not_quantised if config is None else lambda name: config.format_of(f"{parent}.{name}")


def check_groups(module: str, num_inputs: int, group_size: int | None, *, tensor_parallel_size: int = 1) -> None:
    """Refuses a group size that the inputs of a module cannot be split into, before anything is loaded or computed.

    Args:
      module: named in the message.
      num_inputs: K of the whole matrix.
      group_size: None is the whole column, which only one device can hold.
      tensor_parallel_size: devices among which the inputs are split; each must hold whole groups.

    Raises:
      ConfigError: with the sizes that would do.
    """
    share = num_inputs // tensor_parallel_size
    if num_inputs % tensor_parallel_size == 0 and (group_size is None and tensor_parallel_size == 1
                                                   or group_size is not None and share % group_size == 0):
        return
    fitting = [size for size in GROUP_SIZES if share % size == 0 and num_inputs % tensor_parallel_size == 0]
    what = "its whole column" if group_size is None else f"groups of {group_size}"
    split = f" over {tensor_parallel_size} devices, {share} each," if tensor_parallel_size > 1 else ""
    remedies = [f"quantise with a group size of {' or '.join(map(str, fitting))}"] if fitting else []
    remedies += ["lower tensor_parallel_size"] if tensor_parallel_size > 1 else ["quantise by whole columns"]
    remedies.append("leave this module unquantised")
    raise ConfigError(f"{module}: {num_inputs} inputs{split} do not split into {what}: {', or '.join(remedies)}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """How integers of one width are held and read, by the op that multiplies with them."""

    bits: int
    layout: str
    """Name of the packed layout, which a checkpoint's manifest records: another one cannot be read."""

    def pack(self, q: "np.ndarray") -> "np.ndarray":
        """[K, n] uint8 -> packed, int16."""
        import numpy as np

        from pallas_kernels.int4_matmul import layout

        return np.asarray(layout.pack(q, bits=self.bits))

    def unpack(self, packed: "np.ndarray", *, num_inputs: int, num_outputs: int) -> "np.ndarray":
        """The inverse of `pack`."""
        import numpy as np

        from pallas_kernels.int4_matmul import layout

        return np.asarray(layout.unpack(np.asarray(packed), k=num_inputs, n=num_outputs, bits=self.bits))

    def packed_shape(self, *, num_inputs: int, num_outputs: int) -> tuple[int, ...]:
        """Shape of `packed`."""
        from pallas_kernels.int4_matmul import layout

        return layout.packed_shape(num_inputs, num_outputs, bits=self.bits)


FORMATS: dict[str, WeightFormat] = {
    "int4": WeightFormat(bits=4, layout="tiles of 64 columns by 256 inputs, 4 planes of 64 words"),
    "int8": WeightFormat(bits=8, layout="tiles of 64 columns by 256 inputs, 2 planes of 128 words"),
}
"""QuantFormat.name -> how its integers are packed."""


def _require(ok: bool, name: str, value: object, limit: str) -> None:
    if not ok:
        raise UnsupportedModelError(f"{name} = {value!r} of a quantised weight: must be {limit}.")
