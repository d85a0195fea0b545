"""The asyncio facade: what its consumers get, deltas and texts, however slowly they take them; weights exchanged and sleep between requests."""

import asyncio
import dataclasses
import threading

import pytest

import jaxinfer
from jaxinfer.engine import engine as engine_module
from jaxinfer.errors import EngineError, RequestError
from jaxinfer.request import FinishReason
from jaxinfer.tokenizer import Tokenizer
from tests.engine.async_calls import LONG, PARAMS, PROMPT, collect, first, joined, serve
from tests.engine.conftest import LENGTH, SINGLE
from tests.tokenizer.tiny import CHATML, byte_level, wrap


@pytest.fixture
def llm(make_llm):
    return make_llm(deterministic=True, max_num_seqs=4)


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
def talker(byte_model, make_guided):
    """An engine whose random model speaks, through a byte-level tokenizer that splits characters over tokens. It is compiled as
    make_guided's deterministic one is, whose processors are registered with that fixture."""
    tokenizer = Tokenizer(wrap(byte_level(), eos_token="<|endoftext|>", chat_template=CHATML))
    return jaxinfer.LLM.from_model(byte_model, tokenizer=tokenizer, max_num_seqs=4, max_num_batched_tokens=32, page_size=16,
                                   max_model_len=LENGTH, num_pages=200, deterministic=True, compilation_cache_dir=None, **SINGLE)


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
    params = jaxinfer.SamplingParams(temperature=0, max_tokens=150, ignore_eos=True, stop="never in the text")

    async def work(served):
        task = asyncio.create_task(collect(served.generate("fox", params, request_id="r")))
        while not (running := list(talker.engine.scheduler._running.requests.values())) or len(running[0].output_token_ids) < 20:
            await asyncio.sleep(0.002)
        await served.abort("r")
        return await task

    text, ids = joined(serve(talker, work))
    (whole,) = talker.generate("fox", params)
    assert whole.outputs[0].text.startswith(text) and len(text) > 10 and ids == whole.outputs[0].token_ids[:len(ids)]


def test_waiting_for_idleness_needs_no_consumer(llm, tiny_model):
    async def work(served):
        slow = served.generate(PROMPT, PARAMS)
        deltas = [await anext(slow)]
        await served.update_weights(tiny_model.params, wait=True)  # though nobody takes what the request gets
        return deltas + await collect(slow)

    assert len(joined(serve(llm, work))[1]) == 6


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
