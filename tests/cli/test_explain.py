"""What explain and the engine refuse before anything is loaded, and the report itself."""

import dataclasses
import functools
import json
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bench import report
from convert.converter import convert
from jaxinfer.config import EngineConfig
from jaxinfer.engine.fresh_state import make_state
from jaxinfer.engine.hardware import attached, named_gpu
from jaxinfer.engine.prompt_scores import NUM_SCORES
from jaxinfer.engine.resolve import ResolvedConfig
from jaxinfer.engine.step import score_prompt, step
from jaxinfer.errors import CapacityError, ConfigError
from jaxinfer.explain import explain, plan
from jaxinfer.models.registry import abstract_model
from pallas_kernels.dispatch import Choice
from tests.convert.checkpoints import hf_config, hf_tensors, write_hf

IMPLEMENTATIONS = {"attention_implementation": "ragged_paged_attention", "rotary_implementation": "rotary_kv_write",
                   "norm_implementation": "rms_norm", "matmul_implementation": "int4_matmul"}
"""Setting -> the op that it is of."""


def planned(shape: str = "Q", gpu: str = "a100-80gb", *, quantization: str | None = None, lm_head: str | None = None,
            **settings: Any) -> ResolvedConfig:
    config = EngineConfig(**{"max_model_len": 4096, **settings})
    return plan(config, named_gpu(gpu), shape=shape, quantization=quantization, lm_head=lm_head)


def decode_rows(resolved: ResolvedConfig) -> list[int]:
    return [layout.num_rows for layout in resolved.layouts if layout.decode_only]


@pytest.mark.parametrize(("quantization", "dtype", "max_num_seqs", "wanted"), [
    ("int4", "bfloat16", 32, [1, 8, 16, 32]), ("int4", "bfloat16", 1, [1]), ("int8", "bfloat16", 32, [8, 16, 32]),
    ("int4", "float32", 32, [8, 16, 32]), (None, "bfloat16", 1, [8]),
])
def test_a_single_row_decodes_by_itself_where_that_has_a_kernel(quantization: str | None, dtype: str, max_num_seqs: int,
                                                                wanted: list[int]) -> None:
    resolved = planned(gpu="h200", quantization=quantization, max_model_len=256, max_num_seqs=max_num_seqs, dtype=dtype)
    assert decode_rows(resolved) == wanted


@pytest.mark.parametrize(("quantization", "forced", "wanted"), [
    ("int4", "stream", [1, 8]), ("int4", "mosaic", [8]), ("int4", "xla", [8]), ("int8", "stream", [1, 8]), ("int8", "mosaic", [8]),
])
def test_a_single_row_follows_what_products_are_told_to_run_on(quantization: str, forced: str, wanted: list[int]) -> None:
    resolved = planned(gpu="h200", quantization=quantization, matmul_implementation=forced, max_num_seqs=8, max_num_batched_tokens=8)
    assert decode_rows(resolved) == wanted


@pytest.mark.parametrize("lm_head", [None, "int8"])
def test_the_oracle_of_products_is_planned_with_its_whole_matrix(lm_head: str | None) -> None:
    auto, forced = (planned(quantization="int4", lm_head=lm_head, matmul_implementation=name) for name in ("auto", "reference"))
    gate_up, head = 3584 * 2 * 18944, 3584 * 152064
    assert forced.memory.step_bytes - auto.memory.step_bytes == 4 * (gate_up if lm_head is None else head) - 2 * gate_up


def test_report_names_the_block_that_shows_what_was_chosen() -> None:
    lines = explain(planned()).splitlines()
    for name in ("token_buckets", "batch_buckets"):
        assert f"  {name:26} see Buckets" in lines
    for name in IMPLEMENTATIONS:
        assert f"  {name:26} see Kernels" in lines
    assert f"  {'token_buckets':26} (64, 128)" in explain(planned(token_buckets=(64, 128), max_num_batched_tokens=256)).splitlines()


def buckets_of(report: str) -> dict[str, list[str]]:
    """Line of the kernel table -> the buckets below it."""
    lines = report[report.index("\n\nKernels\n") + 2:report.index("\n\nBuckets")].splitlines()[1:]
    return {line.strip(): names.strip().removeprefix("buckets ").split(", ") for line, names in zip(lines[::2], lines[1::2], strict=True)}


