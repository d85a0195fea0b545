"""Bursts (num_scheduler_steps), looped on the device or launched step by step: the same tokens with fewer looks of the host; stops,
aborts and new requests in the midst of one."""

import dataclasses
from unittest import mock

import jax
import numpy as np
import pytest

import jaxinfer
from jaxinfer.engine.pack import pack, pack_again
from jaxinfer.request import FinishReason
from jaxinfer.state import StepOutput
from tests.engine.test_engine import GREEDY, ids, prompts_of
from tests.engine.test_pack import make_plan, row

K = 4
FIXED = {"deterministic": True, "max_num_seqs": 4}
LAUNCHED = {**FIXED, "num_scheduler_steps": K}  # deterministic: one executable for every step
LOOPED = {"num_scheduler_steps": K}


@pytest.fixture(params=["launched", "looped"])
def settings(request):
    """(settings of single steps, settings of bursts)."""
    return (FIXED, LAUNCHED) if request.param == "launched" else ({}, LOOPED)


@dataclasses.dataclass
class Counts:
    """What one run took."""

    num_calls: int = 0
    """Of Engine.step."""
    num_decisions: int = 0
    """Times that next() was asked."""
    num_steps: int = 0
    """That were applied."""
    num_loops: int = 0
    num_launches: int = 0
    """Of single steps."""


def run(llm, prompts, params):
    """(outputs, Counts)."""
    engine = llm.engine
    calls, steps = engine.num_step_calls, engine.metrics.num_steps
    with (mock.patch.object(engine.scheduler, "next", wraps=engine.scheduler.next) as decide,
          mock.patch.object(engine.steps, "run", wraps=engine.steps.run) as launch,
          mock.patch.object(engine.steps, "run_burst", wraps=engine.steps.run_burst) as loop):
        outputs = llm.generate(prompts, params)
        while engine.has_work:  # what was dispatched before the last one ended
            engine.step()
    engine.scheduler.check_invariants()
    assert engine.pages.num_free == engine.pages.capacity
    return outputs, Counts(engine.num_step_calls - calls, decide.call_count, engine.metrics.num_steps - steps, loop.call_count,
                           launch.call_count)


@pytest.mark.parametrize("depth", [1, 0], ids=["asynchronous", "synchronous"])
def test_outputs_are_those_of_single_steps_and_decisions_are_fewer(make_llm, monkeypatch, settings, depth):
    """Greedy and sampled rows of different lengths, over the edges of pages, some with rules, which are no part of any burst."""
    single, burst = make_llm(**settings[0]), make_llm(**settings[1])
    monkeypatch.setattr(burst.engine, "_depth", depth)
    prompts = prompts_of([3, 90, 33, 16], seed=31)
    plain = [jaxinfer.SamplingParams(max_tokens=n, ignore_eos=True, temperature=t, top_p=0.9, seed=7)
             for n, t in ((40, 0), (40, 1.0), (33, 0.7), (1, 0))]
    ruled = [jaxinfer.SamplingParams(max_tokens=20, ignore_eos=True, temperature=0, repetition_penalty=1.3, min_tokens=3), *plain[1:]]
    greedy = [dataclasses.replace(p, temperature=0) for p in plain]
    for params, at_most in ((plain, 20), (ruled, 36), (greedy, 20)):
        want, many = run(single, prompts, params)
        got, few = run(burst, prompts, params)
        assert ids(got) == ids(want) and few.num_decisions <= at_most < many.num_decisions
        assert [o.outputs[0].finish_reason for o in got] == [FinishReason.LENGTH] * 4
        assert (few.num_loops > 0) == (params is greedy and settings[1] is LOOPED)
        assert few.num_steps == few.num_launches + K * few.num_loops


