"""GPTQ's lm_head: read, run, exported, and refused by name in other formats.

The oracle is numpy in float32 with weights dequantised from the formats' definitions (tests/convert/quantized_checkpoints.py).
"""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxinfer
from convert.converter import convert
from convert.export import export
from convert.float32_model import Float32Model
from convert.hf_reader import HFSource
from convert.inspect import inspect
from jaxinfer.checkpoint import read_manifest
from jaxinfer.engine.load import load, teacher_forced_logits
from jaxinfer.errors import CheckpointError, JaxInferError, UnsupportedModelError
from tests.convert.checkpoints import D, V, hf_config, hf_tensors, write_hf
from tests.convert.quantized_checkpoints import CONFIGS, matrix, quantized

LOGITS = jax.jit(teacher_forced_logits, static_argnums=0)
FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
IDS = np.arange(1, 41, dtype=np.int32).reshape(2, 20) * 5
GPTQ = sorted(name for name, config in CONFIGS.items() if config["quant_method"] == "gptq")
assert V % 64, "the packed layout must have to pad"


def folder_of(path: Path, name: str, *, tied: bool = False, **changes: Any) -> tuple[Path, dict[str, np.ndarray]]:
    """A folder whose head is quantised as its layers are, and its tensors with float32 weights in place of packed ones."""
    config = hf_config(tied=tied, quantization_config={**CONFIGS[name], "lm_head": True, **changes}, num_hidden_layers=1)
    stored, plain = quantized(name, hf_tensors(config, np.float16))
    rng = np.random.default_rng(7)
    parts, plain["lm_head.weight"] = matrix(CONFIGS[name], rng, D, V, rng.permutation(D))
    stored.pop("lm_head.weight", None)
    return write_hf(path, config, stored | {f"lm_head.{suffix}": value for suffix, value in parts.items()}), plain


