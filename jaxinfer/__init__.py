"""JAX-native inference for Qwen-class models on NVIDIA GPUs. Importing this touches no device and imports no jax."""

from typing import TYPE_CHECKING, Any

from jaxinfer.config import EngineConfig
from jaxinfer.sampling.params import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from jaxinfer.async_llm import AsyncLLM
    from jaxinfer.engine.load import from_params, load, tensor_parallel_shardings
    from jaxinfer.llm import LLM
    from jaxinfer.sampling.processors import register_logits_processor

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "EngineConfig", "SamplingParams", "StructuredOutputsParams", "from_params", "load",
           "register_logits_processor", "tensor_parallel_shardings"]

_LAZY = {"LLM": ("jaxinfer.llm", "LLM"), "AsyncLLM": ("jaxinfer.async_llm", "AsyncLLM"), "load": ("jaxinfer.engine.load", "load"),
         "from_params": ("jaxinfer.engine.load", "from_params"),
         "tensor_parallel_shardings": ("jaxinfer.engine.load", "tensor_parallel_shardings"),
         "register_logits_processor": ("jaxinfer.sampling.processors", "register_logits_processor")}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
    import importlib

    module, attribute = _LAZY[name]
    return getattr(importlib.import_module(module), attribute)
