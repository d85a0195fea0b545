"""Steps kept in files, and their replay: a planted NaN is named, a clean step gives the same tokens, and what cannot be read is refused."""

import dataclasses
import json
import logging

import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from jaxinfer.engine import dump as dump_file
from jaxinfer.engine.dump import read_dump
from jaxinfer.errors import ConfigError, DumpError
from jaxinfer.replay import main, replay, report
from jaxinfer.request import FinishReason
from tests.engine.conftest import SMALL

PROMPTS = [{"prompt_token_ids": list(range(5, 26))}, {"prompt_token_ids": list(range(40, 59))}]
PARAMS = [jaxinfer.SamplingParams(max_tokens=16, temperature=0), jaxinfer.SamplingParams(
    max_tokens=16, seed=3, temperature=0.9, top_k=50, repetition_penalty=1.3, logit_bias={9: 2.0}, min_tokens=4, logprobs=1,
    structured_outputs={"regex": "[a-z0-9]{24}"}, logits_processors={"ban_unlikely": {"most": 1}})]


def planted(model, name, value):
    weight = model.params[name]
    return dataclasses.replace(model, params={**model.params, name: weight.at[(0,) * weight.ndim].set(value)})


@pytest.fixture(scope="module")
def clean(guided, tmp_path_factory):
    """A decode step of an engine that runs asynchronously: the outputs that it belongs to, and its file."""
    folder = tmp_path_factory.mktemp("steps")

    groups = [guided.stream(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    for _ in range(3):
        for stream in groups:
            next(stream)
    guided.dump_step(folder)
    outputs = [list(stream)[-1] for stream in groups]
    (file,) = folder.iterdir()
    return outputs, file


def test_a_clean_step_gives_the_same_tokens(clean, byte_model):
    outputs, file = clean
    dump = read_dump(file)
    assert dump.header["reason"] == "asked for" and [row["num_tokens"] for row in dump.header["rows"]] == [1, 1]
    rows = replay(dump, byte_model)
    assert all(row.agrees for row in rows) and report(dump, rows).endswith("2 of 2 rows are finite and as dumped")
    for row, got, out in zip(dump.header["rows"], rows, outputs, strict=True):
        assert got.token == out.outputs[0].token_ids[len(row["output_token_ids"])] and len(row["output_token_ids"]) >= 2


def test_a_row_whose_pages_are_too_many_is_computed_whole(guided, byte_model, tmp_path, monkeypatch):
    prompt = {"prompt_token_ids": [*PROMPTS[0]["prompt_token_ids"][:18], 99]}
    guided.generate(prompt, PARAMS[0])
    monkeypatch.setattr(dump_file, "MAX_BYTES", 0)
    guided.dump_step(tmp_path)
    num_compiles = guided.metrics()["num_compiles_after_warmup"]
    (out,) = guided.generate(prompt, PARAMS[0])
    assert guided.metrics()["num_compiles_after_warmup"] == num_compiles
    dump = read_dump(guided.engine.dumps.last_file)
    (row,) = replay(dump, byte_model)
    assert out.num_cached_tokens >= 16 and dump.header["rows"][0]["start"] >= 16 and not dump.header["rows"][0]["has_pages"]
    assert not dump.tensors["pages"].size and row.agrees and row.token == out.outputs[0].token_ids[0]


@pytest.mark.parametrize(("name", "value", "layer", "operation"), [
    ("layers.1.mlp.down.weight", jnp.nan, "layer 1", "layer_1/mlp/down: dot_general"),
    ("layers.0.attention.qkv.weight", jnp.inf, "layer 0", "layer_0/attention/qkv: dot_general"),
    ("final_norm.weight", jnp.nan, "rms_norm.xla", "rms_norm.xla: "),
])
def test_a_planted_value_is_named(clean, byte_model, name, value, layer, operation):
    row = replay(read_dump(clean[1]), planted(byte_model, name, value))[0]
    assert f"first in {layer}" in str(row) and operation in str(row) and f"weights {name} holds" in str(row)


def test_a_step_that_is_not_finite_is_kept_and_named(byte_model, tmp_path):
    """NaN in one layer's weight; step 0 is asked for by its number and not finite at once, and step 1 is no step any more."""
    model = planted(byte_model, "layers.1.mlp.down.weight", jnp.nan)
    settings = {name: value for name, value in SMALL.items() if "buckets" not in name} | {"max_model_len": 64, "deterministic": True}
    llm = jaxinfer.LLM.from_model(model, **settings, num_scheduler_steps=4, dump_steps_dir=str(tmp_path), dump_step_numbers=(0, 5))
    (out,) = llm.generate(PROMPTS[1], PARAMS[0])
    assert out.outputs[0].finish_reason is FinishReason.ERROR
    (file,) = tmp_path.iterdir()
    dump = read_dump(file)
    assert dump.header["reason"] == "not finite" and not dump.tensors["finite"].any() and dump.header["number"] == 0
    (row,) = replay(dump, model)
    assert "first in layer 1: layer_1/mlp/down: dot_general, its input weights layers.1.mlp.down.weight holds NaN" in str(row)
    (healthy,) = replay(dump, byte_model)  # the weights here are not those there
    assert "finite here" in str(healthy) and "not on the device" in str(healthy) and not healthy.agrees
    llm.engine.dumps._num_non_finite = dump_file.MAX_FILES
    llm.generate(PROMPTS[1], PARAMS[0])
    assert len(list(tmp_path.iterdir())) == 1


def test_what_differs_is_told(clean, byte_model):
    _, file = clean
    dump = read_dump(file)
    dump.tensors["tokens"] = dump.tensors["tokens"] + 1
    row = replay(dump, byte_model)[0]
    assert f"token {row.token}, dumped {row.token + 1}; their logits differ by " in str(row) and not row.agrees
    dump.header["rows"][0]["params"]["logits_processors"] = {"elsewhere": {}}
    assert "logits processors elsewhere are not registered here" in str(replay(dump, byte_model)[0])
    dump.header["model"]["num_layers"] = 1
    with pytest.raises(DumpError, match="another model: here num_layers = 2 instead of 1"):
        replay(dump, byte_model)


def test_files_that_are_no_dumps_and_folders_that_cannot_be_written(clean, guided, tmp_path, byte_model, caplog, monkeypatch):
    _, file = clean
    (tmp_path / "cut").write_bytes(file.read_bytes()[:5000])
    with pytest.raises(DumpError, match="cannot be read as a step"):
        read_dump(tmp_path / "cut")
    from safetensors.numpy import save_file
    save_file({"x": np.zeros(1)}, tmp_path / "weights")
    with pytest.raises(DumpError, match="holds no step, but something else"):
        read_dump(tmp_path / "weights")
    save_file({"x": np.zeros(1)}, tmp_path / "other", metadata={"step": json.dumps({"format": "jaxinfer-step-0"})})
    with pytest.raises(DumpError, match="'jaxinfer-step-0': this version reads 'jaxinfer-step-1'"):
        read_dump(tmp_path / "other")
    with pytest.raises(ConfigError, match="dump_step: the folder .*cut' cannot be written to"):
        guided.dump_step(tmp_path / "cut")
    with pytest.raises(ConfigError, match="dump_step_numbers = .* and no dump_steps_dir"):
        jaxinfer.LLM.from_model(byte_model, dump_step_numbers=(1,))

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dump_file, "save_file", full)
    guided.dump_step(tmp_path / "full")
    with caplog.at_level(logging.ERROR):
        (out,) = guided.generate(PROMPTS[1], jaxinfer.SamplingParams(max_tokens=2))
    assert out.finished and "could not be written" in caplog.text and not list((tmp_path / "full").iterdir())


def test_the_command(clean, tmp_path, monkeypatch, capsys, byte_model):
    _, file = clean
    monkeypatch.setattr("jaxinfer.source.converted_checkpoint", lambda model, dtype: tmp_path / model)
    monkeypatch.setattr("jaxinfer.engine.load.load", lambda path, dtype: {"clean": byte_model, "bad": planted(
        byte_model, "layers.0.mlp.down.weight", jnp.nan)}[path.name])
    assert main([f"--dump={file}", "--model=clean"]) == 0
    assert "2 of 2 rows are finite and as dumped" in capsys.readouterr().out
    assert main([f"--dump={file}", "--model=bad"]) == 1
    assert "first in layer 0" in capsys.readouterr().out
    assert main([f"--dump={tmp_path / 'none'}", "--model=clean"]) == 1
    assert "cannot be read as a step" in capsys.readouterr().err
    assert main(["--model=clean"]) == 2
