"""Qwen2 and Qwen2.5. Only the reading of their config and the class."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ConfigReader, ModelConfig, read_head_dim, read_max_len, read_num_layers
from jaxinfer.models.decoder import Decoder

ARCHITECTURE = "Qwen2ForCausalLM"


class Qwen2(Decoder):
    """Source: arXiv 2407.10671; `transformers/models/qwen2/modeling_qwen2.py`."""


def read_config(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Reads a Qwen2Config.

    Raises:
      UnsupportedModelError: an attribute is missing, or has a value that is not implemented.
    """
    reader = ConfigReader(hf_config, architecture=ARCHITECTURE, model_type="qwen2")
    reader.fixed("hidden_act", "silu")
    reader.fixed("use_mrope", False)
    dim, num_heads = reader.required("hidden_size", int), reader.required("num_attention_heads", int)
    num_layers = read_num_layers(reader)
    rope, max_len = read_max_len(reader, default_theta=None)
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
        qkv_bias=True,
        output_bias=False,
        tie_embeddings=reader.optional("tie_word_embeddings", bool, False),
        max_position_embeddings=max_len,
        sliding_windows=read_sliding_windows(reader, num_layers),
    )
    reader.finish()
    return config


def read_sliding_windows(reader: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """`layer_types` decide where they are given; otherwise layers from `max_window_layers` on slide, if any does."""
    enabled = reader.optional("use_sliding_window", bool, False)
    window = reader.optional("sliding_window", int, None)
    first = reader.optional("max_window_layers", int, None)
    types = reader.optional("layer_types", list, None)
    if types is None:
        if not enabled or window is None:
            return (None,) * num_layers
        if first is None:
            reader.required("max_window_layers", int)
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    if len(types) != num_layers or any(kind not in ("sliding_attention", "full_attention") for kind in types):
        raise reader.unsupported("layer_types", f"{num_layers} entries, each 'full_attention' or 'sliding_attention', are needed")
    if "sliding_attention" in types and not (enabled and window):
        raise reader.unsupported("layer_types", f"some layers slide, but use_sliding_window = {enabled} and sliding_window = {window}")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
