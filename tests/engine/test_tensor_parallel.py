"""An engine over several devices: the tokens of one device, weights that are shared and not copied, and what cannot be shared refused."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import jaxinfer
from convert.converter import convert
from jaxinfer.engine.dump import read_dump
from jaxinfer.engine.hardware import named_gpu
from jaxinfer.engine.load import load, random_model, teacher_forced_logits
from jaxinfer.engine.placement import lying_as, place
from jaxinfer.engine.saved_prefixes import checksum
from jaxinfer.errors import CheckpointError, ConfigError
from jaxinfer.explain import explain, plan
from jaxinfer.models.shapes import SHAPES, quantized
from jaxinfer.replay import replay
from jaxinfer.sharding import MODEL_AXIS
from tests.engine.conftest import SMALL
from tests.engine.test_engine import ids, prompts_of
from tests.engine.test_weights import no_compile
from tests.models.hf_mapping import FIXTURES, load_fixture, load_qwen1

pytestmark = pytest.mark.skipif(jax.default_backend() == "gpu" and len(jax.devices()) < 2, reason="a single GPU")

TINY = SHAPES["tiny"]
PROMPTS = prompts_of([5, 40, 77], seed=3)
PARAMS = functools.partial(jaxinfer.SamplingParams, max_tokens=24, ignore_eos=True)
logits_fn = jax.jit(teacher_forced_logits, static_argnums=0)
BURSTS = {**SMALL, "num_scheduler_steps": 4}


def split(model, devices):
    """The model with its weights brought to the devices."""
    return jaxinfer.from_params(model.config, jax.device_put(model.params, jaxinfer.tensor_parallel_shardings(model.config, devices)))


@pytest.fixture(scope="module")
def shared_model(tiny_model):
    return split(tiny_model, jax.devices()[:2])


@pytest.fixture(scope="module")
def one(make_llm):
    return make_llm(num_scheduler_steps=4)


@pytest.fixture(scope="module")
def two(shared_model):
    return jaxinfer.LLM.from_model(shared_model, **BURSTS)


def buffers(params):
    """name -> device -> where its part lies."""
    return {name: {s.device: s.data.unsafe_buffer_pointer() for s in x.addressable_shards} for name, x in params.items()}


@pytest.mark.parametrize("settings", [
    {"temperature": 0}, {"temperature": 0.8, "seed": 3, "top_p": 0.9}, {"temperature": 0, "repetition_penalty": 1.2, "logit_bias": {5: 2.0}},
    {"temperature": 0.5, "seed": 1, "n": 2}], ids=["greedy", "sampled", "ruled", "twice"])
def test_tokens_are_those_of_one_device(one, two, settings):
    with no_compile(two):
        want, got = (llm.generate(PROMPTS, PARAMS(**settings)) for llm in (one, two))
    assert [[c.token_ids for c in o.outputs] for o in got] == [[c.token_ids for c in o.outputs] for o in want]
    two.engine.scheduler.check_invariants()


def test_log_probabilities_are_those_of_one_device_and_of_the_weights(one, two, shared_model):
    params = PARAMS(temperature=0, logprobs=2, prompt_logprobs=1)
    (want,), (got,) = (llm.generate(PROMPTS[1], params) for llm in (one, two))
    chosen = [[step[token].logprob for step, token in zip(o.outputs[0].logprobs, o.outputs[0].token_ids, strict=True)] for o in (want, got)]
    np.testing.assert_allclose(chosen[1], chosen[0], atol=2e-5)
    prompts = [[entry[t].logprob for entry, t in zip(o.prompt_logprobs[1:], o.prompt_token_ids[1:], strict=True)] for o in (want, got)]
    np.testing.assert_allclose(prompts[1], prompts[0], atol=2e-5)
    sequence = np.array([[*got.prompt_token_ids, *got.outputs[0].token_ids]], np.int32)
    logits = np.asarray(jax.nn.log_softmax(shared_model.logits(sequence)[0], axis=-1))[len(got.prompt_token_ids) - 1:-1]
    np.testing.assert_allclose(chosen[1], logits[np.arange(len(chosen[1])), got.outputs[0].token_ids], atol=2e-5)


def test_each_device_holds_its_part_and_the_plan_says_so(one, two):
    state, plan_of_two, plan_of_one = two.engine.steps.state, two.engine.resolved.memory, one.engine.resolved.memory
    assert {s.data.shape[1] for s in state.cache.k[0].addressable_shards} == {1} and state.cache.k[0].shape[1] == 2
    assert plan_of_two.page_bytes * 2 == plan_of_one.page_bytes
    whole = sum(x.nbytes for name, x in two.engine.model.params.items() if "norm" in name)
    assert plan_of_two.weight_bytes - whole == (plan_of_one.weight_bytes - whole) // 2
    assert two.engine.warm_up.aliased_bytes >= two.engine.warm_up.state_bytes, "a pool is copied"
    assert two.engine.resolved.engine.tensor_parallel_size == 2 and "2 x " in two.engine.describe()


def shared_logits(model, devices):
    """Teacher-forced logits of three sequences, each layer shared by the devices; and those of the model as it is."""
    placed, placement = place(split(model, devices))
    whole = placement.whole
    shared = placement.on_each(functools.partial(teacher_forced_logits, placement.graphdef(placed)),
                               inputs=(placement.params(placed), whole, whole), outputs=whole)
    tokens, lengths = np.arange(60, dtype=np.int32).reshape(3, 20) % model.config.vocab_size, np.array([20, 7, 1], np.int32)
    got, want = jax.jit(shared, out_shardings=whole)(placed.params, tokens, lengths), logits_fn(model.graphdef, model.params, tokens, lengths)
    real = np.arange(20) < lengths[:, None]
    return np.asarray(got)[real], np.asarray(want)[real]


FAMILIES = {
    **{name: functools.partial(load_fixture, name) for name in ("qwen3", "llama_untied", "mistral", "qwen2_sliding")},
    "qwen1": load_qwen1,
    "four": functools.partial(random_model, dataclasses.replace(
        TINY, num_heads=8, num_kv_heads=4, output_bias=True, tie_embeddings=False), dtype="float32", seed=2)}


@pytest.mark.parametrize("name", list(FAMILIES))
def test_families(name):
    model = FAMILIES[name]()
    size = 4 if name == "four" and len(jax.devices()) >= 4 else 2
    got, want = shared_logits(model, jax.devices()[-size:][::-1])  # the order of the parts is the caller's
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())


def test_half_precision_stays_within_its_noise():
    model = random_model(TINY, dtype="bfloat16", seed=4)
    exact = jaxinfer.from_params(TINY, {name: x.astype(np.float32) for name, x in model.params.items()})
    got, want = shared_logits(model, jax.devices()[:2])
    _, true = shared_logits(exact, jax.devices()[:2])
    error, alone = np.sqrt(np.mean((got - true)**2)), np.sqrt(np.mean((want - true)**2))
    assert 0 < error < 1.5 * alone


def test_live_weights_are_shared_whatever_mesh_they_were_made_for(tiny_model):
    """A trainer's mesh of its own names, explicit axes and, where there are devices enough, replicas."""
    replicas = 2 if len(jax.devices()) >= 4 else 1
    mesh = jax.make_mesh((replicas, 2), ("data", "model"), (AxisType.Explicit,) * 2, devices=jax.devices()[:2 * replicas])
    ours = jaxinfer.tensor_parallel_shardings(TINY, jax.devices()[:2])
    names = {None: None, MODEL_AXIS: "model"}
    trained = {name: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*(names[axis] for axis in ours[name].spec))))
               for name, x in tiny_model.params.items()}
    placed, placement = place(jaxinfer.from_params(TINY, trained))
    assert placement.devices == tuple(jax.devices()[:2])
    theirs = buffers(trained)
    for name, parts in buffers(placed.params).items():
        assert set(parts) == set(placement.devices)
        assert all(theirs[name][device] == pointer for device, pointer in parts.items()), name


