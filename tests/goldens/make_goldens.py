"""Makes the tiny checkpoints and reference outputs under tests/fixtures. Needs torch and transformers; the tests need neither.

  python tests/goldens/make_goldens.py [name ...]

Each folder holds a random model in its Hugging Face form and golden.npz:
  ids      [2, 48] int32    two sequences
  logits   [2, 48, V] f32   of the model in float32
  greedy16 [2, 16] int32    greedy continuation, with the reference's cache, of the first 12 tokens of each (20 of the small models')
The numbers were made with Python 3.11, torch 2.13 and transformers 5.17.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
SHAPE = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, vocab_size=256,
             max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=None)
LLAMA3 = dict(rope_type="llama3", rope_theta=10000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)
SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, vocab_size=128,
             max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=None)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16)
MODELS = {
    "qwen2_tied": (Qwen2ForCausalLM, Qwen2Config, dict(num_key_value_heads=2, tie_word_embeddings=True, rope_theta=1e6)),
    "qwen2_untied": (Qwen2ForCausalLM, Qwen2Config, dict(num_key_value_heads=1, tie_word_embeddings=False, rope_theta=1e6)),
    "qwen2_sliding": (Qwen2ForCausalLM, Qwen2Config, dict(
        num_key_value_heads=2, tie_word_embeddings=True, rope_theta=1e6, use_sliding_window=True, sliding_window=8, max_window_layers=1)),
    "llama_tied": (LlamaForCausalLM, LlamaConfig, dict(num_key_value_heads=2, tie_word_embeddings=True, rope_theta=1e5)),
    "llama_untied": (LlamaForCausalLM, LlamaConfig, dict(
        num_key_value_heads=2, tie_word_embeddings=False, attention_bias=True, head_dim=32, rope_parameters=LLAMA3)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, dict(SMALL, head_dim=16, tie_word_embeddings=False, rope_theta=1e6)),
    "mistral": (MistralForCausalLM, MistralConfig, dict(SMALL, sliding_window=8, rope_theta=1e4)),
    "llama_yarn": (LlamaForCausalLM, LlamaConfig, dict(SMALL, rope_parameters=YARN)),
    "llama_linear": (LlamaForCausalLM, LlamaConfig, dict(SMALL, rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0))),
    "llama_dynamic": (LlamaForCausalLM, LlamaConfig, dict(
        SMALL, max_position_embeddings=16, rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=4.0))),
    "llama2_old": (LlamaForCausalLM, LlamaConfig, dict(SMALL, num_key_value_heads=4, tie_word_embeddings=False)),
    "qwen2_old": (Qwen2ForCausalLM, Qwen2Config, dict(SMALL, tie_word_embeddings=True, rope_parameters=YARN)),
}
OLD_CONFIGS = {
    "llama2_old": {
        "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 32,
        "initializer_range": 0.02, "intermediate_size": 48, "max_position_embeddings": 64, "model_type": "llama",
        "num_attention_heads": 4, "num_hidden_layers": 2, "pad_token_id": 0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "torch_dtype": "float32", "transformers_version": "4.29.0", "use_cache": True, "vocab_size": 128},
    "qwen2_old": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 48, "max_position_embeddings": 64, "max_window_layers": 2,
        "model_type": "qwen2", "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        "sliding_window": 4096, "tie_word_embeddings": True, "torch_dtype": "float32", "transformers_version": "4.40.1",
        "use_cache": True, "use_sliding_window": False, "vocab_size": 128},
}
"""Configs as these models' first files spell them; each is written in place of what transformers saves."""
ROPES = {
    "default": dict(rope_type="default", rope_theta=1e6),
    "linear": dict(rope_type="linear", rope_theta=1e4, factor=4.0),
    "llama3": dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=8192),
    "dynamic": dict(rope_type="dynamic", rope_theta=1e4, factor=3.0),
    "yarn": dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=2048),
    "yarn_whole": dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=512, attention_factor=1.25,
                       beta_fast=24.0, beta_slow=2.0, truncate=False),
    "yarn_mscale": dict(rope_type="yarn", rope_theta=1e4, factor=40.0, original_max_position_embeddings=512, mscale=1.0,
                        mscale_all_dim=0.8),
}
MAX_LEN = 2048
DYNAMIC_LEN = 5000
"""max_position_embeddings of these configs, and the length at which the dynamic kind's frequencies are taken."""


def randomise(model: torch.nn.Module) -> None:
    """Weights large enough that attention is not flat, biases and norms that cannot be left out unnoticed."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
            else:
                parameter.normal_(0.0, 0.96 * model.config.hidden_size**-0.5)


def make_model(name: str, seed: int) -> None:
    model_class, config_class, extra = MODELS[name]
    torch.manual_seed(seed)
    config = config_class(**{**SHAPE, **extra})
    model = model_class._from_config(config, attn_implementation="eager").eval()
    randomise(model)
    ids = torch.randint(3, config.vocab_size, (2, 48))
    prompt_len = 20 if config.hidden_size == SMALL["hidden_size"] else 12
    with torch.no_grad():  # greedy first: the dynamic rope kind remembers the longest sequence that it saw
        greedy, out = [], model(ids[:, :prompt_len], use_cache=True)
        for _ in range(16):
            greedy.append(out.logits[:, -1:].argmax(-1))
            out = model(greedy[-1], past_key_values=out.past_key_values, use_cache=True)
        logits = model(ids).logits
    folder = FIXTURES / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    if name in OLD_CONFIGS:
        (folder / "config.json").write_text(json.dumps(OLD_CONFIGS[name], indent=2) + "\n")
    np.savez(folder / "golden.npz", ids=ids.numpy().astype(np.int32), logits=logits.numpy(),
             greedy16=torch.cat(greedy, dim=1).numpy().astype(np.int32))


def make_ropes() -> None:
    """Inverse frequencies of each rope kind at head dim 64, and the factor on cosines and sines."""
    out = {}
    for name, parameters in ROPES.items():
        config = LlamaConfig(hidden_size=128, num_attention_heads=2, max_position_embeddings=MAX_LEN, rope_parameters=dict(parameters))
        if name == "default":
            exponents = torch.arange(0, 64, 2, dtype=torch.int64).float() / 64
            frequencies, magnitude = 1.0 / parameters["rope_theta"] ** exponents, 1.0
        else:
            frequencies, magnitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"), seq_len=DYNAMIC_LEN)
        out[name], out[f"{name}_magnitude"] = frequencies.numpy(), np.float64(magnitude)
    np.savez(FIXTURES / "rope.npz", **out)
    (FIXTURES / "rope.json").write_text(json.dumps(ROPES, indent=1) + "\n")


if __name__ == "__main__":
    for seed, name in enumerate(MODELS):
        if name in sys.argv[1:] or not sys.argv[1:]:
            make_model(name, seed)
    make_ropes()
