"""Logits and greedy tokens of tiny random models against transformers (made by tests/goldens/make_goldens.py).

`test_logits` takes the whole road, converter and loader included; the others read the folders with the tests' own mapping.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from convert.converter import convert
from jaxinfer.engine.load import load, teacher_forced_logits
from jaxinfer.models.registry import MODELS
from tests.models.hf_mapping import FIXTURES, NAMES, load_fixture, prompt_len, read_fixture_config

logits_fn = jax.jit(teacher_forced_logits, static_argnums=0)


@functools.cache
def golden(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(FIXTURES / name / "golden.npz"))


@pytest.mark.parametrize("name", NAMES)
def test_logits(name, tmp_path):
    model, want = load(convert(FIXTURES / name, tmp_path / "out", progress=False)), golden(name)
    got = np.asarray(logits_fn(model.graphdef, model.params, want["ids"]))
    assert got.dtype == np.float32 and got.shape == want["logits"].shape
    assert np.abs(want["logits"]).max() > 1.0  # the golden says something
    print(f"{name}: logits differ by at most {np.abs(got - want['logits']).max():.1e}")
    np.testing.assert_allclose(got, want["logits"], atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens(name):
    model, want, length = load_fixture(name), golden(name), prompt_len(name)
    tokens = np.zeros((2, 48), np.int32)
    tokens[:, :length] = want["ids"][:, :length]
    for t in range(length, length + 16):
        logits = logits_fn(model.graphdef, model.params, tokens, np.full(2, t, np.int32), np.full(2, length, np.int32))
        tokens[:, t] = np.argmax(logits[:, t - 1], axis=-1)
    np.testing.assert_array_equal(tokens[:, length:length + 16], want["greedy16"])


@pytest.mark.parametrize("name", ["qwen3", "mistral", "llama_untied", "llama_yarn", "llama_linear", "llama_dynamic", "llama2_old", "qwen2_old"])
def test_greedy_tokens_of_the_engine(name):
    """Over pages, in chunks of less than a prompt; Mistral's window of 8 crosses the edges of pages of 16 and is left far behind."""
    want, length = golden(name), prompt_len(name)
    llm = jaxinfer.LLM.from_model(load_fixture(name), max_num_seqs=2, max_num_batched_tokens=16, deterministic=True, page_size=16,
                                  max_model_len=64, compilation_cache_dir=None)
    params = jaxinfer.SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    for _ in range(2):  # cold, then from the prefix cache
        outputs = llm.generate([{"prompt_token_ids": row[:length].tolist()} for row in want["ids"]], params)
        np.testing.assert_array_equal([o.outputs[0].token_ids for o in outputs], want["greedy16"])


@pytest.mark.parametrize("name", NAMES)
def test_padding_and_neighbours_change_nothing(name):
    model, ids = load_fixture(name), golden(name)["ids"]
    whole = logits_fn(model.graphdef, model.params, ids, None, np.array([48, 48], np.int32))
    padded = ids.copy()
    padded[0, 30:] = 100
    short = logits_fn(model.graphdef, model.params, padded, np.array([30, 48], np.int32), np.array([48, 48], np.int32))
    np.testing.assert_array_equal(short[0, :30], whole[0, :30])
    np.testing.assert_array_equal(short[1], whole[1])


def test_bfloat16_stays_near_float32():
    model, want = load_fixture("qwen2_untied", "bfloat16"), golden("qwen2_untied")
    got = logits_fn(model.graphdef, model.params, want["ids"])
    assert got.dtype == jnp.float32
    error = np.abs(np.asarray(got) - want["logits"])
    assert np.sqrt((error**2).mean()) < 0.05 * want["logits"].std()


def test_logits_method_is_the_pure_function_and_can_be_jitted():
    model, ids = load_fixture("llama_tied"), golden("llama_tied")["ids"][:, :8]
    want = logits_fn(model.graphdef, model.params, ids)
    np.testing.assert_allclose(jax.jit(model.logits)(ids), want, atol=1e-5)


def test_every_family_has_a_golden():
    assert {read_fixture_config(name).architecture for name in (*NAMES, "qwen1_tiny")} == set(MODELS)
