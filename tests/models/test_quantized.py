"""Models with quantised weights: two checkpoints packed by AutoAWQ and AutoGPTQ against their goldens, and what the loader refuses."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from convert.converter import convert
from convert.export import export
from jaxinfer.config import EngineConfig
from jaxinfer.engine.hardware import named_gpu
from jaxinfer.engine.load import from_params, load, random_model, teacher_forced_logits
from jaxinfer.engine.metrics import decode_read_bytes
from jaxinfer.errors import CheckpointError, ConfigError, UnsupportedModelError
from jaxinfer.explain import explain, plan
from jaxinfer.layers.linear import Linear
from jaxinfer.layers.quantized import param_specs
from jaxinfer.models.config import check_quantization
from jaxinfer.models.registry import abstract_model, abstract_params, read_model_config
from jaxinfer.models.shapes import SHAPES, quantized
from jaxinfer.quant import FORMATS, QuantConfig, QuantFormat, check_groups, read_quant_config
from jaxinfer.sharding import LOGICAL_AXES
from tests.models.hf_mapping import FIXTURES

LOGITS = jax.jit(teacher_forced_logits, static_argnums=0)
TINY = SHAPES["tiny"]
INT4 = QuantFormat(bits=4, group_size=32, zero_point=True, permuted=False, scales_dtype="float16")
SYMMETRIC_COLUMN = QuantFormat(bits=8, group_size=None, zero_point=False, permuted=True, scales_dtype="bfloat16")


@pytest.fixture(scope="module", params=["awq_tiny", "gptq_tiny"])
def golden(request, tmp_path_factory) -> tuple[Path, dict[str, np.ndarray]]:
    folder = convert(FIXTURES / request.param, tmp_path_factory.mktemp("quantized") / request.param, progress=False)
    return folder, dict(np.load(FIXTURES / request.param / "golden.npz"))


def test_logits(golden):
    model = load(golden[0], dtype="float32")
    for prompt in ("p7", "p40"):
        want = golden[1][f"{prompt}_logits"]
        got = np.asarray(LOGITS(model.graphdef, model.params, golden[1][f"{prompt}_ids"][None])[0])
        assert np.abs(want).max() > 1.0
        print(f"{golden[0].name} {prompt}: logits differ by at most {np.abs(got - want).max():.1e}")
        np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)


def test_greedy_tokens_of_the_engine(golden):
    llm = jaxinfer.LLM.from_model(load(golden[0], dtype="float32"), max_num_seqs=2, max_num_batched_tokens=16, deterministic=True, page_size=16,
                                  max_model_len=64, compilation_cache_dir=None)
    prompts = [{"prompt_token_ids": golden[1][f"{prompt}_ids"].tolist()} for prompt in ("p7", "p40")]
    want = [golden[1][f"{prompt}_greedy16"].tolist() for prompt in ("p7", "p40")]
    params = jaxinfer.SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    assert [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params)] == want
    memory = llm.engine.resolved.memory
    assert memory.weight_bytes == sum(x.nbytes for x in llm.engine.model.params.values())
    llm.update_weights({name: x + 0 for name, x in llm.engine.model.params.items()})  # packed integers are weights like others
    assert [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params)] == want


def test_dtypes_follow_the_format_and_not_the_model(golden):
    exact, model = load(golden[0], dtype="float32"), load(golden[0], dtype="bfloat16")
    kinds = {str(x.dtype) for name, x in model.params.items() if name.endswith((".weight", ".bias"))}
    assert kinds == {"bfloat16"} and {str(model.params[f"layers.0.mlp.down.{name}"].dtype) for name in ("packed", "scales", "zeros")} == {
        "int16", "float16", "bfloat16"}
    ids = golden[1]["p40_ids"][None]
    error = np.asarray(LOGITS(model.graphdef, model.params, ids)) - np.asarray(LOGITS(exact.graphdef, exact.params, ids))
    assert np.sqrt((error**2).mean()) < 0.05 * golden[1]["p40_logits"].std()


@pytest.mark.parametrize("target", ["awq", "gptq", "gptq_v2"])
def test_exported_and_read_again_it_is_the_same_model(golden, tmp_path, target):
    """Equal bits in every parameter and an equal structure: so the same tokens."""
    again = load(convert(export(golden[0], tmp_path / "back", target=target, progress=False), tmp_path / "again", progress=False))
    model = load(golden[0])
    assert again.params.keys() == model.params.keys()
    for name, value in model.params.items():
        np.testing.assert_array_equal(again.params[name], value)
    quantization = dataclasses.replace(again.config.quantization, method=model.config.quantization.method)
    assert dataclasses.replace(again.config, quantization=quantization) == model.config


def test_every_dimension_has_a_logical_axis():
    mixed = QuantConfig(method="x", weights=INT4, exceptions=(("embedding", SYMMETRIC_COLUMN), ("layers.0.mlp.down", SYMMETRIC_COLUMN),
                                                              ("lm_head", INT4)))
    specs = abstract_model(dataclasses.replace(TINY.untied(), quantization=mixed), "bfloat16")[1]
    assert all(len(spec.axes) == len(spec.shape) and set(spec.axes) <= {None, *LOGICAL_AXES} for spec in specs.values())
    assert specs["layers.1.mlp.down.scales"].axes == ("mlp", None) and specs["layers.0.mlp.down.scales"].axes == (None, None)


def test_live_parameters(golden):
    model = load(golden[0])
    again = from_params(model.config, model.params)
    assert again.graphdef == model.graphdef and str(again.params["embedding.weight"].dtype) == "float16"
    with pytest.raises(CheckpointError, match="layers.0.mlp.down.scales is float32, its quantised format needs float16"):
        from_params(model.config, {**model.params, "layers.0.mlp.down.scales": model.params["layers.0.mlp.down.scales"].astype(jnp.float32)})


@pytest.mark.parametrize("changes", [{"layouts": {"int4": "another"}}, {}])
def test_another_layout_or_no_quantisation_is_refused(golden, tmp_path, changes):
    folder = Path(shutil.copytree(golden[0], tmp_path / "copy"))
    manifest = json.loads((folder / "manifest.json").read_text())
    quantization = {**manifest["quantization"], **changes} if changes else None
    (folder / "manifest.json").write_text(json.dumps({**manifest, "quantization": quantization}))
    words = "holds integers packed as .*another" if changes else "says quantization None, config.json says Quant"
    with pytest.raises(CheckpointError, match=words):
        load(folder)


@pytest.mark.parametrize("quant", [INT4, SYMMETRIC_COLUMN], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_quantised_linear_is_the_product_with_its_weight(quant, bias):
    rng = np.random.default_rng(0)
    linear = Linear(64, (2, 3, 8), axes=(None, "mlp", None, None), bias=bias, dtype=jnp.float32, quant=quant)
    specs = param_specs(quant, num_inputs=64, num_outputs=48)
    q = rng.integers(0, 2**quant.bits, (64, 48), dtype=np.uint8)
    zeros = rng.integers(0, 2**quant.bits, specs["scales"].shape)
    scales, perm = rng.random(specs["scales"].shape).astype(np.float16), rng.permutation(64).astype(np.int32)
    values = {"packed": FORMATS[quant.name].pack(q), "scales": scales.astype(specs["scales"].dtype), "zeros": zeros, "perm": perm}
    for name, spec in specs.items():
        setattr(linear, name, getattr(linear, name).replace(jnp.asarray(values[name], spec.dtype)))
    weight = np.empty((64, 48), np.float32)
    middle = np.repeat(zeros if quant.zero_point else np.full(zeros.shape, 128), 64 // len(zeros), axis=0)
    weight[perm if quant.permuted else np.arange(64)] = (q - middle) * np.repeat(values["scales"].astype(np.float32), 64 // len(zeros), axis=0)
    if bias:
        linear.bias = linear.bias.replace(jnp.asarray(rng.normal(size=(2, 3, 8)), jnp.float32))
    x = rng.normal(size=(3, 64)).astype(np.float32)
    want = (x @ weight).reshape(3, 2, 3, 8) + (np.asarray(linear.bias[...]) if bias else 0)
    np.testing.assert_allclose(linear(jnp.asarray(x)), want, rtol=1e-5, atol=1e-3)
    assert set(specs) == ({"packed", "scales", "zeros"} if quant.zero_point else {"packed", "scales", "perm"})


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize(("k", "n"), [(64, 48), (320, 130)])
def test_our_own_layout_gives_integers_back(name, k, n):
    q = np.random.default_rng(0).integers(0, 2**FORMATS[name].bits, (k, n), dtype=np.uint8)
    packed = FORMATS[name].pack(q)
    assert packed.shape == FORMATS[name].packed_shape(num_inputs=k, num_outputs=n) and packed.dtype == np.int16
    np.testing.assert_array_equal(FORMATS[name].unpack(packed, num_inputs=k, num_outputs=n), q)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_integers_stand_where_the_name_of_the_layout_says(name):
    """A checkpoint stores this layout: whoever changes it must change its name in FORMATS too, so that old ones are refused."""
    q = np.random.default_rng(0).integers(0, 2**FORMATS[name].bits, (600, 130), dtype=np.uint8)
    packed, bits = FORMATS[name].pack(q).view(np.uint16), FORMATS[name].bits
    words = 16 * bits
    assert FORMATS[name].layout == f"tiles of 64 columns by 256 inputs, {16 // bits} planes of {words} words"
    for k, n in ((0, 0), (63, 1), (64, 63), (200, 64), (255, 100), (256, 129), (599, 128)):
        word = packed[n // 64, k // 256, n % 64, k % 256 % words]
        assert word >> (bits * (k % 256 // words)) & (2**bits - 1) == q[k, n]


def test_random_weights_have_the_variance_of_plain_ones():
    mixed = QuantConfig(method="random", weights=INT4, exceptions=(("layers.0.mlp.down", SYMMETRIC_COLUMN), ("layers.1.mlp.down", None),
                                                                   ("embedding", SYMMETRIC_COLUMN), ("lm_head", INT4)))
    config = dataclasses.replace(SHAPES["tiny"].untied(), quantization=mixed)
    model, again = (random_model(config, dtype="float32", seed=0) for _ in range(2))
    assert all(np.array_equal(x, again.params[name]) for name, x in model.params.items())
    for module, k in config.quantizable().items():
        quant, values = config.quantization.format_of(module), {name: np.asarray(x) for name, x in model.params.items() if module in name}
        if quant is None:
            weight = values[f"{module}.weight"]
        else:
            n = values[f"{module}.scales"].shape[1]
            q = FORMATS[quant.name].unpack(values[f"{module}.packed"], num_inputs=k, num_outputs=n).astype(np.float32)
            zeros = values.get(f"{module}.zeros", np.full((1, 1), 2**(quant.bits - 1))).astype(np.float32)
            groups = q.reshape(len(values[f"{module}.scales"]), -1, n) - (zeros[:, None] if quant.zero_point else zeros)
            weight = groups * values[f"{module}.scales"].astype(np.float32)[:, None]
        assert np.mean(weight**2) * k == pytest.approx(1.0, rel=0.1) and abs(weight.mean()) < 0.1 * k**-0.5


@pytest.mark.parametrize(("shape", "name", "gigabytes"), [("Q", "int4", 5.65), ("Q0.5", "int8", 0.6776)])
def test_memory_plans_count_packed_bytes(shape, name, gigabytes):
    params = abstract_params(quantized(SHAPES[shape], name), "bfloat16")
    weights = sum(math.prod(x.shape) * x.dtype.itemsize for x in params.values())
    assert weights == pytest.approx(gigabytes * 1e9, rel=1e-3)
    resolved = plan(EngineConfig(max_model_len=4096), named_gpu("a100-40gb"), shape=shape, quantization=name)
    assert resolved.memory.weight_bytes == weights
    plain = plan(EngineConfig(max_model_len=4096), named_gpu("a100-40gb"), shape=shape)
    assert resolved.memory.step_bytes - plain.memory.step_bytes == 2 * resolved.model.dim * 2 * resolved.model.mlp_dim  # gate_up in bfloat16
    report = explain(resolved)
    assert f"random: {name}, groups of 128, zero points" in report and f"weights                    {weights / 1e9:9.3f} GB" in report
    assert "attention.qkv, attention.output, mlp.gate_up, mlp.down: int4_matmul: " in report


@pytest.mark.parametrize(("shape", "name"), [("Q", "int4"), ("Q0.5", "int8")])
@pytest.mark.parametrize("table", ["lm_head", "embedding"])
def test_memory_plans_count_quantised_tables(shape, name, table):
    """Integers, scales and zero points in place of a plain table, or, as the head of a tied model, beside the embedding."""
    config = SHAPES[shape]
    v, d, bits = config.vocab_size, config.dim, FORMATS[name].bits
    packed = -(-v // 64) * -(-d // 256) * 64 * 256 * bits // 8 + 2 * (d // 128) * v * 2
    settings = EngineConfig(max_model_len=4096)
    with_table, without = (plan(settings, named_gpu("a100-40gb"), shape=shape, quantization="int4", **x) for x in ({table: name}, {}))
    copied = table == "lm_head" and config.tie_embeddings
    assert with_table.memory.weight_bytes == without.memory.weight_bytes + packed - (0 if copied else 2 * v * d)
    assert with_table.memory.step_bytes == without.memory.step_bytes  # 256 rows are too few for a head to become a plain matrix
    assert with_table.model.tie_embeddings == (config.tie_embeddings and not copied)
    report, other = explain(with_table), explain(without)
    assert f"random: int4, groups of 128, zero points; {table}: {name}, groups of 128, zero points" in report
    multiplies = table == "lm_head" or config.tie_embeddings
    assert (", lm_head: int4_matmul" in report or "\n  lm_head: int4_matmul" in report) == multiplies and "lm_head" not in other


def test_a_head_of_many_rows_becomes_a_plain_matrix_strip_by_strip():
    def step_bytes(**settings):
        return plan(EngineConfig(max_model_len=4096, max_num_seqs=512), named_gpu("a100-40gb"), shape="Q", quantization="int4",
                    **settings).memory.step_bytes

    gate_up, strip = 3584 * 2 * 18944 * 2, 2**29 // (2 * 3584 * 64) * 3584 * 64 * 2
    assert step_bytes(lm_head="int4") - step_bytes() == strip - gate_up > 0 and step_bytes(embedding="int4") == step_bytes()


def test_what_a_decode_step_reads_leaves_out_an_untied_embedding_however_it_is_held():
    """Of an untied embedding a step reads single rows."""
    for config, tables in ((TINY.untied(), ("embedding",)), (TINY, ())):
        model = random_model(quantized(config, "int8", embedding="int8"), dtype="float32", seed=0)
        everything = sum(x.nbytes for x in model.params.values())
        left_out = sum(x.nbytes for name, x in model.params.items() if name.startswith(tables)) if tables else 0
        assert decode_read_bytes(model.params, model.config) == everything - left_out and (left_out > 0) == bool(tables)


def test_a_quantised_table_is_named_or_it_is_not_there():
    """`weights` speaks of the layers' linears; head and embedding have a format only where an exception gives one."""
    untied = TINY.untied()
    assert set(untied.projections()) - set(TINY.projections()) == {"lm_head"} and untied.projections()["lm_head"] == untied.dim
    assert untied.quantizable() == {**untied.projections(), "embedding": untied.dim}
    layers_only, both = (dataclasses.replace(untied, quantization=QuantConfig(method="x", weights=INT4, exceptions=exceptions))
                         for exceptions in ((), (("embedding", SYMMETRIC_COLUMN), ("lm_head", INT4))))
    assert layers_only.quantization.format_of("lm_head") is None is layers_only.quantization.format_of("embedding")
    assert {"lm_head.weight", "embedding.weight"} <= abstract_params(layers_only, "bfloat16").keys()
    params = abstract_params(both, "bfloat16")
    assert params["embedding.packed"].shape == FORMATS["int8"].packed_shape(num_inputs=64, num_outputs=256)
    assert params["lm_head.scales"].shape == (2, 256) and not {"lm_head.weight", "embedding.weight"} & params.keys()
    formats = {module: both.quantization.format_of(module) for module in both.quantizable()}
    assert QuantConfig.of("x", formats) == both.quantization
    assert QuantConfig.of("x", {**formats, "lm_head": None, "embedding": None}).exceptions == ()
    assert both.quantization.layouts().keys() == {"int4", "int8"}
    with pytest.raises(ConfigError, match="tensor_parallel_size = 2: quantised weights run on one device only"):
        both.part(2)
    for table in ("lm_head", "embedding"):
        with pytest.raises(ConfigError, match=f"{table}: 64 inputs do not split into groups of 128"):
            dataclasses.replace(untied, quantization=QuantConfig(method="x", weights=INT4, exceptions=(
                (table, dataclasses.replace(INT4, group_size=128)),)))


