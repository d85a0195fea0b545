"""GGUF metadata -> config.json in Hugging Face's form. Closed-world: a key of the architecture that is not understood is refused.

Reads metadata and tensor shapes only.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from jaxinfer.errors import CheckpointError, UnsupportedModelError


@dataclasses.dataclass(frozen=True, kw_only=True)
class GGUFArchitecture:
    """How one `general.architecture` maps to Hugging Face."""

    hf_architecture: str
    model_type: str
    permuted: bool
    """Whether query and key rows are stored in GGML's rope order (pairs interleaved) rather than in halves."""


ARCHITECTURES = {
    "llama": GGUFArchitecture(hf_architecture="LlamaForCausalLM", model_type="llama", permuted=True),
    "qwen2": GGUFArchitecture(hf_architecture="Qwen2ForCausalLM", model_type="qwen2", permuted=False),
}
TRANSFORMERS_FORM = "5.0.0"
"""Whose form the config follows. Where a config names none, transformers takes its tokenizer for a faulty one and warns."""
HARMLESS: dict[str, tuple[Any, ...]] = {
    "attention.sliding_window": (0,), "expert_count": (0,), "expert_used_count": (0,), "use_parallel_residual": (True,),
    "attention.causal": (True,), "logit_scale": (1.0,), "vocab_size": (), "tensor_data_layout": ("Meta AI original pth",),
}
"""Keys that are accepted with these values only; an empty tuple accepts any."""


class _Fields:
    """The metadata of one architecture; remembers what was read, so that the rest can be refused."""

    def __init__(self, metadata: Mapping[str, Any], name: str) -> None:
        prefix = name + "."
        self.name = name
        self._values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
        self._left = set(self._values)

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """A value of this type; a list with one value for each layer counts as that value when all are equal."""
        self._left.discard(key)
        value = self._values.get(key, default)
        if isinstance(value, list) and kind is not list:
            if len(set(value)) != 1:
                raise UnsupportedModelError(f"GGUF key {self.name}.{key} differs between layers ({value!r:.80}): not supported")
            value = value[0]
        if kind is float and type(value) is int:
            value = float(value)
        if value is not None and type(value) is not kind:
            raise CheckpointError(f"GGUF key {self.name}.{key} is {value!r:.80}, expected {kind.__name__}: the file is damaged")
        return value

    def require(self, key: str, kind: type) -> Any:
        value = self.get(key, kind)
        if value is None:
            raise CheckpointError(f"the GGUF file lacks the key {self.name}.{key}, without which its model is unknown")
        return value

    def finish(self) -> None:
        """Refuses what nobody read."""
        for key in sorted(self._left):
            value = self._values[key]
            if key not in HARMLESS or HARMLESS[key] and value not in HARMLESS[key]:
                raise UnsupportedModelError(f"GGUF key {self.name}.{key} = {value!r:.80} is not supported and may change the results")


def architecture_of(metadata: Mapping[str, Any]) -> GGUFArchitecture:
    """The row of ARCHITECTURES for a file's metadata. Raises UnsupportedModelError for an unknown one and for one part of a split file."""
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(f"GGUF architecture {name!r} is not supported; known are {', '.join(ARCHITECTURES)}")
    parts = metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise UnsupportedModelError(f"the GGUF file is one of {parts} parts: merge them first with llama-gguf-split --merge")
    return ARCHITECTURES[name]


def synthesise_config(metadata: Mapping[str, Any], tensors: Collection[str], embedding_shape: tuple[int, ...]) -> dict[str, Any]:
    """config.json of a GGUF model.

    Args:
      metadata: the file's metadata.
      tensors: the file's tensors by Hugging Face name. Tied embeddings are told by the absence of lm_head.weight, attention biases by
        q_proj.bias.
      embedding_shape: [V, D], which decides the vocabulary's size.

    Raises:
      CheckpointError: a needed key is absent or of the wrong type.
      UnsupportedModelError: an unknown architecture, or a key that is not understood.
    """
    row = architecture_of(metadata)
    fields = _Fields(metadata, metadata["general.architecture"])
    dim, num_heads = fields.require("embedding_length", int), fields.require("attention.head_count", int)
    if num_heads < 1:
        raise CheckpointError(f"GGUF key {fields.name}.attention.head_count is {num_heads}, expected at least 1: the file is damaged")
    head_dim = fields.get("attention.key_length", int, dim // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.get(key, int, head_dim) != head_dim:
            raise UnsupportedModelError(f"GGUF key {fields.name}.{key} = {fields.get(key, int)} differs from the head size {head_dim}: "
                                        "not supported")
    config = {
        "architectures": [row.hf_architecture],
        "model_type": row.model_type,
        "transformers_version": TRANSFORMERS_FORM,
        "vocab_size": embedding_shape[0],
        "hidden_size": dim,
        "intermediate_size": fields.require("feed_forward_length", int),
        "num_hidden_layers": fields.require("block_count", int),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.get("attention.head_count_kv", int, num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": fields.require("attention.layer_norm_rms_epsilon", float),
        "rope_theta": fields.get("rope.freq_base", float, 10000.0),  # GGUF's own default
        "max_position_embeddings": fields.require("context_length", int),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        **_rope_scaling(fields),
    }
    if row.hf_architecture == "LlamaForCausalLM":
        config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in tensors
        config["mlp_bias"] = False
    for key in ("bos_token_id", "eos_token_id"):
        if (value := metadata.get(f"tokenizer.ggml.{key}")) is not None:
            config[key] = value
    fields.finish()
    return config


def _rope_scaling(fields: _Fields) -> dict[str, Any]:
    """`rope_scaling` where the file scales rope, in Hugging Face's form; whether the kind is implemented is the model's to say."""
    kind = fields.get("rope.scaling.type", str, "none")
    factor = fields.get("rope.scaling.factor", float, fields.get("rope.scale_linear", float))
    trained = fields.get("rope.scaling.original_context_length", int)
    fields.get("rope.scaling.finetuned", bool)
    if kind == "none" and factor not in (None, 0.0, 1.0):
        kind = "linear"
    if kind == "none":
        return {}
    scaling = {"rope_type": kind, "factor": factor}
    if trained is not None and kind != "linear":
        scaling["original_max_position_embeddings"] = trained
    return {"rope_scaling": scaling}
