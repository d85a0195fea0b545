"""Closed-world reading of Hugging Face configs: published ones are read, and whatever is not implemented is refused by name."""

import json

import pytest

from jaxinfer.errors import UnsupportedModelError
from jaxinfer.models.config import HARMLESS, IGNORED, RopeConfig
from jaxinfer.models.registry import MODELS, read_model_config
from jaxinfer.models.shapes import SHAPES

QWEN2_7B = {  # as published
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
    "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 32768,
    "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.41.2", "use_cache": True, "use_sliding_window": False, "vocab_size": 152064}
SMOLLM2 = {  # as published
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664, "intermediate_size": 1536,
    "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 9,
    "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "transformers_version": "4.42.3", "use_cache": True,
    "vocab_size": 49152}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
CONFIGS = {"Qwen2ForCausalLM": QWEN2_7B, "LlamaForCausalLM": SMOLLM2}


def without(config, *names):
    return {k: v for k, v in config.items() if k not in names}


def test_published_configs_are_the_named_shapes():
    assert read_model_config(QWEN2_7B) == SHAPES["Q"]
    assert read_model_config(SMOLLM2) == SHAPES["smollm2"]


def test_every_family_has_a_config_here():
    assert set(CONFIGS) == set(MODELS)


def test_configs_are_hashable():
    assert len({read_model_config(QWEN2_7B), read_model_config(SMOLLM2), read_model_config(dict(SMOLLM2))}) == 2


@pytest.mark.parametrize("spelling", [
    {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    {"rope_theta": 500000, "rope_scaling": {"type": "llama3", **without(LLAMA3, "rope_type")}},
    {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
    {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}},
    {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 1.0, **LLAMA3}, "rope_scaling": None},
])
def test_rope_spellings(spelling):
    parameters = (("factor", 8.0), ("high_freq_factor", 4.0), ("low_freq_factor", 1.0), ("original_max_position_embeddings", 8192.0))
    got = read_model_config({**without(SMOLLM2, "rope_theta", "rope_scaling"), **spelling}).rope
    assert got == RopeConfig(kind="llama3", theta=5e5, parameters=parameters)


def test_first_llama_configs_have_no_theta_and_no_kv_heads():
    got = read_model_config(without(SMOLLM2, "rope_theta", "num_key_value_heads"))
    assert got.rope == RopeConfig(kind="default", theta=10000.0) and got.num_kv_heads == 9


def test_explicit_head_dim_and_attention_bias():
    got = read_model_config({**SMOLLM2, "head_dim": 96, "attention_bias": True})
    assert (got.head_dim, got.qkv_bias, got.output_bias) == (96, True, True)


@pytest.mark.parametrize(("changes", "windows"), [
    ({}, (None,) * 28),
    ({"use_sliding_window": True, "max_window_layers": 27, "sliding_window": 64}, (None,) * 27 + (64,)),
    ({"use_sliding_window": True, "max_window_layers": 28, "sliding_window": 64}, (None,) * 28),
    ({"use_sliding_window": True, "sliding_window": None}, (None,) * 28),
    ({"use_sliding_window": True, "sliding_window": 64, "layer_types": ["sliding_attention"] + ["full_attention"] * 27},
     (64,) + (None,) * 27),
    ({"sliding_window": None, "layer_types": ["full_attention"] * 28}, (None,) * 28),
])
def test_qwen2_sliding_windows(changes, windows):
    assert read_model_config({**QWEN2_7B, **changes}).sliding_windows == windows


