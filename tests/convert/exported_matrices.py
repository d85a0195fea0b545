"""Matrices as `python -m convert.export` packs them, for AutoAWQ's and AutoGPTQ's own unpacking: tests/goldens/make_unpacked_exports.py.

  python -m tests.convert.exported_matrices FILE.safetensors

A tensor's name is `<case>/<its last part in a checkpoint>`.
"""

import sys

import numpy as np
from safetensors.numpy import save_file

from convert.formats import EXPORTS, QuantizedMatrix

K, N = 256, 64


def matrix(seed: int, *, bits: int = 4, group_size: int | None = 32, symmetric: bool = False, permuted: bool = False,
           least_zero: int = 0) -> QuantizedMatrix:
    """Random integers and scales, with one column of zero scales, and all the integers that `bits` hold."""
    rng = np.random.default_rng(seed)
    groups = 1 if group_size is None else K // group_size
    q = rng.integers(0, 2**bits, (K, N), dtype=np.uint8)
    zeros = rng.integers(least_zero, 2**bits, (groups, N), dtype=np.uint8)
    scales = (rng.integers(1, 2048, (groups, N)) / 2**14).astype(np.float16)
    scales[:, 3] = 0
    order = np.sort(rng.permutation(K).reshape(groups, -1), axis=1).reshape(-1).astype(np.int32)
    return QuantizedMatrix(q=q, scales=scales, zeros=None if symmetric else zeros, bits=bits, group_size=group_size,
                           perm=order if permuted else None)


CASES: dict[str, tuple[str, QuantizedMatrix]] = {
    "awq_g32": ("awq", matrix(0)),
    "awq_g64": ("awq", matrix(1, group_size=64)),
    "awq_g128_symmetric": ("awq", matrix(2, group_size=128, symmetric=True)),
    "awq_column": ("awq", matrix(3, group_size=None)),
    "gptq_4bit_g32": ("gptq", matrix(4, least_zero=1)),
    "gptq_4bit_g128_symmetric": ("gptq", matrix(5, group_size=128, symmetric=True)),
    "gptq_4bit_g64_permuted": ("gptq", matrix(6, group_size=64, permuted=True, least_zero=1)),
    "gptq_4bit_column": ("gptq", matrix(7, group_size=None, least_zero=1)),
    "gptq_8bit_g32_permuted": ("gptq", matrix(8, bits=8, permuted=True, least_zero=1)),
    "gptq_8bit_column_symmetric": ("gptq", matrix(9, bits=8, group_size=None, symmetric=True)),
}
"""Name -> (a key of EXPORTS, what is packed)."""


def packed(case: str) -> dict[str, np.ndarray]:
    """The tensors of a case, by the last part of their name."""
    target, value = CASES[case]
    return EXPORTS[target].pack(value)


if __name__ == "__main__":
    save_file({f"{case}/{name}": value for case in CASES for name, value in packed(case).items()}, sys.argv[1])
