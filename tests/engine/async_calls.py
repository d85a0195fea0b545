"""Requests, and ways to run coroutines over an engine, for the tests of the asyncio facade. Holds no test."""

import asyncio
import dataclasses

import jaxinfer

PARAMS = jaxinfer.SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
LONG = dataclasses.replace(PARAMS, max_tokens=300)
PROMPT = {"prompt_token_ids": [1, 2, 3]}


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
