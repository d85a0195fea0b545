"""Mistral's tensors: Llama's names, no biases."""

from convert.families import llama
from convert.mapping import Entry
from jaxinfer.models.config import ModelConfig


def entries(config: ModelConfig) -> list[Entry]:
    """The table of a Mistral model."""
    return llama.entries(config)
