"""RMSNorm and the rope kinds against formulas in numpy and frequencies from transformers."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.layers.norm import rms_norm
from jaxinfer.layers.rotary import ROPE_KINDS, RopeConfig, prompt_class, rotary_angles, rotate
from jaxinfer.models.config import ConfigReader

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
ROPES = json.loads((FIXTURES / "rope.json").read_text())


def rope_config(name: str) -> RopeConfig:
    """As a config that says this is read, where max_position_embeddings is 2048 (make_goldens.py)."""
    reader = ConfigReader({"model_type": "llama", "rope_parameters": ROPES[name]}, architecture="LlamaForCausalLM", model_type="llama")
    return reader.rope(default_theta=None, max_position_embeddings=2048)


def frequencies(rope: RopeConfig, positions, prompt_lens, head_dim: int = 64) -> np.ndarray:
    """What a rope kind gives each token, [T, H // 2]."""
    kind, positions = ROPE_KINDS[rope.kind], jnp.asarray(positions, jnp.int32)
    if kind.token_frequencies is None:
        return np.broadcast_to(kind.inverse_frequencies(rope, head_dim), (len(positions), head_dim // 2))
    return np.asarray(kind.token_frequencies(rope, head_dim, positions, jnp.asarray(prompt_lens, jnp.int32)))


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


@pytest.mark.parametrize("name", sorted(ROPES))
def test_inverse_frequencies_match_transformers(name):
    golden, rope = np.load(FIXTURES / "rope.npz"), rope_config(name)
    for position, prompt_len in ((7, 5000), (4999, 5000), (4999, 10)):  # the dynamic kind's were taken at length 5000
        (got,) = frequencies(rope, [position], [prompt_len])
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, golden[name], rtol=2.5e-7 if name != "dynamic" else 1e-6)
    assert ROPE_KINDS[rope.kind].magnitude(rope) == pytest.approx(float(golden[f"{name}_magnitude"]), rel=1e-12)


def test_every_rope_kind_has_a_reference():
    assert {rope_config(name).kind for name in ROPES} == {name for name, kind in ROPE_KINDS.items() if kind.in_configs}


def test_yarn_scales_cosines_and_sines():
    rope, at = rope_config("yarn_whole"), jnp.array([0], jnp.int32)
    (cos, sin), keys = rotary_angles(rope, at, at, head_dim=64, logn_len=None)
    assert np.all(cos == 1.25) and not np.any(sin) and keys[0] is cos


def test_dynamic_is_unstretched_within_the_trained_length_whatever_the_neighbours():
    rope = rope_config("dynamic")
    default = frequencies(RopeConfig(kind="default", theta=1e4), [0], [0])[0]
    got = frequencies(rope, [0, 2047, 2048, 5], [7, 2048, 7, 2049])
    np.testing.assert_array_equal(got[:2], [default, default])
    assert np.all(got[2:, 1:] < default[1:])  # decoding past the trained length; a prompt past it
    np.testing.assert_array_equal(got[2], got[3])


@pytest.mark.parametrize(("prompt_len", "alpha"), [(1, 1), (64, 1), (65, 3), (128, 3), (129, 7), (150, 7), (256, 7), (257, 15), (513, 31)])
def test_qwen_ntk_alpha_follows_the_prompt_only(prompt_len, alpha):
    """alpha = max(2 ** ceil(log2(L / 64) + 1) - 1, 1), theta * alpha ** (H / (H - 2))."""
    rope = RopeConfig(kind="qwen_ntk", theta=1e4, parameters=(("seq_length", 64.0),))
    want = (1e4 * alpha ** (16 / 14)) ** (-np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(frequencies(rope, [0, 9000], [prompt_len] * 2, head_dim=16), [want, want], rtol=2.5e-7)
    assert 2 ** (prompt_class(rope, prompt_len) + 1) - 1 == alpha


@pytest.mark.parametrize("seq_len", [2, 64, 2048, 8192, 2**30, 2**31 - 1])
def test_qwen_ntk_takes_any_length_that_int32_holds(seq_len):
    rope = RopeConfig(kind="qwen_ntk", theta=1e4, parameters=(("seq_length", float(seq_len)),))
    lengths = sorted({1, seq_len, min(seq_len + 1, 2**31 - 1), 2**31 - 1})
    got = frequencies(rope, [0] * len(lengths), lengths, head_dim=16)
    assert np.isfinite(got).all() and (got > 0).all()
    classes = [prompt_class(rope, n) for n in lengths]
    for (before, earlier), (after, later) in zip(zip(classes, got, strict=True), list(zip(classes, got, strict=True))[1:], strict=False):
        assert (before == after) == np.array_equal(earlier, later) and after >= before


def test_logn_scales_queries_by_their_position_and_keys_never():
    """max(1, log(p) / log(2048)), p counted from 1, beyond any table."""
    positions = np.array([0, 1, 2046, 2047, 2048, 32766, 40000, 10**6], np.int32)
    rope = RopeConfig(kind="default", theta=1e4)
    plain = rotary_angles(rope, jnp.asarray(positions), jnp.asarray(positions), head_dim=16, logn_len=None)
    scaled = rotary_angles(rope, jnp.asarray(positions), jnp.asarray(positions), head_dim=16, logn_len=2048)
    want = np.maximum(1.0, np.log(positions + 1.0) / np.log(2048.0))[:, None]
    for i in (0, 1):
        np.testing.assert_array_equal(scaled.key[i], plain.key[i])
        np.testing.assert_allclose(scaled.query[i], np.asarray(plain.query[i]) * want, rtol=1e-6)
    np.testing.assert_array_equal(scaled.query[0][:4], plain.query[0][:4])


def test_rotate_is_the_half_split_rotation():
    rng = np.random.default_rng(3)
    x, positions = rng.normal(size=(6, 3, 8)).astype(np.float32), np.array([0, 1, 7, 100, 2, 3], np.int32)
    frequencies = 10000.0 ** (-np.arange(0, 8, 2) / 8)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * positions[:, None] * frequencies)[:, None, :]
    rope, at = RopeConfig(kind="default", theta=10000.0), jnp.asarray(positions)
    cos, sin = rotary_angles(rope, at, at, head_dim=8, logn_len=None).key
    got = rotate(jnp.asarray(x), cos, sin)
    np.testing.assert_allclose(got, np.concatenate([turned.real, turned.imag], -1), atol=2e-5)
    np.testing.assert_array_equal(got[0], x[0])  # position 0 turns nothing


def test_rotate_depends_on_the_distance_only():
    rng = np.random.default_rng(4)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 16)), jnp.float32) for _ in range(2))
    rope = RopeConfig(kind="default", theta=10000.0)

    def score(at_q: int, at_k: int) -> float:
        places = [jnp.array([at], jnp.int32) for at in (at_q, at_k)]
        turned = [rotate(x, *rotary_angles(rope, at, at, head_dim=16, logn_len=None).key) for x, at in zip((q, k), places, strict=True)]
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(9, 4) == pytest.approx(score(1005, 1000), abs=1e-3)
