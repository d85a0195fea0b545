"""The prefix cache saved to disk and loaded by another engine: its hits, its bits, and the refusal of what does not fit."""

import dataclasses
import json
import os

import numpy as np
import pytest
from safetensors import safe_open

import jaxinfer
from jaxinfer.engine import cache_file
from jaxinfer.engine.saved_prefixes import checksum
from jaxinfer.errors import ConfigError, EngineError, PrefixCacheError
from tests.engine.test_engine import GREEDY, ids, prompts_of

FIXED = {"deterministic": True, "max_num_seqs": 4}
PROMPTS = prompts_of([100, 37, 16, 5], seed=51)
PARAMS = jaxinfer.SamplingParams(max_tokens=8, logprobs=1, **GREEDY)


@pytest.fixture(scope="module")
def saved(make_llm, tmp_path_factory):
    """(file, the outputs whose pages it holds)."""
    llm = make_llm(**FIXED)
    llm.engine.pages.evict_all()
    outputs = llm.generate(PROMPTS, PARAMS)
    path = tmp_path_factory.mktemp("cache") / "prefixes.safetensors"
    assert llm.save_prefix_cache(path) == llm.engine.pages.num_cached > 8
    assert os.listdir(path.parent) == [path.name]
    return path, outputs


@pytest.fixture
def other(make_llm):
    """Another engine of the same weights, its cache empty."""
    llm = make_llm(**FIXED, async_scheduling=False)
    llm.engine.pages.evict_all()
    return llm


def test_another_engine_finds_everything_and_goes_on_with_the_same_bits(saved, other):
    path, want = saved
    before = other.metrics()["num_compiles_after_warmup"]
    assert other.load_prefix_cache(path) == other.engine.pages.num_cached
    other.engine.scheduler.check_invariants()
    for out, first in zip(other.generate(PROMPTS, PARAMS), want, strict=True):
        assert out.num_cached_tokens == len(out.prompt_token_ids) - 1
        assert ids([out]) == ids([first]) and out.outputs[0].logprobs == first.outputs[0].logprobs
    assert other.metrics()["num_compiles_after_warmup"] == before
    longer = {"prompt_token_ids": [*want[0].prompt_token_ids, *want[0].outputs[0].token_ids, 3]}
    assert other.generate(longer, PARAMS)[0].num_cached_tokens == 107  # what was generated, too, but for the last token


def test_loading_replaces_what_is_cached_and_a_cache_loaded_can_be_saved(saved, other, tmp_path):
    path, _ = saved
    other.generate(prompts_of([50], seed=52), PARAMS)
    num_pages = other.load_prefix_cache(path)
    assert other.save_prefix_cache(tmp_path / "again") == num_pages == other.engine.pages.num_cached
    pages = [safe_open(p, "numpy").get_tensor("pages") for p in (path, tmp_path / "again")]
    assert pages[0].shape == (num_pages, 2, 2, 2, 16, 16) and np.array_equal(np.sort(pages[0], axis=0), np.sort(pages[1], axis=0))


def test_a_smaller_pool_takes_what_was_used_last(saved, make_llm):
    llm = make_llm(**FIXED, num_pages=25)
    llm.engine.pages.evict_all()
    big = make_llm(**FIXED)
    big.generate(prompts_of([300, 300], seed=53), PARAMS)
    big.generate(PROMPTS[0], PARAMS)
    path = saved[0].with_name("many")
    assert big.save_prefix_cache(path) > 24 and llm.load_prefix_cache(path) == 24
    assert llm.generate(PROMPTS[0], PARAMS)[0].num_cached_tokens == 99


def test_prompts_to_be_scored_are_nobody_elses(make_llm, tmp_path):
    llm = make_llm(**FIXED)
    llm.engine.pages.evict_all()
    params = dataclasses.replace(PARAMS, prompt_logprobs=1)
    for _ in range(2):
        assert llm.generate(PROMPTS[1], params)[0].num_cached_tokens == 0
    assert llm.engine.pages.num_cached > 0 and llm.save_prefix_cache(tmp_path / "none") == 0
    assert llm.load_prefix_cache(tmp_path / "none") == 0


