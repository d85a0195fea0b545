"""Makes the tiny checkpoints and reference outputs under tests/fixtures. Needs torch and transformers; the tests need neither.

  python tests/goldens/make_goldens.py

Each folder holds a random model in its Hugging Face form and golden.npz:
  ids      [2, 48] int32    two sequences
  logits   [2, 48, V] f32   of the model in float32
  greedy16 [2, 16] int32    greedy continuation of the first 12 tokens of each
The numbers were made with Python 3.11, torch 2.13 and transformers 5.17.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
SHAPE = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, vocab_size=256,
             max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=None)
LLAMA3 = dict(rope_type="llama3", rope_theta=10000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)
MODELS = {
    "qwen2_tied": (Qwen2ForCausalLM, Qwen2Config, dict(num_key_value_heads=2, tie_word_embeddings=True, rope_theta=1e6)),
    "qwen2_untied": (Qwen2ForCausalLM, Qwen2Config, dict(num_key_value_heads=1, tie_word_embeddings=False, rope_theta=1e6)),
    "qwen2_sliding": (Qwen2ForCausalLM, Qwen2Config, dict(
        num_key_value_heads=2, tie_word_embeddings=True, rope_theta=1e6, use_sliding_window=True, sliding_window=8, max_window_layers=1)),
    "llama_tied": (LlamaForCausalLM, LlamaConfig, dict(num_key_value_heads=2, tie_word_embeddings=True, rope_theta=1e5)),
    "llama_untied": (LlamaForCausalLM, LlamaConfig, dict(
        num_key_value_heads=2, tie_word_embeddings=False, attention_bias=True, head_dim=32, rope_parameters=LLAMA3)),
}
ROPES = {
    "default": dict(rope_type="default", rope_theta=1e6),
    "linear": dict(rope_type="linear", rope_theta=1e4, factor=4.0),
    "llama3": dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=8192),
}


def randomise(model: torch.nn.Module) -> None:
    """Weights large enough that attention is not flat, biases and norms that cannot be left out unnoticed."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
            else:
                parameter.normal_(0.0, 0.12)


def make_model(name: str, seed: int) -> None:
    model_class, config_class, extra = MODELS[name]
    torch.manual_seed(seed)
    model = model_class._from_config(config_class(**SHAPE, **extra), attn_implementation="eager").eval()
    randomise(model)
    ids = torch.randint(3, SHAPE["vocab_size"], (2, 48))
    with torch.no_grad():
        logits = model(ids).logits
        greedy = ids[:, :12]
        for _ in range(16):
            greedy = torch.cat([greedy, model(greedy).logits[:, -1:].argmax(-1)], dim=1)
    folder = FIXTURES / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    np.savez(folder / "golden.npz", ids=ids.numpy().astype(np.int32), logits=logits.numpy(),
             greedy16=greedy[:, 12:].numpy().astype(np.int32))


def make_ropes() -> None:
    """Inverse frequencies of each rope kind at head dim 64."""
    out = {}
    for name, parameters in ROPES.items():
        config = LlamaConfig(hidden_size=128, num_attention_heads=2, rope_parameters=dict(parameters))
        if name == "default":
            exponents = torch.arange(0, 64, 2, dtype=torch.int64).float() / 64
            out[name] = (1.0 / parameters["rope_theta"] ** exponents).numpy()
        else:
            out[name] = ROPE_INIT_FUNCTIONS[name](config, torch.device("cpu"))[0].numpy()
    np.savez(FIXTURES / "rope.npz", **out)
    (FIXTURES / "rope.json").write_text(json.dumps(ROPES, indent=1) + "\n")


if __name__ == "__main__":
    for seed, name in enumerate(MODELS):
        make_model(name, seed)
    make_ropes()
