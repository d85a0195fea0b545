"""`--verify`: passes for every family, fails for weights in a wrong place, and says beforehand where it cannot be done."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from convert import converter, verify
from convert.converter import convert, plain_source, prepare
from convert.float32_model import FAMILIES, Float32Model
from convert.hf_reader import HFSource
from jaxinfer.checkpoint import read_manifest
from jaxinfer.errors import CapacityError, CheckpointError, UnsupportedModelError
from tests.convert.checkpoints import hf_config, hf_tensors, write_gguf, write_hf
from tests.convert.test_export import FIXTURES, FOLDERS


@pytest.mark.parametrize("name", FOLDERS)
def test_the_independent_path_agrees_with_transformers(name: str) -> None:
    """Its logits against the golden ones, which were made by the models' own libraries."""
    golden = np.load(FIXTURES / name / "golden.npz")
    source = plain_source(prepare(HFSource(FIXTURES / name), name, "float32"))
    prefixes = [key.removesuffix("ids") for key in golden if key.endswith("ids") and key != "long_ids"]  # Qwen v1's, past its seq_length
    for prefix in prefixes:
        ids = np.atleast_2d(golden[prefix + "ids"])
        found = Float32Model(source, np.dtype(np.float32), num_tokens=ids.shape[1]).logits(ids)
        assert np.abs(found - golden[prefix + "logits"]).max() < 2e-4


@pytest.mark.parametrize("name", ["qwen1_tiny", "qwen2_sliding", "qwen3", "llama_yarn"])
def test_families_pass(tmp_path: Path, name: str) -> None:
    folder = convert(FIXTURES / name, tmp_path / "out", progress=False, verify_logits=True)
    result = read_manifest(folder)["verification"]
    assert result["passed"] and result["argmax_equal"] and result["tokens"] == 48 and result["max_abs_diff"] < 1e-4


def test_rounding_is_no_difference(tmp_path: Path) -> None:
    config = hf_config(tied=True)
    source = write_hf(tmp_path / "hf", config, {name: value * 0.1 for name, value in hf_tensors(config, np.float32).items()})
    folder = convert(source, tmp_path / "out", dtype="bfloat16", progress=False, verify_logits=True)
    assert read_manifest(folder)["verification"]["max_abs_diff"] < 1e-3


def test_gguf_is_compared_with_its_dequantised_tensors(tmp_path: Path) -> None:
    config = hf_config("LlamaForCausalLM")
    write_gguf(tmp_path / "m.gguf", config, {name: value * 0.1 for name, value in hf_tensors(config, np.float32).items()})
    assert read_manifest(convert(tmp_path / "m.gguf", tmp_path / "out", progress=False, verify_logits=True))["verification"]["passed"]


@pytest.mark.parametrize("victim", ["qkv.weight", "gate_up.weight", "output.weight", "qkv.bias"])
def test_a_misplaced_weight_fails_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str) -> None:
    real = converter.fill

    def misplace(target: np.ndarray, part: Any, source: Any) -> None:
        real(target, part, source)
        target[...] = np.roll(target, 1, axis=-1 if victim != "output.weight" else 0) if part_of(part, victim) else target

    def part_of(part: Any, name: str) -> bool:
        kinds = {"qkv.weight": "v_proj.weight", "gate_up.weight": "up_proj.weight", "output.weight": "o_proj.weight", "qkv.bias": "v_proj.bias"}
        return bool(part.source.endswith(kinds[name]))

    monkeypatch.setattr(converter, "fill", misplace)
    with pytest.raises(CheckpointError, match="verification failed: the converted model's logits differ .* nothing was written"):
        convert(FIXTURES / "qwen2_tied", tmp_path / "out", progress=False, verify_logits=True)
    assert not list(tmp_path.iterdir())


def test_what_it_cannot_do_is_said_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_hf(tmp_path / "hf", hf_config(), hf_tensors(hf_config()))

    def refused(message: str, error: type[CheckpointError] | type[CapacityError]) -> None:
        with pytest.raises(error, match=message):
            convert(source, tmp_path / "out", progress=False, verify_logits=True)
        assert [path.name for path in tmp_path.iterdir()] == ["hf"]

    monkeypatch.setattr(converter, "fill", lambda *args: pytest.fail("work was begun"))
    with monkeypatch.context() as patch:
        patch.delitem(FAMILIES, "Qwen2ForCausalLM")
        refused("--verify is not implemented for Qwen2ForCausalLM", UnsupportedModelError)
    monkeypatch.setattr(verify, "_available_bytes", lambda: 1 << 20)
    refused("takes 1.1 GB of memory; 0.0 GB are free", CapacityError)


def test_rope_kinds_and_lengths_that_it_does_not_know() -> None:
    source = HFSource(FIXTURES / "llama_tied")
    source.config = {**source.config, "rope_parameters": {"rope_type": "strange", "rope_theta": 1e4}}
    with pytest.raises(UnsupportedModelError, match="not implemented for rope kind 'strange'"):
        Float32Model(source, np.dtype(ml_dtypes.bfloat16), num_tokens=4)
    source = HFSource(FIXTURES / "qwen1_tiny")
    with pytest.raises(UnsupportedModelError, match="more than this model's seq_length 64"):
        Float32Model(source, np.dtype(np.float32), num_tokens=65)
    assert json.loads(json.dumps(verify.token_rows(512).tolist())) and verify.token_rows(7).max() < 7
