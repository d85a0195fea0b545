"""The packing code of AutoAWQ, AutoGPTQ and compressed-tensors, without their kernels: single files of theirs, loaded by path.

  pip install --no-deps --no-build-isolation autoawq==0.2.9 auto-gptq==0.7.1 compressed-tensors==0.20.1 loguru     (Python 3.11, torch)

Importing the packages whole would need triton and a GPU; these files need torch and transformers only.
"""

import importlib.util
import types
from pathlib import Path

import torch

FILES = {
    "awq": ("awq", "utils/packing_utils.py"),
    "gptq": ("auto_gptq", "nn_modules/qlinear/qlinear_cuda.py"),
    "compressed_tensors": ("compressed_tensors", "compressors/pack_quantized/helpers.py"),
}


def library(name: str) -> types.ModuleType:
    """One of FILES as a module."""
    package, file = FILES[name]
    found = importlib.util.find_spec(package)
    assert found is not None and found.submodule_search_locations, f"install {package}: see this file's head"
    spec = importlib.util.spec_from_file_location(f"{package}_packing", Path(next(iter(found.submodule_search_locations))) / file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def awq_weight(tensors: dict[str, torch.Tensor], group_size: int) -> torch.Tensor:
    """[out, in] float32 as AutoAWQ dequantises it, with float32 scales so that the product is exact."""
    return library("awq").dequantize_gemm(tensors["qweight"], tensors["qzeros"], tensors["scales"].float(), 4, group_size).T.float()


def gptq_weight(tensors: dict[str, torch.Tensor], bits: int, group_size: int) -> torch.Tensor:
    """[out, in] float32: what AutoGPTQ's linear makes of the identity, with float32 scales so that the product is exact."""
    num_outputs, num_inputs = tensors["scales"].shape[1], tensors["g_idx"].shape[0]
    linear = library("gptq").QuantLinear(bits, group_size, num_inputs, num_outputs, False)
    linear.qweight, linear.qzeros, linear.g_idx = tensors["qweight"], tensors["qzeros"], tensors["g_idx"]
    linear.scales = tensors["scales"].float()
    return linear(torch.eye(num_inputs)).T
