"""Grids, scale and clipping search, folding and GPTQ on matrices and layers of a few hundred numbers a side."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxinfer
from convert.converter import convert
from convert.quantise import awq, folding
from convert.quantise.gptq import _inverse_factor, gptq
from convert.quantise.grid import GridSpec, Rounded, make_grid, relative_error, round_nearest, round_shrunk, values
from convert.quantise.layer import InputStatistics, add_gram, forward, layer_graph, mirrored, output_widths, sensitivities
from convert.quantise.methods import METHODS, QuantiseConfig, quantise_layer
from convert.source import read_json
from jaxinfer.engine.compiled import jit_logits
from jaxinfer.engine.load import LoadedModel, from_params
from jaxinfer.errors import ConfigError, NonFiniteError
from jaxinfer.models.registry import read_model_config
from tests.convert.test_export import FIXTURES

SPECS = [GridSpec(bits=bits, group_size=group, symmetric=symmetric)
         for bits, group, symmetric in ((4, 32, False), (4, 128, True), (4, None, False), (8, 64, True), (8, None, False))]
FOUR = GridSpec(bits=4, group_size=32, symmetric=False)
K, OUT = 256, 96


def correlated(seed: int = 0) -> tuple[jax.Array, InputStatistics]:
    """(w [K, OUT], statistics of inputs that are correlated and differ in size by channel, as those of language models are)."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2048, 48)) @ rng.standard_normal((48, K)) * np.exp(rng.standard_normal(K)) + rng.standard_normal((2048, K))
    x = x.astype(np.float32)
    return jnp.asarray(0.05 * rng.standard_normal((K, OUT)), jnp.float32), InputStatistics(
        gram=jnp.asarray(x.T @ x), magnitude=jnp.asarray(np.abs(x).sum(0)), sensitivity=jnp.ones(OUT))


def error(rounded: Rounded, w: jax.Array, gram: jax.Array) -> float:
    return float(relative_error(values(rounded), w, gram))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_codes_are_the_nearest_and_scales_fit_float16(spec: GridSpec) -> None:
    w = np.asarray(correlated()[0])
    matrix = round_nearest(jnp.asarray(w), spec=spec).matrix(spec)
    matrix.check("w")
    assert (matrix.zeros is None) == spec.symmetric and matrix.scales.dtype == np.float16
    step = np.repeat(matrix.scales.astype(np.float32), spec.rows(K), axis=0)
    zeros = np.float32(2**(spec.bits - 1)) if matrix.zeros is None else np.repeat(matrix.zeros.astype(np.float32), spec.rows(K), axis=0)
    inside = (w / step + zeros > -0.5) & (w / step + zeros < spec.max_code + 0.5)
    difference = np.abs(matrix.dequantized() - w)
    assert inside.mean() > 0.99 and (difference <= 0.5 * step + 1e-6)[inside].all()
    assert (difference <= 1.01 * step).all()  # what rounding the zero point and the scale pushed outside
    assert np.array_equal(matrix.dequantized(), np.asarray(values(round_nearest(jnp.asarray(w), spec=spec))))


@pytest.mark.parametrize("method", METHODS)
def test_zero_groups_stay_zero(method: str) -> None:
    w, statistics = correlated()
    w = w.at[32:64].set(0.0).at[:, 5].set(0.0)
    if method == "gptq":  # error feedback changes a group that other groups' errors reach; one whose inputs never come is left alone
        statistics = dataclasses.replace(statistics, gram=statistics.gram.at[32:64].set(0.0).at[:, 32:64].set(0.0))
        rounded = gptq("w", w, statistics.gram, spec=FOUR, damping=0.01, act_order=False, clip=True)[0]
    elif method == "awq":
        choice = awq.search_scale("w", w, statistics, FOUR, "auto")
        scaled = w * choice.scale[:, None]
        shrinks = awq.search_clip(scaled, statistics.gram / (choice.scale[:, None] * choice.scale), spec=FOUR)
        rounded = round_shrunk(scaled, shrinks, spec=FOUR)
    else:
        rounded = round_nearest(w, spec=FOUR)
    found = np.asarray(values(rounded))
    assert np.isfinite(found).all() and not found[32:64].any() and not found[:, 5].any() and np.isfinite(np.asarray(rounded.scales)).all()


def test_tiny_weights_keep_a_finite_grid() -> None:
    w = jnp.full((32, 4), 1e-30, jnp.float32)
    rounded = round_nearest(w, spec=FOUR)
    rounded.matrix(FOUR).check("w")
    assert np.abs(np.asarray(values(rounded))).max() < 1e-6


