"""compressed-tensors: pack-quantized (4 or 8 bits) and weight-only int-quantized (8 bits in bytes); one scheme for all linear modules.

    pack-quantized                                                     int-quantized
    weight_packed     [n, K * bits / 32] int32, along K                weight            [n, K] int8
    weight_scale      [n, groups]                                      weight_scale      [n, groups]
    weight_zero_point [n * bits / 32, groups] int32, along n           weight_zero_point [n, groups] int8
    weight_shape      [2] int64, [n, K]
    weight_g_idx      [K] int32, where actorder is group

Values and zero points are signed; both are stored here plus 2**(bits - 1). Source: compressed-tensors 0.20.1 (compressors/pack_quantized).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from convert.formats.bits import unpack_columns, unpack_rows
from convert.formats.gptq import input_order
from convert.formats.matrix import QuantizedMatrix
from convert.formats.scheme import SKIPS_HEAD, Scheme, Settings, TensorSpec, name_patterns
from jaxinfer.errors import CheckpointError, UnsupportedModelError

IGNORED = frozenset({"quant_method", "version", "global_compression_ratio"})
IGNORED_WEIGHTS = frozenset({"observer", "observer_kwargs", "scale_dtype", "zp_dtype"})
PACKED, BYTES = "pack-quantized", "int-quantized"


def read_config(value: Mapping[str, Any]) -> Scheme:
    """The scheme of a quantization_config with quant_method compressed-tensors. Raises UnsupportedModelError for any other variant."""
    what = "quantization_config (compressed-tensors)"
    settings = Settings(value, what=what, ignored=IGNORED)
    layout = settings.required(("format",), (str,))
    if layout not in (PACKED, BYTES):
        raise settings.unsupported("format", f"only {PACKED!r} and weight-only {BYTES!r} are read")
    settings.fixed("quantization_status", "compressed", "frozen")
    for name in ("kv_cache_scheme", "sparsity_config", "transform_config", "moe_sparsity_config"):
        settings.fixed(name, {})
    groups = settings.required(("config_groups",), (dict,))
    skipped = name_patterns(settings.get(("ignore",), (list,)), "ignore", exact=True)
    settings.finish()
    if len(groups) != 1:
        raise UnsupportedModelError(f"{what} has {len(groups)} config_groups: one for all linear modules is read")
    return _read_group(next(iter(groups.values())), layout, skipped, what)


def _read_group(value: Any, layout: str, skipped: tuple[Any, ...], what: str) -> Scheme:
    group = Settings(value if isinstance(value, dict) else {}, what=f"{what} config_groups", ignored=frozenset())
    group.fixed("targets", ["Linear"])
    group.fixed("format", layout)
    group.fixed("input_activations")
    group.fixed("output_activations")
    weights = Settings(group.required(("weights",), (dict,)), what=f"{what} weights", ignored=IGNORED_WEIGHTS)
    group.finish()
    weights.fixed("type", "int")
    weights.fixed("dynamic", False)
    weights.fixed("block_structure")
    weights.fixed("actorder", "group", "weight", "static", False)
    act_order = weights.get(("actorder",), (str, bool)) == "group"
    bits = weights.required(("num_bits",), (int,))
    if bits not in ((4, 8) if layout == PACKED else (8,)):
        raise weights.unsupported("num_bits", f"{layout} is read with {'4 or 8' if layout == PACKED else '8'}")
    symmetric, strategy = weights.required(("symmetric",), (bool,)), weights.required(("strategy",), (str,))
    if strategy not in ("group", "channel"):
        raise weights.unsupported("strategy", "only 'group' and 'channel' are read")
    size = weights.get(("group_size",), (int,))
    if strategy == "group" and (size is None or size < 1):
        raise weights.unsupported("group_size", "strategy 'group' needs a positive number")
    weights.finish()
    return Scheme(name="compressed-tensors" if layout == PACKED else "compressed-tensors-int8", bits=bits,
                  group_size=size if strategy == "group" else None, zero_point=not symmetric, act_order=act_order, zero_offset=0,
                  skipped=(*skipped, SKIPS_HEAD))


def tensors(scheme: Scheme, num_inputs: int, num_outputs: int) -> dict[str, TensorSpec]:
    """The tensors of one matrix, by the last part of their name."""
    groups, per_word, floats = scheme.num_groups(num_inputs), 32 // scheme.bits, ("F16", "BF16", "F32")
    found = {"weight_scale": TensorSpec(shape=(num_outputs, groups), dtypes=floats)}
    if scheme.name == "compressed-tensors":
        found["weight_packed"] = TensorSpec(shape=(num_outputs, -(-num_inputs // per_word)), dtypes=("I32",))
        found["weight_shape"] = TensorSpec(shape=(2,), dtypes=("I64", "I32"))
    else:
        found["weight"] = TensorSpec(shape=(num_outputs, num_inputs), dtypes=("I8",))
    if scheme.zero_point and scheme.name == "compressed-tensors":
        found["weight_zero_point"] = TensorSpec(shape=(-(-num_outputs // per_word), groups), dtypes=("I32",))
    elif scheme.zero_point:
        found["weight_zero_point"] = TensorSpec(shape=(num_outputs, groups), dtypes=("I8",))
    if scheme.act_order:
        found["weight_g_idx"] = TensorSpec(shape=(num_inputs,), dtypes=("I32",))
    return found


def unpack(scheme: Scheme, found: Mapping[str, np.ndarray]) -> QuantizedMatrix:
    """The matrix that the tensors hold. Raises CheckpointError where they contradict each other."""
    zeros = None
    if scheme.name == "compressed-tensors":
        q = unpack_columns(found["weight_packed"], scheme.bits)
        if found["weight_shape"].tolist() != list(q.shape):
            raise CheckpointError(f"weight_shape says {found['weight_shape'].tolist()}, weight_packed holds {list(q.shape)}: the checkpoint is "
                                  "damaged, fetch it again")
        if scheme.zero_point:
            zeros = unpack_rows(found["weight_zero_point"], scheme.bits).T
    else:
        q = found["weight"].view(np.uint8) ^ np.uint8(128)
        if scheme.zero_point:
            zeros = (found["weight_zero_point"].view(np.uint8) ^ np.uint8(128)).T
    scales = found["weight_scale"].T
    perm = input_order(found["weight_g_idx"], scales.shape[0]) if scheme.act_order else None
    q = q.T if perm is None else q.T[perm]
    zeros = None if zeros is None else np.ascontiguousarray(zeros)
    return QuantizedMatrix(q=np.ascontiguousarray(q), scales=np.ascontiguousarray(scales), zeros=zeros, bits=scheme.bits,
                           group_size=scheme.group_size, perm=perm)