@pytest.mark.parametrize("table", ["lm_head", "embedding"])
def test_a_quantised_table_needs_quantised_projections(table):
    with pytest.raises(ConfigError, match=f"{table} = 'int8': only a shape whose projections are quantised is planned so"):
        plan(EngineConfig(), named_gpu("h200"), shape="Q", **{table: "int8"})


def test_only_a_shape_can_be_planned_quantised():
    with pytest.raises(ConfigError, match="quantization = 'int4': only a shape can be planned quantised"):
        plan(EngineConfig(model="x"), named_gpu("h200"), quantization="int4")


def test_configs_survive_json():
    config = QuantConfig(method="rtn", weights=INT4, exceptions=(("layers.0.mlp.down", SYMMETRIC_COLUMN), ("layers.1.mlp.down", None)))
    again = read_quant_config(json.loads(json.dumps(config.to_json())))
    assert again == config and hash(again) == hash(config)
    formats = {f"layers.{i}.mlp.{name}": config.format_of(f"layers.{i}.mlp.{name}") for i in range(3) for name in ("down", "gate_up")}
    assert QuantConfig.of("rtn", formats) == config


def changed(**changes):
    return {name: value for name, value in {**QuantConfig(method="rtn", weights=INT4).to_json(), **changes}.items() if value is not ...}


