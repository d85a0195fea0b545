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
NAMES = ("qwen2_tied", "qwen2_untied", "qwen2_sliding", "llama_tied", "llama_untied", "qwen3", "mistral", "llama_yarn", "llama_linear",
         "llama_dynamic", "llama2_old", "qwen2_old")
"""Folders that tests/goldens/make_goldens.py made. Qwen v1's, qwen1_tiny, has tests of its own."""


def read_fixture_config(name: str) -> ModelConfig:
    return read_model_config(json.loads((FIXTURES / name / "config.json").read_text()))


def prompt_len(name: str) -> int:
    """Tokens of each golden sequence that its greedy continuation follows."""
    return 20 if read_fixture_config(name).dim == 32 else 12


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
    if config.qk_norm:
        layer |= {f"attention.{ours}_norm.weight": tensors[f"{prefix}self_attn.{p}_norm.weight"] for ours, p in (("query", "q"), ("key", "k"))}
    if config.output_bias:
        layer["attention.output.bias"] = tensors[prefix + "self_attn.o_proj.bias"]
    return layer


def load_qwen1() -> LoadedModel:
    """qwen1_tiny, in float32."""
    config = read_fixture_config("qwen1_tiny")
    tensors: dict[str, np.ndarray] = {}
    for shard in sorted((FIXTURES / "qwen1_tiny").glob("*.safetensors")):
        tensors |= load_file(shard)
    params = {"embedding.weight": tensors["transformer.wte.weight"], "final_norm.weight": tensors["transformer.ln_f.weight"],
              "lm_head.weight": tensors["lm_head.weight"]}
    for i in range(config.num_layers):
        source, target = f"transformer.h.{i}.", f"layers.{i}."
        heads = (3, config.num_heads, config.head_dim)
        params |= {
            f"{target}attention_norm.weight": tensors[f"{source}ln_1.weight"],
            f"{target}mlp_norm.weight": tensors[f"{source}ln_2.weight"],
            f"{target}attention.qkv.weight": tensors[f"{source}attn.c_attn.weight"].T.reshape(-1, *heads),
            f"{target}attention.qkv.bias": tensors[f"{source}attn.c_attn.bias"].reshape(heads),
            f"{target}attention.output.weight": tensors[f"{source}attn.c_proj.weight"].T,
            f"{target}mlp.gate_up.weight": np.stack([tensors[f"{source}mlp.{w}.weight"].T for w in ("w2", "w1")], axis=1),
            f"{target}mlp.down.weight": tensors[f"{source}mlp.c_proj.weight"].T,
        }
    return from_params(config, {k: jnp.asarray(v, "float32") for k, v in params.items()})
