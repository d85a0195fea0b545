"""The asyncio facade: deltas, aborts, consumers that go or fall behind, failures, and the thread's end."""

import asyncio
import dataclasses
import random
import subprocess
import sys
import threading
import time

import pytest

import jaxinfer
from jaxinfer.engine import engine as engine_module
from jaxinfer.engine.load import random_model
from jaxinfer.errors import EngineError, RequestError
from jaxinfer.models.shapes import SHAPES
from jaxinfer.request import FinishReason
from jaxinfer.tokenizer import Tokenizer
from tests.engine.conftest import SMALL
from tests.tokenizer.tiny import CHATML, byte_level, wrap

PARAMS = jaxinfer.SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
LONG = dataclasses.replace(PARAMS, max_tokens=300)
PROMPT = {"prompt_token_ids": [1, 2, 3]}


@pytest.fixture
def llm(make_llm):
    return make_llm(deterministic=True, max_num_seqs=4)


def is_idle(llm):
    llm.engine.scheduler.check_invariants()
    return (not llm.engine.scheduler.has_unfinished and not llm.engine.outputs._live
            and llm.engine.pages.num_free == llm.engine.pages.num_pages - 1)


def serve(llm, work):
    """Runs `work(AsyncLLM)` over an LLM's engine; all must be free behind it."""
    async def run():
        async with jaxinfer.AsyncLLM.from_llm(llm) as served:
            result = await asyncio.wait_for(work(served), timeout=60)
        assert not served._open
        return result

    result = asyncio.run(run())
    assert is_idle(llm)
    return result


async def collect(deltas):
    return [delta async for delta in deltas]


async def first(deltas):
    return await anext(deltas)


def joined(deltas, index=0):
    own = [d for d in deltas if d.index == index]
    assert [d.finished for d in own] == [False] * (len(own) - 1) + [True]
    return "".join(d.text for d in own), tuple(t for d in own for t in d.token_ids)


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


def test_many_at_once_equal_generate(llm):
    prompts = [{"prompt_token_ids": list(range(1, n))} for n in (3, 40, 9, 64, 2, 17, 30, 5)]
    params = [dataclasses.replace(PARAMS, max_tokens=3 + 4 * i, logprobs=2) for i in range(8)]
    want = llm.generate(prompts, params)

    async def work(served):
        return await asyncio.gather(*(collect(served.generate(p, q)) for p, q in zip(prompts, params, strict=True)))

    for deltas, out in zip(serve(llm, work), want, strict=True):
        assert joined(deltas)[1] == out.outputs[0].token_ids
        assert [entry for d in deltas for entry in d.logprobs] == out.outputs[0].logprobs
        last = deltas[-1]
        assert (last.finish_reason, last.prompt_token_ids) == (FinishReason.LENGTH, out.prompt_token_ids)
        assert last.cumulative_logprob == out.outputs[0].cumulative_logprob and 0 < last.metrics.ttft_s <= last.metrics.latency_s
        assert all(d.metrics is None for d in deltas[:-1])


def test_completions_of_one_prompt_carry_their_index(llm):
    params = jaxinfer.SamplingParams(n=3, temperature=1.5, seed=4, max_tokens=7, ignore_eos=True, prompt_logprobs=1)
    (want,) = llm.generate(PROMPT, params)
    deltas = serve(llm, lambda served: collect(served.generate(PROMPT, params, request_id="mine")))
    assert {d.request_id for d in deltas} == {"mine"}
    for completion in want.outputs:
        assert joined(deltas, completion.index)[1] == completion.token_ids
    assert [d.prompt_logprobs for d in deltas if d.finished and d.index == 0] == [want.prompt_logprobs]


def test_a_consumer_that_falls_behind_gets_larger_deltas_and_slows_nobody(llm):
    async def work(served):
        slow = served.generate(PROMPT, LONG)
        deltas = [await anext(slow)]
        whole = await collect(served.generate(PROMPT, LONG))  # the slow one's tokens are made meanwhile
        while served.metrics()["num_running"]:
            await asyncio.sleep(0.01)
        return deltas + await collect(slow), whole

    slow, whole = serve(llm, work)
    assert len(slow) == 2 and joined(slow)[1] == joined(whole)[1] and len(joined(slow)[1]) == 300