def test_a_loop_leaves_the_bits_of_single_steps(make_llm):
    """Tokens, keys and values, page table and slots' tables, over the edges of pages; a page that comes with a later step of the loop.

    Each slot has its page: in the null page, where padded rows write, a GPU leaves whichever of them came last."""
    llm = make_llm(**LOOPED)
    steps, layout = llm.engine.steps, next(x for x in llm.engine.resolved.layouts if x.decode_only)
    rng = np.random.default_rng(0)
    table = np.array(steps.state.page_table)
    table[1, 0] = 9
    leaves, treedef = jax.tree.flatten(steps.state)
    before = [rng.normal(size=x.shape).astype(x.dtype) if x.dtype == np.float32 else
              table if x is steps.state.page_table else np.zeros(x.shape, x.dtype) for x in leaves]
    rows = [row(2, 14, [7]), row(0, 45, [9]), row(1, 3, [250])]
    updates = [[(2, 0, 5), (0, 0, 6), (0, 1, 7), (0, 2, 8)], [], [(2, 1, 10), (0, 3, 12)], []]
    buffers = [pack(make_plan(*rows), layout, updates[0])]
    for i in range(1, K):
        following = make_plan(*(r._replace(start=r.start + i, token_ids=(), from_device=True) for r in rows))
        buffers.append(pack_again(buffers[-1], dataclasses.replace(following, page_updates=tuple(updates[i])), layout))

    def after(work):
        steps.state = jax.tree.unflatten(treedef, [jax.device_put(x, old.sharding) for x, old in zip(before, leaves, strict=True)])
        outputs = work()
        tokens, finite = (np.concatenate([np.asarray(getattr(o, name)).reshape(-1, layout.num_rows) for o in outputs])
                          for name in ("tokens", "finite"))
        return tokens[:, :3], finite[:, :3], jax.device_get(jax.tree.leaves(steps.state))

    want = after(lambda: [steps.run(layout, b, samples=False, wants_logprobs=False) for b in buffers])
    got = after(lambda: [steps.run_burst(layout, np.stack(buffers))])
    steps.renew_state()
    assert want[0].shape == (K, 3) and len(set(want[0].ravel().tolist())) > K and want[1].all()
    tolerance = 0 if jax.default_backend() == "cpu" else 1e-5  # a GPU's two executables may sum in different orders
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=tolerance)


def test_tokens_of_a_loop_come_in_one_copy(make_llm):
    llm = make_llm(**LOOPED)
    copies = []

    @dataclasses.dataclass
    class Counted:
        array: jax.Array

        def __array__(self, dtype=None, copy=None):
            copies.append(self.array.shape)
            return np.asarray(self.array)

    def counted(layout, buffers, run_burst=llm.engine.steps.run_burst):
        output = run_burst(layout, buffers)
        return StepOutput(tokens=Counted(output.tokens), finite=Counted(output.finite))

    with mock.patch.object(llm.engine.steps, "run_burst", counted):
        _, counts = run(llm, prompts_of([5, 6]), jaxinfer.SamplingParams(max_tokens=1 + 6 * K, **GREEDY))
    assert copies == [(K, 4)] * 2 * 6 and counts.num_steps == 1 + 6 * K


@pytest.mark.parametrize(("changes", "loops"), [
    ({}, True), ({"stop_token_ids": [255]}, True), ({"temperature": 1.0, "seed": 3}, False), ({"logprobs": 2}, False),
    ({"repetition_penalty": 1.2}, False), ({"logit_bias": {"7": -1.0}}, False), ({"min_tokens": 24}, False),
], ids=lambda x: next(iter(x), "plain") if isinstance(x, dict) else None)
def test_only_plain_greedy_rows_are_looped_and_nothing_compiles(make_llm, changes, loops):
    """One row that asks for more sends all to single steps; what the one before left compiled serves the next."""
    llm, before = make_llm(**LOOPED), make_llm(**LOOPED).metrics()["num_compiles_after_warmup"]
    plain = jaxinfer.SamplingParams(max_tokens=24, **GREEDY)
    outputs, counts = run(llm, prompts_of([4, 20], seed=36), [plain, dataclasses.replace(plain, **changes)])
    assert (counts.num_loops > 0) == loops and llm.metrics()["num_compiles_after_warmup"] == before
    assert ids(outputs)[0] == ids(make_llm().generate(prompts_of([4, 20], seed=36)[0], plain))[0]


def test_rows_that_end_at_different_times_leave_most_steps_looped(make_llm):
    """Each end costs less than a burst of single steps, and no row is computed past its length."""
    prompts = prompts_of([9] * 4, seed=37)
    params = [jaxinfer.SamplingParams(max_tokens=n, **GREEDY) for n in (13, 30, 59, 90)]
    want, single = run(make_llm(), prompts, params)
    got, counts = run(make_llm(**LOOPED), prompts, params)
    assert ids(got) == ids(want) and counts.num_steps <= single.num_steps
    assert K * counts.num_loops > 0.7 * counts.num_steps and counts.num_launches < 4 * (K + 2)