ROTARY, NORM = {"mosaic (rotation and both pools in one launch": 14}, {"mosaic (sum and norm in one launch": 14}
SCATTER = "xla (XLA fuses the rotation and scatters into each pool, any shape, CPU and GPU); not mosaic: "


@pytest.mark.parametrize(("shape", "gpu", "settings", "rotary", "norm"), [
    ("Q", "a100-80gb", {}, ROTARY, NORM),
    ("M", "h200", {}, ROTARY, NORM),
    ("M", "h200", {"tensor_parallel_size": 4}, ROTARY, NORM),
    ("Q", "h200", {"kv_dtype": "float32"}, {f"{SCATTER}copies without a cast, not bfloat16 into float32": 14}, NORM),
    ("tiny", "h200", {"max_model_len": 64}, ROTARY,
     {"xla (fused with its neighbours, any shape, CPU and GPU); not mosaic: needs a width that is a multiple of 128, not 64": 14}),
], ids=["Q", "M", "M-over-4", "other-kv-dtype", "tiny"])
def test_report_names_what_rotates_and_what_adds_and_norms(shape: str, gpu: str, settings: dict[str, Any], rotary: dict[str, int],
                                                           norm: dict[str, int]) -> None:
    resolved = planned(shape, gpu, **settings)
    table = buckets_of(explain(resolved))
    for op, wanted in (("rotary_kv_write", rotary), ("rms_norm", norm)):
        found = {line: names for line, names in table.items() if line.startswith(f"{op}: ")}
        assert len(found) == len(wanted) and sum(map(len, found.values())) == len(resolved.layouts) == 14
        for start, count in wanted.items():
            assert [len(names) for line, names in found.items() if line.startswith(f"{op}: {start}")] == [count]


def test_report_names_what_is_forced_and_what_multiplies_elsewhere() -> None:
    forced = {"attention_implementation": "mosaic", "rotary_implementation": "xla", "norm_implementation": "reference",
              "matmul_implementation": "mosaic"}
    resolved = planned(gpu="h200", quantization="int4", lm_head="int8", **forced)
    report = explain(resolved)
    assert all(f"  {name:26} {value}" in report.splitlines() for name, value in forced.items())
    every = [layout.name for layout in resolved.layouts]
    decode, mixed = ([layout.name for layout in resolved.layouts if layout.decode_only == kind] for kind in (True, False))
    assert buckets_of(report) == {
        "decode: ragged_paged_attention: mosaic (asked for by name)": decode,
        "prefill and mixed: ragged_paged_attention: mosaic (asked for by name)": mixed,
        "rotary_kv_write: xla (asked for by name)": every, "rms_norm: reference (asked for by name)": every,
        "attention.qkv, attention.output, mlp.gate_up, mlp.down, lm_head: int4_matmul: mosaic (asked for by name)": every,
        "lm_head: int4_matmul: mosaic (asked for by name)": ["prompt scores"]}


@pytest.mark.parametrize(("quantization", "forced"), [
    (None, {}), ("int4", {}), (None, dict.fromkeys(("attention_implementation", "rotary_implementation", "norm_implementation"), "reference")),
    *(("int4", {name: "reference"}) for name in IMPLEMENTATIONS), ("int4", dict.fromkeys(IMPLEMENTATIONS, "xla")),
], ids=str)
def test_the_kernel_table_is_of_the_calls_that_a_step_makes(quantization: str | None, forced: dict[str, str],
                                                            caplog: pytest.LogCaptureFixture) -> None:
    """Every op of a layer is asked with the facts that the step's own trace gives it, in every bucket, for what is forced and for its
    choice of the others, and no op is left out; so is the head where prompt tokens are scored."""
    config = EngineConfig(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=32, token_buckets=(16, 32), num_pages=9, page_size=32,
                          kv_dtype="float32", **forced)
    resolved = plan(config, attached(), shape="tiny", quantization=quantization, lm_head=None if quantization is None else "int8")
    state = make_state(resolved.model, jax.ShapeDtypeStruct, max_num_seqs=4, num_pages=9, page_size=32, max_num_tokens=32,
                       num_pages_per_seq=resolved.num_pages_per_seq, dtype=resolved.dtype, kv_dtype=resolved.kv_dtype)
    graphdef, specs = abstract_model(resolved.model, str(resolved.dtype))
    params = {name: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for name, spec in specs.items()}

    def asked() -> set[tuple[Choice, object]]:
        found = {record.args[:2] for record in caplog.records if record.name == "pallas_kernels.dispatch"}
        caplog.clear()
        return found

    with caplog.at_level(logging.DEBUG, logger="pallas_kernels.dispatch"):
        explain(resolved)
        planned_calls = asked()
        for layout in resolved.layouts:
            run = functools.partial(step, graphdef=graphdef, layout=layout, num_valid_tokens=256, forced=resolved.forced)
            jax.eval_shape(run, params, state, jax.ShapeDtypeStruct((layout.num_words,), jnp.int32))
        scores = jax.ShapeDtypeStruct((NUM_SCORES,), jnp.int32)
        run = functools.partial(score_prompt, graphdef=graphdef, num_valid_tokens=256, num_logprobs=1, forced=resolved.forced)
        jax.eval_shape(run, params, state.hidden, scores, scores)
        made = asked()
    assert {choice.op for choice, _ in made} == {op for name, op in IMPLEMENTATIONS.items() if quantization or op != "int4_matmul"}
    assert made == planned_calls
    for name, op in IMPLEMENTATIONS.items():
        reasons = {(choice.implementation, choice.reason) for choice, _ in made if choice.op == op}
        if name in forced:
            assert reasons == {(forced[name], "asked for by name")}
        else:
            assert "asked for by name" not in {reason for _, reason in reasons}


