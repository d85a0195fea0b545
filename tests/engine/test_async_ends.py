"""The asyncio facade: how requests end before their time, by their consumers, aborts, failures, loops and facades that close."""

import asyncio
import dataclasses
import random
import subprocess
import sys
import time

import pytest

import jaxinfer
from jaxinfer.engine import engine as engine_module
from jaxinfer.errors import EngineError, RequestError
from jaxinfer.request import FinishReason
from tests.engine.async_calls import LONG, PARAMS, PROMPT, collect, first, is_idle, joined, serve
from tests.engine.conftest import SMALL


@pytest.fixture
def llm(make_llm):
    return make_llm(deterministic=True, max_num_seqs=4)


def test_a_loop_closed_before_its_consumer_looked_holds_nothing(llm):
    served, loop = jaxinfer.AsyncLLM.from_llm(llm), asyncio.new_event_loop()
    deltas = served.generate(PROMPT, LONG, request_id="same")
    loop.run_until_complete(anext(deltas))
    stream = served._open["same"]
    end = time.monotonic() + 30
    while not stream._is_signalled and time.monotonic() < end:
        time.sleep(0.001)
    loop.close()
    while not stream.requests[0].is_finished and time.monotonic() < end:
        time.sleep(0.001)
    assert stream.requests[0].finish_reason is FinishReason.ABORT
    asyncio.run(collect(served.generate(PROMPT, PARAMS, request_id="same")))
    asyncio.run(served.shutdown())
    assert is_idle(llm)


@pytest.mark.parametrize("how", ["cancel", "break", "close", "cancel at once"])
def test_a_consumer_that_goes_frees_its_pages_and_disturbs_nobody(llm, how):
    want = llm.generate(PROMPT, dataclasses.replace(PARAMS, max_tokens=60))[0].outputs[0].token_ids

    async def goes(served):
        deltas = served.generate(PROMPT, dataclasses.replace(LONG, n=2))
        async for _ in deltas:
            if how == "break":
                break
            if how == "close":
                await deltas.aclose()

    async def work(served):
        neighbour = asyncio.create_task(collect(served.generate(PROMPT, dataclasses.replace(PARAMS, max_tokens=60))))
        task = asyncio.create_task(goes(served))
        await asyncio.sleep(0 if how == "cancel at once" else 0.05)
        task.cancel()
        await asyncio.wait([task])
        assert joined(await neighbour)[1] == want
        while llm.engine.scheduler.has_unfinished:
            await asyncio.sleep(0.005)
        assert llm.engine.pages.num_free == llm.engine.pages.num_pages - 1

    serve(llm, work)


def test_abort_ends_a_request_where_it_stands(llm):
    async def work(served):
        assert not await served.abort("r")
        task = asyncio.create_task(collect(served.generate(PROMPT, dataclasses.replace(LONG, n=2), request_id="r")))
        await asyncio.sleep(0)
        early = asyncio.create_task(collect(served.generate(PROMPT, LONG, request_id="early")))
        await asyncio.sleep(0)
        assert await served.abort("early")
        while not served.metrics()["num_output_tokens"]:
            await asyncio.sleep(0.005)
        with pytest.raises(RequestError, match="'r' belongs to a request that is being served"):
            await first(served.generate(PROMPT, PARAMS, request_id="r"))
        assert await served.abort("r")
        return await task, await early

    llm.reset_metrics()
    deltas, early = serve(llm, work)
    assert [d.finish_reason for d in deltas if d.finished] == [FinishReason.ABORT] * 2
    assert 0 < len(joined(deltas, 0)[1]) < 300 and early[-1].finish_reason is FinishReason.ABORT


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_in_a_step_reaches_everybody_who_waits(tiny_model, monkeypatch):
    llm = jaxinfer.LLM.from_model(tiny_model, **{**SMALL, "enforce_eager": True})

    def fails(*args):
        raise OverflowError("int too large")

    async def run():
        served = jaxinfer.AsyncLLM.from_llm(llm)
        served.check_health()
        monkeypatch.setattr(engine_module, "pack", fails)
        results = await asyncio.gather(*(collect(served.generate(PROMPT, PARAMS)) for _ in range(3)), return_exceptions=True)
        for error in results:
            assert isinstance(error, EngineError) and "OverflowError: int too large" in str(error)
            assert isinstance(error.__cause__, OverflowError)
        for call in (first(served.generate(PROMPT, PARAMS)), served.update_weights({}), served.sleep()):
            with pytest.raises(EngineError, match="int too large"):
                await call
        with pytest.raises(EngineError, match=r"AsyncLLM\.from_model"):
            served.check_health()
        await served.shutdown()

    asyncio.run(run())