def test_nothing_is_emitted_past_a_stop(make_llm, settings):
    prompts = prompts_of([9, 12], seed=32)
    params = jaxinfer.SamplingParams(max_tokens=24, **GREEDY)
    free = ids(make_llm(**settings[0]).generate(prompts, params))
    llm = make_llm(**settings[1])
    for at in range(1, 12):  # wherever in a burst it falls
        stop = free[0][at]
        (stopped, other), _ = run(llm, prompts, [dataclasses.replace(params, stop_token_ids=[stop]), params])
        assert stopped.outputs[0].token_ids == free[0][:free[0].index(stop) + 1] and stopped.outputs[0].finish_reason is FinishReason.STOP
        assert other.outputs[0].token_ids == free[1]
    # What was computed past the stop is not offered to others.
    assert ids(run(llm, prompts, params)[0]) == free


def test_a_stop_string_in_the_midst_of_a_loop_ends_the_text_there(make_guided):
    prompts = [{"prompt_token_ids": [65, 66, 67]}, {"prompt_token_ids": [80, 81]}]
    params = jaxinfer.SamplingParams(max_tokens=40, **GREEDY)
    llm = make_guided(num_scheduler_steps=K)
    free = llm.generate(prompts, params)
    text = free[0].outputs[0].text
    stop = next(text[i:i + 2] for i in range(len(text) // 2, len(text)) if text.find(text[i:i + 2]) == i)
    got, counts = run(llm, prompts, [dataclasses.replace(params, stop=[stop]), params])
    assert got[0].outputs[0].text == text[:text.index(stop)] and got[0].outputs[0].stop_reason == stop
    assert got[0].outputs[0].token_ids == free[0].outputs[0].token_ids[:len(got[0].outputs[0].token_ids)]
    assert ids(got)[1] == ids(free)[1] and counts.num_loops > 3


def test_logits_that_are_not_finite_in_a_later_step_of_a_loop_end_their_request_alone(make_llm):
    llm = make_llm(**LOOPED)
    prompts, params = prompts_of([9, 12], seed=32), jaxinfer.SamplingParams(max_tokens=30, **GREEDY)
    want = ids(llm.generate(prompts, params))
    loops = []

    def spoiled(layout, buffers, run_burst=llm.engine.steps.run_burst):
        loops.append(run_burst(layout, buffers))
        finite = np.array(loops[-1].finite)
        finite[2, 0] = len(loops) != 2
        return dataclasses.replace(loops[-1], finite=finite)

    with mock.patch.object(llm.engine.steps, "run_burst", spoiled):
        (broken, other), _ = run(llm, prompts, params)
    assert broken.outputs[0].finish_reason is FinishReason.ERROR and other.outputs[0].token_ids == want[1]
    assert broken.outputs[0].token_ids == want[0][:1 + K + 2]  # of the prompt, the first loop, and two steps of the second
    assert ids(llm.generate(prompts, params)) == want


def test_streams_yield_within_a_burst_and_closing_one_leaves_others_alone(make_llm, settings):
    llm = make_llm(**settings[1])
    prompts = prompts_of([20, 25], seed=33)
    params = jaxinfer.SamplingParams(max_tokens=30, **GREEDY)
    want = ids(make_llm(**settings[0]).generate(prompts, params))
    first, second = llm.stream(prompts[0], params), llm.stream(prompts[1], params)
    lengths = [len(next(first).outputs[0].token_ids) for _ in range(3)]
    assert lengths == sorted(set(lengths)) and lengths[-1] < 30
    got = [next(second) for _ in range(2)][-1].outputs[0].token_ids
    first.close()  # its tokens in flight are dropped
    for out in second:
        assert out.outputs[0].token_ids[:len(got)] == got
        got = out.outputs[0].token_ids
    assert got == want[1] and not llm.engine.scheduler.has_unfinished
    assert ids(llm.generate(prompts, params)) == want
    assert llm.engine.pages.num_free == llm.engine.pages.capacity


def test_a_request_aborted_while_its_loop_runs_keeps_what_it_had(make_llm):
    llm = make_llm(**LOOPED)
    engine, params = llm.engine, jaxinfer.SamplingParams(max_tokens=60, **GREEDY)
    prompts = prompts_of([20, 25], seed=33)
    want = ids(make_llm().generate(prompts, params))
    groups = [llm.groups.make(p, params) for p in prompts]
    for group in groups:
        llm.groups.add(group)
    (gone,), (other,) = (group.requests for group in groups)
    while len(gone.output_token_ids) < 2 * K:
        engine.step()
    assert [len(launch.plans) for launch in engine._in_flight[0]] == [K]
    kept = list(gone.output_token_ids)
    engine.abort(gone)
    while engine.has_work:
        engine.step()
    assert gone.output_token_ids == kept == list(want[0][:len(kept)]) and tuple(other.output_token_ids) == want[1]
    for group in groups:
        llm.groups.finish(group)
    assert engine.pages.num_free == engine.pages.capacity


def test_a_new_request_waits_for_two_loops_at_most(make_llm):
    llm = make_llm(**LOOPED)
    params = jaxinfer.SamplingParams(max_tokens=60, **GREEDY)
    stream = llm.stream(prompts_of([5])[0], params)
    for _ in range(3):
        next(stream)
    group = llm.groups.make(prompts_of([6], seed=3)[0], params)
    llm.groups.add(group)
    assert len(llm.engine._in_flight) == 1
    before = llm.engine.metrics.num_steps
    while not group.requests[0].output_token_ids:
        llm.engine.step()
    assert llm.engine.metrics.num_steps - before <= K + 1  # the loop in flight, and the step that holds the prompt
    assert len(list(stream)[-1].outputs[0].token_ids) == 60
    llm.groups.finish(group)


def test_a_request_that_waits_ends_the_bursts(make_llm, settings):
    """Five prompts in four slots: while the fifth waits, every step is decided anew, so that it comes in as soon as one ends."""
    prompts = prompts_of([9] * 5, seed=34)
    params = [jaxinfer.SamplingParams(max_tokens=n, **GREEDY) for n in (6, 30, 30, 30, 30)]
    got, counts = run(make_llm(**settings[1]), prompts, params)
    want = make_llm(**settings[0]).generate(prompts, params)
    assert ids(got) == ids(want) and 10 < counts.num_decisions < 25


def test_a_pool_too_small_for_a_burst_falls_back_to_single_steps(make_llm):
    prompts = prompts_of([60, 70, 80, 90], seed=35)
    for temperature in (1.0, 0.0):
        params = jaxinfer.SamplingParams(max_tokens=60, ignore_eos=True, temperature=temperature, seed=1)
        got, _ = run(make_llm(**LOOPED, num_pages=25), prompts, params)
        assert ids(got) == ids(make_llm().generate(prompts, params)) and sum(o.metrics.num_preemptions for o in got) > 0


def test_steps_read_together_share_their_time(make_llm, settings, monkeypatch):
    """The first burst after a prompt counts with its time, not as K - 1 steps that took none; time without requests is nobody's."""
    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now

    clock, llm = Clock(), make_llm(**settings[1])
    metrics, take_in = llm.engine.metrics, llm.engine._apply_oldest
    monkeypatch.setattr("jaxinfer.engine.metrics.time", clock)
    monkeypatch.setattr(llm.engine, "_apply_oldest", lambda: (setattr(clock, "now", clock.now + 1.0), take_in())[1])
    prompt, params = prompts_of([9], seed=32)[0], jaxinfer.SamplingParams(max_tokens=1 + 3 * K, **GREEDY)
    llm.reset_metrics()
    (whole,), _ = run(llm, prompt, params)
    assert (metrics.num_decode_steps, metrics.num_decode_tokens, metrics.decode_seconds) == (3 * K, 3 * K, 3.0)
    assert metrics.num_steps == metrics.num_output_tokens == 1 + 3 * K
    token_ids = whole.outputs[0].token_ids
    at = max(token_ids.index(token) for token in token_ids[:2 * K])
    assert at > 0
    num_bursts = -(-at // K)
    llm.reset_metrics()
    llm.generate(prompt, dataclasses.replace(params, stop_token_ids=[token_ids[at]]))
    assert llm.engine.has_work and (metrics.num_decode_steps, metrics.num_decode_tokens) == (num_bursts * K, at)
    for _ in range(2):  # a burst was dispatched before the stop was seen: its turn comes after the pause; the second time there is none
        clock.now += 1000.0
        llm.generate(prompt, dataclasses.replace(params, max_tokens=1))
    assert metrics.num_decode_tokens == at + 1 and metrics.decode_seconds == num_bursts + 1.0


def test_loops_are_counted_described_and_reuse_the_state_in_place(make_llm):
    single, looped = make_llm().engine, make_llm(**LOOPED).engine
    assert looped.warm_up.num_executables == single.warm_up.num_executables + 1
    assert looped.warm_up.aliased_bytes >= looped.warm_up.state_bytes
    assert f"bursts of 4 steps, looped on the device for buckets 4; {single.warm_up.num_executables + 1} executables" in looped.describe()
    assert "looped on the device for buckets none" in make_llm(**LAUNCHED).engine.describe() and "bursts" not in single.describe()