def test_bursts_are_chosen_by_platform_and_looped_for_small_decode_buckets() -> None:
    cpu = dataclasses.replace(named_gpu("h200"), platform="cpu")
    for gpu in ("a100-80gb", "h200"):
        assert planned(gpu=gpu).num_scheduler_steps == 8
    assert plan(EngineConfig(max_model_len=4096), cpu, shape="Q0.5").num_scheduler_steps == 1
    assert planned(num_scheduler_steps=1).num_scheduler_steps == 1 and planned(num_scheduler_steps=5).num_scheduler_steps == 5
    resolved = planned()
    assert [(x.num_rows, x.decode_only) for x in resolved.burst_layouts] == [(8, True), (16, True), (32, True), (64, True), (128, True)]
    assert [x.num_rows for x in resolved.layouts if x.decode_only] == [8, 16, 32, 64, 128, 256]
    report = explain(resolved)
    assert "  bursts of 8 (rows)        8, 16, 32, 64, 128" in report.splitlines()
    assert f"Buckets: {len(resolved.layouts) + 5} executables" in report
    assert f"  {'num_scheduler_steps':26} 8" in report.splitlines()
    for settings in ({"num_scheduler_steps": 1}, {"deterministic": True}, {"enforce_eager": True}):
        assert planned(**settings).burst_layouts == () and "bursts of" not in explain(planned(**settings))