def rewritten(path, change):
    """The file with its metadata changed."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + length])
    change(header["__metadata__"])
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length:]


@pytest.mark.parametrize(("change", "message"), [
    (lambda m: m.update(format="x"), "format is 'x' in the file"), (lambda m: m.update(version="2"), "version is '2'.*save it anew with this"),
    (lambda m: m.update(page_size="64"), "page_size is '64' in the file and '16' here: start the engine with that page_size"),
    (lambda m: m.update(kv_dtype="bfloat16"), "kv_dtype is 'bfloat16'.*that kv_dtype"),
    (lambda m: m.update(model="abc"), "model is 'abc'.*other weights or another configuration; start without it"),
    (lambda m: m.update(state=m["state"].replace("1", "2", 1)), "damaged .its table of entries does not match"),
    (lambda m: m.pop("state"), "its header cannot be understood: KeyError"),
])
def test_a_file_of_something_else_is_refused(saved, other, tmp_path, change, message):
    (tmp_path / "file").write_bytes(rewritten(saved[0], change))
    with pytest.raises(PrefixCacheError, match=message):
        other.load_prefix_cache(tmp_path / "file")


def test_a_damaged_file_is_refused_wherever_it_is_cut_or_changed(saved, other, tmp_path):
    path, _ = saved
    data, file = path.read_bytes(), tmp_path / "file"
    start = 8 + int.from_bytes(data[:8], "little")
    other.generate(PROMPTS[2], PARAMS)
    kept = other.engine.pages.num_cached
    for size in (0, 7, 8, 100, start, start + 1, len(data) - 1):
        file.write_bytes(data[:size])
        with pytest.raises(PrefixCacheError, match="is damaged .*start without it"):
            other.load_prefix_cache(file)
    for at in (start, (start + len(data)) // 2, len(data) - 1):
        file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1:])
        with pytest.raises(PrefixCacheError, match="does not match its checksum"):
            other.load_prefix_cache(file)
    file.write_bytes(os.urandom(200))
    with pytest.raises(PrefixCacheError, match="is damaged"):
        other.load_prefix_cache(file)
    assert other.engine.pages.num_cached == kept  # and what was there has stayed
    with pytest.raises(PrefixCacheError, match="No such file"):
        other.load_prefix_cache(tmp_path / "absent")


def test_other_weights_are_told_apart(saved, make_llm, tiny_model, other):
    name = "layers.1.mlp.down.weight"
    weights = tiny_model.params[name]
    other.update_weights({name: weights.at[0, 0].set(weights[0, 1]).at[0, 1].set(weights[0, 0])})
    try:
        with pytest.raises(PrefixCacheError, match="model is .* other weights"):
            other.load_prefix_cache(saved[0])
    finally:
        other.update_weights({name: weights})
    assert other.load_prefix_cache(saved[0]) > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "uint8", "int16"])
def test_the_checksum_sees_values_and_places(dtype):
    import jax.numpy as jnp

    x = jnp.arange(6).reshape(2, 3).astype(dtype)
    others = [x, x.at[0, 0].set(7), x[::-1], x.reshape(3, 2).T, x.at[1, 2].set(4).at[1, 1].set(5)]
    assert len({int(checksum(y)) for y in others}) == len(others)


def test_what_stands_at_the_path_survives_a_failure_to_write(saved, make_llm, tmp_path, monkeypatch):
    llm = make_llm(**FIXED)
    file = tmp_path / "file"
    file.write_bytes(b"before")
    monkeypatch.setattr(cache_file.os, "fsync", lambda number: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(PrefixCacheError, match="cannot be written .No space left on device."):
        llm.save_prefix_cache(file)
    assert file.read_bytes() == b"before" and os.listdir(tmp_path) == ["file"]
    with pytest.raises(PrefixCacheError, match="No such file"):
        llm.save_prefix_cache(tmp_path / "absent" / "file")
    assert llm.generate(PROMPTS[0], PARAMS)[0].outputs  # the engine goes on


@pytest.mark.parametrize("path", ["", ".", "/", "a\0b", "\ud800", None, 5, b"file"])
@pytest.mark.parametrize("method", ["save_prefix_cache", "load_prefix_cache"])
def test_a_path_that_names_no_file_is_refused_and_the_engine_goes_on(other, method, path):
    with pytest.raises(PrefixCacheError, match="path = .*must name a file"):
        getattr(other, method)(path)
    assert other.generate(PROMPTS[0], PARAMS)[0].outputs


def test_what_is_no_ordinary_file_is_neither_waited_for_nor_replaced(other, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        for call in (other.load_prefix_cache, other.save_prefix_cache):
            with pytest.raises(PrefixCacheError, match="no ordinary file"):
                call(path)
    assert pipe.is_fifo() and os.listdir(tmp_path) == ["pipe"]


def test_a_header_nested_without_end_is_damaged(other, tmp_path):
    header = b"[" * 100_000
    (tmp_path / "file").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(PrefixCacheError, match="RecursionError"):
        other.load_prefix_cache(tmp_path / "file")


def test_each_of_several_writers_of_one_path_writes_a_whole_file(saved, make_llm, tmp_path):
    """Threads of a process, and processes of equal number on several machines, do not write into each other's file."""
    identity = make_llm(**FIXED).engine.saved_prefixes._identity(make_llm(**FIXED).engine.model)
    with cache_file.CacheFile(saved[0], identity) as file:
        state, rows = file.state, list(file.rows(range(file.num_rows)))

    def blocks():
        for i, row in enumerate(rows):
            if i == 3:  # the second writer comes and goes while the first one writes
                cache_file.write(tmp_path / "file", identity, state, (row[None] for row in rows))
            yield row[None]

    cache_file.write(tmp_path / "file", identity, state, blocks())
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_bytes() == saved[0].read_bytes()


def test_engines_that_cannot_save_say_so(make_llm, tmp_path):
    with pytest.raises(ConfigError, match="save_prefix_cache: enable_prefix_caching = False"):
        make_llm(**FIXED, enable_prefix_caching=False).save_prefix_cache(tmp_path / "file")
    llm = make_llm(**FIXED)
    stream = llm.stream(PROMPTS[0], PARAMS)
    next(stream)
    with pytest.raises(EngineError, match="load_prefix_cache: 1 requests are running"):
        llm.load_prefix_cache(tmp_path / "file")
    stream.close()
