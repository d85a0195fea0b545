"""An engine stays whole: Ctrl-C, failures inside a step, two threads, callbacks and streams that step for each other."""

import dataclasses
import os
import signal
import threading

import numpy as np
import pytest

import jaxinfer
from jaxinfer.batch import steps_to_ends
from jaxinfer.engine import engine as engine_module
from jaxinfer.engine.guard import Guard
from jaxinfer.errors import EngineError, RequestError
from jaxinfer.request import FinishReason
from tests.engine.conftest import SMALL

PARAMS = jaxinfer.SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
PROMPT = {"prompt_token_ids": [1, 2, 3]}


@pytest.fixture(autouse=True)
def heard_interrupts():
    """A shell starts what it puts in the background with SIGINT ignored; here it raises KeyboardInterrupt all the same."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def is_idle(llm):
    return not llm.engine.has_work and not llm.engine.outputs._live and llm.engine.pages.num_free == llm.engine.pages.num_pages - 1


def test_interrupt_inside_a_step_comes_after_it(make_llm, monkeypatch):
    llm = make_llm()
    want = llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids
    pack, packed = engine_module.pack, []

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGINT)
        packed.append(pack(*args))
        return packed[-1]

    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "pack", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPT, PARAMS)
    assert len(packed) == 1 and signal.getsignal(signal.SIGINT) is before
    assert llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids == want
    assert is_idle(llm)


def test_interrupt_between_steps_of_a_stream_leaves_the_engine_usable(make_llm):
    llm = make_llm()
    with pytest.raises(KeyboardInterrupt):
        for _ in llm.stream(PROMPT, PARAMS):
            raise KeyboardInterrupt
    assert len(llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids) == 6


def test_a_failure_inside_a_step_is_named_by_every_later_call(tiny_model, monkeypatch):
    llm = jaxinfer.LLM.from_model(tiny_model, **{**SMALL, "enforce_eager": True})

    def fails(*args):
        raise OverflowError("int too large")

    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "pack", fails)
        with pytest.raises(OverflowError):
            llm.generate(PROMPT, PARAMS)
    for call in (lambda: llm.generate(PROMPT, PARAMS), lambda: list(llm.stream(PROMPT, PARAMS)), llm.engine.step):
        with pytest.raises(EngineError, match=r"OverflowError: int too large.*LLM\.from_model"):
            call()


def test_a_refused_request_does_not_break_the_engine(make_llm):
    llm = make_llm()
    with pytest.raises(RequestError):
        llm.engine.add(dataclasses.replace(llm.groups.make(PROMPT, PARAMS).requests[0], prompt_token_ids=()))
    assert len(llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids) == 6


def test_a_second_thread_is_refused_and_its_requests_leave_later(make_llm, monkeypatch):
    llm = make_llm()
    pack, errors = engine_module.pack, []

    def with_visitor(*args):
        if not errors:
            thread = threading.Thread(target=visit)
            thread.start()
            thread.join()
        return pack(*args)

    def visit():
        try:
            llm.generate(PROMPT, PARAMS)
        except EngineError as e:
            errors.append(e)

    monkeypatch.setattr(engine_module, "pack", with_visitor)
    assert len(llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids) == 6
    assert "one thread at a time" in str(errors[0]) and is_idle(llm)


def test_a_request_ended_during_a_step_is_withdrawn_right_after_it(make_llm, monkeypatch):
    """As when the garbage collector closes a stream in the middle of a step."""
    llm = make_llm()
    stream = llm.stream(PROMPT, PARAMS)
    next(stream)
    pack = engine_module.pack

    def with_close(*args):
        stream.close()
        return pack(*args)

    monkeypatch.setattr(engine_module, "pack", with_close)
    assert len(llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids) == 6
    assert is_idle(llm)


def test_a_stream_that_others_bring_to_its_end_still_shows_it(make_llm):
    llm = make_llm()
    stream, other = llm.stream(PROMPT, PARAMS), llm.stream(PROMPT, PARAMS)
    next(stream), next(other)
    longer = dataclasses.replace(PARAMS, max_tokens=20)
    (out,) = llm.generate(PROMPT, longer)
    for s in (stream, other):
        (last,) = list(s)
        assert last.finished and last.outputs[0].token_ids == out.outputs[0].token_ids[:6]
    assert is_idle(llm)


def test_generate_inside_on_output(make_llm):
    llm = make_llm()
    params = [dataclasses.replace(PARAMS, max_tokens=n) for n in (2, 4, 3, 30)]
    order, inner = [], []

    def on_output(index, output):
        order.append(index)
        inner.append(llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids)

    outputs = llm.generate([PROMPT] * 4, params, on_output=on_output)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [2, 4, 3, 30]
    assert sorted(order) == [0, 1, 2, 3] and order[-1] == 3 and len(set(inner)) == 1
    assert is_idle(llm)


def test_requests_withdrawn_from_outside_end(make_llm):
    llm = make_llm()

    def withdraw(index, output):
        for request in list(llm.engine.scheduler._running.requests.values()):
            llm.engine.scheduler.abort(request.request_id)

    outputs = llm.generate([PROMPT] * 2, [PARAMS, dataclasses.replace(PARAMS, max_tokens=50)], on_output=withdraw)
    assert outputs[1].outputs[0].finish_reason is FinishReason.ABORT


def test_work_that_the_engine_does_not_know_is_an_error(make_llm):
    llm = make_llm()
    group = llm.groups.make(PROMPT, PARAMS)
    with pytest.raises(EngineError, match="internal error"):
        next(steps_to_ends(llm.engine, {0: group}, {}))


def test_a_refused_group_leaves_nothing(make_llm, monkeypatch):
    llm = make_llm()
    add, added = llm.engine.scheduler.add, []

    def refuses_the_second(request, **deadline):
        if added:
            raise RequestError("no room")
        added.append(request)
        add(request, **deadline)

    monkeypatch.setattr(llm.engine.scheduler, "add", refuses_the_second)
    (out,) = llm.generate(PROMPT, jaxinfer.SamplingParams(n=2), on_error="return")
    assert out.error == "no room" and is_idle(llm)


def test_a_second_interrupt_is_not_put_off():
    guard = Guard()
    with pytest.raises(KeyboardInterrupt), guard.using():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("not interrupted")
    assert guard.is_broken


@pytest.mark.parametrize(("prompts", "message"), [
    (5, "type int"), (None, "type NoneType"), ({"prompt_token_ids": 5}, "is a int"), ({"prompt_token_ids": None}, "is a NoneType"),
    ({"prompt_token_ids": [1, True]}, "integer"), ({"prompt_token_ids": [1.0]}, "integer"), ({1: 2, "a": 3}, "exactly one of"),
    ({"prompt_token_ids": [1, 10**5000]}, "16610 bits"),
])
def test_prompts_of_another_form(make_llm, prompts, message):
    llm = make_llm()
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, PARAMS)
    if isinstance(prompts, dict):
        (out,) = llm.generate([prompts], PARAMS, on_error="return")
        assert out.error and is_idle(llm)


@pytest.mark.parametrize("params", [{"temperature": 0}, [{"temperature": 0}], 5, "greedy"])
def test_params_of_another_form(make_llm, params):
    llm = make_llm()
    with pytest.raises(RequestError, match="sampling parameters of type (dict|int|str)"):
        llm.generate([PROMPT], params)
    if not isinstance(params, list):
        with pytest.raises(RequestError, match="sampling parameters of type"):
            next(llm.stream(PROMPT, params))


@pytest.mark.parametrize("messages", [5, None, "hello", {"role": "user", "content": "x"}])
def test_messages_of_another_form(make_llm, messages):
    with pytest.raises(RequestError, match="messages of type"):
        make_llm().chat(messages, PARAMS)


def test_numpy_ids(make_llm):
    llm = make_llm()
    want = llm.generate(PROMPT, PARAMS)[0]
    for given in (np.array([1, 2, 3]), list(np.array([1, 2, 3], np.int32)), range(1, 4)):
        (out,) = llm.generate({"prompt_token_ids": given}, PARAMS)
        assert out.prompt_token_ids == (1, 2, 3) and all(type(t) is int for t in out.prompt_token_ids)
        assert out.outputs[0].token_ids == want.outputs[0].token_ids