@pytest.mark.parametrize(("value", "words"), [
    ({"quant_method": "awq"}, "quant_method = 'awq': only a checkpoint converted by python -m convert"),
    (changed(bits=...), "exactly bits, exceptions, group_size"), (changed(extra=1), "exactly bits, exceptions, group_size"),
    (changed(exceptions={"a": {"bits": 4}}), "exactly bits"), (changed(bits=3), "bits = 3 of a quantised weight: must be 4 or 8"),
    (changed(group_size=48), "group_size = 48 .*one of 32, 64, 128, or null"), (changed(zero_point=1), "zero_point = 1"),
    (changed(permuted=None), "permuted = None"), (changed(scales_dtype="int8"), "scales_dtype = 'int8'.*float16, bfloat16, float32"),
    (changed(exceptions={"layers.7.mlp.down": None}), "names layers.7.mlp.down, which the model has not"),
    (changed(exceptions={"lm_head": None}), "names lm_head, which the model has not or cannot hold quantised .its embeddings are tied")])
def test_other_configs_are_refused(value, words):
    config = json.loads((FIXTURES / "qwen2_tied" / "config.json").read_text())
    with pytest.raises(UnsupportedModelError, match=words):
        read_model_config({**config, "quantization_config": value})


@pytest.mark.parametrize(("k", "group", "devices", "words"), [
    (96, 64, 1, "m: 96 inputs do not split into groups of 64: quantise with a group size of 32, or quantise by whole columns, or leave this"),
    (576, 128, 1, "with a group size of 32 or 64"), (40, 32, 1, "groups of 32: quantise by whole columns, or leave"),
    (18944, 128, 8, "inputs over 8 devices, 2368 each, do not split into groups of 128: quantise with a group size of 32 or 64, or lower"),
    (256, None, 2, "do not split into its whole column: quantise with a group size of 32 or 64 or 128, or lower tensor_parallel_size"),
    (100, 32, 3, "over 3 devices, 33 each, do not split into groups of 32: lower tensor_parallel_size, or leave")])
def test_groups_must_divide_the_inputs_of_every_device(k, group, devices, words):
    with pytest.raises(ConfigError, match=words):
        check_groups("m", k, group, tensor_parallel_size=devices)


def test_tensor_parallel_shares_are_checked_where_inputs_are_split():
    check_groups("m", 18944, 128, tensor_parallel_size=4)
    config = quantized(SHAPES["Q"], "int4")
    check_quantization(config.quantization, config.projections(), tensor_parallel_size=4)
    with pytest.raises(ConfigError, match="layers.0.attention.output: 3584 inputs over 8 devices, 448 each"):
        check_quantization(config.quantization, config.projections(), tensor_parallel_size=8)
    with pytest.raises(ConfigError, match="layers.0.attention.qkv: 64 inputs do not split into groups of 128"):
        dataclasses.replace(TINY, quantization=QuantConfig(method="x", weights=dataclasses.replace(INT4, group_size=128)))
