"""Mistral. Only the reading of its config and the class."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ConfigReader, ModelConfig, read_head_dim, read_max_len, read_num_layers
from jaxinfer.models.decoder import Decoder

ARCHITECTURE = "MistralForCausalLM"


class Mistral(Decoder):
    """Llama with a sliding window in every layer. Source: arXiv 2310.06825; `transformers/models/mistral/modeling_mistral.py`."""


def read_config(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Reads a MistralConfig.

    Raises:
      UnsupportedModelError: an attribute is missing, or has a value that is not implemented.
    """
    reader = ConfigReader(hf_config, architecture=ARCHITECTURE, model_type="mistral")
    reader.fixed("hidden_act", "silu")
    dim, num_heads = reader.required("hidden_size", int), reader.required("num_attention_heads", int)
    num_layers = read_num_layers(reader)
    rope, max_len = read_max_len(reader, default_theta=10000.0)  # as the first Mistral was trained
    if "sliding_window" not in hf_config:
        raise reader.unsupported("sliding_window", "it must be stated: a number of tokens, or null for none")
    config = ModelConfig(
        architecture=ARCHITECTURE,
        vocab_size=reader.required("vocab_size", int),
        num_layers=num_layers,
        dim=dim,
        num_heads=num_heads,
        num_kv_heads=reader.required("num_key_value_heads", int),
        head_dim=read_head_dim(reader, dim=dim, num_heads=num_heads),
        mlp_dim=reader.required("intermediate_size", int),
        norm_eps=reader.required("rms_norm_eps", float),
        rope=rope,
        logn_len=None,
        qk_norm=False,
        stacked_qkv=False,
        qkv_bias=False,
        output_bias=False,
        tie_embeddings=reader.optional("tie_word_embeddings", bool, False),
        max_position_embeddings=max_len,
        sliding_windows=(reader.optional("sliding_window", int, None),) * num_layers,
    )
    reader.finish()
    return config
