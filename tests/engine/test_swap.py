"""Preempted requests whose pages wait in host memory: bits stay the same, nothing is computed twice, nothing compiles."""

import dataclasses

import jax
import numpy as np
import pytest

import jaxinfer
from jaxinfer.engine import hardware, swap
from jaxinfer.engine.page_moves import MAX_CALLS_AHEAD, NUM_PAGES_MOVED
from jaxinfer.errors import CapacityError, ConfigError
from jaxinfer.explain import explain, plan
from jaxinfer.scheduler.plan import SchedulePlan
from tests.engine.conftest import SMALL
from tests.engine.test_engine import ids, prompts_of
from tests.engine.test_equality import FIXED, NO_CACHE, PARAMS, alone, batched
from tests.engine.test_weights import no_compile

PAGE_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # of the tiny model in float32, 16 tokens a page
SWAP = {**FIXED, "num_pages": 25, "swap_space_bytes": 100 * PAGE_BYTES}


def eager_to_swap(llm, tokens_per_page=0.0):
    """The engine with a price of moves that does not depend on what this machine measured."""
    llm.engine.host_pages.tokens_per_page = tokens_per_page
    return llm


def swapped_and_recomputed(llm):
    stats = llm.engine.scheduler.stats()
    return np.array([stats.num_swapped_tokens, stats.num_recomputed_tokens, stats.num_preemptions])


@pytest.mark.parametrize("settings", [NO_CACHE, {}, {"num_scheduler_steps": 4, "async_scheduling": False}],
                         ids=["without prefix cache", "with it", "bursts, one at a time"])
def test_bits_are_those_of_undisturbed_requests(make_llm, settings):
    params = PARAMS if "num_scheduler_steps" not in settings else [dataclasses.replace(p, logprobs=None) for p in PARAMS]
    want = alone(make_llm(**FIXED, **NO_CACHE), params)
    llm = eager_to_swap(make_llm(**SWAP, **settings))
    before = swapped_and_recomputed(llm)
    with no_compile(llm):
        got = batched(llm, params)
    assert ids(got) == ids(want) and [o.outputs[0].logprobs for o in got] == [o.outputs[0].logprobs for o in want]
    num_swapped, num_recomputed, num_preemptions = swapped_and_recomputed(llm) - before
    if settings == NO_CACHE:
        assert num_swapped > 50 and num_recomputed == 0
    else:  # most was found in the prefix cache; where it has all, the last token alone is computed
        assert num_swapped > 0 and num_recomputed <= num_preemptions
    llm.engine.scheduler.check_invariants()
    assert llm.engine.host_pages.num_free == 100 and not llm.engine._swapped._under_way


def test_over_two_devices(tiny_model):
    if len(jax.devices()) < 2:
        pytest.skip("a single device")
    params = jax.device_put(tiny_model.params, jaxinfer.tensor_parallel_shardings(tiny_model.config, jax.devices()[:2]))
    base = {name: value for name, value in SMALL.items() if not name.endswith("_buckets")}
    llm = eager_to_swap(jaxinfer.LLM.from_model(jaxinfer.from_params(tiny_model.config, params), **base | SWAP | NO_CACHE))
    assert llm.engine.resolved.num_host_pages == 100 and llm.engine.resolved.memory.page_bytes == PAGE_BYTES // 2
    with no_compile(llm):
        got = batched(llm, PARAMS)
    num_swapped, num_recomputed, _ = swapped_and_recomputed(llm)
    assert num_swapped > 50 and num_recomputed == 0 and ids(got) == ids(alone(llm, PARAMS))
    check_moves(llm)


def test_one_that_is_withdrawn_while_it_waits_and_sleep(make_llm):
    llm = eager_to_swap(make_llm(**SWAP, **NO_CACHE))
    prompts, params = prompts_of([150, 150, 150], seed=5), jaxinfer.SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    want = ids(llm.generate(prompts[:2], params))
    groups = [llm.groups.make(prompt, params) for prompt in prompts]
    for group in groups:
        llm.groups.add(group)
    while llm.engine.host_pages.num_free == 100:
        llm.engine.step()
    (waiting,) = [group for group in groups if llm.engine.host_pages.num_tokens(group.requests[0])]
    llm.engine.abort(waiting.requests[0])
    assert llm.engine.host_pages.num_free == 100
    while llm.engine.has_work:
        llm.engine.step()
    for group in groups:
        llm.groups.finish(group)
    llm.sleep()
    llm.wake()
    assert ids(llm.generate(prompts[:2], params)) == want
    llm.engine.scheduler.check_invariants()


