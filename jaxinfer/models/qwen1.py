"""Qwen (v1: Qwen-1.8B to Qwen-72B and their chat models). Only the reading of its config, in both generations, and the class."""

from collections.abc import Mapping
from typing import Any

from jaxinfer.errors import UnsupportedModelError
from jaxinfer.models.config import ConfigReader, ModelConfig, RopeConfig, read_num_layers
from jaxinfer.models.decoder import Decoder

ARCHITECTURE = "QWenLMHeadModel"

ALIASES = {
    "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers", "ffn_hidden_size": "intermediate_size",
    "n_positions": "max_position_embeddings", "activation": "hidden_act",
}
"""The spellings of August 2023 -> those of the configs after it."""

IGNORED = frozenset({
    # Training.
    "attn_pdrop", "embd_pdrop", "resid_pdrop", "attn_dropout_prob", "emb_dropout_prob", "bias_dropout_fusion",
    # How the reference would run it. Keys and values are held as the engine's settings say.
    "bf16", "fp16", "fp32", "params_dtype", "onnx_safe", "softmax_in_fp32", "use_cache_kernel", "tokenizer_type",
})
"""Attributes that change no number here."""


class Qwen1(Decoder):
    """Multi-head attention with biases on query, key and value only, logn-scaled queries, and dynamic NTK by the prompt's length.

    Source: arXiv 2309.16609; Qwen-7B's modeling_qwen.py.
    """


def read_config(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Reads a QWenConfig of either generation.

    `no_bias` is true although `c_attn` has a bias, and `intermediate_size` is that of w1 and w2 together.

    Raises:
      UnsupportedModelError: an attribute is missing, or has a value that is not implemented.
    """
    reader = ConfigReader(hf_config, architecture=ARCHITECTURE, model_type="qwen", aliases=ALIASES, ignored=IGNORED)
    _check_fixed(reader)
    num_layers, num_heads = read_num_layers(reader), reader.required("num_attention_heads", int)
    seq_len = reader.required("seq_length", int)
    if not 1 < seq_len < 2**31:
        raise reader.unsupported("seq_length", "an integer > 1 that int32 holds is needed")
    head_dim = reader.required("kv_channels", int)
    rope = _read_rope(reader, head_dim=head_dim, seq_len=seq_len)
    mlp_dim = reader.required("intermediate_size", int)
    if mlp_dim % 2:
        raise reader.unsupported("intermediate_size", "it is twice the width of w1 and of w2, so it must be even")
    config = ModelConfig(
        architecture=ARCHITECTURE,
        vocab_size=_read_vocab_size(reader),
        num_layers=num_layers,
        dim=reader.required("hidden_size", int),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        mlp_dim=mlp_dim // 2,
        norm_eps=reader.required("layer_norm_epsilon", float),
        rope=rope,
        logn_len=seq_len if reader.required("use_logn_attn", bool) else None,
        qk_norm=False,
        stacked_qkv=True,
        qkv_bias=True,
        output_bias=False,
        tie_embeddings=False,
        max_position_embeddings=reader.required("max_position_embeddings", int),
        sliding_windows=(None,) * num_layers,
    )
    reader.finish()
    return config


def _check_fixed(reader: ConfigReader) -> None:
    """What every published Qwen has alike."""
    reader.fixed("no_bias", True)
    reader.fixed("tie_word_embeddings", False)
    reader.fixed("scale_attn_weights", True)
    reader.fixed("rotary_pct", 1.0)
    reader.fixed("pos_emb", "rotary")
    reader.fixed("hidden_act", "swiglu", "silu")
    reader.fixed("apply_residual_connection_post_layernorm", False)
    reader.fixed("use_cache_quantization", False)


def _read_rope(reader: ConfigReader, *, head_dim: int, seq_len: int) -> RopeConfig:
    theta = reader.required("rotary_emb_base", float)
    if not 0 < theta < float("inf"):
        raise reader.unsupported("rotary_emb_base", "a finite number > 0 is needed")
    if not reader.required("use_dynamic_ntk", bool):
        return RopeConfig(kind="default", theta=theta)
    if head_dim < 4:
        raise reader.unsupported("kv_channels", "dynamic NTK needs heads of at least 4")
    return RopeConfig(kind="qwen_ntk", theta=theta, parameters=(("seq_length", float(seq_len)),))


def _read_vocab_size(reader: ConfigReader) -> int:
    """V: the padded size where the older configs state it beside the vocabulary's."""
    vocab_size = reader.required("vocab_size", int)
    padded = reader.optional("padded_vocab_size", int, vocab_size)
    if padded < vocab_size:
        raise UnsupportedModelError(f"padded_vocab_size = {padded} in the {ARCHITECTURE} config: must be at least vocab_size = {vocab_size}.")
    return padded
