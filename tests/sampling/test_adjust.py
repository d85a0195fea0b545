"""Rules and penalties against a plain numpy oracle that works on token lists, as vLLM states them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sampling.adjust import adjust
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.sampling.rules import recent_tokens, token_counts, token_rules
from jaxinfer.state import NUM_RECENT, SlotTables
from tests.sampling.states import make_slots, make_state, sample_all

V = 70  # no multiple of 32: the last word of a mask is not full
ENDS = (3, 68)


def random_case(rng):
    """(params, barred words, prompt, output) with few distinct tokens, so that words and counts meet."""
    few = rng.choice(V, 12, replace=False)

    def pick(n):
        return [int(t) for t in rng.choice(few, n)]

    def on(share):
        return rng.random() < share

    params = SamplingParams(
        repetition_penalty=float(rng.choice([0.5, 1.0, 1.3, 2.5])), presence_penalty=float(rng.choice([-2, 0, 0.4, 2])),
        frequency_penalty=float(rng.choice([-2, 0, 0.7])), min_tokens=int(rng.integers(0, 12)),
        logit_bias={t: float(rng.normal() * 5) for t in set(pick(4))} if on(0.5) else None,
        allowed_token_ids=rng.choice(V, 40, replace=False).tolist() if on(0.3) else None)
    words = tuple(tuple(pick(int(n))) for n in rng.integers(1, NUM_RECENT + 1, int(rng.integers(0, 20)))) if on(0.7) else ()
    words += tuple((few[0],) * n for n in (2, 3)) if words else ()
    return params, words, pick(int(rng.integers(1, 10))), pick(int(rng.integers(0, 14)))


def oracle(logits, params, words, prompt, output):
    out = logits.astype(np.float64)
    if params.allowed_token_ids is not None:
        out[[t for t in range(V) if t not in params.allowed_token_ids]] = -np.inf
    for word in words:
        n = len(word) - 1
        if len(output) >= n and tuple(output[len(output) - n:]) == tuple(word[:-1]):
            out[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        out[list(ENDS)] = -np.inf
    for token, bias in params.biases.items():
        out[token] += bias
    for token in range(V):
        n = output.count(token)
        if n or token in prompt:
            out[token] = out[token] / params.repetition_penalty if out[token] > 0 else out[token] * params.repetition_penalty
        out[token] -= params.frequency_penalty * n + params.presence_penalty * (n > 0)
    return out


def test_equals_the_oracle_on_random_cases():
    rng = np.random.default_rng(0)
    cases = [random_case(rng) for _ in range(400)]
    slots = rng.permutation(len(cases))  # rows and slots are in no order
    by_slot = [cases[i] for i in np.argsort(slots)]
    rules = [token_rules(p, w, ENDS, vocab_size=V) for p, w, _, _ in by_slot]
    tables = SlotTables(
        recent_tokens=jnp.stack([recent_tokens(len(prompt), output) for _, _, prompt, output in by_slot]),
        counts=jnp.stack([token_counts(prompt, output, vocab_size=V) for _, _, prompt, output in by_slot]),
        rules=jax.tree.map(lambda *x: jnp.stack(x), *rules))

    def column(f):
        return np.array([f(*case) for case in cases])

    state = make_state(
        len(cases), slots=slots, position=column(lambda p, w, a, b: len(a) + len(b)), prompt_lens=column(lambda p, w, a, b: len(a)),
        repetition_penalty=column(lambda p, w, a, b: p.repetition_penalty), presence_penalty=column(lambda p, w, a, b: p.presence_penalty),
        frequency_penalty=column(lambda p, w, a, b: p.frequency_penalty),
        mask=column(lambda p, w, a, b: 2 if len(b) < p.min_tokens else 1), has_biases=column(lambda p, w, a, b: bool(p.biases)),
        has_words=column(lambda p, w, a, b: any(len(x) > 1 for x in w)))
    logits = rng.normal(size=(len(cases), V)).astype(np.float32) * 4
    got = np.asarray(jax.jit(adjust)(logits, state, tables))
    want = np.stack([oracle(x, *case) for x, case in zip(logits, cases, strict=True)])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    barred_late = sum(any(len(w) > 1 and tuple(b[len(b) - len(w) + 1:]) == w[:-1] for w in words) for _, words, _, b in cases)
    assert barred_late > 30  # words of several tokens did meet their beginnings


def test_rows_that_ask_for_nothing_keep_their_bits_whatever_their_slot_held_before():
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(6, V)).astype(np.float32) * 3)
    stale = [token_rules(SamplingParams(allowed_token_ids=[1], logit_bias={2: 50.0}), ((5, 6), (7,)), ENDS, vocab_size=V)] * 6
    slots = make_slots(6, V, stale)
    state = make_state(6, temperature=0.0, presence_penalty=np.array([2.0, 0, 0, 0, 0, 0]), position=9)
    slots = SlotTables(recent_tokens=slots.recent_tokens + 5, counts=slots.counts + 3, rules=slots.rules)
    got = np.asarray(adjust(logits, state, slots))
    assert (got[1:] == np.asarray(logits)[1:]).all() and np.allclose(got[0], np.asarray(logits)[0] - 2)
    tokens, finite, _ = sample_all(logits, state, slots, num_valid_tokens=V)
    assert tokens.tolist() == np.asarray(logits).argmax(1).tolist() and finite.all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_stays_barred_whatever_the_bias_and_nothing_left_is_reported(temperature):
    rules = [token_rules(SamplingParams(logit_bias={69: 1e4, 4: 1e3}), (), (), vocab_size=V),
             token_rules(SamplingParams(allowed_token_ids=[2]), ((2,),), (), vocab_size=V)]
    state = make_state(2, temperature=temperature, mask=[0, 1], has_biases=[1, 0])
    tokens, finite, _ = sample_all(jnp.zeros((2, V)), state, make_slots(2, V, rules), num_valid_tokens=69)
    assert int(tokens[0]) == 4 and finite.tolist() == [True, False]


def test_biases_at_the_edges():
    """The first and last id, a bias that forces a token, one that rules it out, and as many as fit."""
    vocab = 400
    rules = [token_rules(SamplingParams(logit_bias=bias), (), (), vocab_size=vocab) for bias in (
        {0: 100.0}, {vocab - 1: 100}, {7: -1e4}, {t: -100.0 for t in range(300)})]
    logits = jnp.zeros((4, vocab)).at[:, 7].set(9.0)
    tokens, _, _ = sample_all(logits, make_state(4, temperature=1e-6, has_biases=1), make_slots(4, vocab, rules), num_valid_tokens=vocab)
    assert tokens[:2].tolist() == [0, vocab - 1] and int(tokens[2]) != 7 and int(tokens[3]) >= 300


def test_draws_follow_the_adjusted_distribution():
    """20 000 seeds over one slot: barred and padded tokens never, the others as often as softmax of adjusted logits / temperature."""
    rows, vocab = 20_000, 9
    params = SamplingParams(logit_bias={1: 1.0, 5: -0.5}, repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=0.2, min_tokens=9)
    prompt, output = [1, 2], [3, 3, 4]
    tables = make_slots(1, vocab, [token_rules(params, ((6,), (4, 7)), (0,), vocab_size=vocab)])
    tables = SlotTables(recent_tokens=jnp.asarray(recent_tokens(len(prompt), output))[None],
                        counts=jnp.asarray(token_counts(prompt, output, vocab_size=vocab))[None], rules=tables.rules)
    state = make_state(rows, temperature=0.7, seed=np.arange(rows), slots=0, mask=2, has_biases=1, has_words=1, position=5, prompt_lens=2,
                       repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=0.2)
    logits = np.random.default_rng(5).normal(size=vocab).astype(np.float32)
    tokens, finite, _ = sample_all(jnp.broadcast_to(logits, (rows, vocab)), state, tables, num_valid_tokens=8)
    x = logits.astype(np.float64) + np.array([0, 1, 0, 0, 0, -0.5, 0, 0, 0])
    x[1:5] = np.where(x[1:5] > 0, x[1:5] / 1.5, x[1:5] * 1.5) - np.array([0, 0, 0.3 + 2 * 0.2, 0.3 + 0.2])
    x[[0, 6, 7, 8]] = -np.inf
    expected = rows * np.exp(x / 0.7) / np.exp(x / 0.7).sum()
    counts = np.bincount(np.asarray(tokens), minlength=vocab)
    assert finite.all() and not counts[[0, 6, 7, 8]].any()
    assert (((counts - expected) ** 2)[1:6] / expected[1:6]).sum() < 18.5  # 99.9 % quantile at 4 degrees of freedom


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_adjusted_logits_that_are_not_finite_are_reported(temperature, bad):
    """However they came about: here by a table that no checked request fills."""
    rules = [token_rules(SamplingParams(logit_bias={4: 1.0}), (), (), vocab_size=V)] * 2
    slots = make_slots(2, V, rules)
    values = jnp.asarray(slots.rules.bias_values).at[1, 0].set(bad)
    slots = dataclasses.replace(slots, rules=dataclasses.replace(slots.rules, bias_values=values))
    _, finite, _ = sample_all(jnp.zeros((2, V)), make_state(2, temperature=temperature, has_biases=1), slots, num_valid_tokens=V)
    assert finite.tolist() == [True, False]
