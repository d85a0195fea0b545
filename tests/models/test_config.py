"""Closed-world reading of Hugging Face configs: published ones are read, and whatever is not implemented is refused by name."""

import json

import pytest

from jaxinfer.errors import UnsupportedModelError
from jaxinfer.models.config import HARMLESS, IGNORED, RopeConfig
from jaxinfer.models.registry import MODELS, read_model_config
from jaxinfer.models.shapes import SHAPES


def without(config, *names):
    return {k: v for k, v in config.items() if k not in names}


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
QWEN_7B = {  # as published
    "architectures": ["QWenLMHeadModel"],
    "auto_map": {"AutoConfig": "configuration_qwen.QWenConfig", "AutoModelForCausalLM": "modeling_qwen.QWenLMHeadModel"},
    "attn_dropout_prob": 0.0, "bf16": False, "emb_dropout_prob": 0.0, "fp16": False, "fp32": False, "hidden_size": 4096,
    "intermediate_size": 22016, "initializer_range": 0.02, "kv_channels": 128, "layer_norm_epsilon": 1e-06,
    "max_position_embeddings": 32768, "model_type": "qwen", "no_bias": True, "num_attention_heads": 32, "num_hidden_layers": 32,
    "onnx_safe": None, "rotary_emb_base": 10000, "rotary_pct": 1.0, "scale_attn_weights": True, "seq_length": 8192,
    "tie_word_embeddings": False, "tokenizer_class": "QWenTokenizer", "transformers_version": "4.32.0", "use_cache": True,
    "use_dynamic_ntk": True, "use_flash_attn": "auto", "use_logn_attn": True, "vocab_size": 151936}
QWEN_7B_CHAT = {  # as published
    "activation": "swiglu", "apply_residual_connection_post_layernorm": False, "architectures": ["QWenLMHeadModel"],
    "auto_map": {"AutoConfig": "configuration_qwen.QWenConfig", "AutoModelForCausalLM": "modeling_qwen.QWenLMHeadModel"},
    "attn_pdrop": 0.0, "bf16": False, "fp16": False, "fp32": False, "bias_dropout_fusion": True, "bos_token_id": 151643,
    "embd_pdrop": 0.0, "eos_token_id": 151643, "ffn_hidden_size": 22016, "initializer_range": 0.02, "kv_channels": 128,
    "layer_norm_epsilon": 1e-06, "model_type": "qwen", "n_embd": 4096, "n_head": 32, "n_layer": 32, "n_positions": 6144, "no_bias": True,
    "onnx_safe": None, "padded_vocab_size": 151936, "params_dtype": "torch.bfloat16", "pos_emb": "rotary", "resid_pdrop": 0.1,
    "rotary_emb_base": 10000, "rotary_pct": 1.0, "scale_attn_weights": True, "seq_length": 2048, "tie_word_embeddings": False,
    "tokenizer_type": "QWenTokenizer", "transformers_version": "4.31.0", "use_cache": True, "use_flash_attn": "auto",
    "vocab_size": 151936, "use_dynamic_ntk": True, "use_logn_attn": True}
QWEN3_8B = {  # as published
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 12288, "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
    "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936}
MISTRAL_7B = {  # as published
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
    "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0",
    "use_cache": True, "vocab_size": 32000}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
CONFIGS = {"Qwen2ForCausalLM": QWEN2_7B, "LlamaForCausalLM": SMOLLM2, "QWenLMHeadModel": QWEN_7B, "Qwen3ForCausalLM": QWEN3_8B,
           "MistralForCausalLM": MISTRAL_7B}


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


@pytest.mark.parametrize(("scaling", "parameters", "max_len"), [
    ({"type": "linear", "factor": 4.0}, {"factor": 4.0}, 4 * 8192),
    ({"type": "dynamic", "factor": 2.0}, {"factor": 2.0, "original_max_position_embeddings": 8192.0}, 2 * 8192),
    (without(LLAMA3, "original_max_position_embeddings"),
     {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192.0}, 8192),
    ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
     {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 4.0, "original_max_position_embeddings": 4096.0, "truncate": 1.0}, 16384),
    ({"type": "yarn", "factor": 4, "beta_fast": 20, "mscale": 1.0, "mscale_all_dim": None, "truncate": False},
     {"beta_fast": 20.0, "beta_slow": 1.0, "factor": 4.0, "mscale": 1.0, "original_max_position_embeddings": 8192.0, "truncate": 0.0},
     4 * 8192),
])
@pytest.mark.parametrize("new_spelling", [False, True])
def test_rope_kinds_fill_in_what_configs_leave_out_and_say_how_long_the_model_is(scaling, parameters, max_len, new_spelling):
    base = without(SMOLLM2, "rope_theta", "rope_scaling")
    spelled = {"rope_parameters": {"rope_theta": 1e5, **scaling}} if new_spelling else {"rope_theta": 1e5, "rope_scaling": scaling}
    got = read_model_config({**base, **spelled})
    kind = scaling.get("type", "llama3")
    assert got.rope == RopeConfig(kind=kind, theta=1e5, parameters=tuple(parameters.items()))
    assert got.max_position_embeddings == max_len


def test_mistral_needs_its_window_stated():
    with pytest.raises(UnsupportedModelError, match="sliding_window = None"):
        read_model_config(without(MISTRAL_7B, "sliding_window"))
    assert read_model_config({**MISTRAL_7B, "sliding_window": None}).sliding_windows == (None,) * 32
    assert read_model_config(MISTRAL_7B).sliding_windows == (4096,) * 32


def test_qwen3_has_its_own_head_dim_and_norms():
    got = read_model_config({**QWEN3_8B, "hidden_size": 2560})
    assert (got.head_dim, got.dim // got.num_heads, got.qk_norm, got.qkv_bias) == (128, 80, True, False)


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
    ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config says quant_method = 'awq'"]),
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
    ({"rope_scaling": {"type": "longrope", "factor": 4.0, "short_factor": [1.0]}}, ["'longrope'", "default", "yarn"]),
    ({"rope_scaling": {"type": "qwen_ntk", "seq_length": 2048}}, ["'qwen_ntk'", "not implemented"]),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": 2.5, "beta_slow": -1}}, ["'beta_slow'", "-1"]),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": "big"}}, ["'attention_factor'", "'big'"]),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": "no"}}, ["'truncate'", "'no'"]),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}}, ["original_max_position_embeddings"]),
    ({"max_position_embeddings": 2**31}, ["max_position_embeddings = 2147483648", "int32"]),
    ({"max_position_embeddings": 2**30, "rope_scaling": {"type": "linear", "factor": 4.0}}, ["4294967296", "int32"]),
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
    (a, n) for a in sorted(set(CONFIGS) - {"QWenLMHeadModel"})
    for n in ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size", "rms_norm_eps",
              "max_position_embeddings")
] + [("Qwen2ForCausalLM", "num_key_value_heads"), ("Qwen2ForCausalLM", "rope_theta"), ("Qwen3ForCausalLM", "head_dim")])
def test_a_missing_attribute_is_named(architecture, name):
    with pytest.raises(UnsupportedModelError, match=f"has no '{name}'"):
        read_model_config(without(CONFIGS[architecture], name))


def test_ignored_and_harmless_are_apart():
    assert not IGNORED & set(HARMLESS)


def test_ignored_attributes_are_ignored():
    noise = {name: {"any": [1, "thing"]} for name in IGNORED - {"architectures"}}
    assert read_model_config(json.loads(json.dumps({**QWEN2_7B, **noise}))) == SHAPES["Q"]