def test_a_mesh_of_one_device_is_that_device(tiny_model):
    """Not the first one; its engine runs there, and what comes from elsewhere is brought there."""
    there = jax.devices()[1]
    meshed = jaxinfer.from_params(TINY, jax.device_put(tiny_model.params, NamedSharding(Mesh(np.array([there]), ("x",)), PartitionSpec("x"))))
    llm = jaxinfer.LLM.from_model(meshed, **{**SMALL, "max_model_len": 64, "max_num_batched_tokens": 16, "token_buckets": (16,)})
    assert buffers(llm.engine.steps.params) == buffers(meshed.params)
    prompt, params = {"prompt_token_ids": [1, 2, 3]}, PARAMS(temperature=0, max_tokens=5, logprobs=1)
    first = ids(llm.generate(prompt, params))
    llm.update_weights(tiny_model.params)
    llm.sleep()
    llm.wake()
    assert ids(llm.generate(prompt, params)) == first
    assert all(x.devices() == {there} for x in jax.tree.leaves((llm.engine.steps.params, llm.engine.steps.state)))


def test_of_whole_replicas_the_first_serves(tiny_model):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    copied = jax.device_put(tiny_model.params, NamedSharding(mesh, PartitionSpec()))
    placed, placement = place(jaxinfer.from_params(TINY, copied))
    assert placement.devices == (jax.devices()[0],) and placement.mesh is None
    theirs = buffers(copied)
    assert all(parts == {jax.devices()[0]: theirs[name][jax.devices()[0]]} for name, parts in buffers(placed.params).items())


