"""Converted checkpoints back to Hugging Face folders: bitwise for every family, and refused where they cannot be."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from convert import export as export_module
from convert.converter import convert
from convert.export import export, main
from convert.families import FAMILIES
from jaxinfer.checkpoint import read_manifest, read_param
from jaxinfer.errors import CheckpointError, ConfigError, JaxInferError, UnsupportedModelError
from tests.convert.checkpoints import hf_config, hf_tensors, write_hf

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
FOLDERS = sorted(path.parent.name for path in FIXTURES.glob("*/config.json") if list(path.parent.glob("*.safetensors")))


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor, read by the safetensors library."""
    found: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        shard = load_file(path)
        assert not found.keys() & shard.keys()
        found |= shard
    return found


def assert_equal(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert found[name].tobytes() == np.ascontiguousarray(value).tobytes(), name


def test_the_fixtures_cover_every_family() -> None:
    found = {json.loads((FIXTURES / name / "config.json").read_text())["architectures"][0] for name in FOLDERS}
    assert found >= FAMILIES.keys(), f"no fixture of {FAMILIES.keys() - found}"


@pytest.mark.parametrize("name", FOLDERS)
def test_round_trip_is_bitwise(tmp_path: Path, name: str) -> None:
    source = FIXTURES / name
    config = json.loads((source / "config.json").read_text())
    target = config.pop("quantization_config", {}).get("quant_method", "hf")
    converted = convert(source, tmp_path / "converted", progress=False)
    folder = export(converted, tmp_path / "hf", target=target, max_shard_bytes=40_000, progress=False)
    assert_equal(tensors_of(folder), tensors_of(source))
    written = json.loads((folder / "config.json").read_text())
    assert written.pop("quantization_config", {}).get("quant_method", "hf") == target and written == config
    for file in ("generation_config.json", "tokenizer_config.json"):
        if (source / file).exists():
            assert json.loads((folder / file).read_text()) == json.loads((source / file).read_text())
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            assert file.metadata() == {"format": "pt"}
            assert {tensor for tensor, shard in weight_map.items() if shard == path.name} == set(file.keys())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_tied_embeddings_are_stored_once(tmp_path: Path, tied: bool, dtype: Any) -> None:
    config = hf_config(tied=tied)
    tensors = hf_tensors(config, dtype)
    copy = {"lm_head.weight": tensors["model.embed_tokens.weight"]} if tied else {}
    source = write_hf(tmp_path / "hf", config, {**tensors, **copy})
    folder = export(convert(source, tmp_path / "out", progress=False), tmp_path / "back", progress=False)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert_equal(tensors_of(folder), tensors)


def test_a_changed_dtype_is_stated_and_converts_again(tmp_path: Path) -> None:
    config = hf_config(torch_dtype="bfloat16")
    first = convert(write_hf(tmp_path / "hf", config, hf_tensors(config)), tmp_path / "a", dtype="float32", progress=False)
    folder = export(first, tmp_path / "back", progress=False)
    assert json.loads((folder / "config.json").read_text()) == {**config, "torch_dtype": "float32"}
    again = export(convert(folder, tmp_path / "b", progress=False), tmp_path / "back2", progress=False)
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_refusals_and_interruption_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = hf_config()
    source = convert(write_hf(tmp_path / "hf", config, hf_tensors(config)), tmp_path / "out", progress=False)

    def refused(model: Path, output: Path, message: str, error: type[JaxInferError] = CheckpointError, **settings: Any) -> None:
        with pytest.raises(error, match=message):
            export(model, output, progress=False, **settings)
        assert not list(tmp_path.glob("back*"))

    refused(tmp_path / "hf", tmp_path / "back", "is not a converted checkpoint")
    refused(tmp_path / "absent", tmp_path / "back", "is no folder")
    refused(source, tmp_path / "hf", "an export replaces nothing")
    refused(source, source / "x", "lies in the checkpoint", ConfigError)
    refused(source, tmp_path, "is, holds or lies in", ConfigError)
    refused(source, tmp_path / "back", "max_shard_bytes is 0", ConfigError, max_shard_bytes=0)
    manifest = json.loads((source / "manifest.json").read_text())

    def edit(**changes: Any) -> None:
        (source / "manifest.json").write_text(json.dumps({**manifest, **changes}))

    edit(quantization={"method": "awq"})
    refused(source, tmp_path / "back", "holds quantised weights", UnsupportedModelError)
    edit(architecture="LlamaForCausalLM")
    refused(source, tmp_path / "back", "whose config.json says Qwen2ForCausalLM", UnsupportedModelError)
    edit(tensors={k: v for k, v in manifest["tensors"].items() if k != "final_norm.weight"})
    refused(source, tmp_path / "back", r"in 1 parameters \(final_norm.weight\)")
    edit(dtype="float32")
    refused(source, tmp_path / "back", "has parameters that are not float32")
    edit()
    monkeypatch.setattr(export_module, "read_param", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        export(source, tmp_path / "back", progress=False)
    assert not list(tmp_path.glob("back*"))


def test_one_parameter_is_read_or_named(tmp_path: Path) -> None:
    folder = convert(FIXTURES / "qwen2_tied", tmp_path / "out", progress=False)
    manifest = read_manifest(folder)
    found = read_param(folder, manifest, "final_norm.weight")
    assert np.array_equal(found, tensors_of(FIXTURES / "qwen2_tied")["model.norm.weight"])
    manifest["tensors"]["ghost"] = {"shape": [3], "dtype": "float32"}
    with pytest.raises(CheckpointError, match="holds no ghost, which manifest.json lists"):
        read_param(folder, manifest, "ghost")


def test_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = hf_config()
    source = convert(write_hf(tmp_path / "hf", config, hf_tensors(config)), tmp_path / "out", progress=False)
    assert main([f"--model={source}", f"--output={tmp_path / 'back'}", "--format=hf", "--noprogress"]) == 0
    assert_equal(tensors_of(tmp_path / "back"), hf_tensors(config))
    assert main([f"--model={source}", f"--output={tmp_path / 'back'}"]) == 1
    assert main([f"--model={source}"]) == 2
    assert main([f"--model={source}", f"--output={tmp_path / 'b'}", "--format=gguf"]) == 2
    assert main([f"--model={source}", f"--output={tmp_path / 'b'}", "--format=awq"]) == 1
    errors = capfd.readouterr().err
    assert "--output is needed" in errors and "holds no quantised weights, which --format=awq writes" in errors
