"""The sampler against a full sort in numpy float64, and its draws against the distribution they should follow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sampling.sampler import greedy, keep_threshold
from tests.sampling.states import draw, make_state

V = 97


def sorted_keep(weights, top_k, top_p, min_p):
    """Oracle: sorts the row, float64."""
    w = weights.astype(np.float64)
    keep = w >= min_p
    order = np.argsort(-w, kind="stable")
    order = order[keep[order]]
    if top_k:
        order = order[:top_k]
    if top_p < 1:
        mass = np.cumsum(w[order])
        order = order[:int(np.searchsorted(mass, top_p * mass[-1])) + 1]
    out = np.zeros(len(w), bool)
    out[order] = True
    return out


def test_keep_threshold_equals_full_sort():
    rng = np.random.default_rng(0)
    rows = 10_000
    logits = rng.normal(size=(rows, V)) * rng.uniform(0.1, 8, (rows, 1))
    weights = np.exp(logits - logits.max(1, keepdims=True)).astype(np.float32)
    top_k = rng.choice([0, 1, 2, 5, 50, V, 1000], rows)
    top_p = rng.choice([1.0, 0.999, 0.9, 0.5, 0.1, 1e-4], rows).astype(np.float32)
    min_p = rng.choice([0.0, 0.0, 0.01, 0.3, 1.0], rows).astype(np.float32)
    got = weights.view(np.int32) >= np.asarray(
        jax.jit(keep_threshold)(jnp.asarray(weights), make_state(rows, top_k=top_k, top_p=top_p, min_p=min_p)))
    differing = 0
    for i in range(rows):
        want = sorted_keep(weights[i], top_k[i], float(top_p[i]), float(min_p[i]))
        if not (got[i] == want).all():  # only a sum within float32 rounding of the goal may move the edge, by one token
            assert abs(int(got[i].sum()) - int(want.sum())) == 1 and (got[i] | want).sum() == max(got[i].sum(), want.sum())
            edge = weights[i][got[i] & want].astype(np.float64).sum()
            total = weights[i][sorted_keep(weights[i], top_k[i], 1.0, float(min_p[i]))].astype(np.float64).sum()
            assert abs(edge - float(top_p[i]) * total) < 1e-5 * total
            differing += 1
    assert differing <= rows * 0.002


def test_greedy_takes_the_lowest_of_equal_logits_and_never_padding():
    logits = jnp.zeros((2, V)).at[0, 5].set(3.0).at[0, 9].set(3.0).at[1, V - 1].set(50.0).at[1, 4].set(1.0)
    for tokens, finite in (draw(logits, make_state(2, temperature=0.0), num_valid_tokens=V - 1), greedy(logits, num_valid_tokens=V - 1)):
        assert tokens.tolist() == [5, 4] and finite.tolist() == [True, True]


def test_padding_is_never_drawn_even_when_all_is_hot():
    logits = jnp.zeros((256, V)).at[:, V - 7:].set(30.0)
    tokens, _ = draw(logits, make_state(256, temperature=5.0, seed=np.arange(256)), num_valid_tokens=V - 7)
    assert int(tokens.max()) < V - 7


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_rows_are_reported_and_padding_is_not_looked_at(bad):
    logits = jnp.zeros((3, V)).at[1, 3].set(bad).at[2, V - 1].set(bad)
    for _, finite in (draw(logits, make_state(3, temperature=0.0), num_valid_tokens=V - 1), greedy(logits, num_valid_tokens=V - 1)):
        assert finite.tolist() == [True, False, True]


def test_draws_follow_the_distribution():
    rows = 20000
    logits = jnp.asarray(np.random.default_rng(1).normal(size=8).astype(np.float32))
    tokens, _ = draw(jnp.broadcast_to(logits, (rows, 8)), make_state(rows, temperature=0.7, seed=np.arange(rows)), num_valid_tokens=8)
    expected = rows * np.asarray(jax.nn.softmax(logits / 0.7))
    chi2 = float((((np.bincount(np.asarray(tokens), minlength=8) - expected) ** 2) / expected).sum())
    assert chi2 < 24.3  # 99.9 % quantile at 7 degrees of freedom


def test_a_row_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(2)
    logits = jnp.asarray(rng.normal(size=(16, V)).astype(np.float32))
    mixed = make_state(16, temperature=rng.choice([0.0, 0.8], 16), top_p=0.9, top_k=40, seed=np.arange(16), position=7)
    together, _ = draw(logits, mixed, num_valid_tokens=V)
    for i in range(16):
        alone, _ = draw(logits[i:i + 1], jax.tree.map(lambda x, i=i: x[i:i + 1], mixed), num_valid_tokens=V)
        assert int(alone[0]) == int(together[i])


def test_seed_index_and_position_each_change_the_stream():
    logits = jnp.zeros((64, V))
    base = {"seed": 3, "sample_index": 0, "position": np.arange(64)}
    first = draw(logits, make_state(64, **base), num_valid_tokens=V)[0]
    assert (first == draw(logits, make_state(64, **base), num_valid_tokens=V)[0]).all()
    for change in ({"seed": 4}, {"sample_index": 1}, {"position": np.arange(64) + 64}):
        assert (first != draw(logits, make_state(64, **{**base, **change}), num_valid_tokens=V)[0]).any()


@pytest.mark.parametrize("settings", [
    {"min_p": 1.0}, {"top_p": 1e-50}, {"top_p": 1e-38}, {"top_k": 1}, {"min_p": 1.0, "top_p": 1e-50, "top_k": 1},
])
def test_the_strictest_settings_leave_the_likeliest_token(settings):
    """At any temperature: division must not take its weight off 1, and no goal may underflow."""
    rows = 200
    rng = np.random.default_rng(6)
    logits = jnp.asarray(rng.normal(size=(rows, V)).astype(np.float32) * 7)
    temperatures = rng.choice([1e-45, 1e-38, 1e-3, 0.3, 0.7, 1.0, 1.7, 3.0, 1e4], rows)
    tokens, finite = draw(logits, make_state(rows, temperature=temperatures, seed=np.arange(rows), **settings), num_valid_tokens=V)
    assert finite.all() and tokens.tolist() == np.asarray(logits).argmax(1).tolist()
