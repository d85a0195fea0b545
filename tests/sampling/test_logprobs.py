"""Log-probabilities and the search for the likeliest tokens against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sampling.logprobs import logprobs_of, top_by_groups
from tests.sampling.states import NUM_LOGPROBS, make_slots, make_state, sample_all


@pytest.mark.parametrize(("width", "k"), [(5, 5), (127, 20), (128, 1), (1000, 20), (5000, 20)])
def test_top_by_groups_equals_a_stable_sort(width, k):
    rng = np.random.default_rng(width)
    x = rng.choice(rng.normal(size=max(width // 3, 2)), (200, width)).astype(np.float32)  # many ties
    x[::7, width // 2:] = -np.inf
    values, ids = jax.jit(top_by_groups, static_argnums=1)(x, k)
    order = np.argsort(-x, axis=1, kind="stable")[:, :k]
    want = np.take_along_axis(x, order, axis=1)
    assert (np.asarray(values) == want).all()
    assert (np.asarray(ids) == order)[want > -np.inf].all()


def test_equal_log_softmax_with_ranks():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(64, 333)).astype(np.float32) * 6
    tokens = rng.integers(0, 333, 64)
    tokens[:20] = logits[:20].argmax(1)
    got = jax.jit(logprobs_of, static_argnames="num_logprobs")(logits, jnp.asarray(tokens), num_logprobs=20)
    x = logits.astype(np.float64)
    want = x - np.log(np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)) - x.max(1, keepdims=True)
    np.testing.assert_allclose(got.chosen, want[np.arange(64), tokens], atol=2e-5)
    np.testing.assert_allclose(got.top, -np.sort(-want, axis=1)[:, :20], atol=2e-5)
    assert got.ranks.tolist() == ((want > want[np.arange(64), tokens][:, None]).sum(1) + 1).tolist()
    assert (np.asarray(got.top_ids) == np.argsort(-x, axis=1)[:, :20]).all()


def test_are_of_the_raw_valid_distribution():
    """Temperature, penalties and masks change the draw, not what is reported; padding takes no probability."""
    logits = jnp.asarray(np.random.default_rng(4).normal(size=(2, 40)).astype(np.float32))
    state = make_state(2, temperature=[0.0, 3.0], top_k=[0, 2], presence_penalty=1.0, wants_logprobs=[0, 1])
    tokens, _, got = sample_all(logits, state, make_slots(2, 40), num_valid_tokens=37)
    want = jax.nn.log_softmax(logits[:, :37])
    np.testing.assert_allclose(got.chosen, want[jnp.arange(2), tokens], atol=1e-5)
    np.testing.assert_allclose(got.top, jax.lax.top_k(want, NUM_LOGPROBS)[0], atol=1e-5)
