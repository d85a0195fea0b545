"""The engine on a tiny random model: random traffic, closed compile set, and equality of the ways to serve a request."""

import jax
import numpy as np
import pytest

import jaxinfer
from jaxinfer.engine.compiled import enable_compilation_cache, jit_logits
from jaxinfer.errors import CapacityError, ConfigError, RequestError
from jaxinfer.request import FinishReason
from tests.engine.conftest import SINGLE, SMALL

GREEDY = {"temperature": 0, "ignore_eos": True}


def prompts_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [{"prompt_token_ids": rng.integers(0, 256, n).tolist()} for n in lengths]


def ids(outputs):
    return [c.token_ids for o in outputs for c in o.outputs]


def test_random_traffic_ends_returns_its_pages_and_compiles_nothing(make_llm):
    llm = make_llm()
    rng = np.random.default_rng(7)
    params = [jaxinfer.SamplingParams(
        temperature=float(rng.choice([0, 0.5, 1.5])), top_k=int(rng.choice([0, 1, 40, 500])), top_p=float(rng.choice([1.0, 0.9, 0.3])),
        min_p=float(rng.choice([0, 0.1])), seed=int(rng.integers(1 << 32)) if rng.random() < 0.5 else None, n=int(rng.choice([1, 1, 1, 2])),
        max_tokens=int(rng.integers(1, 24)), ignore_eos=True) for _ in range(200)]
    before = llm.metrics()["num_compiles_after_warmup"]  # of the whole process: other engines of these tests
    outputs = llm.generate(prompts_of(rng.integers(1, 301, 200)), params)
    for out, p in zip(outputs, params, strict=True):
        assert out.finished and len(out.outputs) == p.n
        for completion in out.outputs:
            assert completion.finish_reason is FinishReason.LENGTH and len(completion.token_ids) == p.max_tokens
            assert all(0 <= t < 256 for t in completion.token_ids)
    scheduler = llm.engine.scheduler
    scheduler.check_invariants()
    pages = llm.engine.pages
    assert pages.num_free == pages.num_pages - 1 and not llm.engine.has_work
    assert llm.metrics()["num_compiles_after_warmup"] == before


def test_greedy_follows_the_teacher_forced_argmax(make_llm, tiny_model):
    prompts = prompts_of([1, 5, 16, 17, 40, 100], seed=1)
    outputs = make_llm().generate(prompts, jaxinfer.SamplingParams(max_tokens=12, **GREEDY))
    lengths = np.array([len(out.prompt_token_ids) + 12 for out in outputs], np.int32)
    sequences = np.zeros((len(outputs), lengths.max()), np.int32)
    for sequence, out in zip(sequences, outputs, strict=True):
        ids_of = [*out.prompt_token_ids, *out.outputs[0].token_ids]
        sequence[:len(ids_of)] = ids_of
    forced = np.asarray(jit_logits(tiny_model)(sequences, lengths))
    for row, length, out in zip(forced, lengths, outputs, strict=True):
        logits = row[len(out.prompt_token_ids) - 1:length - 1]
        top2 = np.sort(logits, axis=-1)[:, -2:]
        clear = top2[:, 1] - top2[:, 0] > 1e-4
        assert clear.sum() > 6 and (logits.argmax(-1) == out.outputs[0].token_ids)[clear].all()


@pytest.mark.parametrize("other", [
    {"async_scheduling": False}, {"enable_prefix_caching": False}, {"num_pages": 25},
], ids=lambda x: next(iter(x)))
def test_deterministic_mode_gives_the_same_tokens_however_served(make_llm, other):
    """Alone, batched, with fewer neighbours, from a warm cache, chunked anew or preempted: all bit-equal in deterministic mode."""
    fixed = {"deterministic": True, "max_num_seqs": 4}
    prompts = prompts_of([3, 90, 33, 150, 64, 1, 90, 33], seed=2)
    params = [jaxinfer.SamplingParams(max_tokens=40, ignore_eos=True, temperature=t, seed=i, top_p=0.9) for i, t in
              enumerate([0, 1.0, 0, 0.7, 1.0, 0, 0, 1.3])]
    base = make_llm(**fixed)
    want = ids(base.generate(prompts, params))
    assert want == ids(base.generate(prompts, params))  # now from the prefix cache
    assert want == [ids(base.generate(p, q))[0] for p, q in zip(prompts, params, strict=True)]
    got = make_llm(**{**fixed, **other}).generate(prompts, params)
    assert ids(got) == want
    if "num_pages" in other:
        assert sum(o.metrics.num_preemptions for o in got) > 0