def test_weights_that_lie_already_are_not_moved(two, shared_model, tiny_model):
    assert buffers(two.engine.steps.params) == buffers(shared_model.params)
    before = ids(two.generate(PROMPTS, PARAMS(temperature=0)))
    other = random_model(TINY, dtype="float32", seed=9)
    there = split(other, jax.devices()[:2])
    with no_compile(two):
        two.update_weights(there.params)
        changed = ids(two.generate(PROMPTS, PARAMS(temperature=0)))
    assert buffers(two.engine.steps.params) == buffers(there.params) and changed != before
    two.update_weights({name: np.asarray(x) for name, x in tiny_model.params.items()})  # from the host: brought there
    two.sleep()
    assert all(x.is_deleted() for x in jax.tree.leaves(two.engine.steps.state))
    two.wake()
    assert ids(two.generate(PROMPTS, PARAMS(temperature=0))) == before
    two.update_weights(shared_model.params)


def test_saved_prefixes_do_not_ask_how_many_devices_there_are(one, two, tmp_path):
    (want,) = one.generate(PROMPTS[2], PARAMS(temperature=0))
    for saving, loading in ((two, one), (one, two)):
        saving.generate(PROMPTS[2], PARAMS(temperature=0))
        num_saved = saving.save_prefix_cache(tmp_path / "prefixes")
        loading.engine.pages.evict_all()
        assert loading.load_prefix_cache(tmp_path / "prefixes") == num_saved > 3
        (got,) = loading.generate(PROMPTS[2], PARAMS(temperature=0))
        assert got.num_cached_tokens >= 64 and ids([got]) == ids([want])


def test_a_dumped_step_is_replayed_on_one_device(two, tiny_model, tmp_path):
    two.dump_step(tmp_path)
    two.generate(PROMPTS[1], PARAMS(temperature=0, max_tokens=2))
    (row,) = replay(read_dump(two.engine.dumps.last_file), tiny_model)
    assert row.agrees, str(row)


def test_a_checkpoint_is_read_in_parts(tmp_path):
    convert(str(FIXTURES / "qwen3"), tmp_path / "model", dtype="float32")
    whole, parts = load(tmp_path / "model"), load(tmp_path / "model", tensor_parallel_size=2)
    shardings = jaxinfer.tensor_parallel_shardings(whole.config, jax.devices()[:2])
    for name, x in parts.params.items():
        assert x.sharding == shardings[name] and (np.asarray(x) == np.asarray(whole.params[name])).all()
    settings = {**SMALL, "max_model_len": 64, "token_buckets": (16,), "max_num_batched_tokens": 16}
    llm = jaxinfer.LLM(tmp_path / "model", **settings, tensor_parallel_size=2)
    (out,) = llm.generate({"prompt_token_ids": [1, 2, 3]}, PARAMS(temperature=0, max_tokens=3))
    sequence = np.array([[1, 2, 3, *out.outputs[0].token_ids]], np.int32)
    assert np.asarray(whole.logits(sequence))[0, 2:-1].argmax(-1).tolist() == list(out.outputs[0].token_ids)


