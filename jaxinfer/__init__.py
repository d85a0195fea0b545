"""JAX-native inference for Qwen-class models on NVIDIA GPUs. Importing this touches no device and imports no jax."""

from typing import TYPE_CHECKING, Any

from jaxinfer.config import EngineConfig
from jaxinfer.sampling.params import SamplingParams

if TYPE_CHECKING:
    from jaxinfer.engine.load import load
    from jaxinfer.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "SamplingParams", "load"]

_LAZY = {"LLM": ("jaxinfer.llm", "LLM"), "load": ("jaxinfer.engine.load", "load")}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
    import importlib

    module, attribute = _LAZY[name]
    return getattr(importlib.import_module(module), attribute)
