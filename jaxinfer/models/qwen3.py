"""Qwen3, dense. Only the reading of its config and the class."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ConfigReader, ModelConfig, read_max_len, read_num_layers
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.qwen2 import read_sliding_windows

ARCHITECTURE = "Qwen3ForCausalLM"


class Qwen3(Decoder):
    """Every query and key head has an RMSNorm. Source: arXiv 2505.09388; `transformers/models/qwen3/modeling_qwen3.py`."""


def read_config(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Reads a Qwen3Config.

    Raises:
      UnsupportedModelError: an attribute is missing, or has a value that is not implemented.
    """
    reader = ConfigReader(hf_config, architecture=ARCHITECTURE, model_type="qwen3")
    reader.fixed("hidden_act", "silu")
    num_layers = read_num_layers(reader)
    rope, max_len = read_max_len(reader, default_theta=None)
    bias = reader.optional("attention_bias", bool, False)
    config = ModelConfig(
        architecture=ARCHITECTURE,
        vocab_size=reader.required("vocab_size", int),
        num_layers=num_layers,
        dim=reader.required("hidden_size", int),
        num_heads=reader.required("num_attention_heads", int),
        num_kv_heads=reader.required("num_key_value_heads", int),
        head_dim=reader.required("head_dim", int),  # apart from D / N in most sizes
        mlp_dim=reader.required("intermediate_size", int),
        norm_eps=reader.required("rms_norm_eps", float),
        rope=rope,
        logn_len=None,
        qk_norm=True,
        stacked_qkv=False,
        qkv_bias=bias,
        output_bias=bias,
        tie_embeddings=reader.optional("tie_word_embeddings", bool, False),
        max_position_embeddings=max_len,
        sliding_windows=read_sliding_windows(reader, num_layers),
    )
    reader.finish()
    return config
