"""Qwen2's and Qwen2.5's tensors: Llama's names, with biases on query, key and value, which the config's `qkv_bias` brings in."""

from convert.families import llama
from convert.mapping import Entry
from jaxinfer.models.config import ModelConfig


def entries(config: ModelConfig) -> list[Entry]:
    """The table of a Qwen2 model."""
    assert config.qkv_bias and not config.output_bias, "Qwen2 has biases on query, key and value only"
    return llama.entries(config)