def test_the_loop_is_free_while_a_step_runs(llm, monkeypatch):
    pack, release = engine_module.pack, threading.Event()

    def blocks(*args):
        assert release.wait(timeout=30)
        return pack(*args)

    monkeypatch.setattr(engine_module, "pack", blocks)

    async def work(served):
        task = asyncio.create_task(collect(served.generate(PROMPT, PARAMS)))
        other = asyncio.create_task(collect(served.generate(PROMPT, PARAMS)))
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert not task.done()
        other.cancel()
        served.metrics()
        release.set()
        return await task

    assert len(joined(serve(llm, work))[1]) == 6


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


@pytest.mark.parametrize(("prompt", "options", "message"), [
    ("text", {}, "no tokenizer"), (PROMPT, {"request_id": ""}, "not empty"), (PROMPT, {"request_id": 5}, "request_id = 5"),
    (PROMPT, {"params": 5}, "sampling parameters of type int"), ({"prompt_token_ids": [1] * 400}, {}, "at most 383"),
    (PROMPT, {"priority": 1}, "no effect"), (PROMPT, {"deadline_s": 0}, "deadline_s = 0"),
])
def test_refusals_reach_their_consumer_alone(llm, prompt, options, message):
    async def work(served):
        with pytest.raises(RequestError, match=message):
            await first(served.generate(prompt, **options))
        with pytest.raises(RequestError, match="messages of type"):
            served.chat("text")
        return await collect(served.generate(PROMPT, PARAMS))

    assert len(joined(serve(llm, work))[1]) == 6


def test_what_the_scheduler_refuses_comes_through_the_stream(llm, monkeypatch):
    with monkeypatch.context() as patch:
        def refuses(request, **_):
            raise RequestError("no room")

        patch.setattr(llm.engine.scheduler, "add", refuses)

        async def work(served):
            with pytest.raises(RequestError, match="no room"):
                await first(served.generate(PROMPT, PARAMS))

        serve(llm, work)


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


def test_weights_are_exchanged_between_requests(llm, tiny_model):
    doubled = {"final_norm.weight": tiny_model.params["final_norm.weight"] * -1}
    before = llm.metrics()["num_compiles_after_warmup"]

    async def work(served):
        old = joined(await collect(served.generate(PROMPT, PARAMS)))
        running = asyncio.create_task(collect(served.generate(PROMPT, LONG)))
        while not llm.engine.scheduler.num_running:
            await asyncio.sleep(0.005)
        with pytest.raises(EngineError, match="1 requests are running and 0 waiting"):
            await served.update_weights(doubled)
        waiting = asyncio.create_task(served.update_weights(doubled, wait=True))
        await asyncio.sleep(0)
        behind = asyncio.create_task(collect(served.generate(PROMPT, PARAMS)))
        gone = asyncio.create_task(collect(served.generate(PROMPT, PARAMS)))
        ended = asyncio.create_task(collect(served.generate(PROMPT, PARAMS, request_id="held back")))
        await asyncio.sleep(0.02)
        gone.cancel()
        assert await served.abort("held back") and (await ended)[-1].finish_reason is FinishReason.ABORT
        assert not waiting.done()
        await waiting
        new = joined(await behind)
        assert running.done() and joined(await running)[1][:6] == old[1] and new != old
        await served.sleep()
        with pytest.raises(EngineError, match=r"wake\(\)"):
            await first(served.generate(PROMPT, PARAMS))
        await served.wake()
        assert joined(await collect(served.generate(PROMPT, PARAMS))) == new
        await served.update_weights({name: tiny_model.params[name] for name in doubled})
        assert joined(await collect(served.generate(PROMPT, PARAMS))) == old

    serve(llm, work)
    assert llm.metrics()["num_compiles_after_warmup"] == before


@pytest.fixture(scope="module")
def talker():
    """An engine whose random model speaks, through a byte-level tokenizer that splits characters over tokens."""
    model = random_model(dataclasses.replace(SHAPES["tiny"], vocab_size=352), dtype="float32", seed=1)
    tokenizer = Tokenizer(wrap(byte_level(), eos_token="<|endoftext|>", chat_template=CHATML))
    return jaxinfer.LLM.from_model(model, tokenizer=tokenizer, max_num_seqs=4, max_num_batched_tokens=32, page_size=16, max_model_len=256,
                                   deterministic=True, compilation_cache_dir=None)


