"""The strict loader on converted checkpoints: what it hands out, and what it refuses."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from convert.converter import convert
from jaxinfer.engine.load import load
from jaxinfer.errors import CheckpointError, ConfigError
from tests.models.hf_mapping import FIXTURES, NAMES, load_fixture, read_fixture_config


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    return convert(FIXTURES / "qwen2_untied", tmp_path_factory.mktemp("load") / "qwen2_untied", progress=False)


@pytest.fixture
def copy(converted, tmp_path) -> Path:
    return Path(shutil.copytree(converted, tmp_path / "copy"))


def edit(file: Path, **changes) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("name", NAMES)
def test_loaded_equals_an_independent_mapping(name, tmp_path):
    model, want = load(convert(FIXTURES / name, tmp_path / "out", progress=False)), load_fixture(name)
    assert model.config == read_fixture_config(name) and model.graphdef == want.graphdef
    assert set(model.params) == set(want.params)
    for key, value in want.params.items():
        np.testing.assert_array_equal(model.params[key], value)


def test_facts_and_place(converted):
    model = jaxinfer.load(str(converted))
    assert model.path == converted and model.manifest["architecture"] == "Qwen2ForCausalLM"
    assert all(value.devices() == {jax.devices()[0]} for value in model.params.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_requested_dtype_is_cast_on_the_way(converted, dtype):
    model, stored = load(converted, dtype=dtype), load(converted)
    for name, value in model.params.items():
        assert value.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(value, stored.params[name].astype(dtype))


def test_an_unknown_dtype_is_refused(converted):
    with pytest.raises(ConfigError, match="dtype = 'int3'.*bfloat16"):
        load(converted, dtype="int3")


@pytest.mark.parametrize("path", ["nowhere", "empty"])
def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path, path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=path):
        load(tmp_path / path)


def test_a_manifest_and_a_config_that_disagree_on_quantisation_are_refused(copy):
    edit(copy / "manifest.json", quantization={"method": "awq"})
    with pytest.raises(CheckpointError, match="manifest.json says quantization .*awq.*, config.json says None"):
        load(copy)


@pytest.mark.parametrize(("text", "words"), [
    (None, "config.json cannot be read"), ("{", "config.json is not JSON"), ("[]", "config.json holds no JSON object")])
def test_a_damaged_config_is_refused(copy, text, words):
    (copy / "config.json").unlink()
    if text is not None:
        (copy / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=words):
        load(copy)


def test_a_config_of_another_architecture_is_refused(copy):
    shutil.copy(FIXTURES / "llama_tied" / "config.json", copy / "config.json")
    with pytest.raises(CheckpointError, match="manifest.json says Qwen2ForCausalLM, config.json says LlamaForCausalLM"):
        load(copy)


@pytest.mark.parametrize(("changes", "word"), [
    ({"tie_word_embeddings": True}, "lm_head.weight"), ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "layers.2."),
    ({"intermediate_size": 32}, "layers.0.mlp.down.weight")])
def test_a_config_of_another_size_is_refused(copy, changes, word):
    edit(copy / "config.json", **changes)
    with pytest.raises(CheckpointError, match=word):
        load(copy)
