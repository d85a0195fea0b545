"""Llama (and SmolLM2, which is one). Only the reading of its config and the class."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ConfigReader, ModelConfig, read_head_dim, read_max_len, read_num_layers
from jaxinfer.models.decoder import Decoder

ARCHITECTURE = "LlamaForCausalLM"


class Llama(Decoder):
    """Source: arXiv 2302.13971, 2307.09288; `transformers/models/llama/modeling_llama.py`."""


def read_config(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Reads a LlamaConfig.

    Raises:
      UnsupportedModelError: an attribute is missing, or has a value that is not implemented.
    """
    reader = ConfigReader(hf_config, architecture=ARCHITECTURE, model_type="llama")
    reader.fixed("hidden_act", "silu")
    reader.fixed("mlp_bias", False)
    dim, num_heads = reader.required("hidden_size", int), reader.required("num_attention_heads", int)
    num_layers = read_num_layers(reader)
    rope, max_len = read_max_len(reader, default_theta=10000.0)  # the first Llama configs do not state it
    bias = reader.optional("attention_bias", bool, False)
    config = ModelConfig(
        architecture=ARCHITECTURE,
        vocab_size=reader.required("vocab_size", int),
        num_layers=num_layers,
        dim=dim,
        num_heads=num_heads,
        num_kv_heads=reader.optional("num_key_value_heads", int, num_heads),  # absent before grouped-query attention
        head_dim=read_head_dim(reader, dim=dim, num_heads=num_heads),
        mlp_dim=reader.required("intermediate_size", int),
        norm_eps=reader.required("rms_norm_eps", float),
        rope=rope,
        logn_len=None,
        qk_norm=False,
        stacked_qkv=False,
        qkv_bias=bias,
        output_bias=bias,
        tie_embeddings=reader.optional("tie_word_embeddings", bool, False),
        max_position_embeddings=max_len,
        sliding_windows=(None,) * num_layers,
    )
    reader.finish()
    return config