def test_texts_joined_are_the_whole_text_and_stop_strings_are_never_half_shown(talker):
    """Characters of two to four bytes a token each, beside letters that begin stop strings."""
    encode = talker.tokenizer.encode
    some = sorted({encode_byte(talker, byte) for byte in "日本語🦊üabx".encode()})
    stops = [None, ["ab", "xx"], ["ax", "bb", "日"], "aa", ["x", "🦊"], ["ab", "x"]]
    params = [jaxinfer.SamplingParams(temperature=1.5, seed=i, max_tokens=90, ignore_eos=True, allowed_token_ids=some, n=1 + i % 2,
                                      stop=stop, include_stop_str_in_output=i == 5, skip_special_tokens=bool(i % 3))
              for i, stop in enumerate(stops)]
    prompts = ["the quick", "fox", "naïve café", {"prompt": "x"}, {"prompt_token_ids": encode("two")}, "日本"]
    want = talker.generate(prompts, params)

    async def work(served):
        return await asyncio.gather(*(collect(served.generate(p, q)) for p, q in zip(prompts, params, strict=True)))

    num_stopped, num_held_back = 0, 0
    for deltas, out, p in zip(serve(talker, work), want, params, strict=True):
        for completion in out.outputs:
            text, ids = joined(deltas, completion.index)
            assert (text, ids) == (completion.text, completion.token_ids)
            own = [d for d in deltas if d.index == completion.index]
            assert (own[-1].finish_reason, own[-1].stop_reason) == (completion.finish_reason, completion.stop_reason)
            num_stopped += completion.finish_reason is FinishReason.STOP
            num_held_back += sum(not d.text for d in own[:-1])
            shown = "".join(d.text for d in own[:-1])
            if p.stop and not p.include_stop_str_in_output:
                assert not any(stop in shown for stop in p.stop)
    assert num_stopped >= 3 and num_held_back > 20


def encode_byte(llm, byte):
    """The token that stands for one byte."""
    return next(t for t, spelled in ((t, llm.tokenizer.byte_table[t]) for t in range(3, llm.tokenizer.num_tokens)) if spelled == bytes([byte]))


def test_chat(talker):
    messages = [{"role": "user", "content": "fox"}]
    (want,) = talker.chat(messages, PARAMS)
    deltas = serve(talker, lambda served: collect(served.chat(messages, PARAMS)))
    assert joined(deltas) == (want.outputs[0].text, want.outputs[0].token_ids) and deltas[0].prompt_token_ids == want.prompt_token_ids


def test_an_aborted_text_shows_what_a_stop_string_held_back(talker):
    """The deltas of an abort are those of the output so far."""
    params = jaxinfer.SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, stop="never in the text")

    async def work(served):
        task = asyncio.create_task(collect(served.generate("fox", params, request_id="r")))
        while not (running := list(talker.engine.scheduler._running.requests.values())) or len(running[0].output_token_ids) < 20:
            await asyncio.sleep(0.002)
        await served.abort("r")
        return await task

    text, ids = joined(serve(talker, work))
    (whole,) = talker.generate("fox", params)
    assert whole.outputs[0].text.startswith(text) and len(text) > 10 and ids == whole.outputs[0].token_ids[:len(ids)]


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


def test_waiting_for_idleness_needs_no_consumer(llm, tiny_model):
    async def work(served):
        slow = served.generate(PROMPT, PARAMS)
        deltas = [await anext(slow)]
        await served.update_weights(tiny_model.params, wait=True)  # though nobody takes what the request gets
        return deltas + await collect(slow)

    assert len(joined(serve(llm, work))[1]) == 6


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


@pytest.mark.parametrize(("settings", "steps"), [({}, 1), ({"num_scheduler_steps": None}, 1), ({"num_scheduler_steps": 8}, 8)])
def test_bursts_are_left_out_unless_asked_for(llm, monkeypatch, settings, steps):
    """A newcomer would wait for them; LLM's own choice on a GPU is another."""
    asked = []

    class Recorded:
        def __new__(cls, model, **given):
            asked.append(given)
            return llm

        @staticmethod
        def from_model(model, **given):
            asked.append(given)
            return llm

    monkeypatch.setattr("jaxinfer.async_llm.LLM", Recorded)
    for make in (jaxinfer.AsyncLLM, jaxinfer.AsyncLLM.from_model):
        asyncio.run(make(llm.engine.model, **settings).shutdown())
    assert [given["num_scheduler_steps"] for given in asked] == [steps, steps]
