"""Makes tests/fixtures/unpacked_exports.json: what AutoAWQ's and AutoGPTQ's own code unpacks from matrices that convert.export packed.

  python -m tests.convert.exported_matrices FILE.safetensors                (our environment)
  python tests/goldens/make_unpacked_exports.py FILE.safetensors            (Python 3.11: see quantizers.py)

For each case: `tensors`, the digests of the tensors that the library was given, and `weight`, that of the [out, in] float32 which it made of
them. Nothing here knows what was packed. tests/convert/test_formats.py holds the writers to it.
"""

import importlib.metadata
import json
import sys
from pathlib import Path

import torch
from digests import digest
from quantizers import awq_weight, gptq_weight
from safetensors.torch import load_file

OUTPUT = Path(__file__).resolve().parents[1] / "fixtures" / "unpacked_exports.json"
LIBRARIES = {"awq": "autoawq", "gptq": "auto-gptq"}


def unpacked(layout: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """[out, in] float32 by the library's code; bits and groups follow from the shapes, as its config would state them."""
    if layout == "awq":
        return awq_weight(tensors, tensors["qweight"].shape[0] // tensors["scales"].shape[0])
    num_inputs = tensors["g_idx"].shape[0]
    return gptq_weight(tensors, 32 * tensors["qweight"].shape[0] // num_inputs, num_inputs // tensors["scales"].shape[0])


def main(file: Path) -> None:
    cases: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in load_file(file).items():
        case, _, name = key.partition("/")
        cases.setdefault(case, {})[name] = value
    record = {}
    for case in sorted(cases):
        tensors = {name: digest(value.numpy()) for name, value in sorted(cases[case].items())}
        record[case] = {"tensors": tensors, "weight": digest(unpacked(case.partition("_")[0], cases[case]).numpy())}
    made_by = {name: importlib.metadata.version(name) for name in LIBRARIES.values()}
    OUTPUT.write_text(json.dumps({"made_by": made_by, "cases": record}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
