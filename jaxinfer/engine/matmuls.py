"""Products with quantised weights as a plan sees them: what each bucket runs them on, and what they hold meanwhile. Multiplies nothing."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxinfer.engine.hardware import Hardware
from jaxinfer.models.config import ModelConfig
from jaxinfer.quant import EMBEDDING, HEAD
from jaxinfer.state import StepLayout
from pallas_kernels.dispatch import Choice, Target

if TYPE_CHECKING:
    from pallas_kernels.int4_matmul.config import MatmulSpec


def matmul_choices(model: ModelConfig, layout: StepLayout, *, dtype: np.dtype, hardware: Hardware) -> list[str]:
    """What each kind of quantised linear runs on in a bucket, and why: 'mlp.down: ...'; kinds alike stand together."""
    found = dict[str, list[str]]()
    for module in _quantised(model):
        kind, names = _kind(module), found.setdefault(str(_choice(_spec(model, module, layout, dtype), hardware)), [])
        if kind not in names:
            names.append(kind)
    return [f"{', '.join(names)}: {choice}" for choice, names in found.items()]


def favours_single_rows(model: ModelConfig, *, dtype: np.dtype, hardware: Hardware) -> bool:
    """Whether a projection has a kernel for a single token, which a bucket of more rows would not take."""
    single = StepLayout(num_tokens=1, num_rows=1, num_updates=1, null_slot=0, decode_only=True)
    return any(_choice(_spec(model, module, single, dtype), hardware).implementation == "stream"
               for module in _quantised(model) if module not in (HEAD, EMBEDDING))


def dequantised_bytes(model: ModelConfig, layouts: Sequence[StepLayout], *, dtype: np.dtype, hardware: Hardware) -> int:
    """The widest linear as a plain matrix, which steps of many tokens make of its integers for as long as they multiply with it.

    The vocabulary head meets only the last token of each row, and counts only where a bucket has rows enough; of its plain matrix no more
    than a strip exists at a time.
    """
    from pallas_kernels.int4_matmul.config import xla_strip_tiles
    from pallas_kernels.int4_matmul.layout import TILE_N

    most = 0
    for module, num_inputs in _quantised(model).items():
        num_outputs = _widths(model)[_kind(module)]
        if module in (HEAD, EMBEDDING):
            spec = _spec(model, module, max(layouts, key=lambda layout: layout.num_rows), dtype)
            if _choice(spec, hardware).implementation not in ("dequantize", "xla"):
                continue
            num_outputs = min(num_outputs, TILE_N * xla_strip_tiles(spec, target_of(hardware)))
        most = max(most, num_inputs * num_outputs * dtype.itemsize)
    return most


def _quantised(model: ModelConfig) -> dict[str, int]:
    """Quantised module that is multiplied with -> its inputs. The embedding is one where it is the head too."""
    if model.quantization is None:
        return {}
    modules = model.quantizable() if model.tie_embeddings else model.projections()
    return {module: k for module, k in modules.items() if model.quantization.format_of(module) is not None}


def _kind(module: str) -> str:
    """'layers.3.mlp.down' -> 'mlp.down'; 'lm_head', also where it is the embedding."""
    return HEAD if module in (HEAD, EMBEDDING) else module.split(".", 2)[2]


def _widths(model: ModelConfig) -> dict[str, int]:
    """Outputs of each kind of linear."""
    return {"attention.qkv": (model.num_heads + 2 * model.num_kv_heads) * model.head_dim, "attention.output": model.dim,
            "mlp.gate_up": 2 * model.mlp_dim, "mlp.down": model.dim, HEAD: model.vocab_size}


def _spec(model: ModelConfig, module: str, layout: StepLayout, dtype: np.dtype) -> "MatmulSpec":
    """The facts of a quantised module's product in a bucket: of all tokens, or of each row's last for the head, whose logits are float32."""
    from pallas_kernels.int4_matmul.config import MatmulSpec

    quant = None if model.quantization is None else model.quantization.format_of(module)
    assert quant is not None, module
    num_inputs, kind = model.quantizable()[module], _kind(module)
    head = kind == HEAD
    return MatmulSpec(
        m=layout.num_rows if head else layout.num_tokens, k=num_inputs, n=_widths(model)[kind], group_size=quant.group_size or num_inputs,
        bits=quant.bits, x_dtype=str(dtype), scale_dtype=quant.scales_dtype, zero_dtype="bfloat16" if quant.zero_point else None,
        has_bias={"attention.qkv": model.qkv_bias, "attention.output": model.output_bias}.get(kind, False),
        out_dtype="float32" if head else str(dtype), activation="swiglu" if kind == "mlp.gate_up" else None)


def _choice(spec: "MatmulSpec", hardware: Hardware) -> Choice:
    from pallas_kernels.int4_matmul.api import int4_matmul_choice

    return int4_matmul_choice(spec, target_of(hardware))


def target_of(hardware: Hardware) -> Target:
    """The hardware as ops know it."""
    return Target(platform=hardware.platform, compute_capability=hardware.compute_capability, device_kind=hardware.name)
