"""The tests' own reading of a tiny Hugging Face folder into jaxinfer's layout: numpy only, nothing shared with the converter."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from jaxinfer.engine.load import LoadedModel, from_params
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.registry import read_model_config

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
NAMES = ("qwen2_tied", "qwen2_untied", "qwen2_sliding", "llama_tied", "llama_untied")


def read_fixture_config(name: str) -> ModelConfig:
    return read_model_config(json.loads((FIXTURES / name / "config.json").read_text()))


def load_fixture(name: str, dtype: str = "float32") -> LoadedModel:
    """A tiny checkpoint of tests/fixtures."""
    config, tensors = read_fixture_config(name), load_file(FIXTURES / name / "model.safetensors")
    params = {"embedding.weight": tensors["model.embed_tokens.weight"], "final_norm.weight": tensors["model.norm.weight"]}
    if not config.tie_embeddings:
        params["lm_head.weight"] = tensors["lm_head.weight"]
    for i in range(config.num_layers):
        params.update({f"layers.{i}.{k}": v for k, v in map_layer(config, tensors, f"model.layers.{i}.").items()})
    return from_params(config, {k: jnp.asarray(v, dtype) for k, v in params.items()})


def map_layer(config: ModelConfig, tensors: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """One layer's tensors. Heads of one KV group lie together: its queries, its key, its value."""
    num_kv_heads, head_dim = config.num_kv_heads, config.head_dim

    def fused(suffix: str) -> np.ndarray:
        parts = [tensors[f"{prefix}self_attn.{p}_proj.{suffix}"] for p in "qkv"]
        return np.concatenate([p.reshape(num_kv_heads, -1, head_dim, *p.shape[1:]) for p in parts], axis=1)  # [K, G + 2, H, ...]

    layer = {
        "attention_norm.weight": tensors[prefix + "input_layernorm.weight"],
        "mlp_norm.weight": tensors[prefix + "post_attention_layernorm.weight"],
        "attention.qkv.weight": np.moveaxis(fused("weight"), -1, 0),
        "attention.output.weight": tensors[prefix + "self_attn.o_proj.weight"].T,
        "mlp.gate_up.weight": np.stack([tensors[f"{prefix}mlp.{p}_proj.weight"].T for p in ("gate", "up")], axis=1),
        "mlp.down.weight": tensors[prefix + "mlp.down_proj.weight"].T,
    }
    if config.qkv_bias:
        layer["attention.qkv.bias"] = fused("bias")
    if config.output_bias:
        layer["attention.output.bias"] = tensors[prefix + "self_attn.o_proj.bias"]
    return layer
