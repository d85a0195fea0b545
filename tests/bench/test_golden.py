"""bench.golden against goldens that this engine made itself: it must agree with them, and must notice one changed token."""

import copy
from typing import Any

import pytest

import jaxinfer
from bench import golden
from jaxinfer.engine.load import random_model
from jaxinfer.models.shapes import SHAPES

MARGINS = [1.0, 0.1, 1.0, 1.0, 1.0, 0.1, 0.1, 1.0]


@pytest.fixture(scope="module")
def llm() -> Any:
    return jaxinfer.LLM.from_model(random_model(SHAPES["tiny"], dtype="float32", seed=0), max_num_seqs=4, max_num_batched_tokens=32,
                                   token_buckets=(32,), batch_buckets=(4,), page_size=16, max_model_len=64, compilation_cache_dir=None,
                                   enforce_eager=True)


@pytest.fixture(scope="module")
def made(llm: Any) -> list[dict[str, Any]]:
    prompts = [[5, 9, 2], [17, 3, 3, 8, 40, 7]]
    params = jaxinfer.SamplingParams(temperature=0, max_tokens=len(MARGINS), ignore_eos=True)
    outs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    return [{"ids": ids, "new": list(out.outputs[0].token_ids), "margin": MARGINS} for ids, out in zip(prompts, outs, strict=True)]


def test_clear_stretches_are_runs_of_two_and_more() -> None:
    assert golden.clear_stretches(MARGINS, 0.4) == [(2, 5)]
    assert golden.clear_stretches(MARGINS, 0.05) == [(0, 8)] and golden.clear_stretches(MARGINS, 2.0) == []
    assert golden.clear_stretches([1.0, 1.0], 0.4) == [(0, 2)] and golden.clear_stretches([], 0.4) == []


@pytest.mark.parametrize("forced", [golden.prefill_forced, golden.decode_forced], ids=("prefill", "decode"))
def test_the_engine_along_a_golden(llm: Any, made: list[dict[str, Any]], forced: Any) -> None:
    figures = forced(llm, made, 0.4)
    is_decode = forced is golden.decode_forced
    assert figures["ok"] and (figures["positions"], figures["clear"], figures["tested"]) == (16, 10, 4 if is_decode else 10)
    changed = copy.deepcopy(made)
    changed[1]["new"][4] ^= 1
    spoiled = forced(llm, changed, 0.4)
    assert not spoiled["ok"] and spoiled["equal_where_clear"] < spoiled["tested"]


def test_perplexity_through_the_engine_is_that_of_the_dense_pass(llm: Any) -> None:
    from jaxinfer.engine.compiled import jit_logits

    ids = [(7 * i * i + 3) % 200 for i in range(40)]
    dense = golden.perplexity(jit_logits(llm.engine.model), ids, 17)
    assert golden.engine_perplexity(llm, ids, 17) == pytest.approx(dense, rel=1e-4)


def test_the_kernels_are_named_with_their_reason(llm: Any) -> None:
    decode, prefill = golden.kernels(llm)
    assert decode.startswith("decode, H ") and "pages of 16: ragged_paged_attention: xla (" in decode and "not mosaic: " in decode
    assert prefill.startswith("prefill and mixed, H ")
