"""How an engine starts, and what is left of one that did not or that nobody needs any more."""

import gc
import logging
import threading
import time
import weakref

import jax
import pytest

import jaxinfer
from jaxinfer.engine import compiled, executables
from jaxinfer.errors import CapacityError
from tests.engine.conftest import SINGLE, SMALL
from tests.engine.test_engine import prompts_of


def test_an_engine_that_nobody_holds_gives_its_memory_back_at_once(tiny_model):
    """Without a run of the garbage collector, which may come long after the next engine has asked for the same memory."""
    llm = jaxinfer.LLM.from_model(tiny_model, **{**SMALL, "enforce_eager": True})
    llm.generate(prompts_of([20]), jaxinfer.SamplingParams(max_tokens=2, temperature=0))
    held = [weakref.ref(x) for x in jax.tree.leaves(llm.engine.steps.state)]
    gc.collect()
    gc.disable()
    try:
        del llm
        assert len(held) > 8 and not any(ref() is not None for ref in held)
    finally:
        gc.enable()


@pytest.mark.parametrize("collects", [True, False])
def test_after_a_compile_that_failed_the_rest_is_not_compiled(tiny_model, monkeypatch, collects):
    calls, real = [], executables._compile

    def fails(field, key, lowered):
        calls.append(field)
        time.sleep(0.2)
        if len(calls) == 1:
            raise RuntimeError("planted")
        return real(field, key, lowered)

    monkeypatch.setattr(executables, "_compile", fails)
    monkeypatch.setattr(executables.os, "cpu_count", lambda: 1)
    before = threading.active_count()
    (gc.enable if collects else gc.disable)()
    try:
        with pytest.raises(RuntimeError, match="planted"):
            jaxinfer.LLM.from_model(tiny_model, **SMALL, **SINGLE)
        assert gc.isenabled() == collects
    finally:
        gc.enable()
    assert 1 <= len(calls) < 8 and threading.active_count() == before


def test_memory_that_runs_out_at_start_is_a_capacity_error(tiny_model, monkeypatch):
    def exhausted(field, key, lowered):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes.")

    monkeypatch.setattr(executables, "_compile", exhausted)
    with pytest.raises(CapacityError, match="no room for the largest step .* lower gpu_memory_utilization .*allocate 123 bytes"):
        jaxinfer.LLM.from_model(tiny_model, **SMALL, **SINGLE)


def test_a_cache_folder_that_cannot_be_made_is_no_reason_not_to_start(monkeypatch, caplog):
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        with caplog.at_level(logging.WARNING):
            compiled.enable_compilation_cache("/dev/null/folder")
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert "compilation_cache_dir = '/dev/null/folder' cannot be made (Not a directory)" in caplog.text
