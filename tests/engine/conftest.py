"""Tiny random models shared by the engine's tests."""

import pytest

import jaxinfer
from jaxinfer.engine.load import random_model
from jaxinfer.models.shapes import SHAPES

SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "token_buckets": (32,), "batch_buckets": (4,), "page_size": 16,
         "max_model_len": 384, "compilation_cache_dir": None}


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
            made[key] = jaxinfer.LLM.from_model(tiny_model, **{**SMALL, **settings})
        return made[key]

    return make
