"""Live weights: shared without a copy, exchanged without a compile, put to sleep and woken; what cannot be is refused and changes nothing."""

import contextlib
import dataclasses
import gc
import weakref

import jax
import numpy as np
import pytest

import jaxinfer
from jaxinfer.engine import fresh_state
from jaxinfer.engine.load import random_model
from jaxinfer.errors import CapacityError, CheckpointError, ConfigError, EngineError
from jaxinfer.models.shapes import SHAPES
from tests.engine.conftest import SMALL

PARAMS = jaxinfer.SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
PROMPT = {"prompt_token_ids": list(range(5, 75))}


@pytest.fixture(scope="module")
def other():
    return random_model(SHAPES["tiny"], dtype="float32", seed=9)


@pytest.fixture
def llm(make_llm, tiny_model):
    llm = make_llm(deterministic=True, max_num_seqs=4)
    llm.update_weights(tiny_model.params)  # what other tests leave may be copies of them: an engine that woke has its own
    yield llm
    assert not llm.engine.weights.is_asleep, "the next test needs it awake"
    llm.update_weights(tiny_model.params)


@contextlib.contextmanager
def no_compile(llm):
    before = llm.metrics()["num_compiles_after_warmup"]  # of the whole process
    yield
    assert llm.metrics()["num_compiles_after_warmup"] == before


@pytest.fixture
def own_llm():
    """An engine that may be left broken or asleep, over weights that nobody else holds."""
    return jaxinfer.LLM.from_model(random_model(SHAPES["tiny"], dtype="float32", seed=0), **{**SMALL, "enforce_eager": True})


def tokens(llm, prompt=PROMPT):
    (out,) = llm.generate(prompt, PARAMS)
    return out.outputs[0].token_ids


def follows(model, output):
    """Whether greedy output agrees with teacher forcing wherever the margin is clear."""
    sequence = np.array([[*PROMPT["prompt_token_ids"], *output]], np.int32)
    logits = np.asarray(model.logits(sequence))[0, len(PROMPT["prompt_token_ids"]) - 1:-1]
    top2 = np.sort(logits, axis=-1)[:, -2:]
    clear = top2[:, 1] - top2[:, 0] > 1e-4
    return clear.sum() > 5 and (logits.argmax(-1) == output)[clear].all()


def test_weights_are_shared_not_copied(tiny_model):
    model = jaxinfer.from_params(tiny_model.config, tiny_model.params)
    llm = jaxinfer.LLM.from_model(model, **{**SMALL, "enforce_eager": True})
    for name, x in tiny_model.params.items():
        assert llm.engine.model.params[name] is x and llm.engine.steps.params[name] is x, name


def test_an_update_exchanges_all_weights_and_forgets_the_prefix_cache(llm, tiny_model, other):
    old = tokens(llm)
    assert llm.generate(PROMPT, PARAMS)[0].num_cached_tokens >= 64
    with no_compile(llm):
        llm.update_weights(other.params)
        (out,) = llm.generate(PROMPT, PARAMS)
    assert out.num_cached_tokens == 0 and out.outputs[0].token_ids != old
    assert follows(other, out.outputs[0].token_ids) and not follows(tiny_model, out.outputs[0].token_ids)
    assert all(llm.engine.model.params[name] is x for name, x in other.params.items())
    with no_compile(llm):
        llm.update_weights({name: np.asarray(x) for name, x in tiny_model.params.items()})
        assert tokens(llm) == old
    llm.engine.scheduler.check_invariants()


def test_a_part_of_the_weights(llm, tiny_model, other):
    part = {name: x for name, x in other.params.items() if name.startswith("layers.1.")}
    llm.update_weights(part)
    mixed = {**tiny_model.params, **part}
    assert 0 < len(part) < len(mixed) and all(llm.engine.steps.params[name] is x for name, x in mixed.items())
    assert follows(dataclasses.replace(tiny_model, params=mixed), tokens(llm))


def deleted(x):
    copy = jax.numpy.array(x)
    copy.delete()
    return copy


@pytest.mark.parametrize(("change", "messages"), [
    (lambda p: {"embedding.weight": p["embedding.weight"][:-1], "final_norm.weight": p["final_norm.weight"].astype("bfloat16")},
     ["2 of 2 weights do not fit", "embedding.weight has the shape [255, 64] instead of [256, 64]",
      "final_norm.weight has the dtype bfloat16 instead of float32", "none was taken"]),
    (lambda p: {"final_norm.wieght": p["final_norm.weight"]},
     ["'final_norm.wieght' is not part of the model (did you mean 'final_norm.weight'?)"]),
    (lambda p: {5: p["final_norm.weight"]}, ["5 is not part of the model"]),
    (lambda p: {"final_norm.weight": [1.0] * 64}, ["final_norm.weight is a list instead of an array"]),
    (lambda p: {"final_norm.weight": deleted(p["final_norm.weight"])}, ["final_norm.weight was deleted, as donated arrays are"]),
    (lambda p: {f"x{i}": p["final_norm.weight"] for i in range(25)}, ["25 of 25", "and 5 more"]),
    (lambda p: {}, ["with 0 names", "llm.engine.model.params"]), (lambda p: [p], ["weights of type list"]),
])
def test_weights_that_do_not_fit_are_named_and_none_is_taken(llm, tiny_model, change, messages):
    given = change(tiny_model.params)
    if isinstance(given, dict) and len(given) == 1:
        given["layers.0.attention_norm.weight"] = tiny_model.params["layers.0.attention_norm.weight"] * 2
    with pytest.raises(CheckpointError) as raised:
        llm.update_weights(given)
    assert all(message in str(raised.value) for message in messages), str(raised.value)
    assert all(llm.engine.model.params[name] is x for name, x in tiny_model.params.items())


