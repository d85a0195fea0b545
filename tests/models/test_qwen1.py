"""Qwen v1 against its golden: NTK alpha by the prompt, logn queries, and equality of the ways to serve a request (qwen1_tiny).

The golden's prompts are `short` (9 tokens) and `mid` (48), within the trained length of 64; `cross` (60), which crosses it while
decoding and keeps its alpha; and `long` (150), whose alpha is 7.
"""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxinfer
from convert.converter import convert
from jaxinfer.engine.load import load, teacher_forced_logits
from jaxinfer.errors import UnsupportedModelError
from jaxinfer.models.config import RopeConfig
from jaxinfer.models.qwen1 import ALIASES, read_config
from jaxinfer.models.registry import abstract_params, read_model_config
from jaxinfer.models.shapes import SHAPES
from jaxinfer.tokenizer import Tokenizer
from tests.models.hf_mapping import FIXTURES, load_qwen1, read_fixture_config
from tests.models.test_config import QWEN_7B, QWEN_7B_CHAT, without
from tests.tokenizer.test_tiktoken import write

PROMPTS = ("short", "mid", "cross", "long")
GREEDY = jaxinfer.SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SETTINGS = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "page_size": 16, "max_model_len": 192, "compilation_cache_dir": None,
            "deterministic": True}
logits_fn = jax.jit(teacher_forced_logits, static_argnums=0)


@functools.cache
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(FIXTURES / "qwen1_tiny" / "golden.npz"))


@functools.cache
def model():
    return load_qwen1()


@functools.cache
def engine(**settings) -> jaxinfer.LLM:
    return jaxinfer.LLM.from_model(model(), **{**SETTINGS, **settings})


def prompt(name: str) -> dict[str, list[int]]:
    return {"prompt_token_ids": golden()[f"{name}_ids"].tolist()}


def check_greedy(outputs, names) -> None:
    for output, name in zip(outputs, names, strict=True):
        assert list(output.outputs[0].token_ids) == golden()[f"{name}_greedy16"].tolist(), name


def test_logits_through_the_converter(tmp_path):
    converted = load(convert(FIXTURES / "qwen1_tiny", tmp_path / "out", dtype="float32", progress=False))
    assert set(converted.params) == set(model().params)
    for key, value in model().params.items():
        np.testing.assert_array_equal(converted.params[key], value)
    for name in PROMPTS:
        want = golden()[f"{name}_logits"]
        got = np.asarray(logits_fn(converted.graphdef, converted.params, golden()[f"{name}_ids"][None]))[0]
        print(f"{name}: logits differ by at most {np.abs(got - want).max():.1e}")
        assert np.abs(want).max() > 1.0
        np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)


def test_the_older_spelling_converts_to_the_same_model(tmp_path):
    """And c_attn keeps its bias, which `no_bias: true` denies in both."""
    source = Path(shutil.copytree(FIXTURES / "qwen1_tiny", tmp_path / "old"))
    config = json.loads((source / "config.json").read_text())
    for old, new in ALIASES.items():
        if new in config:
            config[old] = config.pop(new)
    assert config["no_bias"] and "n_embd" in config and "hidden_size" not in config
    (source / "config.json").write_text(json.dumps({**config, "padded_vocab_size": 512, "activation": "swiglu", "pos_emb": "rotary"}))
    converted = load(convert(source, tmp_path / "out", dtype="float32", progress=False))
    assert converted.config == model().config and "layers.0.attention.qkv.bias" in converted.params
    for key, value in model().params.items():
        np.testing.assert_array_equal(converted.params[key], value)


@pytest.mark.parametrize("chat_format", ["chatml", "raw"])
def test_vocabulary_and_generation_config_travel_with_the_conversion(tmp_path, chat_format):
    source = write(Path(shutil.copytree(FIXTURES / "qwen1_tiny", tmp_path / "source")), chat_format=chat_format, eos_token_id=5,
                   stop_words_ids=[[6]])
    tokenizer = Tokenizer.from_dir(convert(source, tmp_path / "out", progress=False))
    assert tokenizer.encode(" the<|im_end|>") == Tokenizer.from_dir(source).encode(" the<|im_end|>")
    assert tokenizer.has_chat_template == (chat_format == "chatml") and {5, 6} < tokenizer.end_token_ids