@pytest.mark.parametrize(("changes", "words"), [
    ({"architectures": ["GPT2LMHeadModel"]}, ["architectures", "GPT2LMHeadModel", "Qwen2ForCausalLM"]),
    ({"architectures": None}, ["architectures = None"]),
    ({"architectures": ["Qwen2ForCausalLM", "LlamaForCausalLM"]}, ["exactly one"]),
    ({"model_type": "llama"}, ["model_type = 'llama'", "'qwen2'"]),
    ({"hidden_act": "gelu"}, ["hidden_act = 'gelu'", "'silu'"]),
    ({"use_mrope": True}, ["use_mrope = True"]),
    ({"new_trick": 3}, ["new_trick = 3", "not implemented"]),
    ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config = {'quant_method': 'awq'}"]),
    ({"is_encoder_decoder": True}, ["is_encoder_decoder = True"]),
    ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor = 0.5"]),
    ({"pretraining_tp": 1, "chunk_size_feed_forward": 7}, ["chunk_size_feed_forward = 7"]),
    ({"num_key_value_heads": 3}, ["num_kv_heads = 3", "divisor of 28"]),
    ({"num_attention_heads": 24, "num_key_value_heads": 4}, ["hidden_size 3584", "24 heads", "head_dim"]),
    ({"head_dim": 33}, ["head_dim = 33", "even"]),
    ({"num_hidden_layers": 0, "layer_types": []}, ["num_hidden_layers = 0", "1 to 1024"]),
    ({"num_hidden_layers": 10**12}, ["num_hidden_layers = 1000000000000", "1 to 1024"]),
    ({"num_attention_heads": 0}, ["0 heads"]),
    ({"hidden_size": -1, "head_dim": 2}, ["dim = -1"]),
    ({"rope_theta": 0}, ["rope_theta = 0.0", "> 0"]),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, ["'factor'", "found 0"]),
    ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": -4}, ["sliding_windows", "-4"]),
    ({"vocab_size": "many"}, ["vocab_size = 'many'", "int"]),
    ({"vocab_size": True}, ["vocab_size = True"]),
    ({"rms_norm_eps": 0.0}, ["norm_eps = 0.0", "> 0"]),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, ["'yarn'", "default", "llama3"]),
    ({"rope_scaling": {"rope_type": "linear"}}, ["'linear'", "'factor'", "None"]),
    ({"rope_scaling": {"rope_type": "linear", "factor": True}}, ["'factor'", "True"]),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 32}}, ["'beta_fast' = 32"]),
    ({"rope_scaling": {"type": "linear", "rope_type": "llama3"}}, ["'rope_type' = 'llama3'", "'linear'"]),
    ({"rope_scaling": {"factor": 4.0}}, ["'factor' = 4.0", "'default'"]),
    ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, ["rope_theta = 1000000.0", "500000.0"]),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, ["full_attention"]),
    ({"rope_scaling": "linear"}, ["rope_scaling = 'linear'", "dict"]),
    ({"use_sliding_window": True, "max_window_layers": None}, ["max_window_layers"]),
    ({"layer_types": ["full_attention"]}, ["layer_types", "28 entries"]),
    ({"layer_types": ["chunked_attention"] * 28}, ["chunked_attention"]),
    ({"layer_types": ["sliding_attention"] * 28}, ["use_sliding_window = False"]),
])
def test_refusals(changes, words):
    with pytest.raises(UnsupportedModelError) as caught:
        read_model_config({**QWEN2_7B, **changes})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("architecture", sorted(CONFIGS))
@pytest.mark.parametrize("odd", [None, True, -1, 0, 1.5, float("nan"), float("inf"), 2**70, "x", [], [[]], {}, {"rope_type": []},
                                 {"rope_theta": "x"}, [{}]], ids=repr)
def test_any_odd_value_is_read_or_refused_with_a_typed_error(architecture, odd):
    for name in sorted({*CONFIGS[architecture], "head_dim", "rope_parameters", "rope_scaling", "layer_types"}):
        try:
            read_model_config({**CONFIGS[architecture], name: odd})
        except UnsupportedModelError as error:
            assert len(str(error)) > 20


def test_llama_refuses_an_mlp_bias():
    with pytest.raises(UnsupportedModelError, match="mlp_bias = True"):
        read_model_config({**SMOLLM2, "mlp_bias": True})


@pytest.mark.parametrize(("architecture", "name"), [
    (a, n) for a in CONFIGS for n in ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size",
                                      "rms_norm_eps", "max_position_embeddings")
] + [("Qwen2ForCausalLM", "num_key_value_heads"), ("Qwen2ForCausalLM", "rope_theta")])
def test_a_missing_attribute_is_named(architecture, name):
    with pytest.raises(UnsupportedModelError, match=f"has no '{name}'"):
        read_model_config(without(CONFIGS[architecture], name))


def test_ignored_and_harmless_are_apart():
    assert not IGNORED & set(HARMLESS)


def test_ignored_attributes_are_ignored():
    noise = {name: {"any": [1, "thing"]} for name in IGNORED - {"architectures"}}
    assert read_model_config(json.loads(json.dumps({**QWEN2_7B, **noise}))) == SHAPES["Q"]
