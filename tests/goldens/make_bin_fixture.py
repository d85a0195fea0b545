"""Makes tests/fixtures/bin-tiny: a tiny Qwen2 saved by torch as .bin shards, with every way in which torch stores a tensor. Needs torch.

  python tests/goldens/make_bin_fixture.py

The weights are multiples of 1/64 of small integers from a formula, which tests/convert/test_torch_file.py repeats without torch.
The files were made with torch 2.13.
"""

import json
import shutil
from collections import OrderedDict
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "bin-tiny"
D, F, V, N, K, H = 8, 12, 16, 2, 1, 4
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": V, "hidden_size": D, "intermediate_size": F,
    "num_hidden_layers": 1, "num_attention_heads": N, "num_key_value_heads": K, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "max_position_embeddings": 64, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 2,
}
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D),
    LAYER + "input_layernorm.weight": (D,), LAYER + "post_attention_layernorm.weight": (D,),
    LAYER + "self_attn.q_proj.weight": (N * H, D), LAYER + "self_attn.q_proj.bias": (N * H,),
    LAYER + "self_attn.k_proj.weight": (K * H, D), LAYER + "self_attn.k_proj.bias": (K * H,),
    LAYER + "self_attn.v_proj.weight": (K * H, D), LAYER + "self_attn.v_proj.bias": (K * H,),
    LAYER + "self_attn.o_proj.weight": (D, N * H), LAYER + "mlp.gate_proj.weight": (F, D), LAYER + "mlp.up_proj.weight": (F, D),
    LAYER + "mlp.down_proj.weight": (D, F),
}


def values(name: str) -> torch.Tensor:
    """Tensor number i holds (7 * i + 3 * j) % 61 - 30, over 64, at element j."""
    shape = SHAPES[name]
    j = torch.arange(torch.Size(shape).numel())
    return (((7 * list(SHAPES).index(name) + 3 * j) % 61 - 30) / 64).reshape(shape)


def main() -> None:
    state = OrderedDict((name, values(name).bfloat16()) for name in SHAPES)
    fused = torch.cat([state[LAYER + f"self_attn.{p}_proj.weight"] for p in "qkv"])  # three tensors that are views of one storage
    for p, (start, stop) in zip("qkv", ((0, N * H), (N * H, (N + K) * H), ((N + K) * H, (N + 2 * K) * H)), strict=True):
        state[LAYER + f"self_attn.{p}_proj.weight"] = fused[start:stop]
    down = LAYER + "mlp.down_proj.weight"
    state[down] = state[down].T.contiguous().T  # strides that are not those of its shape
    state["model.norm.weight"] = torch.nn.Parameter(state["model.norm.weight"])
    state[LAYER + "input_layernorm.weight"] = state[LAYER + "input_layernorm.weight"].float()
    state[LAYER + "post_attention_layernorm.weight"] = state[LAYER + "post_attention_layernorm.weight"].half()
    state[LAYER + "self_attn.rotary_emb.inv_freq"] = torch.ones(H // 2)
    state._metadata = OrderedDict([("", {"version": 1})])
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    names = list(state)
    weight_map = {name: f"pytorch_model-{1 + (i >= 6):05d}-of-00002.bin" for i, name in enumerate(names)}
    for shard in sorted(set(weight_map.values())):
        part = OrderedDict((name, state[name]) for name in names if weight_map[name] == shard)
        part._metadata = state._metadata
        torch.save(part, FOLDER / shard)
    (FOLDER / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1) + "\n")
    (FOLDER / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")


if __name__ == "__main__":
    main()
