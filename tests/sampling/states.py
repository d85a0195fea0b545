"""Per-row settings and slots' tables for the sampler's tests."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxinfer.sampling.logprobs import token_logprobs
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.sampling.rules import token_rules
from jaxinfer.sampling.sampler import sample
from jaxinfer.state import NUM_RECENT, SamplingState, SlotTables

DEFAULTS = {"top_p": 1.0, "repetition_penalty": 1.0, "temperature": 1.0}
DTYPES = {"seed": jnp.uint32, **dict.fromkeys(
    ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"), jnp.float32)}
NUM_LOGPROBS = 5


def make_state(rows, **settings):
    """A SamplingState of `rows` rows; each setting is one value for all or one a row. Row b stands in slot b."""
    values = {**DEFAULTS, "slots": jnp.arange(rows), **settings}
    return SamplingState(**{f.name: jnp.broadcast_to(jnp.asarray(values.get(f.name, 0), DTYPES.get(f.name, jnp.int32)), (rows,))
                            for f in dataclasses.fields(SamplingState)})


def make_slots(rows, vocab_size, rules=None):
    """Slots' tables with no output, and the given rules, one a row."""
    rules = rules or [token_rules(SamplingParams(), (), (), vocab_size=vocab_size)] * rows
    return SlotTables(recent_tokens=jnp.zeros((rows, NUM_RECENT), jnp.int32), counts=jnp.zeros((rows, vocab_size), jnp.int32),
                      rules=jax.tree.map(lambda *x: jnp.stack(x), *rules))


@functools.partial(jax.jit, static_argnames="num_valid_tokens")
def sample_all(logits, sampling, slots, *, num_valid_tokens):
    """(tokens, finite, log-probabilities)."""
    tokens, finite = sample(logits, sampling, slots, num_valid_tokens=num_valid_tokens)
    return tokens, finite, token_logprobs(logits, tokens, num_valid_tokens=num_valid_tokens, num_logprobs=NUM_LOGPROBS)


def draw(logits, sampling, *, num_valid_tokens):
    """(tokens, finite) with no rules."""
    return sample_all(logits, sampling, make_slots(1, logits.shape[1]), num_valid_tokens=num_valid_tokens)[:2]