@pytest.mark.parametrize(("settings", "error", "message"), [
    ({"attention_implementation": "zzz"}, ConfigError, "attention_implementation = 'zzz': .*wgmma, mosaic, jax_triton, xla, reference"),
    ({"attention_implementation": "wgmma"}, ConfigError,
     "attention_implementation = 'wgmma' in bucket 8: ragged_paged_attention: .*cannot do this case: [^.]*\\. 'auto' lets it choose"),
    ({"rotary_implementation": "zzz"}, ConfigError, "rotary_implementation = 'zzz': rotary_kv_write: .*mosaic, xla, reference"),
    ({"rotary_implementation": "mosaic", "kv_dtype": "float32"}, ConfigError,
     "rotary_implementation = 'mosaic' in bucket 8: rotary_kv_write: .* copies without a cast, not bfloat16 into float32.* 'auto' lets it"),
    ({"norm_implementation": "zzz"}, ConfigError, "norm_implementation = 'zzz': rms_norm: .*mosaic, xla, reference"),
    ({"norm_implementation": "mosaic", "dtype": "float32"}, ConfigError,
     "norm_implementation = 'mosaic' in bucket 8: rms_norm: .* needs 16-bit values, not float32.* 'auto' lets it choose"),
    ({"matmul_implementation": "xla"}, ConfigError,
     "matmul_implementation = 'xla': no product of this model has quantised weights, so that it would change nothing: leave it at 'auto'"),
    ({"matmul_implementation": "zzz", "quantization": "int4"}, ConfigError,
     "matmul_implementation = 'zzz': int4_matmul: .*wgmma, dequantize, stream, mosaic, xla, reference"),
    ({"matmul_implementation": "wgmma", "quantization": "int4"}, ConfigError,
     "matmul_implementation = 'wgmma' in bucket 8, layers.0.attention.qkv: int4_matmul: .* is built for sm_90, .* 'auto' lets it choose"),
    ({"matmul_implementation": "stream", "quantization": "int4", "max_num_seqs": 8, "max_num_batched_tokens": 16}, ConfigError,
     "matmul_implementation = 'stream' in bucket 16x8, layers.0.attention.qkv: int4_matmul: .* at most 8 tokens, not 16"),
    ({"matmul_implementation": "stream", "quantization": "int4", "lm_head": "int4", "max_num_seqs": 8, "max_num_batched_tokens": 8},
     ConfigError, "matmul_implementation = 'stream' in prompt scores, lm_head: int4_matmul: .* at most 8 tokens, not 128"),
    ({"scheduling_policy": "lifo"}, ConfigError, "scheduling_policy = 'lifo'.*fcfs"),
    ({"batch_buckets": (4, 8), "max_num_seqs": 4}, ConfigError, "batch_buckets holds 8, more than max_num_seqs = 4"),
    ({"token_buckets": (512,), "max_num_batched_tokens": 256, "max_num_seqs": 4}, ConfigError, "token_buckets holds 512"),
    ({"num_pages": 10**8}, CapacityError, "100000000 pages .* more than the 80.00 GB"),
    ({"kv_cache_memory_bytes": 79 * 10**9}, CapacityError, "more than the 80.00 GB of NVIDIA A100"),
    ({"num_pages": 2}, CapacityError, "lower max_model_len to 64, or raise num_pages to at least 65"),
    ({"kv_cache_memory_bytes": 1}, CapacityError, "max_model_len = 4096 .*: raise kv_cache_memory_bytes to at least [0-9]+\\."),
    ({"gpu_memory_utilization": 0.01}, CapacityError, ": lower max_num_seqs or max_num_batched_tokens, or raise gpu_memory_utilization"),
])
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        planned(**settings)


@pytest.mark.parametrize(("name", "value", "form"), [
    ("seed", "a", "an integer"), ("seed", None, "an integer"), ("gpu_memory_utilization", "0.9", "a number"),
    ("length_buckets", 64, "a list of integers or None"), ("length_buckets", "64", "a list of integers or None"),
    ("token_buckets", (1.5,), "a list of integers or None"), ("batch_buckets", (True,), "a list of integers or None"),
    ("max_num_seqs", True, "an integer or None"), ("max_model_len", 1.0, "an integer or None"), ("max_model_len", 1, ">= 2"),
    ("page_size", 16.0, "an integer or None"), ("enforce_eager", 1, "True or False"), ("model", None, "a text"),
    ("scheduling_policy", 3, "a text"), ("tensor_parallel_size", True, "an integer"), ("gpu_memory_utilization", True, "a number"),
    ("preemption_grace_tokens", 1.5, "an integer"), ("length_bucket_caps", ("1",), "a list of integers or None"),
])
def test_settings_of_another_type_are_refused(name: str, value: Any, form: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig.from_settings({name: value})
    assert str(error.value) == f"{name} = {value!r}: must be {form}." or (form == ">= 2" and form in str(error.value))


def test_lists_are_tuples_and_whole_shares_numbers() -> None:
    config = EngineConfig.from_settings({"token_buckets": [8, 16], "gpu_memory_utilization": 1, "length_buckets": []})
    assert config.token_buckets == (8, 16) and config.length_buckets == ()


def test_a_checkpoint_without_a_tokenizer_is_explained(tmp_path: Path) -> None:
    config = hf_config(tied=True)
    folder = convert(write_hf(tmp_path / "hf", config, hf_tensors(config)), tmp_path / "out", progress=False)
    resolved = plan(EngineConfig(model=str(folder)), named_gpu("h200"))
    assert resolved.num_valid_tokens == resolved.model.vocab_size


def test_benchmark_figures_go_to_the_checkout_or_else_to_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert report.default_folder() == report.RESULTS
    monkeypatch.setattr(report, "__file__", str(tmp_path / "bench" / "report.py"))
    monkeypatch.chdir(tmp_path)
    assert report.write("x", {"a": 1}) == Path("x.json") and json.loads((tmp_path / "x.json").read_text())["a"] == 1
    assert report.write("x", {}, tmp_path / "new") == tmp_path / "new" / "x.json"