def by_rows(model):
    """As fully sharded training splits: every parameter by its first axis."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("fsdp",))
    return jax.device_put(model.params, NamedSharding(mesh, PartitionSpec("fsdp")))


def apart(model):
    """Two devices that share nothing: half of the parameters on each."""
    return {name: jax.device_put(x, jax.devices()[i % 2]) for i, (name, x) in enumerate(model.params.items())}


@pytest.mark.parametrize(("arrange", "devices"), [(by_rows, "2 devices"), (apart, "1 device ")])
def test_weights_that_lie_otherwise_are_refused(tiny_model, arrange, devices):
    with pytest.raises(ConfigError, match=rf"of 16 weights do not lie as an engine over {devices}.*layers.0.*tensor_parallel_shardings"):
        jaxinfer.LLM.from_model(jaxinfer.from_params(TINY, arrange(tiny_model)), **SMALL)


def test_arrays_that_are_none_are_refused_by_name(tiny_model):
    for x, words in ((np.zeros(64, np.float32), "final_norm.weight is a ndarray"), (jax.numpy.zeros(64), "final_norm.weight was deleted")):
        model = jaxinfer.from_params(TINY, {**tiny_model.params, "final_norm.weight": x})
        if isinstance(x, jax.Array):
            x.delete()
        with pytest.raises(CheckpointError, match=words):
            place(model)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_that_the_caller_has_set_is_the_callers(one, two, shared_model, axis_type, tmp_path):
    want, num = ids(one.generate(PROMPTS, PARAMS(temperature=0))), min(len(jax.devices()), 4)
    with jax.set_mesh(jax.make_mesh((num,), ("model",), (axis_type,), devices=jax.devices()[:num])):
        small = {**SMALL, "max_model_len": 128, "max_num_batched_tokens": 16, "token_buckets": (16,)}
        for model in (shared_model, random_model(TINY, dtype="float32", seed=0)):
            assert ids(jaxinfer.LLM.from_model(model, **small).generate(PROMPTS, PARAMS(temperature=0))) == want
        for llm in (one, two):
            assert ids(llm.generate(PROMPTS, PARAMS(temperature=0))) == want
            assert llm.save_prefix_cache(tmp_path / "prefixes") > 0
            llm.update_weights(llm.engine.model.params)
            llm.sleep()
            llm.wake()
            assert ids(llm.generate(PROMPTS, PARAMS(temperature=0))) == want
        assert not jax.sharding.get_abstract_mesh().empty
    assert buffers(two.engine.steps.params).keys() == buffers(shared_model.params).keys()
    two.update_weights(shared_model.params)
    one.update_weights(random_model(TINY, dtype="float32", seed=0).params)


def test_weights_in_the_hosts_memory_are_brought_to_the_devices(two, shared_model):
    if "pinned_host" not in {memory.kind for memory in jax.devices()[0].addressable_memories()}:
        pytest.skip("no pinned_host memory")
    want = ids(two.generate(PROMPTS, PARAMS(temperature=0)))
    offloaded = {name: jax.device_put(x, x.sharding.with_memory_kind("pinned_host")) for name, x in shared_model.params.items()}
    two.update_weights(offloaded)
    assert ids(two.generate(PROMPTS, PARAMS(temperature=0))) == want
    with pytest.raises(ConfigError, match="16 of 16 weights do not lie as an engine over 2 devices needs them.*pinned_host"):
        place(jaxinfer.from_params(TINY, offloaded))
    two.update_weights(shared_model.params)


def test_the_callers_numpy_arrays_stay_the_callers(one, two, tiny_model, shared_model):
    for llm, model in ((one, tiny_model), (two, shared_model)):
        want = ids(llm.generate(PROMPTS, PARAMS(temperature=0)))
        mine = {name: np.array(x) for name, x in model.params.items()}
        llm.update_weights(mine)
        for x in mine.values():
            x[:] = 0
        assert ids(llm.generate(PROMPTS, PARAMS(temperature=0))) == want
        llm.update_weights(model.params)


def test_a_checksum_is_that_of_the_whole_and_gathers_nothing(tiny_model, shared_model):
    summed = jax.jit(checksum)
    for name, x in shared_model.params.items():
        assert int(summed(x)) == int(summed(tiny_model.params[name]))
        assert "all-gather" not in summed.lower(x).compile().as_text()
    changed = shared_model.params["layers.0.mlp.down.weight"].at[77, 3].multiply(1.0001)
    assert int(summed(changed)) != int(summed(shared_model.params["layers.0.mlp.down.weight"]))


def test_what_cannot_be_shared_is_refused(tmp_path, shared_model):
    with pytest.raises(ConfigError, match="tensor_parallel_size = 3: num_kv_heads = 2 of the model does not divide by it: use one of 1, 2"):
        TINY.part(3)
    with pytest.raises(ConfigError, match="tensor_parallel_size = 10000000000.* use one of 1, 2, 4, 8, 16, 32"):
        SHAPES["M"].part(10**10)
    for devices in ([], [jax.devices()[0]] * 2, [0, 1], None, jax.devices()[0]):
        with pytest.raises(ConfigError, match="must be a list of different devices"):
            jaxinfer.tensor_parallel_shardings(TINY, devices)
    for size in (0, -1, True, 2.0, "2", None):
        with pytest.raises(ConfigError, match=f"tensor_parallel_size = {size!r}: must be an integer >= 1"):
            random_model(TINY, dtype="float32", seed=0, tensor_parallel_size=size)
    with pytest.raises(ConfigError, match="enforce_eager = True over 2 devices"):
        jaxinfer.LLM.from_model(shared_model, **SMALL, enforce_eager=True)
    with pytest.raises(ConfigError, match="tensor_parallel_size = 2: quantised weights run on one device only"):
        random_model(quantized(TINY, "int4"), dtype="bfloat16", seed=0, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="tensor_parallel_size = 64: this process has .* devices"):
        random_model(TINY, dtype="float32", seed=0, tensor_parallel_size=64)
    with pytest.raises(ConfigError, match="tensor_parallel_size = 4: the weights lie on 2 devices"):
        jaxinfer.LLM.from_model(shared_model, **SMALL, tensor_parallel_size=4)
    with pytest.raises(ConfigError, match="tensor_parallel_size = 0: must be an integer >= 1"):
        jaxinfer.EngineConfig(tensor_parallel_size=0)


def test_arrays_are_seen_through_another_sharding_only_where_they_lie_so():
    here, there = SingleDeviceSharding(jax.devices()[0]), SingleDeviceSharding(jax.devices()[1])
    x = jax.device_put(np.arange(4.0), here)
    assert lying_as(x, here) is x and lying_as(x, there) is None
    both = jax.device_put(x, NamedSharding(Mesh(np.array(jax.devices()[:2]), ("a",)), PartitionSpec("a")))
    assert lying_as(both, here) is None and lying_as(x, both.sharding) is None


def test_the_plan_of_absent_devices_is_of_one_of_them():
    one, two = (plan(jaxinfer.EngineConfig(tensor_parallel_size=n, max_model_len=8192), named_gpu("a100-40gb"), shape="Q") for n in (1, 2))
    assert abs(two.memory.weight_bytes / one.memory.weight_bytes - 0.5) < 1e-3 and two.memory.page_bytes * 2 == one.memory.page_bytes
    assert two.num_pages > 2 * one.num_pages
    text = explain(two)
    assert "2 x NVIDIA A100-SXM4-40GB" in text and "Memory, each device" in text
