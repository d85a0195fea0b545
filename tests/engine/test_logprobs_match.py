"""Log-probabilities of generated tokens equal those of model.logits on the same weights, before and after an exchange of them."""

import dataclasses

import jax
import numpy as np
import pytest

import jaxinfer
from jaxinfer.engine.load import random_model, teacher_forced_logits
from jaxinfer.models.shapes import SHAPES
from tests.engine.conftest import SMALL

LENGTH = 128
PARAMS = jaxinfer.SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, seed=3, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(5)
    return [{"prompt_token_ids": rng.integers(0, 256, n).tolist()} for n in (1, 7, 33, 100, 64)]


@pytest.fixture(scope="module")
def score():
    """(model, its params or others, sequences, prompt lengths) -> log-probability of each token after the prompt, float64."""
    run = jax.jit(teacher_forced_logits, static_argnums=0)

    def score(model, params, outputs):
        scores = []
        for out in outputs:
            ids = [*out.prompt_token_ids, *out.outputs[0].token_ids]
            padded = np.zeros((1, LENGTH), np.int32)
            padded[0, :len(ids)] = ids
            logits = np.asarray(run(model.graphdef, params, padded, np.array([len(ids)], np.int32)))[0].astype(np.float64)
            logprobs = logits - logits.max(-1, keepdims=True)
            logprobs -= np.log(np.exp(logprobs).sum(-1, keepdims=True))
            first = len(out.prompt_token_ids)
            scores.append(logprobs[np.arange(first - 1, len(ids) - 1), ids[first:]])
        return np.concatenate(scores)

    return score


def engine_scores(outputs):
    return np.array([entry[token].logprob for out in outputs for entry, token in zip(out.outputs[0].logprobs, out.outputs[0].token_ids,
                                                                                    strict=True)])


def test_float32(make_llm, tiny_model, prompts, score):
    """Both sides compute in float32 from the same float32 weights: only the order of sums differs."""
    llm = make_llm(deterministic=True, max_num_seqs=4)
    for params in (tiny_model.params, random_model(SHAPES["tiny"], dtype="float32", seed=8).params, tiny_model.params):
        llm.update_weights(params)
        outputs = llm.generate(prompts, PARAMS)
        np.testing.assert_allclose(engine_scores(outputs), score(tiny_model, params, outputs), rtol=0, atol=1e-5)


def test_bfloat16_errs_no_more_than_teacher_forcing_does(prompts, score):
    """With bfloat16 activations both sides round, in different orders (paged attention, chunks of prompts, batches).

    The bound is not picked: the float32 model of the same (bfloat16) weights is the truth, and the engine may be off it by at most
    twice what model.logits in bfloat16 is off it.
    """
    model = random_model(SHAPES["tiny"], dtype="bfloat16", seed=2)
    exact = jaxinfer.from_params(model.config, {name: x.astype("float32") for name, x in model.params.items()})
    llm = jaxinfer.LLM.from_model(model, **{k: v for k, v in SMALL.items() if not k.endswith("_buckets")}, deterministic=True)
    outputs = llm.generate(prompts, dataclasses.replace(PARAMS, max_tokens=25))
    truth = score(exact, exact.params, outputs)
    teacher = np.abs(score(model, model.params, outputs) - truth)
    engine = np.abs(engine_scores(outputs) - truth)
    assert 0 < engine.max() <= 2 * teacher.max() and engine.mean() <= 2 * teacher.mean()