def check_moves(llm):
    """Pages saved, overwritten and loaded into other pages are as they were, to the bit, and no other page changes."""
    steps, swapped = llm.engine.steps, llm.engine._swapped
    rng = np.random.default_rng(0)
    leaves, treedef = jax.tree.flatten(steps.state.cache)
    fill = [rng.normal(size=x.shape).astype(x.dtype) for x in leaves]
    steps.state = dataclasses.replace(steps.state, cache=jax.tree.unflatten(treedef, [
        jax.device_put(new, old.sharding) for new, old in zip(fill, leaves, strict=True)]))
    num = NUM_PAGES_MOVED + 3  # more than a call takes
    nothing = SchedulePlan(rows=(), page_updates=(), num_tokens=0, num_prefill_tokens=0, preempted=())
    saving = dataclasses.replace(nothing, page_saves=tuple((1 + i, 50 - i) for i in range(num)))
    swapped.save(saving)
    again = dataclasses.replace(nothing, page_saves=((12, 50),), page_loads=((50, 13), (49, 1), *((50 - i, 14 + i) for i in range(2, num - 1))))
    swapped.save(again)  # a host page that was given up, and a load of the same plan
    swapped.load(again)
    swapped.load(dataclasses.replace(nothing, page_loads=((50 - num + 1, 2),)))
    assert not swapped._under_way
    moved = {13: 12, 1: 2, 2: num, **{14 + i: 1 + i for i in range(2, num - 1)}}
    for before, after in zip(fill, jax.tree.leaves(steps.state.cache), strict=True):
        want = before.copy()
        for destination, source in moved.items():
            want[destination] = before[source]
        np.testing.assert_array_equal(np.asarray(after)[1:], want[1:])  # the null page's are nobody's


def test_pages_come_back_as_they_were(make_llm, monkeypatch):
    check_moves(make_llm(**SWAP))
    monkeypatch.setattr(swap, "MAX_CALLS_AHEAD", 1)
    check_moves(make_llm(**SWAP))


def test_pages_come_back_as_they_were_without_jit(tiny_model):
    llm = jaxinfer.LLM.from_model(tiny_model, **{**SMALL, **SWAP, "max_num_batched_tokens": 16, "token_buckets": None, "batch_buckets": None,
                                                 "enforce_eager": True})
    assert 0 < llm.engine.host_pages.tokens_per_page < float("inf")
    check_moves(llm)


def test_the_pool_is_not_copied_and_the_plan_has_room_for_what_is_under_way(make_llm):
    engine = make_llm(**SWAP).engine
    block = NUM_PAGES_MOVED * PAGE_BYTES
    reading, writing = (f.memory_analysis() for f in (engine.steps._executables.read_pages, engine.steps._executables.write_pages))
    assert writing.alias_size_in_bytes >= engine.warm_up.state_bytes and writing.temp_size_in_bytes <= 2 * block
    assert reading.output_size_in_bytes <= block + 1024 and reading.temp_size_in_bytes <= 2 * block
    assert engine.resolved.memory.step_bytes - make_llm(**FIXED, num_pages=25).engine.resolved.memory.step_bytes == 2 * MAX_CALLS_AHEAD * block


def test_a_move_that_costs_more_than_the_tokens_is_not_made(make_llm):
    llm = make_llm(**SWAP, **NO_CACHE)
    before = swapped_and_recomputed(eager_to_swap(llm, 16.0))
    batched(llm, PARAMS)
    num_swapped, num_recomputed, num_preemptions = swapped_and_recomputed(llm) - before
    assert num_swapped == 0 and num_recomputed > 0 and num_preemptions > 0


def test_what_is_measured_at_start_decides_and_is_told(make_llm):
    engine = make_llm(**SWAP).engine
    assert 0 < engine._swapped.tokens_per_page() < float("inf")
    assert "; 100 pages on the host, where preempted requests go if a page saves " in engine.describe()
    assert "on the host" not in make_llm(**FIXED, num_pages=25).engine.describe()
    text = explain(plan(jaxinfer.EngineConfig(swap_space_bytes=10 * 2**30, tensor_parallel_size=2), hardware.named_gpu("h100"), shape="Q"))
    assert "host memory for swaps" in text and " pages of all devices, " in text and "swap_space_bytes           10737418240" in text


def test_impossible_sizes_are_refused(tiny_model):
    with pytest.raises(ConfigError, match="swap_space_bytes = -1: must be an integer >= 0"):
        jaxinfer.EngineConfig(swap_space_bytes=-1)
    with pytest.raises(ConfigError, match=f"swap_space_bytes = 100: less than one page of {PAGE_BYTES} bytes; raise it"):
        jaxinfer.LLM.from_model(tiny_model, **SMALL, swap_space_bytes=100)
    with pytest.raises(CapacityError, match=r"swap_space_bytes = 1000000000000000: \d+ pages take 1000000.00 GB, which this machine of"):
        jaxinfer.LLM.from_model(tiny_model, **SMALL, num_pages=25, swap_space_bytes=10**15)