def test_completions_of_one_prompt_differ_and_repeat(make_llm):
    params = jaxinfer.SamplingParams(n=4, temperature=1.5, max_tokens=8, seed=5, ignore_eos=True)
    (prompt,) = prompts_of([9])
    first, second = (make_llm().generate(prompt, params)[0] for _ in range(2))
    assert ids([first]) == ids([second]) and len(set(ids([first]))) == 4
    assert [c.index for c in first.outputs] == [0, 1, 2, 3]


def test_unseeded_requests_differ(make_llm):
    (prompt,) = prompts_of([9])
    params = jaxinfer.SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True)
    assert len(set(ids(make_llm().generate([prompt] * 4, params)))) > 1


def test_stop_ids_and_end_tokens(make_llm):
    llm = make_llm()
    (prompt,) = prompts_of([9], seed=4)
    free = ids(llm.generate(prompt, jaxinfer.SamplingParams(max_tokens=12, **GREEDY)))[0]
    stop = free[5]
    (out,) = llm.generate(prompt, jaxinfer.SamplingParams(max_tokens=12, stop_token_ids=[stop], **GREEDY))
    completion = out.outputs[0]
    assert completion.finish_reason is FinishReason.STOP and completion.stop_reason == stop
    assert completion.token_ids == free[:free.index(stop) + 1]


def test_stream_is_cumulative_and_closing_it_early_frees_everything(make_llm):
    llm = make_llm()
    (prompt,) = prompts_of([40], seed=5)
    params = jaxinfer.SamplingParams(max_tokens=10, **GREEDY)
    whole = ids(llm.generate(prompt, params))[0]
    lengths = []
    for out in llm.stream(prompt, params):
        assert out.outputs[0].token_ids == whole[:len(out.outputs[0].token_ids)]
        lengths.append(len(out.outputs[0].token_ids))
    assert lengths == sorted(set(lengths)) and lengths[-1] == 10 and out.finished
    stream = llm.stream(prompt, params)
    next(stream)
    stream.close()
    assert ids(llm.generate(prompt, params))[0] == whole
    assert llm.engine.pages.num_free == llm.engine.resolved.num_pages - 1
    llm.engine.scheduler.check_invariants()


def test_a_long_cached_prefix_needs_more_page_updates_than_a_bucket_takes(make_llm):
    llm = make_llm(max_num_seqs=1, batch_buckets=(1,))
    (prompt,) = prompts_of([370], seed=6)
    params = jaxinfer.SamplingParams(max_tokens=5, **GREEDY)
    cold, warm = llm.generate(prompt, params)[0], llm.generate(prompt, params)[0]
    assert cold.num_cached_tokens == 0 and warm.num_cached_tokens == 369 and ids([cold]) == ids([warm])
    assert max(x.num_updates for x in llm.engine.resolved.layouts) < 368 // 16


def test_non_finite_logits_end_the_request_with_an_error(tiny_model):
    name = "layers.1.attention_norm.weight"
    broken = {**tiny_model.params, name: tiny_model.params[name].at[3].set(np.nan)}
    import dataclasses

    llm = jaxinfer.LLM.from_model(dataclasses.replace(tiny_model, params=broken), **SMALL, **SINGLE)
    (out,) = llm.generate({"prompt_token_ids": [1, 2, 3]})
    assert out.outputs[0].finish_reason is FinishReason.ERROR and "non-finite logits, first in its layer 1" in out.error


