"""The parameter tree of the contract, binding, random weights, live parameters, and shardings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxinfer.engine.load import from_params, random_model, teacher_forced_logits
from jaxinfer.errors import CheckpointError, ConfigError
from jaxinfer.models.registry import abstract_model, abstract_params, bind
from jaxinfer.models.shapes import SHAPES
from jaxinfer.sharding import LOGICAL_AXES, MODEL_AXIS, param_sharding

TINY = SHAPES["tiny"]


def test_parameter_tree_of_a_qwen2():
    got = {k: (v.shape, str(v.dtype)) for k, v in abstract_params(SHAPES["Q"], "bfloat16").items()}
    layer = {
        "attention_norm.weight": (3584,), "attention.qkv.weight": (3584, 4, 9, 128), "attention.qkv.bias": (4, 9, 128),
        "attention.output.weight": (3584, 3584), "mlp_norm.weight": (3584,), "mlp.gate_up.weight": (3584, 2, 18944),
        "mlp.down.weight": (18944, 3584)}
    want = {"embedding.weight": (152064, 3584), "final_norm.weight": (3584,), "lm_head.weight": (152064, 3584)}
    want |= {f"layers.{i}.{k}": shape for i in range(28) for k, shape in layer.items()}
    assert got == {k: (shape, "bfloat16") for k, shape in want.items()}
    assert sum(np.prod(shape) for shape in want.values()) == 7_615_616_512  # Qwen2-7B's published count


def test_tied_llama_has_no_head_and_no_bias():
    got = abstract_params(SHAPES["smollm2"], "float32")
    assert "lm_head.weight" not in got and not any(k.endswith("bias") for k in got)
    assert sum(v.size for v in got.values()) == 134_515_008


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_every_dimension_has_a_known_axis(shape):
    for name, spec in abstract_model(SHAPES[shape], "bfloat16")[1].items():
        assert len(spec.axes) == len(spec.shape), name
        assert set(spec.axes) <= {None, *LOGICAL_AXES}, name


def test_bind_puts_each_parameter_in_its_place():
    graphdef, specs = abstract_model(TINY, "float32")
    params = {name: jnp.full(spec.shape, i, spec.dtype) for i, (name, spec) in enumerate(specs.items())}
    model = bind(graphdef, params)
    np.testing.assert_array_equal(model.layers[1].mlp.down.weight[...], params["layers.1.mlp.down.weight"])
    np.testing.assert_array_equal(model.layers[0].attention.qkv.bias[...], params["layers.0.attention.qkv.bias"])
    assert hash(graphdef) == hash(abstract_model(TINY, "float32")[0]) and graphdef == abstract_model(TINY, "float32")[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_model_is_repeatable_and_of_sensible_size(dtype):
    model = random_model(TINY, dtype=dtype, seed=3)
    again, other = random_model(TINY, dtype=dtype, seed=3), random_model(TINY, dtype=dtype, seed=4)
    assert {k: (v.shape, v.dtype) for k, v in model.params.items()} == {
        k: (v.shape, v.dtype) for k, v in abstract_params(TINY, dtype).items()}
    for name, value in model.params.items():
        np.testing.assert_array_equal(value, again.params[name])
        assert name.endswith("norm.weight") or not np.array_equal(value, other.params[name])
    q0, q1 = (model.params[f"layers.{i}.attention.qkv.weight"] for i in (0, 1))
    assert not np.array_equal(q0, q1)
    assert float(q0.astype(jnp.float32).std()) == pytest.approx(TINY.dim**-0.5, rel=0.05)


def test_random_activations_stay_finite_through_many_layers():
    config = TINY.__class__(**{**vars(TINY), "num_layers": 24, "sliding_windows": (None,) * 24})
    model = random_model(config, dtype="float16", seed=0)
    tokens = jnp.arange(12, dtype=jnp.int32)[None]
    logits = jax.jit(teacher_forced_logits, static_argnums=0)(model.graphdef, model.params, tokens)
    assert bool(jnp.all(jnp.isfinite(logits))) and 1e-2 < float(logits.std()) < 1e2


def test_from_params_takes_live_arrays_as_they_are():
    params = random_model(TINY, dtype="float32", seed=0).params
    model = from_params(TINY, params)
    assert all(model.params[name] is value for name, value in params.items())


@pytest.mark.parametrize(("change", "words"), [
    (lambda p: p.pop("final_norm.weight"), ["final_norm.weight is missing"]),
    (lambda p: p.update({"lm_head.weight": jnp.zeros((256, 64))}), ["lm_head.weight is not part of the model"]),
    (lambda p: p.update({"final_norm.weight": jnp.zeros(32)}), ["final_norm.weight has the shape [32] instead of [64]"]),
    (lambda p: p.update({"final_norm.weight": jnp.zeros(64, jnp.bfloat16)}), ["['bfloat16', 'float32']"]),
    (lambda p: [p.pop(k) for k in list(p) if k.startswith("layers.1.")], ["layers.1.attention.output.weight is missing", "and 2 more"]),
])
def test_from_params_refuses_another_tree(change, words):
    params = dict(random_model(TINY, dtype="float32", seed=0).params)
    change(params)
    with pytest.raises(CheckpointError) as caught:
        from_params(TINY, params)
    for word in words:
        assert word in str(caught.value)


def test_param_sharding_splits_what_tensor_parallelism_splits():
    device = jax.devices()[0]
    mesh = Mesh(np.array([device]), (MODEL_AXIS,))
    specs = abstract_model(SHAPES["Q"], "bfloat16")[1]

    def partition(name: str) -> PartitionSpec:
        return param_sharding(name, specs[name].shape, specs[name].axes, mesh=mesh, device=device).spec

    assert partition("layers.0.attention.qkv.weight") == PartitionSpec(None, MODEL_AXIS, None, None)
    assert partition("layers.0.attention.output.weight") == PartitionSpec(MODEL_AXIS, None)
    assert partition("layers.0.mlp.gate_up.weight") == PartitionSpec(None, None, MODEL_AXIS)
    assert partition("layers.0.mlp.down.weight") == PartitionSpec(MODEL_AXIS, None)
    assert partition("embedding.weight") == PartitionSpec(MODEL_AXIS, None)
    assert partition("final_norm.weight") == PartitionSpec(None)
    assert param_sharding("x", (4,), (None,), mesh=None, device=device).device_set == {device}


def test_param_sharding_refuses_what_does_not_divide():
    mesh = jax.sharding.AbstractMesh((3,), (MODEL_AXIS,))
    with pytest.raises(ConfigError, match=r"layers.0.x: its kv_heads axis of 4 cannot be split over 3 devices"):
        param_sharding("layers.0.x", (8, 4), (None, "kv_heads"), mesh=mesh, device=jax.devices()[0])
