"""Tiny random models shared by the engine's tests."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jaxinfer
from jaxinfer.engine.load import random_model
from jaxinfer.models.shapes import SHAPES
from jaxinfer.tokenizer import Tokenizer
from tests.tokenizer.tiny import byte_level, wrap

SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "token_buckets": (32,), "batch_buckets": (4,), "page_size": 16,
         "max_model_len": 384, "compilation_cache_dir": None}
SINGLE = {"num_scheduler_steps": 1}  # on a GPU, too


@pytest.fixture(scope="session")
def tiny_model():
    return random_model(SHAPES["tiny"], dtype="float32", seed=0)


@pytest.fixture(scope="session")
def make_llm(tiny_model):
    """Engines over the same weights, made once for each set of settings."""
    made = {}

    def make(**settings):
        key = tuple(sorted(settings.items()))
        if key not in made:
            base = {k: v for k, v in SMALL.items() if not (settings.get("deterministic") and k.endswith("_buckets"))}
            made[key] = jaxinfer.LLM.from_model(tiny_model, **{**base, **SINGLE, **settings})
        return made[key]

    return make


V = 352
LENGTH = 192


def entropy_temperature(logits, params, context):
    """Divides by a temperature that falls as the distribution's entropy (nats) rises above `limit`; leaves surer rows alone."""
    logp = jax.nn.log_softmax(logits, axis=-1)
    entropy = -jnp.sum(jnp.where(jnp.isfinite(logp), jnp.exp(logp) * logp, 0.0), axis=-1)
    temperature = jnp.where(entropy > params["limit"], params["cold"], 1.0)
    return logits / temperature[:, None]


def ban_unlikely(logits, params, context):
    """Bars tokens less likely than `share` of the likeliest, and those that the output holds `most` times already (0: any number)."""
    unlikely = logits < jnp.max(logits, axis=-1, keepdims=True) + jnp.log(params["share"])[:, None]
    often = (params["most"] > 0)[:, None] & (context.counts >= params["most"][:, None])
    return jnp.where(unlikely | often, -jnp.inf, logits)


@pytest.fixture(scope="session")
def byte_tokenizer():
    return Tokenizer(wrap(byte_level(), eos_token="<|endoftext|>"))


@pytest.fixture(scope="session")
def byte_model():
    return random_model(dataclasses.replace(SHAPES["tiny"], vocab_size=V), dtype="float32", seed=1)


@pytest.fixture(scope="session")
def make_guided(byte_model, byte_tokenizer):
    """Engines with a tokenizer and three logit processors, made once for each set of settings."""
    made = {}
    jaxinfer.register_logits_processor("entropy_temperature", entropy_temperature, {"limit": None, "cold": 0.1})
    jaxinfer.register_logits_processor("broken", lambda logits, params, context: logits * float("nan"))
    jaxinfer.register_logits_processor("ban_unlikely", ban_unlikely, {"share": 1e-9, "most": 0})

    def make(**settings):
        key = tuple(sorted(settings.items()))
        if key not in made:
            base = {name: value for name, value in SMALL.items() if not settings.get("deterministic") or "buckets" not in name}
            made[key] = jaxinfer.LLM.from_model(byte_model, tokenizer=byte_tokenizer, **{
                **base, **SINGLE, "max_model_len": LENGTH, "num_pages": 200, **settings})
        return made[key]

    return make


@pytest.fixture(scope="session")
def guided(make_guided):
    return make_guided()
