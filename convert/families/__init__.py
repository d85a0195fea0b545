"""One table a model family, from its Hugging Face tensor names to our parameters. Adding a family is a file and a row."""

from collections.abc import Callable

from convert.families import llama, mistral, qwen1, qwen2, qwen3
from convert.mapping import Entry
from jaxinfer.models.config import ModelConfig

FAMILIES: dict[str, Callable[[ModelConfig], list[Entry]]] = {
    "LlamaForCausalLM": llama.entries,
    "MistralForCausalLM": mistral.entries,
    "QWenLMHeadModel": qwen1.entries,
    "Qwen2ForCausalLM": qwen2.entries,
    "Qwen3ForCausalLM": qwen3.entries,
}
TIED = ("lm_head.weight", "model.embed_tokens.weight")
"""Source names of a vocabulary head and of the embedding that it repeats when a model's embeddings are tied."""
