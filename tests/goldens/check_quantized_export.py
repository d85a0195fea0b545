"""Checks exported folders with the unpacking of AutoAWQ and AutoGPTQ themselves: every matrix must be what our own file says, bit for bit.

  python -m convert.export --model=CONVERTED --output=FOLDER --format=awq|gptq                 (our environment)
  python tests/goldens/check_quantized_export.py FOLDER REFERENCE.safetensors                   (Python 3.11: see quantizers.py)

REFERENCE holds `<module>.weight` [out, in] float32 of every quantised matrix, dequantised by us:

  python -m tests.convert.dequantize CONVERTED REFERENCE.safetensors                            (our environment)
"""

import json
import sys
from pathlib import Path

import torch
from quantizers import awq_weight, gptq_weight
from safetensors.torch import load_file


def main(folder: Path, reference_file: Path) -> None:
    tensors = {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    reference = load_file(reference_file)
    modules = sorted(name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight"))
    assert modules and {f"{module}.weight" for module in modules} == set(reference), "other modules are quantised than the reference says"
    for module in modules:
        parts = {name: tensors[f"{module}.{name}"] for name in ("qweight", "qzeros", "scales", "g_idx") if f"{module}.{name}" in tensors}
        want = reference[f"{module}.weight"]
        group_size = want.shape[1] if config["group_size"] == -1 else config["group_size"]
        found = awq_weight(parts, group_size) if config["quant_method"] == "awq" else gptq_weight(parts, config["bits"], group_size)
        assert torch.equal(found, want), f"{module}: largest difference {(found - want).abs().max()}"
    print(f"{folder}: {len(modules)} matrices equal bit for bit what {config['quant_method']}'s own code unpacks")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