def test_padded_vocabulary_rows_are_never_sampled(tmp_path):
    """Rows past the tokenizer's tokens get logits far above all others, whatever the hidden state."""
    tokenizer = Tokenizer.from_dir(write(tmp_path))
    head = model().params["lm_head.weight"]
    direction = 1e6 * head[:1]
    padded = head.at[tokenizer.num_tokens:].set(0.0).at[-2:].set(np.concatenate([direction, -direction]))
    loud = dataclasses.replace(model(), params={**model().params, "lm_head.weight": padded})
    logits = np.asarray(logits_fn(loud.graphdef, loud.params, golden()["mid_ids"][None]))
    assert tokenizer.num_tokens < 510 and (logits.argmax(-1) >= 510).all()
    llm = jaxinfer.LLM.from_model(loud, tokenizer=tokenizer, **SETTINGS)
    params = [dataclasses.replace(GREEDY, temperature=t, top_p=p, top_k=k, seed=7)
              for t, p, k in ((0, 1.0, 0), (1.0, 1.0, 0), (50.0, 1.0, 0), (1.0, 0.5, 3))]
    for output in llm.generate([prompt("short")] * 4, params):
        assert len(output.outputs[0].token_ids) == 16 and max(output.outputs[0].token_ids) < tokenizer.num_tokens


def test_logits_of_a_row_do_not_depend_on_its_neighbours():
    lengths = np.array([len(golden()[f"{name}_ids"]) for name in PROMPTS], np.int32)
    tokens = np.zeros((4, 150), np.int32)
    for row, name in zip(tokens, PROMPTS, strict=True):
        row[:len(golden()[f"{name}_ids"])] = golden()[f"{name}_ids"]
    got = np.asarray(logits_fn(model().graphdef, model().params, tokens, lengths))
    for row, name, length in zip(got, PROMPTS, lengths, strict=True):
        np.testing.assert_allclose(row[:length], golden()[f"{name}_logits"], atol=1e-4, rtol=0)


def test_teacher_forcing_with_the_prompts_alpha_follows_the_reference_across_the_trained_length():
    tokens = np.concatenate([golden()["cross_ids"], golden()["cross_greedy16"]])[None]
    as_decoded = np.asarray(logits_fn(model().graphdef, model().params, tokens, None, np.array([60], np.int32)))[0, 59:-1]
    as_prompt = np.asarray(logits_fn(model().graphdef, model().params, tokens))[0, 59:-1]
    np.testing.assert_array_equal(as_decoded.argmax(-1), golden()["cross_greedy16"])
    assert np.abs(as_decoded - as_prompt).max() > 1e-2  # a prompt of 76 tokens has alpha 3: it matters


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_alone_cold_then_warm(name):
    for expected_hit in (False, True):
        outputs = engine().generate([prompt(name)], GREEDY)
        check_greedy(outputs, [name])
        assert not expected_hit or name == "short" or outputs[0].num_cached_tokens >= (len(golden()[f"{name}_ids"]) - 1) // 16 * 16


@pytest.mark.parametrize("settings", [
    {}, {"enable_prefix_caching": False}, {"max_num_batched_tokens": 16},
    {"deterministic": False, "token_buckets": (256,), "batch_buckets": (4,)},
], ids=["plain", "no cache", "chunked", "own decode bucket"])
def test_greedy_of_all_in_one_batch(settings):
    llm = engine(**settings)
    before = llm.metrics()["num_compiles_after_warmup"]  # of the whole process: other engines of these tests
    outputs = llm.generate([prompt(name) for name in PROMPTS], GREEDY)
    check_greedy(outputs, PROMPTS)
    assert llm.metrics()["num_compiles_after_warmup"] == before


