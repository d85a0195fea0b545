"""Makes tests/fixtures/packed_matrices.npz: small matrices packed by AutoGPTQ's and compressed-tensors' own code, with their float32 values.

  python tests/goldens/make_packed_matrices.py                              (Python 3.11: see quantizers.py)

Keys are `<case>/<tensor>` as the library names it, `<case>/weight_f32` [out, in] as (q - z) * float32(scale) from the numbers that were
packed, and `<case>/config`, the quantization_config as JSON. AutoAWQ's layout is covered by tests/fixtures/awq_tiny.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quantizers import library

OUTPUT = Path(__file__).resolve().parents[1] / "fixtures" / "packed_matrices.npz"
K, N = 128, 64


def numbers(seed: int, bits: int, group_size: int, *, symmetric: bool, act_order: bool) -> tuple[torch.Tensor, ...]:
    """q [N, K] and zeros [N, groups] as unsigned integers, scales [N, groups] float16, the group of each input [K]."""
    rng = torch.Generator().manual_seed(seed)
    groups = K // group_size
    q = torch.randint(0, 2**bits, (N, K), generator=rng)
    zeros = torch.full((N, groups), 2**(bits - 1)) if symmetric else torch.randint(1, 2**bits, (N, groups), generator=rng)
    scales = (torch.rand((N, groups), generator=rng) * 0.01 + 0.001).half()
    scales[3] = 0.0  # an all-zero column of groups
    index = torch.arange(K) // group_size
    return q, zeros, scales, index[torch.randperm(K, generator=rng)] if act_order else index


def gptq_case(seed: int, *, bits: int, group_size: int, sym: bool, desc_act: bool) -> dict[str, Any]:
    q, zeros, scales, index = numbers(seed, bits, group_size, symmetric=sym, act_order=desc_act)
    weight = (q - zeros[:, index]).float() * scales.float()[:, index]
    linear = torch.nn.Linear(K, N, bias=False)
    linear.weight.data = weight
    packed = library("gptq").QuantLinear(bits, group_size, K, N, False, weight_dtype=torch.float16)
    safe = torch.where(scales == 0, torch.ones_like(scales), scales)  # its packing divides by the scale: q is then the zero point
    packed.pack(linear, safe.float(), zeros.float(), g_idx=index.int())
    config = {"quant_method": "gptq", "bits": bits, "group_size": -1 if group_size == K else group_size, "sym": sym, "desc_act": desc_act}
    return {"qweight": packed.qweight, "qzeros": packed.qzeros, "scales": scales.T.contiguous(), "g_idx": index.int(), "weight_f32": weight,
            "config": config}


def packed_case(seed: int, *, bits: int, group_size: int, symmetric: bool, actorder: str | None = None) -> dict[str, Any]:
    q, zeros, scales, index = numbers(seed, bits, group_size, symmetric=symmetric, act_order=actorder == "group")
    weight = (q - zeros[:, index]).float() * scales.float()[:, index]
    pack, half = library("compressed_tensors").pack_to_int32, 2**(bits - 1)
    found = {"weight_packed": pack((q - half).to(torch.int8), bits), "weight_scale": scales, "weight_shape": torch.tensor([N, K]),
             "weight_f32": weight}
    if not symmetric:
        found["weight_zero_point"] = pack((zeros - half).to(torch.int8), bits, packed_dim=0).contiguous()
    if actorder == "group":
        found["weight_g_idx"] = index.int()
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "channel" if group_size == K else "group",
               "group_size": None if group_size == K else group_size, "dynamic": False, "actorder": actorder}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return found | {"config": {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
                               "config_groups": {"group_0": group}, "ignore": ["lm_head"]}}


CASES = {
    "gptq_4bit_g32": gptq_case(0, bits=4, group_size=32, sym=False, desc_act=False),
    "gptq_4bit_g32_desc_act": gptq_case(1, bits=4, group_size=32, sym=False, desc_act=True),
    "gptq_4bit_sym_g64_desc_act": gptq_case(2, bits=4, group_size=64, sym=True, desc_act=True),
    "gptq_8bit_g64": gptq_case(3, bits=8, group_size=64, sym=False, desc_act=False),
    "gptq_8bit_sym_column": gptq_case(4, bits=8, group_size=K, sym=True, desc_act=False),
    "packed_4bit_sym_g32": packed_case(5, bits=4, group_size=32, symmetric=True),
    "packed_4bit_g64": packed_case(6, bits=4, group_size=64, symmetric=False),
    "packed_4bit_g32_actorder": packed_case(7, bits=4, group_size=32, symmetric=False, actorder="group"),
    "packed_8bit_column": packed_case(8, bits=8, group_size=K, symmetric=False),
}


def main() -> None:
    arrays = {}
    for case, found in CASES.items():
        for name, value in found.items():
            arrays[f"{case}/{name}"] = np.array(json.dumps(value)) if name == "config" else value.numpy()
    np.savez_compressed(OUTPUT, **arrays)


if __name__ == "__main__":
    main()
