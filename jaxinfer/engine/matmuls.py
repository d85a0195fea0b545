"""Products with quantised weights as a plan sees them: what each bucket runs them on, and what they hold meanwhile. Multiplies nothing."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxinfer.engine.forced import choice_of
from jaxinfer.engine.hardware import Hardware
from jaxinfer.engine.prompt_scores import NUM_SCORES
from jaxinfer.errors import ConfigError
from jaxinfer.layers.forced import ForcedKernels
from jaxinfer.models.config import ModelConfig
from jaxinfer.quant import EMBEDDING, HEAD
from jaxinfer.state import StepLayout
from pallas_kernels.dispatch import Choice, Target

if TYPE_CHECKING:
    from jaxinfer.engine.resolve import ResolvedConfig
    from pallas_kernels.int4_matmul.config import MatmulSpec


def matmul_choices(resolved: "ResolvedConfig", layout: StepLayout) -> list[str]:
    """What each kind of quantised linear runs on in a bucket, and why: 'mlp.down: ...'; kinds alike stand together.

    Raises:
      ConfigError: matmul_implementation names none, or one that cannot do a product of the bucket on this hardware.
    """
    found, said = dict[str, list[str]](), dict["MatmulSpec", str]()  # of layers alike one is asked about
    for module in _quantised(resolved.model):
        spec = _spec(resolved.model, module, _num_tokens(module, layout), resolved.dtype)
        if spec not in said:
            said[spec] = str(_choice(spec, resolved.hardware, resolved.forced, where=f"bucket {layout.name}, {module}"))
        kind, names = _kind(module), found.setdefault(said[spec], [])
        if kind not in names:
            names.append(kind)
    return [f"{', '.join(names)}: {choice}" for choice, names in found.items()]


def score_choices(resolved: "ResolvedConfig") -> list[str]:
    """What the vocabulary head runs on, if it is quantised, where prompt tokens are scored (engine/prompt_scores.py), and why: 'lm_head: ...'.

    Raises:
      ConfigError: as for matmul_choices.
    """
    heads = [module for module in _quantised(resolved.model) if _kind(module) == HEAD]
    specs = {module: _spec(resolved.model, module, NUM_SCORES, resolved.dtype) for module in heads}
    return [f"{HEAD}: {_choice(spec, resolved.hardware, resolved.forced, where=f'prompt scores, {module}')}" for module, spec in specs.items()]


def check_forced_matmuls(resolved: "ResolvedConfig") -> None:
    """Refuses what matmul_implementation names where it cannot do one of the engine's products.

    Raises:
      ConfigError: as for matmul_choices, or no product has quantised weights.
    """
    if not _quantised(resolved.model):
        raise ConfigError(f"matmul_implementation = {resolved.forced.matmul!r}: no product of this model has quantised weights, so that it "
                          "would change nothing: leave it at 'auto', or give a quantised model (python -m convert.quantize makes one).")
    for layout in resolved.layouts:
        matmul_choices(resolved, layout)
    score_choices(resolved)


def favours_single_rows(model: ModelConfig, *, dtype: np.dtype, hardware: Hardware, forced: ForcedKernels) -> bool:
    """Whether a projection has a kernel for a single token, or is told to take it, which a bucket of more rows would not."""
    return any(_name(_spec(model, module, 1, dtype), hardware, forced) == "stream"
               for module in _quantised(model) if module not in (HEAD, EMBEDDING))


def dequantised_bytes(model: ModelConfig, layouts: Sequence[StepLayout], *, dtype: np.dtype, hardware: Hardware, forced: ForcedKernels) -> int:
    """The widest linear as a plain matrix, which steps of many tokens make of its integers for as long as they multiply with it.

    The vocabulary head meets only the last token of each row, and counts only where a bucket has rows enough; of its plain matrix no more
    than a strip exists at a time. The oracle, which runs only where it is asked for, makes all of any matrix, in float32.
    """
    from pallas_kernels.int4_matmul.config import xla_strip_tiles
    from pallas_kernels.int4_matmul.layout import TILE_N

    most = 0
    for module, num_inputs in _quantised(model).items():
        num_outputs = _widths(model)[_kind(module)]
        if forced.matmul == "reference":
            most = max(most, num_inputs * num_outputs * 4)
            continue
        if module in (HEAD, EMBEDDING):
            spec = _spec(model, module, max(layout.num_rows for layout in layouts), dtype)
            if _name(spec, hardware, forced) not in ("dequantize", "xla"):
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


def _num_tokens(module: str, layout: StepLayout) -> int:
    """The tokens that a module meets in a bucket: all, or each row's last for the head."""
    return layout.num_rows if _kind(module) == HEAD else layout.num_tokens


def _spec(model: ModelConfig, module: str, num_tokens: int, dtype: np.dtype) -> "MatmulSpec":
    """The facts of a quantised module's product with so many tokens. The head's logits are float32."""
    from pallas_kernels.int4_matmul.config import MatmulSpec

    quant = None if model.quantization is None else model.quantization.format_of(module)
    assert quant is not None, module
    num_inputs, kind = model.quantizable()[module], _kind(module)
    head, has_bias = kind == HEAD, {"attention.qkv": model.qkv_bias, "attention.output": model.output_bias}.get(kind, False)
    return MatmulSpec(
        m=num_tokens, k=num_inputs, n=_widths(model)[kind], group_size=quant.group_size or num_inputs,
        bits=quant.bits, x_dtype=str(dtype), scale_dtype=quant.scales_dtype, zero_dtype="bfloat16" if quant.zero_point else None,
        has_bias=has_bias, leaves_parts=kind in ("attention.output", "mlp.down") and not has_bias,
        out_dtype="float32" if head else str(dtype), activation="swiglu" if kind == "mlp.gate_up" else None)


def _choice(spec: "MatmulSpec", hardware: Hardware, forced: ForcedKernels, *, where: str) -> Choice:
    from pallas_kernels.int4_matmul.api import int4_matmul_choice

    return choice_of("matmul", int4_matmul_choice, spec, target_of(hardware), forced, where=where)


def _name(spec: "MatmulSpec", hardware: Hardware, forced: ForcedKernels) -> str:
    """What a product runs on; a name that is forced is not asked whether it can, which check_forced_matmuls does once there is a plan."""
    from pallas_kernels.int4_matmul.api import int4_matmul_choice

    return forced.matmul or int4_matmul_choice(spec, target_of(hardware)).implementation


def target_of(hardware: Hardware) -> Target:
    """The hardware as ops know it."""
    return Target(platform=hardware.platform, compute_capability=hardware.compute_capability, device_kind=hardware.name)
