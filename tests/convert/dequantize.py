"""Every quantised matrix of a converted checkpoint as `<module>.weight` [out, in] float32, for tests/goldens/check_quantized_export.py.

  python -m tests.convert.dequantize CONVERTED REFERENCE.safetensors
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def dequantized(folder: Path) -> dict[str, np.ndarray]:
    """Source weight -> [out, in] float32, exactly (q - z) * float32(scale)."""
    from convert.families import FAMILIES
    from convert.quantized import matrix_of, module_of
    from jaxinfer.checkpoint import read_manifest, read_param
    from jaxinfer.models.registry import abstract_params, read_model_config

    manifest, model = read_manifest(folder), read_model_config(json.loads((folder / "config.json").read_text()))
    assert model.quantization is not None
    plain = dataclasses.replace(model, quantization=None)
    shapes, found = abstract_params(plain, manifest["dtype"]), {}
    for entry in FAMILIES[model.architecture](plain):
        module, names = module_of(entry.target), [name for name in manifest["tensors"] if name.startswith(module_of(entry.target) + ".")]
        if f"{module}.packed" in names:
            quant_format = model.quantization.format_of(module)
            assert quant_format is not None
            shape = shapes[entry.target].shape
            weight = matrix_of(module, {name: read_param(folder, manifest, name) for name in names}, quant_format, shape).dequantized()
            for part in entry.parts:
                found[part.source] = np.ascontiguousarray(weight.reshape(shape)[part.index].reshape(shape[0], -1).T)
    return found


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    save_file(dequantized(Path(sys.argv[1])), sys.argv[2])
