"""Page copies on the device: whole-prompt hits recompute one token, completions of a prompt share its pages; bits stay the same."""

import dataclasses

import jax
import numpy as np
import pytest

import jaxinfer
from jaxinfer.engine import executables
from tests.engine.test_engine import GREEDY, ids, prompts_of

FIXED = {"deterministic": True, "max_num_seqs": 4}
LENGTHS = [1, 15, 16, 17, 33, 100]


@pytest.fixture(scope="module")
def shared_llm(tiny_model):
    """64 sequences at once over pages of 64."""
    return jaxinfer.LLM.from_model(tiny_model, max_num_seqs=64, max_num_batched_tokens=64, deterministic=True, page_size=64,
                                   max_model_len=512, compilation_cache_dir=None)


def rows_of_the_next_plan(llm, monkeypatch):
    """(first position, tokens, samples) of each row, in the plans given from now on."""
    plans, plan_next = [], llm.engine.scheduler.next

    def record():
        plan = plan_next()
        plans.append(plan)
        return plan

    monkeypatch.setattr(llm.engine.scheduler, "next", record)
    return plans


def test_copies_move_pages_and_nothing_else(make_llm):
    steps = make_llm().engine.steps
    rng = np.random.default_rng(0)
    fill = [rng.normal(size=x.shape).astype(x.dtype) for x in jax.tree.leaves(steps.state.cache)]
    treedef = jax.tree.structure(steps.state.cache)
    steps.state = dataclasses.replace(steps.state, cache=jax.tree.unflatten(treedef, [jax.device_put(x) for x in fill]))
    copies = [(i + 1, 40 + i) for i in range(executables.NUM_PAGE_COPIES + 3)]  # more than a call takes
    steps.copy_pages(copies)
    for before, after in zip(fill, jax.tree.leaves(steps.state.cache), strict=True):
        want = before.copy()
        for source, destination in copies:
            want[destination] = before[source]
        np.testing.assert_array_equal(np.asarray(after), want)


def test_the_pool_is_not_copied(make_llm):
    engine = make_llm().engine
    plan = engine.steps._executables.copy_pages.memory_analysis()
    assert plan.alias_size_in_bytes >= engine.warm_up.state_bytes
    assert plan.temp_size_in_bytes <= 1.5 * executables.NUM_PAGE_COPIES * engine.resolved.memory.page_bytes


def test_a_whole_prompt_hit_computes_its_last_token_alone(make_llm, monkeypatch):
    llm = make_llm(**FIXED)
    params = jaxinfer.SamplingParams(max_tokens=4, **GREEDY)
    for n, prompt in zip(LENGTHS, prompts_of(LENGTHS, seed=21), strict=True):
        cold = llm.generate(prompt, params)[0]
        with monkeypatch.context() as patch:
            plans = rows_of_the_next_plan(llm, patch)
            warm = llm.generate(prompt, params)[0]
        first = plans[0]
        assert [(row.start, row.num_tokens, row.samples) for row in first.rows] == [(n - 1, 1, True)]
        assert len(first.page_copies) == int((n - 1) % 16 > 0)
        assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, n - 1) and ids([cold]) == ids([warm])


def test_outputs_are_bit_equal_with_and_without(make_llm):
    """Shared beginnings of every kind, greedy and sampled: from copies, from whole pages, and computed anew."""
    rng = np.random.default_rng(3)
    (system,) = prompts_of([90], seed=22)
    prompts = [{"prompt_token_ids": system["prompt_token_ids"][:rng.integers(1, 91)] + rng.integers(0, 256, rng.integers(1, 20)).tolist()}
               for _ in range(12)]
    params = [jaxinfer.SamplingParams(max_tokens=12, ignore_eos=True, temperature=t, seed=i, logprobs=2)
              for i, t in enumerate([0, 1.0, 0.7] * 4)]
    want = make_llm(**FIXED, enable_prefix_caching=False).generate(prompts, params)
    before = make_llm(**FIXED).engine.scheduler.stats().num_cached_tokens
    for _ in range(2):
        got = make_llm(**FIXED).generate(prompts, params)
        assert ids(got) == ids(want)
        assert [o.outputs[0].logprobs for o in got] == [o.outputs[0].logprobs for o in want]
    cached = make_llm(**FIXED).engine.scheduler.stats().num_cached_tokens - before
    assert cached >= sum(len(o.prompt_token_ids) - 1 for o in got)  # all of them, the second time


def test_completions_share_the_prompts_pages_and_copy_the_last(make_llm, monkeypatch):
    llm = make_llm(**FIXED)
    (prompt,) = prompts_of([56], seed=23)  # three pages of 16 and half of one, in steps of 32 tokens
    params = jaxinfer.SamplingParams(n=4, temperature=1.2, max_tokens=6, seed=3, ignore_eos=True)
    with monkeypatch.context() as patch:
        plans = rows_of_the_next_plan(llm, patch)
        got = llm.generate(prompt, params)[0]
    assert [[row.num_tokens for row in plan.rows] for plan in plans[:3]] == [[32], [24], [1, 1, 1, 1]]
    assert len(plans[2].page_copies) == 3
    assert [row.request.num_cached_tokens for row in plans[2].rows] == [0, 55, 55, 55]
    want = make_llm(**FIXED, enable_prefix_caching=False).generate(prompt, params)[0]
    assert ids([got]) == ids([want]) and len(set(ids([got]))) == 4


def test_64_requests_share_a_prefix_in_as_many_pages_as_it_fills(shared_llm):
    """400 shared tokens fill 6 pages of 64; each request has one more, for the other 16 and 48 of its own."""
    llm = shared_llm
    (prefix,) = prompts_of([400], seed=24)
    prompts = [{"prompt_token_ids": prefix["prompt_token_ids"] + [i]} for i in range(64)]
    params = jaxinfer.SamplingParams(max_tokens=47, **GREEDY)
    groups = [llm.groups.make(prompt, params) for prompt in prompts]
    for group in groups:
        llm.groups.add(group)
    requests, most = [r for group in groups for r in group.requests], 0
    while llm.engine.has_work:
        llm.engine.step()
        most = max(most, len({page for r in requests for page in r.pages}))
    for group in groups:
        llm.groups.finish(group)
    assert most == 6 + 64 * 1
    # What one computed, the others found: the beginning, to the token.
    assert sorted(r.num_cached_tokens for r in requests) == [0] + [400] * 63
    assert llm.engine.pages.num_free == llm.engine.pages.capacity


def test_copies_compile_nothing(make_llm):
    llm = make_llm()
    before = llm.metrics()["num_compiles_after_warmup"]
    (prompt,) = prompts_of([70], seed=25)
    for _ in range(2):
        llm.generate(prompt, jaxinfer.SamplingParams(n=3, max_tokens=3, temperature=1.0, ignore_eos=True))
    assert llm.metrics()["num_compiles_after_warmup"] == before
