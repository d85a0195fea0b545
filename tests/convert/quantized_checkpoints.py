"""Tiny quantised Hugging Face folders for the tests, packed here from the formats' definitions with no helper of convert/."""

from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
CONFIGS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False},
    "gptq_v2": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False, "checkpoint_format": "gptq_v2"},
    "gptq_desc_act": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True},
    "gptq_8bit_sym": {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True, "desc_act": False},
}


def _compressed(layout: str, **weights: Any) -> dict[str, Any]:
    given = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": given, "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed", "ignore": ["lm_head"],
            "config_groups": {"group_0": group}}


CONFIGS |= {
    "packed": _compressed("pack-quantized", symmetric=False),
    "packed_sym_actorder": _compressed("pack-quantized", actorder="group"),
    "int8": _compressed("int-quantized", num_bits=8, strategy="channel", group_size=None),
}


def words(values: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """[rows, columns] -> int32 words along the columns, value by value."""
    per_word = 32 // bits
    out = np.zeros((values.shape[0], values.shape[1] // per_word), np.uint32)
    for column in range(values.shape[1]):
        place = column % per_word if order is None else order.index(column % per_word)
        out[:, column // per_word] |= values[:, column].astype(np.uint32) << np.uint32(bits * place)
    return out.view(np.int32)


def quantized(name: str, tensors: Tensors, seed: int = 0) -> tuple[Tensors, Tensors]:
    """(the tensors with every projection quantised as CONFIGS[name] says, the same as float32 weights). Integers are random."""
    rng = np.random.default_rng(seed)
    stored, plain = dict(tensors), dict(tensors)
    orders: dict[int, np.ndarray] = {}
    for weight in [key for key in tensors if key.endswith("_proj.weight")]:
        module, (n, k) = weight.removesuffix(".weight"), tensors[weight].shape
        order = orders.setdefault(k, rng.permutation(k))
        del stored[weight]
        parts, plain[weight] = matrix(CONFIGS[name], rng, k, n, order)
        stored |= {f"{module}.{suffix}": value for suffix, value in parts.items()}
    return stored, plain


def matrix(config: dict[str, Any], rng: np.random.Generator, k: int, n: int, order: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """(tensors, weight [n, k] float32) of one random matrix; `order` gives the groups where the config has act-order."""
    weights = next(iter(config["config_groups"].values()))["weights"] if "config_groups" in config else {}
    bits = config.get("bits", weights.get("num_bits"))
    size = config.get("group_size", weights.get("group_size"))
    size = k if size in (-1, None) else size
    symmetric = config.get("sym", weights.get("symmetric", False))
    act_order = config.get("desc_act", weights.get("actorder") == "group")
    index = order // size if act_order else np.arange(k) // size
    q = rng.integers(0, 2**bits, (k, n))
    offset = int(config["quant_method"] == "gptq" and config.get("checkpoint_format") != "gptq_v2")
    zeros = np.full((k // size, n), 2**(bits - 1)) if symmetric else rng.integers(offset, 2**bits, (k // size, n))
    scales = (rng.random((k // size, n)) * (0.2 / 2**bits) + 0.001).astype(np.float16)
    weight = ((q - zeros[index]).astype(np.float32) * scales[index].astype(np.float32)).T
    if config["quant_method"] == "awq":
        return {"qweight": words(q, 4, AWQ_ORDER), "qzeros": words(zeros, 4, AWQ_ORDER), "scales": scales}, weight
    if config["quant_method"] == "gptq":
        return {"qweight": np.ascontiguousarray(words(q.T, bits).T), "qzeros": words(zeros - offset, bits), "scales": scales,
                "g_idx": index.astype(np.int32)}, weight
    found = {"weight_scale": np.ascontiguousarray(scales.T)}
    if config["format"] == "int-quantized":
        found["weight"] = (q.T - 128).astype(np.int8)
        return found, weight
    found |= {"weight_packed": words(np.ascontiguousarray(q.T), bits), "weight_shape": np.array([n, k], np.int64)}
    if not symmetric:
        found["weight_zero_point"] = np.ascontiguousarray(words(zeros, bits).T)
    if act_order:
        found["weight_g_idx"] = index.astype(np.int32)
    return found, weight