@pytest.mark.parametrize("group_size, symmetric", [(32, True), (None, False)])
def test_awq_and_gptq_beat_rounding_on_correlated_inputs(group_size: int | None, symmetric: bool) -> None:
    w, statistics = correlated()
    spec = GridSpec(bits=4, group_size=group_size, symmetric=symmetric)
    nearest = error(round_nearest(w, spec=spec), w, statistics.gram)
    for act_order in (False, True):
        rounded, damping = gptq("w", w, statistics.gram, spec=spec, damping=0.01, act_order=act_order, clip=False)
        assert damping == 0.01 and error(rounded, w, statistics.gram) < 0.5 * nearest
        narrowed = gptq("w", w, statistics.gram, spec=spec, damping=0.01, act_order=act_order, clip=True)[0]
        assert error(narrowed, w, statistics.gram) < error(rounded, w, statistics.gram)
    choice = awq.search_scale("w", w, statistics, spec, "auto")
    assert choice.plain_loss == pytest.approx(nearest, rel=1e-4) and choice.loss < 0.8 * nearest
    scaled, gram = w * choice.scale[:, None], statistics.gram / (choice.scale[:, None] * choice.scale)
    without = error(round_nearest(scaled, spec=spec), scaled, gram)
    assert without == pytest.approx(choice.loss, rel=1e-3), "the search's loss is that of the matrix that results"
    clipped = round_shrunk(scaled, awq.search_clip(scaled, gram, spec=spec), spec=spec)
    assert error(clipped, scaled, gram) < without


def test_gptq_is_the_sequential_rule() -> None:
    """Against the textbook loop, which eliminates one row at a time from the inverse Hessian, in float64."""
    w, statistics = correlated()
    w, gram = w[:64, :8], statistics.gram[:64, :64]
    spec = GridSpec(bits=4, group_size=None, symmetric=True)
    scale, zero = (np.asarray(x, np.float64)[0] for x in make_grid(w, spec))
    left, hessian = np.asarray(w, np.float64), np.asarray(gram, np.float64) / np.asarray(gram).diagonal().mean() + 0.01 * np.eye(64)
    inverse, wanted = np.linalg.inv(hessian), np.zeros((64, 8))
    for i in range(64):
        wanted[i] = np.clip(np.round(left[i] / scale) + zero, 0, 15)
        lost = (left[i] - (wanted[i] - zero) * scale) / inverse[i, i]
        left -= np.outer(inverse[:, i], lost)
        inverse = inverse - np.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    found = gptq("w", w, gram, spec=spec, damping=0.01, act_order=False, clip=False)[0]
    assert (np.asarray(found.q) == wanted).mean() > 0.99


