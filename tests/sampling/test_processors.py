"""The stage of logit processors: who is touched and who is not, parameters, context, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.errors import ConfigError, RequestError
from jaxinfer.sampling import processors as module
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.sampling.processors import NO_PROCESSORS, LogitsProcessor, ProcessorTable, register_logits_processor, registered_processors
from jaxinfer.sampling.rules import recent_tokens, token_counts, token_rules
from jaxinfer.sampling.sampler import sample
from tests.sampling.states import make_slots, make_state

V, PROMPT, OUTPUT = 40, (1, 2, 3), [4, 4, 7, 9, 11, 13, 15, 17, 19]


def shift(logits, params, context):
    return logits + params["by"][:, None] * params["times"][:, None]


def echo(logits, params, context):
    """Makes the sampled token tell what the context holds."""
    del params
    last = context.recent_tokens[:, -1]
    return jnp.where(jnp.arange(V) == last[:, None], context.counts[:, 4:5] * 100.0 + context.num_outputs[:, None], jnp.full_like(logits, -5.0))


def unbar(logits, params, context):
    return jnp.full_like(logits, 7.0)


TABLE = ProcessorTable(processors=(
    LogitsProcessor(name="shift", function=shift, params=(("by", None), ("times", 2.0))),
    LogitsProcessor(name="echo", function=echo, params=()), LogitsProcessor(name="unbar", function=unbar, params=())))


@functools.partial(jax.jit, static_argnames="table")
def run(logits, state, slots, table):
    return table.apply(logits, state, slots), sample(logits, state, slots, num_valid_tokens=V - 2, processors=table)


def apply(asked, *, on=1, table=TABLE, logits=None):
    """Logits after the stage, and what is sampled from them; one row for each request."""
    num, rows = len(asked), 4
    asked, on = [*asked, *[None] * (rows - num)], np.resize(on, rows)
    logits = jnp.zeros((rows, V)) if logits is None else jnp.resize(logits, (rows, V))
    rules = [token_rules(SamplingParams(logits_processors=a), (), (), vocab_size=V, processors=table) for a in asked]
    slots = dataclasses.replace(
        make_slots(len(asked), V, rules), counts=jnp.asarray([token_counts(PROMPT, OUTPUT, vocab_size=V)] * len(asked)),
        recent_tokens=jnp.asarray([recent_tokens(len(PROMPT), OUTPUT)] * len(asked)))
    state = make_state(len(asked), has_processors=on, position=len(PROMPT) + len(OUTPUT), prompt_lens=len(PROMPT), temperature=0.0)
    out, (tokens, finite) = run(logits, state, slots, table)
    return np.asarray(out)[:num], (np.asarray(tokens)[:num], np.asarray(finite)[:num])


def test_each_row_gets_its_own_processors_and_parameters():
    out, _ = apply([{"shift": {"by": 1}}, {"shift": {"by": 0.5, "times": 4}}, None, {"shift": {"by": -1}, "unbar": {}}])
    assert (out == np.array([2.0, 2.0, 0.0, 7.0])[:, None]).all()


def test_stale_words_of_a_slot_do_nothing_to_a_row_that_asks_for_nothing():
    logits = jax.random.normal(jax.random.key(0), (2, V))
    out, _ = apply([{"shift": {"by": 1}}] * 2, on=np.array([1, 0]), logits=logits)
    assert (out[1] == np.asarray(logits)[1]).all() and (out[0] != np.asarray(logits)[0]).all()


def test_the_context_and_what_is_barred_stays_barred():
    logits = jnp.zeros((2, V)).at[1, :].set(-jnp.inf).at[1, 3].set(-8.0)
    out, (tokens, finite) = apply([{"echo": {}}, {"unbar": {}}], logits=logits)
    assert out[0, OUTPUT[-1]] == 2 * 100 + len(OUTPUT) and (np.delete(out[0], OUTPUT[-1]) == -5).all()
    assert out[1, 3] == 7 and (np.delete(out[1], 3) == -np.inf).all()
    assert tokens.tolist() == [OUTPUT[-1], 3] and finite[0]  # the second row's logits were not finite before


def test_the_context_of_a_short_output():
    slots = make_slots(1, V)
    slots = dataclasses.replace(slots, recent_tokens=slots.recent_tokens.at[0, 3].set(30).at[0, 4].set(31))
    context = module.context_of(make_state(1, position=5, prompt_lens=3), slots)
    assert context.recent_tokens.tolist() == [[-1, -1, -1, -1, -1, 30, 31]] and context.num_outputs.tolist() == [2]


def test_words_and_their_order():
    assert TABLE.num_words == 5 and NO_PROCESSORS.num_words == 1 == len(NO_PROCESSORS.words(None))
    assert TABLE.words({"echo": {}, "shift": {"by": 3}}).tolist() == [1, 3, 2, 1, 0] and TABLE.words(None).tolist() == [0, 0, 2, 0, 0]
    assert hash(TABLE) == hash(dataclasses.replace(TABLE))


@pytest.mark.parametrize(("asked", "message"), [
    ({"other": {}}, r"'other' is not one of this engine's \(echo, shift, unbar\)"), ({"shift": {}}, "'shift' needs by"),
    ({"shift": {"by": 1, "to": 2}}, "'shift' has no parameter 'to': known are by, times"), ({"echo": {"x": 1}}, "known are none"),
])
def test_what_a_request_cannot_ask_for(asked, message):
    with pytest.raises(RequestError, match=message):
        TABLE.check(asked)


def test_registration(monkeypatch):
    monkeypatch.setattr(module, "_REGISTERED", {})
    with pytest.raises(RequestError, match=r"\(none\): register it by jaxinfer.register_logits_processor before the engine starts"):
        registered_processors().check({"shift": {"by": 1}})
    register_logits_processor("shift", shift, {"by": None, "times": 2})
    for name, function, params, message in (
            ("shift", shift, {}, "'shift' exists already"), ("a b", shift, {}, "must be an identifier"), ("x", shift, {"1": 2}, "identifier"),
            ("x", shift, {"by": float("nan")}, "the default nan of 'by'"), ("x", shift, {"by": 10**400}, "of 'by' must be a finite number"),
            ("x", 3, {}, "a int is no function")):
        with pytest.raises(ConfigError, match=message):
            register_logits_processor(name, function, params)
    registered_processors().check_functions(V)
    register_logits_processor("narrow", lambda logits, params, context: logits[:, :1])
    with pytest.raises(ConfigError, match=r"'narrow' gives float32 \(2, 1\) for float32 logits \(2, 40\)"):
        registered_processors().check_functions(V)
    module._REGISTERED.pop("narrow")
    register_logits_processor("flat", lambda logits, params, context: logits * params["by"], {"by": 1})
    with pytest.raises(ConfigError, match=r"'flat' cannot be traced \(ValueError: Incompatible shapes.*parameters \(2,\) each"):
        registered_processors().check_functions(V)