def test_traced_weights_are_refused(llm):
    def update(x):
        llm.update_weights({"final_norm.weight": x})

    with pytest.raises(CheckpointError, match="is traced: call update_weights outside jit"):
        jax.eval_shape(update, llm.engine.model.params["final_norm.weight"])


def test_open_requests_are_a_reason_to_refuse_or_to_wait(llm, tiny_model, other):
    stream = llm.stream(PROMPT, PARAMS)
    next(stream)
    for call in (lambda: llm.update_weights(other.params), llm.sleep, lambda: llm.sleep(2), llm.wake):
        with pytest.raises(EngineError, match=r"1 requests are running and 0 waiting. Let them end .*wait=True"):
            call()
    llm.update_weights(other.params, wait=True)
    assert follows(tiny_model, list(stream)[-1].outputs[0].token_ids) and follows(other, tokens(llm))


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_the_device_and_waking_changes_nothing(llm, tiny_model, level):
    before, num_compiles = tokens(llm), llm.metrics()["num_compiles_after_warmup"]
    llm.wake()  # awake already: nothing happens
    llm.sleep(level)
    assert all(x.is_deleted() for x in jax.tree.leaves(llm.engine.steps.state)) and not llm.engine.model.params
    again = "update_weights(params) with all weights, then wake()" if level == 2 else r"call wake()"
    calls = [lambda: llm.generate(PROMPT, PARAMS), lambda: next(llm.stream(PROMPT, PARAMS)), lambda: llm.sleep(level),
             lambda: llm.generate([PROMPT], PARAMS, on_error="return")]
    for call in calls if level == 2 else [*calls, lambda: llm.update_weights(tiny_model.params)]:
        with pytest.raises(EngineError) as raised:
            call()
        assert f"asleep (level {level})" in str(raised.value) and again in str(raised.value)
    if level == 2:
        names = list(tiny_model.params)
        with pytest.raises(EngineError, match=rf"{len(names)} of {len(names)} are missing \({names[0]}.* and \d+ more\)"):
            llm.wake()
        llm.update_weights({name: tiny_model.params[name] for name in names[:-1]})
        with pytest.raises(EngineError, match=rf"1 of {len(names)} are missing \({names[-1]}\)"):
            llm.wake()
        llm.update_weights({names[-1]: tiny_model.params[names[-1]]})
    llm.wake()
    assert tokens(llm) == before and llm.metrics()["num_compiles_after_warmup"] == num_compiles
    llm.engine.scheduler.check_invariants()


def test_nobody_holds_the_weights_of_a_sleeping_engine(own_llm):
    held = [weakref.ref(x) for x in own_llm.engine.model.params.values()]
    own_llm.sleep(level=2)  # level 1 keeps them on a CPU, where host memory is the device's: numpy shares the arrays
    gc.collect()
    assert len(held) > 10 and not any(ref() is not None for ref in held)


def test_waking_where_the_memory_is_taken_can_be_tried_again(llm, monkeypatch):
    before = tokens(llm)
    llm.sleep()

    def exhausted(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes.")

    with monkeypatch.context() as patch:
        patch.setattr(fresh_state, "make_state", exhausted)
        with pytest.raises(CapacityError, match=r"stays asleep.*KV pool \(.* GB\) do not fit.*call wake\(\) again.*kv_cache_memory_bytes"):
            llm.wake()
    with pytest.raises(EngineError, match=r"wake\(\)"):
        tokens(llm)
    assert not llm.engine.model.params
    llm.wake()
    assert tokens(llm) == before


@pytest.mark.parametrize("level", [0, 3, True, None, "1"])
def test_other_levels_of_sleep_are_refused(llm, level):
    with pytest.raises(ConfigError, match="must be 1 .* or 2"):
        llm.sleep(level)


def test_a_pool_that_does_not_fit_says_what_to_set(monkeypatch, tiny_model):
    def exhausted(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes.")

    monkeypatch.setattr(fresh_state, "make_state", exhausted)
    with pytest.raises(CapacityError, match=r"KV pool of 97 pages \(\d+ bytes\) does not fit on .*trainer.*set kv_cache_memory_bytes"):
        jaxinfer.LLM.from_model(tiny_model, **SMALL)


def test_other_errors_of_the_device_are_not_taken_for_it(monkeypatch, tiny_model):
    def fails(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("INTERNAL: no such device")

    monkeypatch.setattr(fresh_state, "make_state", fails)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no such device"):
        jaxinfer.LLM.from_model(tiny_model, **SMALL)


@pytest.mark.parametrize("num_bytes", [10**6, 10**6 + 12345])
def test_a_budget_in_bytes_is_kept(tiny_model, num_bytes):
    llm = jaxinfer.LLM.from_model(tiny_model, **{**SMALL, "kv_cache_memory_bytes": num_bytes, "enforce_eager": True})
    cache = sum(x.nbytes for x in jax.tree.leaves(llm.engine.steps.state.cache))
    page = llm.engine.resolved.memory.page_bytes
    assert num_bytes - page < cache <= num_bytes and cache == llm.engine.resolved.memory.kv_bytes