def test_columns_count_by_their_sensitivity() -> None:
    """With all sensitivity in half the columns, the scale is judged by their error alone."""
    w, statistics = correlated()
    w = w.at[:, OUT // 2:].multiply(30.0)
    half = dataclasses.replace(statistics, sensitivity=jnp.where(jnp.arange(OUT) < OUT // 2, 3.0, 0.0))
    choice = awq.search_scale("w", w, half, FOUR, "auto")
    found = values(round_nearest(w * choice.scale[:, None], spec=FOUR)) / choice.scale[:, None]
    for loss, approximate in ((choice.loss, found), (choice.plain_loss, values(round_nearest(w, spec=FOUR)))):
        counted = float(relative_error(approximate[:, :OUT // 2], w[:, :OUT // 2], statistics.gram))
        assert loss == pytest.approx(counted, rel=1e-3)
        assert loss != pytest.approx(float(relative_error(approximate, w, statistics.gram)), rel=1e-3)


def test_tied_rows_share_their_scale() -> None:
    config = read_model_config(read_json(FIXTURES / "qwen2_tied" / "config.json"))
    rng = np.random.default_rng(0)
    width = config.num_heads * config.head_dim
    x = rng.standard_normal((512, width)).astype(np.float32) * np.exp(rng.standard_normal(width)).astype(np.float32)
    statistics = InputStatistics(gram=jnp.asarray(x.T @ x), magnitude=jnp.asarray(np.abs(x).sum(0)), sensitivity=jnp.ones(64))
    choice = awq.search_scale("o", jnp.asarray(rng.standard_normal((width, 64)), jnp.float32), statistics, FOUR, "activation",
                              folding.tie("attention.output", config))
    heads = np.asarray(choice.scale).reshape(config.num_kv_heads, -1, config.head_dim)
    assert choice.rule == "activation" and heads.shape[1] > 1 and np.ptp(heads, axis=1).max() == 0 and np.ptp(heads) > 0.1


@pytest.fixture(scope="module", params=["qwen1_tiny", "qwen2_untied", "qwen3", "llama_tied"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return jaxinfer.load(convert(FIXTURES / request.param, tmp_path_factory.mktemp("m") / "c", dtype="float32", progress=False))


def test_folding_leaves_the_model_unchanged(loaded: LoadedModel) -> None:
    """Every family: KV heads of several query heads, stacked qkv, biases; scales far from one."""
    config, params, rng = loaded.config, dict(loaded.params), np.random.default_rng(0)
    for index in range(config.num_layers):
        prefix = f"layers.{index}."
        layer = {name.removeprefix(prefix): value for name, value in params.items() if name.startswith(prefix)}
        drawn = {name: np.exp(rng.standard_normal(layer[f"{name}.weight"].shape[0])) for name in folding.LINEARS}
        scales = {name: awq.tied(jnp.asarray(scale, jnp.float32), folding.tie(name, config)) for name, scale in drawn.items()}
        norms, scales = folding.representable(layer, scales, dtype=np.dtype(np.float32))
        folded = folding.fold(layer, norms, scales, config=config)
        assert all(not np.allclose(folded[f"{name}.weight"], layer[f"{name}.weight"], rtol=0.1) for name in folding.LINEARS)
        params |= {prefix + name: value for name, value in folded.items()}
    tokens = jnp.asarray(np.arange(48).reshape(2, 24) * 7 % config.vocab_size, jnp.int32)
    wanted, found = (jit_logits(model)(tokens) for model in (loaded, from_params(config, params)))
    assert float(jnp.abs(wanted - found).max()) < 1e-4 and not np.array_equal(wanted, found)


def test_norms_are_divided_into_what_can_be_stored() -> None:
    rng = np.random.default_rng(0)
    norm = rng.standard_normal(64).astype(ml_dtypes.bfloat16).astype(np.float32)
    norm[3] = 0.0
    params = {"attention_norm.weight": jnp.asarray(norm), "mlp_norm.weight": jnp.asarray(norm)}
    scales = {name: jnp.asarray(np.exp(rng.standard_normal(64)), jnp.float32) for name in folding.LINEARS}
    norms, adjusted = folding.representable(params, scales, dtype=np.dtype(ml_dtypes.bfloat16))
    for linear, path in folding.NORMS.items():
        stored = np.asarray(norms[path])
        assert np.array_equal(stored.astype(ml_dtypes.bfloat16).astype(np.float32), stored)
        np.testing.assert_allclose(stored * np.asarray(adjusted[linear]), norm, rtol=1e-6)
        assert adjusted[linear][3] == 1.0
        np.testing.assert_allclose(np.delete(adjusted[linear], 3), np.delete(scales[linear], 3), rtol=2**-7)


@pytest.mark.parametrize("loaded", ["qwen1_tiny", "qwen3"], indirect=True)  # stacked qkv; a group's heads, their norms
def test_sensitivity_is_the_squared_derivative_of_the_layers_output(loaded: LoadedModel) -> None:
    """All down columns alike, by the output's size; exactly zero where nothing reads a column, or where a change changes nothing."""
    config, graph = loaded.config, layer_graph(loaded.config, 0)
    layer = {name.removeprefix("layers.0."): value for name, value in loaded.params.items() if name.startswith("layers.0.")}
    layer["mlp.down.weight"] = layer["mlp.down.weight"].at[5].set(0.0)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 8, config.dim)), jnp.float32)
    found = sensitivities(x, layer, config=config, graph=graph)
    assert {name: value.shape for name, value in found.items()} == {name: (n,) for name, n in output_widths(config).items()}
    out = forward(x, layer, config=config, graph=graph)
    np.testing.assert_allclose(found["mlp.down"], float(jnp.mean(1 / jnp.mean(jnp.square(out), -1))), rtol=1e-3)
    read = np.asarray(found["mlp.gate_up"]).reshape(2, -1)
    assert not read[:, 5].any() and np.delete(read, 5, axis=1).all()
    alone = np.asarray(sensitivities(x[:, :1], layer, config=config, graph=graph)["attention.qkv"])
    parts = alone.reshape(3, -1) if config.stacked_qkv else np.moveaxis(alone.reshape(config.num_kv_heads, -1, config.head_dim), 1, 0)
    assert not parts[:-1].any() and parts[-1].all(), "a token that sees only itself: its query and key do nothing"


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return jaxinfer.load(convert(FIXTURES / "qwen2_untied", tmp_path_factory.mktemp("m") / "c", dtype="float32", progress=False))


def layer_and_statistics(loaded: LoadedModel) -> tuple[dict[str, jax.Array], dict[str, InputStatistics]]:
    layer = {name.removeprefix("layers.0."): value for name, value in loaded.params.items() if name.startswith("layers.0.")}
    rng, statistics = np.random.default_rng(0), {}
    for name in folding.LINEARS:
        k = layer[f"{name}.weight"].shape[0]
        x = (rng.standard_normal((256, k)) * np.exp(rng.standard_normal(k))).astype(np.float32)
        columns = layer[f"{name}.weight"].size // k
        statistics[name] = InputStatistics(gram=jnp.asarray(x.T @ x), magnitude=jnp.asarray(np.abs(x).sum(0)), sensitivity=jnp.ones(columns))
    return layer, statistics


def test_what_is_not_finite_is_named(qwen2: LoadedModel) -> None:
    layer, statistics = layer_and_statistics(qwen2)
    settings = QuantiseConfig(method="awq", grid=FOUR)

    def refused(message: str, layer: dict[str, jax.Array], statistics: dict[str, InputStatistics]) -> None:
        with pytest.raises(NonFiniteError, match=message):
            quantise_layer("layers.7", layer, statistics, settings, qwen2.config, np.dtype(np.float32))

    broken = dataclasses.replace(statistics["mlp.down"], gram=statistics["mlp.down"].gram.at[3, 3].set(jnp.nan))
    refused("layers.7.mlp.down: its calibration activations are NaN", layer, statistics | {"mlp.down": broken})
    weight = layer["mlp.gate_up.weight"]
    refused("layers.7.mlp.gate_up: its weights are not finite", layer | {"mlp.gate_up.weight": weight.at[0].set(jnp.inf)}, statistics)
    huge = dataclasses.replace(statistics["mlp.down"], gram=jnp.full_like(statistics["mlp.down"].gram, 3e38))
    refused("layers.7.mlp.down: the loss without scaling is", layer, statistics | {"mlp.down": huge})
    with pytest.raises(NonFiniteError, match="w: the Hessian .* even at damping = 1: nothing is saved"):
        gptq("w", correlated()[0], -correlated()[1].gram, spec=FOUR, damping=0.01, act_order=False, clip=False)


def test_a_few_huge_tokens_are_factored_in_float64() -> None:
    """One token of activations 30000 times the others': float32 loses the others' part of the Hessian, float64 does not."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2048, K))
    x[0] *= 3e4
    gram, w = jnp.asarray(x.T @ x, jnp.float32), correlated()[0]
    assert not np.isfinite(np.asarray(_inverse_factor(gram, 1e-6))).all(), "the case is one that float32 cannot factor"
    rounded, damping = gptq("w", w, gram, spec=FOUR, damping=1e-6, act_order=False, clip=False)
    assert damping == 1e-6 and error(rounded, w, gram) < error(round_nearest(w, spec=FOUR), w, gram)


def test_a_huge_token_does_not_swamp_the_gram_matrix() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1024, 64)).astype(np.float32)
    x[0] = 3e4 * np.sign(x[0])
    exact = x.astype(np.float64).T @ x.astype(np.float64)
    zero = InputStatistics(gram=jnp.zeros((64, 64)), magnitude=jnp.zeros(64), sensitivity=jnp.ones(64))
    found = np.asarray(mirrored(dataclasses.replace(zero, gram=add_gram(zero.gram, jnp.asarray(x)))).gram, np.float64)
    plain = np.asarray(jnp.matmul(jnp.asarray(x).T, jnp.asarray(x), precision="highest"), np.float64)
    assert np.array_equal(found, found.T) and np.abs(found - exact).max() < 0.5 * np.abs(plain - exact).max()


def test_damping_is_raised_where_it_must_be_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    w, statistics = correlated()
    diagonal = jnp.diagonal(statistics.gram).mean()
    rounded, damping = gptq("w", w, statistics.gram - 0.05 * diagonal * jnp.eye(K), spec=FOUR, damping=0.01, act_order=False, clip=False)
    assert damping == pytest.approx(0.1) and "w: its Hessian has no Cholesky factor at damping = 0.01; 0.1 was taken" in caplog.text
    assert error(rounded, w, statistics.gram) < error(round_nearest(w, spec=FOUR), w, statistics.gram)


@pytest.mark.parametrize("settings, message", [
    ({"method": "gguf"}, "method = 'gguf': must be one of awq, gptq, rtn"),
    ({"awq_scaling": "best"}, "awq_scaling = 'best'"),
    ({"awq_rounding": "up"}, "awq_rounding = 'up': must be one of feedback, nearest"),
    ({"damping": 0.0}, "damping = 0.0"),
    ({"num_int8": -1}, "keep_int8 = auto:-1"),
    ({"compute_dtype": "float16"}, "compute_dtype = 'float16'"),
])
def test_settings_are_checked(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QuantiseConfig(**{"method": "awq", "grid": FOUR, **settings})  # type: ignore[arg-type]
