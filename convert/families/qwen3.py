"""Qwen3's tensors: Llama's names, and a norm of queries and one of keys in every layer."""

from convert.families import llama
from convert.mapping import Entry, Part
from jaxinfer.models.config import ModelConfig


def entries(config: ModelConfig) -> list[Entry]:
    """The table of a dense Qwen3 model."""
    table = llama.entries(config)
    for layer in range(config.num_layers):
        source, target = f"model.layers.{layer}.self_attn", f"layers.{layer}.attention"
        table.append(Entry(f"{target}.query_norm.weight", (Part(f"{source}.q_norm.weight", "same"),)))
        table.append(Entry(f"{target}.key_norm.weight", (Part(f"{source}.k_norm.weight", "same"),)))
    return table