@pytest.mark.parametrize(("prompt", "message"), [
    ({"prompt_token_ids": []}, "0 tokens"), ({"prompt_token_ids": [256]}, "outside the vocabulary [0, 256)"),
    ({"prompt_token_ids": [-1]}, "token id -1"), ({"prompt_token_ids": [1] * 384}, "at most 383"),
    ({"prompt_token_ids": ["a"]}, "integer"), ({}, "exactly one of"), ("text", "no tokenizer"), (7, "type int"),
])
def test_bad_prompts_are_refused_and_lose_nothing(make_llm, prompt, message):
    llm = make_llm()
    good = prompts_of([5])[0]
    params = jaxinfer.SamplingParams(max_tokens=3, **GREEDY)
    with pytest.raises(RequestError, match="(?s).*") as error:
        llm.generate([good, prompt], params)
    assert message in str(error.value) and not llm.engine.has_work
    first, second = llm.generate([good, prompt], params, on_error="return")
    assert len(first.outputs[0].token_ids) == 3 and message in second.error and second.outputs == ()


def test_bad_requests_beside_the_prompt(make_llm):
    llm = make_llm()
    for params, message in ((jaxinfer.SamplingParams(stop="x"), "needs a tokenizer|need a tokenizer"),
                            (jaxinfer.SamplingParams(stop_token_ids=[999]), "outside the vocabulary")):
        with pytest.raises(RequestError, match=message):
            llm.generate(prompts_of([3]), params)
    with pytest.raises(RequestError, match="2 sampling parameters for 1 prompts"):
        llm.generate(prompts_of([3]), [jaxinfer.SamplingParams()] * 2)
    with pytest.raises(ConfigError, match="on_error"):
        llm.generate(prompts_of([3]), on_error="ignore")


@pytest.mark.parametrize(("settings", "error", "message"), [
    ({"max_model_len": 600}, ConfigError, "trained for 512"), ({"num_pages": 5}, CapacityError, "max_model_len to 64"),
    ({"kv_cache_memory_bytes": 1}, CapacityError, "max_model_len"), ({"max_num_batched_tokens": 2}, ConfigError, "at least 4"),
    ({"page_sise": 16}, ConfigError, "Did you mean 'page_size'"), ({"page_size": 17}, ConfigError, "one of"),
    ({"block_size": 16}, ConfigError, "given twice"), ({"scheduling_policy": "lifo"}, ConfigError, "fcfs"),
    ({"dtype": "int4"}, ConfigError, "bfloat16"), ({"tensor_parallel_size": 2}, ConfigError, "the weights lie on 1 device"),
    ({"num_pages": 64, "kv_cache_memory_bytes": 10**6}, ConfigError, "give one of them"),
    ({"token_buckets": (8, 4)}, ConfigError, "increasing"), ({"deterministic": True}, ConfigError, "leave out one of the two"),
    ({"num_scheduler_steps": 0}, ConfigError, "an integer in [1, 32]"),
])
def test_settings_that_cannot_work_are_refused(tiny_model, settings, error, message):
    with pytest.raises(error) as raised:
        jaxinfer.LLM.from_model(tiny_model, **{**SMALL, **settings})
    assert message in str(raised.value)


def test_eager_mode_gives_the_same_tokens(make_llm):
    prompts = prompts_of([7, 20], seed=8)
    params = jaxinfer.SamplingParams(max_tokens=3, **GREEDY)
    eager = make_llm(enforce_eager=True, num_scheduler_steps=2)  # bursts are single steps there
    assert ids(eager.generate(prompts, params)) == ids(make_llm().generate(prompts, params))


def test_donated_state_is_reused_in_place(make_llm):
    warm_up = make_llm().engine.warm_up
    assert warm_up.aliased_bytes >= warm_up.state_bytes


def test_the_folder_of_compiled_programs_is_the_processs_own_or_else_the_settings(tmp_path):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    try:
        for own, asked, then in (("own", "asked", "own"), (None, None, None), (None, "asked", "asked")):
            jax.config.update(names[0], own and str(tmp_path / own))
            enable_compilation_cache(asked and str(tmp_path / asked))
            assert jax.config.jax_compilation_cache_dir == (then and str(tmp_path / then))
        assert (tmp_path / "asked").is_dir() and jax.config.jax_persistent_cache_min_compile_time_secs == 0.5
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
