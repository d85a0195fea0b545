"""RMSNorm and the rope kinds against formulas in numpy and frequencies from transformers."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.layers.norm import rms_norm
from jaxinfer.layers.rotary import ROPE_KINDS, RopeConfig, rotary_angles, rotate

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


def rope_config(name: str) -> RopeConfig:
    settings = json.loads((FIXTURES / "rope.json").read_text())[name]
    parameters = tuple(sorted((k, float(v)) for k, v in settings.items() if k not in ("rope_type", "rope_theta")))
    return RopeConfig(kind=settings["rope_type"], theta=settings["rope_theta"], parameters=parameters)


def test_rms_norm_formula():
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(5, 48)), rng.normal(size=48)
    want = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight
    got = rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32), eps=1e-5)
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


def test_rms_norm_rounds_before_the_weight_as_transformers_does():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 64)), jnp.bfloat16)
    weight = jnp.asarray(np.random.default_rng(2).normal(size=64), jnp.bfloat16)
    wide = x.astype(jnp.float32)
    normalised = (wide / jnp.sqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(jnp.bfloat16)
    got = rms_norm(x, weight, eps=1e-6)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), (normalised * weight).astype(jnp.float32), rtol=2**-7)


def test_rms_norm_of_zeros_is_zero_and_large_bfloat16_stays_finite():
    assert not jnp.any(rms_norm(jnp.zeros((2, 8)), jnp.ones(8), eps=1e-6))
    assert jnp.all(jnp.isfinite(rms_norm(jnp.full((1, 8), 1e18, jnp.bfloat16), jnp.ones(8, jnp.bfloat16), eps=1e-6)))


@pytest.mark.parametrize("name", sorted(ROPE_KINDS))
def test_inverse_frequencies_match_transformers(name):
    got = ROPE_KINDS[name].inverse_frequencies(rope_config(name), 64)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, np.load(FIXTURES / "rope.npz")[name], rtol=2.5e-7)


def test_every_rope_kind_has_a_reference():
    assert set(np.load(FIXTURES / "rope.npz")) == set(ROPE_KINDS)


def test_rotate_is_the_half_split_rotation():
    rng = np.random.default_rng(3)
    x, positions = rng.normal(size=(6, 3, 8)).astype(np.float32), np.array([0, 1, 7, 100, 2, 3], np.int32)
    frequencies = 10000.0 ** (-np.arange(0, 8, 2) / 8)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * positions[:, None] * frequencies)[:, None, :]
    cos, sin = rotary_angles(RopeConfig(kind="default", theta=10000.0), jnp.asarray(positions), 8)
    got = rotate(jnp.asarray(x), cos, sin)
    np.testing.assert_allclose(got, np.concatenate([turned.real, turned.imag], -1), atol=2e-5)
    np.testing.assert_array_equal(got[0], x[0])  # position 0 turns nothing


def test_rotate_depends_on_the_distance_only():
    rng = np.random.default_rng(4)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 16)), jnp.float32) for _ in range(2))
    rope = RopeConfig(kind="default", theta=10000.0)

    def score(at_q: int, at_k: int) -> float:
        turned = [rotate(x, *rotary_angles(rope, jnp.array([at], jnp.int32), 16)) for x, at in ((q, at_q), (k, at_k))]
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(9, 4) == pytest.approx(score(1005, 1000), abs=1e-3)