def test_shutdown_aborts_what_is_open_and_refuses_what_comes(llm):

    async def run():
        served = jaxinfer.AsyncLLM.from_llm(llm)
        task = asyncio.create_task(collect(served.generate(PROMPT, LONG)))
        while not llm.engine.scheduler.num_running:
            await asyncio.sleep(0.005)
        await served.shutdown()
        await served.shutdown()
        assert (await task)[-1].finish_reason is FinishReason.ABORT
        with pytest.raises(EngineError, match="was shut down: make a new one"):
            await first(served.generate(PROMPT, PARAMS))
        assert not served._stepper._thread.is_alive()

    asyncio.run(run())
    assert is_idle(llm)
    assert len(llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids) == 6


def test_a_closed_loop_withdraws_its_consumers_and_a_dropped_facade_ends_its_thread(llm):
    served = jaxinfer.AsyncLLM.from_llm(llm)
    thread = served._stepper._thread
    loop = asyncio.new_event_loop()
    deltas = served.generate(PROMPT, LONG)
    loop.run_until_complete(anext(deltas))
    loop.close()  # without closing its generators, as after a crash
    deadline = time.monotonic() + 30
    while llm.engine.scheduler.has_unfinished and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not llm.engine.scheduler.has_unfinished
    assert len(joined(asyncio.run(collect(served.generate(PROMPT, PARAMS))))[1]) == 6
    with pytest.raises(StopIteration):
        deltas.aclose().send(None)
    del deltas, served
    thread.join(timeout=30)
    assert not thread.is_alive()


def test_the_interpreter_ends_with_a_facade_left_open_in_the_middle_of_its_steps():
    code = """
import time, types
from jaxinfer.async_llm import AsyncLLM
def step():
    time.sleep(0.01)
    return []
engine = types.SimpleNamespace(has_work=True, step=step)
served = AsyncLLM.from_llm(types.SimpleNamespace(engine=engine, groups=None, config=None, tokenizer=None))
time.sleep(0.1)
print(served._stepper._thread.is_alive())
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "True\n", "")


@pytest.mark.parametrize("seed", range(3))
def test_random_comings_and_goings_leave_nothing(llm, seed):
    """Tasks that are cancelled, aborted, expire or end, in any order; those that end have what they would have alone."""
    rng = random.Random(seed)
    prompts = [{"prompt_token_ids": [rng.randrange(256) for _ in range(rng.randrange(1, 80))]} for _ in range(40)]
    params = [dataclasses.replace(PARAMS, max_tokens=rng.randrange(1, 60), n=rng.choice([1, 1, 2])) for _ in prompts]
    fates = [rng.choice(["end", "end", "cancel", "abort", "expire"]) for _ in prompts]
    want = llm.generate(prompts, params)

    async def one(served, i):
        await asyncio.sleep(rng.random() * 0.2)
        task = asyncio.create_task(collect(served.generate(prompts[i], params[i], request_id=f"r{i}",
                                                           deadline_s=0.02 if fates[i] == "expire" else None)))
        if fates[i] in ("cancel", "abort"):
            await asyncio.sleep(rng.random() * 0.1)
            if fates[i] == "abort":
                await served.abort(f"r{i}")
            else:
                task.cancel()
        await asyncio.wait([task])
        return [] if task.cancelled() else task.result()

    async def work(served):
        return await asyncio.gather(*(one(served, i) for i in range(len(prompts))))

    for deltas, out, fate in zip(serve(llm, work), want, fates, strict=True):
        for completion in out.outputs if deltas else []:
            ids = joined(deltas, completion.index)[1]
            assert ids == completion.token_ids[:len(ids)] and (fate != "end" or len(ids) == len(completion.token_ids))
