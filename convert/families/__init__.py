"""One table a model family, from its Hugging Face tensor names to our parameters. Adding a family is a file and a row."""

from collections.abc import Callable

from convert.families import llama, qwen2
from convert.mapping import Entry
from jaxinfer.models.config import ModelConfig

FAMILIES: dict[str, Callable[[ModelConfig], list[Entry]]] = {
    "LlamaForCausalLM": llama.entries,
    "Qwen2ForCausalLM": qwen2.entries,
}
TIED = ("lm_head.weight", "model.embed_tokens.weight")
"""Source names of a vocabulary head and of the embedding that it repeats when a model's embeddings are tied."""
