"""`python -m convert.inspect`: the facts of every kind of checkpoint, and what it calls unusual."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from convert.converter import convert
from convert.inspect import inspect, main
from jaxinfer.errors import CheckpointError, UnsupportedModelError
from tests.convert.checkpoints import V, hf_config, hf_tensors, write_gguf, write_hf
from tests.convert.test_export import FIXTURES
from tests.convert.test_torch_file import BIN_TINY


def fields(report: str) -> dict[str, str]:
    """The report's fixed part, label -> value."""
    return {line[:14].strip(): line[15:] for line in report.partition("unusual:")[0].splitlines()}


def test_every_kind(tmp_path: Path) -> None:
    config = hf_config("LlamaForCausalLM", tied=True)
    write_gguf(tmp_path / "m.gguf", config, hf_tensors(config, np.float32))
    found = fields(inspect(tmp_path / "m.gguf"))
    assert found["kind"] == "GGUF file" and found["quantisation"].startswith("GGML Q4_0") and found["tied"].startswith("yes")
    assert found["end tokens"] == "eos_token_id [261]" and found["chat template"] == "yes" and found["tokenizer"].endswith("'smollm', 264 ids")
    folder = convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    found = fields(inspect(folder))
    assert found["kind"] == "converted checkpoint" and found["tensors"] == "bfloat16 14 (100.0%)" and found["chat template"] == "yes"
    assert "manifest.json [261]" in found["end tokens"] and found["note"].startswith("not verified: ")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["verification"] = {"max_abs_diff": 1.5e-6, "argmax_equal": True, "tokens": 48, "passed": True}
    edit(folder, "manifest.json", manifest)
    assert fields(inspect(folder))["note"] == ("verified against the source over 48 tokens: largest difference of a logit 1.5e-06, likeliest "
                                               "tokens equal")
    found = fields(inspect(BIN_TINY))
    assert found["kind"] == "Hugging Face folder, 2 torch .bin (pickle) files" and found["context"] == "64"
    found = fields(inspect(FIXTURES / "qwen1_tiny"))
    assert found["rope"] == "Qwen's dynamic NTK, theta 10000" and found["architecture"] == "QWenLMHeadModel"
    rope = fields(inspect(FIXTURES / "llama_yarn"))["rope"]
    assert rope.startswith("yarn, theta 10000.0") and "factor 4.0" in rope


def edit(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(json.dumps(value))


TOKENIZER = {"model": {"vocab": {"a": 0, "b": 255}}, "added_tokens": [{"id": 259, "content": "<end>"}]}
UNUSUAL: dict[str, Callable[[Path], Any]] = {
    "the config says float16, most weights are bfloat16": lambda f: edit(f, "config.json", hf_config(torch_dtype="float16")),
    "no generation_config.json": lambda f: None,
    "no tokenizer files": lambda f: None,
    "no end token is declared": lambda f: edit(f, "config.json", hf_config(eos_token_id=None)),
    "the declarations of end tokens differ": lambda f: edit(f, "generation_config.json", {"eos_token_id": [3, 9]}),
    f"the embedding has {V} rows for 260 tokens: padding that is never sampled": lambda f: edit(f, "tokenizer.json", TOKENIZER),
    f"the embedding has {V} rows for 301 tokens: too few": lambda f: edit(f, "tokenizer.json", {"model": {"vocab": {"z": 300}}}),
    "tied embeddings, yet a head is stored": lambda f: edit(f, "config.json", hf_config(tied=True)),
    "the config names code of its own": lambda f: edit(f, "config.json", hf_config(auto_map={"AutoModel": "x.Y"})),
    "cannot be converted or run: the Qwen2ForCausalLM config has attributes that are not implemented: strange = 1": (
        lambda f: edit(f, "config.json", hf_config(strange=1))),
    "cannot be converted or run: quantization_config says quant_method = None": lambda f: edit(
        f, "config.json", hf_config(quantization_config={"bits": 4})),
    "cannot be converted or run: architectures = None": lambda f: edit(f, "config.json", hf_config(architectures=None)),
}


@pytest.mark.parametrize("sentence", sorted(UNUSUAL))
def test_what_is_unusual(tmp_path: Path, sentence: str) -> None:
    folder = write_hf(tmp_path / "hf", hf_config(), hf_tensors(hf_config()))
    UNUSUAL[sentence](folder)
    assert sentence in inspect(folder).partition("unusual:")[2]


def test_mixed_dtypes_two_formats_and_nothing_unusual(tmp_path: Path) -> None:
    tensors = hf_tensors(hf_config())
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32)
    folder = write_hf(tmp_path / "hf", hf_config(), tensors)
    (folder / "pytorch_model.bin").write_bytes(b"not read")
    report = inspect(folder)
    assert "weights of several dtypes (bfloat16, float32): conversion makes them bfloat16" in report
    assert "weights both as model.safetensors and as pytorch_model.bin: the first is read" in report
    write_hf(folder, hf_config(torch_dtype="bfloat16"), hf_tensors(hf_config(), ml_dtypes.bfloat16))
    edit(folder, "generation_config.json", {"eos_token_id": 3})
    edit(folder, "tokenizer.json", {"model": {"vocab": {"a": V - 1}}})
    assert inspect(folder).endswith("unusual: nothing")


def test_damaged_and_unknown_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for path, error in ((tmp_path / "absent", CheckpointError), (tmp_path, CheckpointError), (Path(__file__), UnsupportedModelError)):
        with pytest.raises(error):
            inspect(path)
    folder = Path(shutil.copytree(BIN_TINY, tmp_path / "bin"))
    (folder / "config.json").write_text("{")
    assert main([f"--model={folder}"]) == 1
    assert capfd.readouterr().err.startswith("error: ")
    assert main([]) == 2
    assert main([f"--model={BIN_TINY}"]) == 0
    assert "architecture   Qwen2ForCausalLM" in capfd.readouterr().out
