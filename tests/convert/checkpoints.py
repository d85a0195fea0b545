"""Tiny source checkpoints for the conversion tests, and an independent computation of what they must become."""

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType, quants

D, L, N, K, H, F, V = 64, 2, 4, 2, 32, 96, 272
CODES = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(ml_dtypes.bfloat16): "BF16", np.dtype(np.int8): "I8",
         np.dtype(np.int32): "I32", np.dtype(np.int64): "I64"}
QUANT_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16", "F32")


def hf_config(architecture: str = "Qwen2ForCausalLM", *, tied: bool = False, **changes: Any) -> dict[str, Any]:
    config = {
        "architectures": [architecture], "model_type": {"Qwen2ForCausalLM": "qwen2", "LlamaForCausalLM": "llama"}[architecture],
        "vocab_size": V, "hidden_size": D, "intermediate_size": F, "num_hidden_layers": L, "num_attention_heads": N,
        "num_key_value_heads": K, "head_dim": H, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "max_position_embeddings": 128, "tie_word_embeddings": tied, "eos_token_id": 3,
    }
    return {**config, **changes}


def hf_tensors(config: dict[str, Any], dtype: Any = ml_dtypes.bfloat16, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face's names."""
    rng = np.random.default_rng(seed)
    V, D, L = (config[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for i in range(L):
        p = f"model.layers.{i}"
        shapes |= {f"{p}.input_layernorm.weight": (D,), f"{p}.post_attention_layernorm.weight": (D,),
                   f"{p}.self_attn.q_proj.weight": (N * H, D), f"{p}.self_attn.k_proj.weight": (K * H, D),
                   f"{p}.self_attn.v_proj.weight": (K * H, D), f"{p}.self_attn.o_proj.weight": (D, N * H),
                   f"{p}.mlp.gate_proj.weight": (F, D), f"{p}.mlp.up_proj.weight": (F, D), f"{p}.mlp.down_proj.weight": (D, F)}
        if config["model_type"] == "qwen2" or config.get("attention_bias"):
            shapes |= {f"{p}.self_attn.{name}_proj.bias": (heads * H,) for name, heads in (("q", N), ("k", K), ("v", K))}
        if config.get("attention_bias"):
            shapes[f"{p}.self_attn.o_proj.bias"] = (D,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, D)
    return {name: rng.standard_normal(shape, dtype=np.float32).astype(dtype) for name, shape in shapes.items()}


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Written byte by byte, independently of the reader under test and of the safetensors library."""
    header, chunks, end = dict[str, Any](), list[bytes](), 0
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": CODES[array.dtype], "shape": list(array.shape), "data_offsets": [end, end + len(raw)]}
        chunks.append(raw)
        end += len(raw)
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(chunks))


def write_hf(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], *, shards: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    weight_map = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(sorted(tensors))}
    for shard in set(weight_map.values()):
        write_safetensors(folder / shard, {name: tensors[name] for name in tensors if weight_map[name] == shard})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def expected(config: dict[str, Any], tensors: dict[str, np.ndarray], dtype: Any) -> dict[str, np.ndarray]:
    """The parameters, element by element from their definition, with no helper of convert/."""
    source = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
    out = {"embedding.weight": source["model.embed_tokens.weight"], "final_norm.weight": source["model.norm.weight"]}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = source["lm_head.weight"]
    groups = N // K
    for i in range(L):
        p, t = f"model.layers.{i}", f"layers.{i}"
        out[f"{t}.attention_norm.weight"] = source[f"{p}.input_layernorm.weight"]
        out[f"{t}.mlp_norm.weight"] = source[f"{p}.post_attention_layernorm.weight"]
        for kind in ("weight", "bias"):
            if f"{p}.self_attn.q_proj.{kind}" not in source:
                continue
            q, k, v = (source[f"{p}.self_attn.{name}_proj.{kind}"] for name in "qkv")
            fused = np.zeros((*q.shape[1:], K, groups + 2, H))
            for head in range(K):
                for group in range(groups):
                    first = (head * groups + group) * H
                    fused[..., head, group, :] = q[first:first + H].T
                fused[..., head, groups, :] = k[head * H:(head + 1) * H].T
                fused[..., head, groups + 1, :] = v[head * H:(head + 1) * H].T
            out[f"{t}.attention.qkv.{kind}"] = fused
        out[f"{t}.attention.output.weight"] = source[f"{p}.self_attn.o_proj.weight"].T
        if f"{p}.self_attn.o_proj.bias" in source:
            out[f"{t}.attention.output.bias"] = source[f"{p}.self_attn.o_proj.bias"]
        out[f"{t}.mlp.gate_up.weight"] = np.stack([source[f"{p}.mlp.gate_proj.weight"].T, source[f"{p}.mlp.up_proj.weight"].T], axis=1)
        out[f"{t}.mlp.down.weight"] = source[f"{p}.mlp.down_proj.weight"].T
    return {name: value.astype(np.float32).astype(dtype) for name, value in out.items()}


def byte_tokens() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte if byte in kept else next(spare)) for byte in range(256)]


def gguf_vocabulary() -> tuple[list[str], list[int], list[str]]:
    """(tokens, types, merges): 256 bytes, three merges, three control tokens, one user-defined, one padding row."""
    merges = ["Ġ t", "h e", "Ġt he"]
    tokens = [*byte_tokens(), "Ġt", "he", "Ġthe", "<|bos|>", "<|im_start|>", "<|im_end|>", "<tool>", "[PAD]"]
    return tokens, [1] * 259 + [3, 3, 3, 4, 5], merges


def ggml_rows(weight: np.ndarray) -> np.ndarray:
    """Hugging Face's row order -> GGML's rope order, as llama.cpp's converter states it."""
    heads = weight.shape[0] // H
    return weight.reshape(heads, 2, H // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], *, pre: str = "smollm",
               types: tuple[str, ...] = QUANT_TYPES, metadata: dict[str, Any] | None = None) -> dict[str, np.ndarray]:
    """A GGUF file whose matrices take the given types in turn; returns the tensors as they dequantise, under Hugging Face's names."""
    arch = config["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(D)
    writer.add_block_count(L)
    writer.add_feed_forward_length(F)
    writer.add_head_count(N)
    writer.add_head_count_kv(K)
    writer.add_key_length(H)
    writer.add_value_length(H)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    tokens, kinds, merges = gguf_vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(259)
    writer.add_eos_token_id(261)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}")
    for key, value in (metadata or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    names = gguf.get_tensor_name_map({"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}[arch], L)
    exact = {}
    for i, (name, value) in enumerate(tensors.items()):
        kind = GGMLQuantizationType[types[i % len(types)] if value.ndim > 1 else "F32"]
        stored = value.astype(np.float32)
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            stored = ggml_rows(stored)
        packed = quants.quantize(stored, kind)
        opened = np.asarray(quants.dequantize(packed, kind), np.float32).reshape(stored.shape)
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            opened = opened.reshape(-1, H // 2, 2, *opened.shape[1:]).swapaxes(1, 2).reshape(opened.shape)
        exact[name] = opened
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return exact