def test_recomputing_after_preemption_keeps_the_prompts_alpha():
    """Three of `cross` fit as they start, not as they grow: some give way past the trained length and are computed anew from there."""
    params = dataclasses.replace(GREEDY, max_tokens=80)
    outputs = engine(num_pages=17, enable_prefix_caching=False).generate([prompt("cross")] * 3, params)
    (want,) = engine(enable_prefix_caching=False).generate([prompt("cross")], params)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert list(want.outputs[0].token_ids[:16]) == golden()["cross_greedy16"].tolist()
    assert [output.outputs[0].token_ids for output in outputs] == [want.outputs[0].token_ids] * 3


def test_prefixes_are_shared_only_between_prompts_of_one_alpha():
    """Keys of the first tokens differ with the length of the prompt that they begin: 64 tokens have alpha 1, 65 to 128 have 3."""
    llm = engine()
    ids = np.random.default_rng(11).integers(0, 512, 150).tolist()
    fresh = engine(enable_prefix_caching=False)
    hits = {}
    for length in (64, 65, 128, 129, 63, 100, 150):
        (out,) = llm.generate([{"prompt_token_ids": ids[:length]}], GREEDY)
        (want,) = fresh.generate([{"prompt_token_ids": ids[:length]}], GREEDY)
        assert out.outputs[0].token_ids == want.outputs[0].token_ids
        hits[length] = out.num_cached_tokens
    assert hits == {64: 0, 65: 0, 128: 64, 129: 0, 63: 62, 100: 99, 150: 128}


def test_both_generations_of_the_published_config():
    new, old = read_model_config(QWEN_7B), read_model_config(QWEN_7B_CHAT)
    assert new == SHAPES["qwen1-7b"]
    ntk = RopeConfig(kind="qwen_ntk", theta=1e4, parameters=(("seq_length", 2048.0),))
    assert old == dataclasses.replace(new, rope=ntk, logn_len=2048, max_position_embeddings=6144)
    params = abstract_params(new, "bfloat16")
    assert 2 * sum(p.size for p in params.values()) == 15442649088  # the total size of the published index


def test_neither_logn_nor_ntk_where_the_config_says_so():
    config = read_config({**QWEN_7B, "use_logn_attn": False, "use_dynamic_ntk": False})
    assert config.logn_len is None and config.rope == RopeConfig(kind="default", theta=1e4)


@pytest.mark.parametrize(("changes", "words"), [
    ({"no_bias": False}, ["no_bias = False"]),
    ({"visual": {"layers": 48}}, ["visual = {'layers': 48}"]),
    ({"n_embd": 2048}, ["n_embd = 2048", "hidden_size = 4096", "two spellings"]),
    ({"intermediate_size": 22017}, ["intermediate_size = 22017", "even"]),
    ({"tie_word_embeddings": True}, ["tie_word_embeddings = True"]),
    ({"rotary_pct": 0.5}, ["rotary_pct = 0.5"]),
    ({"use_cache_quantization": True}, ["use_cache_quantization = True"]),
    ({"scale_attn_weights": False}, ["scale_attn_weights = False"]),
    ({"kv_channels": 2}, ["kv_channels = 2", "at least 4"]),
    ({"seq_length": 1}, ["seq_length = 1"]),
    ({"rotary_emb_base": -1}, ["rotary_emb_base = -1"]),
    ({"padded_vocab_size": 100}, ["padded_vocab_size = 100", "151936"]),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_scaling"]),
])
def test_refusals(changes, words):
    with pytest.raises(UnsupportedModelError) as caught:
        read_config({**QWEN_7B, **changes})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["seq_length", "kv_channels", "use_logn_attn", "use_dynamic_ntk", "rotary_emb_base", "layer_norm_epsilon",
                                  "hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"])
def test_a_missing_attribute_is_named(name):
    with pytest.raises(UnsupportedModelError, match=f"has no '{name}'"):
        read_config(without(QWEN_7B, name))


def test_the_fixtures_config_is_read():
    config = read_fixture_config("qwen1_tiny")
    assert (config.mlp_dim, config.logn_len, config.qkv_bias, config.output_bias) == (96, 64, True, False)
    assert json.loads((FIXTURES / "qwen1_tiny" / "config.json").read_text())["intermediate_size"] == 192