@pytest.mark.parametrize("name", GPTQ)
@pytest.mark.parametrize("tied", [False, True])
def test_a_gptq_head_is_read_and_run(tmp_path: Path, name: str, tied: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Logits are those of float32 numpy with the dequantised head, whether or not the config ties an embedding to it."""
    source, plain = folder_of(tmp_path / "hf", name, tied=tied)
    with caplog.at_level(logging.INFO):
        folder = convert(source, tmp_path / "out", progress=False, verify_logits=True)
    assert ("its embeddings are tied, but its vocabulary head is quantised" in caplog.text) == tied
    manifest = read_manifest(folder)
    assert manifest["verification"]["passed"] and manifest["verification"]["max_abs_diff"] < 1e-4
    assert manifest["num_params"] == sum(value.size for value in plain.values())
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    model = load(folder, dtype="float32")
    assert "lm_head.weight" not in model.params and model.params["lm_head.scales"].shape[1] == V
    untied = write_hf(tmp_path / "plain", hf_config(num_hidden_layers=1), plain)
    want = Float32Model(HFSource(untied), np.dtype(np.float32), num_tokens=IDS.shape[1]).logits(IDS)
    assert np.abs(want).max() > 1.0
    np.testing.assert_allclose(LOGITS(model.graphdef, model.params, IDS), want, atol=1e-4, rtol=0)
    quantization = model.config.quantization
    assert quantization is not None and quantization.exceptions == (("lm_head", quantization.format_of("lm_head")),)
    text = inspect(source)
    assert "head stored" in text and ("tied embeddings, yet a quantised head is stored: a conversion unties them" in text) == tied
    assert "head stored" in inspect(folder)


@pytest.mark.parametrize("name", ["gptq", "gptq_desc_act", "gptq_8bit_sym"])
def test_a_gptq_head_is_exported_with_the_bits_that_it_came_with(tmp_path: Path, name: str) -> None:
    source, _ = folder_of(tmp_path / "hf", name)
    folder = convert(source, tmp_path / "out", progress=False)
    back = export(folder, tmp_path / "back", target="gptq", progress=False)
    stored, written = load_file(source / "model.safetensors"), load_file(back / "model.safetensors")
    assert stored.keys() == written.keys() and all(stored[key].tobytes() == written[key].tobytes() for key in stored)
    assert json.loads((back / "config.json").read_text())["quantization_config"]["lm_head"] is True
    again = load(convert(back, tmp_path / "again", progress=False))
    assert again.config == load(folder).config
    with pytest.raises(UnsupportedModelError, match="AutoAWQ knows no quantised lm_head"):
        export(folder, tmp_path / "no", target="awq", progress=False)


def test_a_tied_head_is_exported_as_an_untied_one(tmp_path: Path) -> None:
    """Other engines would take the embedding for the head where the config still ties them."""
    folder = convert(folder_of(tmp_path / "hf", "gptq", tied=True)[0], tmp_path / "out", progress=False)
    back = export(folder, tmp_path / "back", target="gptq_v2", progress=False)
    assert json.loads((back / "config.json").read_text())["tie_word_embeddings"] is False
    assert {"model.embed_tokens.weight", "lm_head.qweight"} <= load_file(back / "model.safetensors").keys()
    again = load(convert(back, tmp_path / "again", progress=False))
    model = load(folder)
    assert again.params.keys() == model.params.keys() and all(np.array_equal(again.params[key], model.params[key]) for key in model.params)


@pytest.mark.parametrize(("name", "changes", "error", "message"), [
    ("gptq", {"lm_head": False}, UnsupportedModelError, "holds lm_head.qweight, but its quantization_config does not say lm_head = true"),
    ("awq", {"lm_head": None}, UnsupportedModelError, "holds lm_head.qweight, but a quantised vocabulary head is read in GPTQ's layout only"),
    ("packed", {"lm_head": None}, UnsupportedModelError, "holds lm_head.weight_packed, but .*not in compressed-tensors"),
    ("int8", {"lm_head": None}, UnsupportedModelError, "holds lm_head.weight_scale, but .*not in compressed-tensors-int8"),
    ("awq", {}, UnsupportedModelError, "attributes that are not implemented: lm_head = True")])
def test_other_heads_are_refused_by_name(tmp_path: Path, name: str, changes: dict[str, Any], error: type[JaxInferError], message: str) -> None:
    source, _ = folder_of(tmp_path / "hf", name, **changes)
    with pytest.raises(error, match=message):
        convert(source, tmp_path / "out", progress=False)


def test_a_head_that_the_config_promises_must_be_there(tmp_path: Path) -> None:
    config = hf_config(quantization_config={**CONFIGS["gptq"], "lm_head": True}, num_hidden_layers=1)
    stored, _ = quantized("gptq", hf_tensors(config, np.float16))
    with pytest.raises(CheckpointError, match="missing tensor lm_head.qweight, needed for lm_head.weight, which the quantization_config says"):
        convert(write_hf(tmp_path / "hf", config, stored), tmp_path / "out", progress=False)


@pytest.fixture(scope="module")
def gptq_tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray, np.ndarray]:
    """(the checkpoint that AutoGPTQ packed with its head rounded to nearest and packed here, head as it was, head as it is; [V, D] both)."""
    folder = Path(shutil.copytree(FIXTURES / "gptq_tiny", tmp_path_factory.mktemp("head") / "hf"))
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    before = tensors.pop("lm_head.weight").astype(np.float32)
    groups = before.T.reshape(-1, 32, before.shape[0])  # [g, 32, V]
    low, high = np.minimum(groups.min(1), 0), np.maximum(groups.max(1), 0)
    scales = ((high - low) / 15).astype(np.float16)
    zeros = np.clip(np.round(-low / scales), 1, 15)
    q = np.clip(np.round(groups / scales[:, None].astype(np.float32)) + zeros[:, None], 0, 15)
    after = ((q - zeros[:, None]) * scales[:, None].astype(np.float32)).reshape(before.T.shape).T
    shifts = 4 * np.arange(8, dtype=np.uint32)
    words = (q.reshape(-1, 8, before.shape[0]).astype(np.uint32) << shifts[:, None]).sum(1, dtype=np.uint32)
    zero_words = ((zeros - 1).reshape(len(zeros), -1, 8).astype(np.uint32) << shifts).sum(2, dtype=np.uint32)
    tensors |= {"lm_head.qweight": words.view(np.int32), "lm_head.qzeros": zero_words.view(np.int32), "lm_head.scales": scales,
                "lm_head.g_idx": (np.arange(before.shape[1]) // 32).astype(np.int32)}
    config["quantization_config"]["lm_head"] = True
    return write_hf(folder, config, tensors), before, after


def test_against_the_golden_logits_of_the_other_head(tmp_path: Path, gptq_tiny: tuple[Path, np.ndarray, np.ndarray]) -> None:
    """The golden logits give the hidden states, for their head has more tokens than inputs; these give the logits of the packed head."""
    source, before, after = gptq_tiny
    golden = np.load(FIXTURES / "gptq_tiny" / "golden.npz")
    model = load(convert(source, tmp_path / "out", progress=False), dtype="float32")
    rounded = load(tmp_path / "out", dtype="bfloat16")
    for prompt in ("p7", "p40"):
        hidden = golden[f"{prompt}_logits"].astype(np.float64) @ np.linalg.pinv(before.astype(np.float64)).T
        np.testing.assert_allclose(hidden @ before.T, golden[f"{prompt}_logits"], atol=1e-4)
        want = hidden @ after.T
        assert np.abs(want - golden[f"{prompt}_logits"]).max() > 0.05, "the packed head is no other than the plain one"
        got = np.asarray(LOGITS(model.graphdef, model.params, golden[f"{prompt}_ids"][None])[0])
        np.testing.assert_allclose(got, want, atol=2e-4, rtol=0)
        coarse = np.asarray(LOGITS(rounded.graphdef, rounded.params, golden[f"{prompt}_ids"][None])[0])
        assert np.sqrt(((coarse - want)**2).mean()) < 0.05 * want.std()


def test_the_engine_runs_it(tmp_path: Path, gptq_tiny: tuple[Path, np.ndarray, np.ndarray]) -> None:
    """Greedy tokens are those of the teacher-forced logits; its bytes are in the memory plan; packed weights are exchanged like others."""
    llm = jaxinfer.LLM.from_model(load(convert(gptq_tiny[0], tmp_path / "out", progress=False), dtype="float32"), max_num_seqs=2,
                                  max_num_batched_tokens=16, deterministic=True, page_size=16, max_model_len=64, compilation_cache_dir=None)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    params = jaxinfer.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    ids = [*prompt, *llm.generate([{"prompt_token_ids": prompt}], params)[0].outputs[0].token_ids]
    model = llm.engine.model
    logits = np.asarray(LOGITS(model.graphdef, model.params, np.array([ids], np.int32))[0])
    assert logits[len(prompt) - 1:-1].argmax(-1).tolist() == ids[len(prompt):]
    assert llm.engine.resolved.memory.weight_bytes == sum(x.nbytes for x in model.params.values())
    llm.update_weights({name: x + 0 for name, x in model.params.items()})
    assert [*prompt, *llm.generate([{"prompt_token_ids": prompt}], params)[0].outputs[0].token_ids] == ids
