"""Engines whose ops are told by name what to run on: nothing else is traced for them, and their tokens are those of the ops' own choice."""

import logging

import numpy as np
import pytest

import jaxinfer
from jaxinfer.engine.dump import read_dump
from jaxinfer.engine.executables import Builder
from jaxinfer.engine.load import random_model
from jaxinfer.errors import ConfigError
from jaxinfer.models.shapes import SHAPES, quantized
from jaxinfer.replay import replay
from tests.engine.conftest import SINGLE, SMALL

OPS = {"attention_implementation": "ragged_paged_attention", "rotary_implementation": "rotary_kv_write",
       "norm_implementation": "rms_norm", "matmul_implementation": "int4_matmul"}
"""Setting -> the op that it is of."""
PROMPTS = [{"prompt_token_ids": np.random.default_rng(n).integers(0, 256, n).tolist()} for n in (3, 40)]
PARAMS = jaxinfer.SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, prompt_logprobs=0)


@pytest.fixture(scope="module")
def model():
    return random_model(quantized(SHAPES["tiny"], "int4", lm_head="int8"), dtype="float32", seed=0)


def make(model, **forced):
    return jaxinfer.LLM.from_model(model, **{**SMALL, **SINGLE, **forced})


def served(llm):
    """The outputs' tokens, and the log-probabilities of the prompts' tokens, which the quantised head gives, too."""
    outputs = llm.generate(PROMPTS, PARAMS)
    scores = [logprob.logprob for out in outputs for at in out.prompt_logprobs[1:] for logprob in at.values()]
    return [out.outputs[0].token_ids for out in outputs], np.asarray(scores)


@pytest.fixture(scope="module")
def wanted(model):
    return served(make(model))


@pytest.mark.parametrize("forced", [*({name: "reference"} for name in OPS), dict.fromkeys(OPS, "xla")], ids=lambda x: "-".join(x))
def test_forced_ops_are_traced_as_asked_and_give_the_same_tokens(model, wanted, forced, caplog):
    with caplog.at_level(logging.DEBUG, logger="pallas_kernels.dispatch"):
        llm = make(model, **forced)
    asked = [record.args[0] for record in caplog.records if record.name == "pallas_kernels.dispatch"]
    for name, op in OPS.items():
        found = {(choice.implementation if name in forced else None, choice.reason == "asked for by name")
                 for choice in asked if choice.op == op}
        assert found == {(forced.get(name), name in forced)}, op
    tokens, scores = served(llm)
    assert tokens == wanted[0] and np.abs(scores - wanted[1]).max() < 1e-4


def test_a_step_of_forced_ops_is_dumped_and_replayed(model, tmp_path):
    llm = make(model, **dict.fromkeys(OPS, "reference"))
    llm.dump_step(tmp_path)
    llm.generate(PROMPTS, PARAMS)
    (file,) = tmp_path.iterdir()
    rows = replay(read_dump(file), model)
    assert rows and all(row.agrees for row in rows), [str(row) for row in rows]


@pytest.mark.parametrize(("quantised", "name", "value"), [
    *((True, name, "zzz") for name in OPS), (False, "matmul_implementation", "xla"),
])
def test_what_cannot_be_forced_stops_an_engine_before_it_compiles(model, tiny_model, monkeypatch, quantised, name, value):
    monkeypatch.delattr(Builder, "compiled")
    with pytest.raises(ConfigError, match=f"{name} = '{value}': "):
        make(model if quantised else tiny_model, **{name: value})
