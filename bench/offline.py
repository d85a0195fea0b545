"""Decode speed, time to first token and throughput through the public engine, of a checkpoint or of random weights at a named shape.

  python -m bench.offline --model=DIR [--dtypes=float32,bfloat16] [--batch_sizes=1,8] [--hf_python=PYTHON_WITH_TORCH --hf_model=FOLDER_OR_GGUF]
  python -m bench.offline --shape=Q --batch_sizes=1,8,32 --prompt_len=512 --max_tokens=256 --profile
Every figure is the median of --repeats runs and stands beside the device's bandwidth. JSON goes to --output_dir, written as figures come.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import app, flags

from bench import profiling, report
from jaxinfer import cli

if TYPE_CHECKING:
    from jaxinfer import LLM

_FLAGS = flags.FlagValues()  # its own: other commands have flags of these names
_MODEL = flags.DEFINE_string("model", None, "Converted checkpoint, Hugging Face folder or .gguf file.", flag_values=_FLAGS)
_SHAPE = flags.DEFINE_string("shape", None, "Random weights at this named shape instead (see jaxinfer/models/shapes.py).", flag_values=_FLAGS)
_QUANTIZATION = flags.DEFINE_enum("quantization", None, ["int4", "int8"], "Quantises the projections of --shape; a checkpoint says itself.",
                                  flag_values=_FLAGS)
_DTYPES = flags.DEFINE_list("dtypes", ["bfloat16"], "Dtypes to run, one engine each.", flag_values=_FLAGS)
_BATCH_SIZES = flags.DEFINE_list("batch_sizes", ["1", "8", "32"], "Sequences that decode together.", flag_values=_FLAGS)
_PROMPT_LEN = flags.DEFINE_integer("prompt_len", 512, "Prompt tokens a sequence in the decode runs.", lower_bound=1, flag_values=_FLAGS)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 256, "New tokens a sequence in the decode runs.", lower_bound=2, flag_values=_FLAGS)
_TTFT_LENS = flags.DEFINE_list("ttft_lens", [], "Prompt lengths whose time to first token is measured, batch 1.", flag_values=_FLAGS)
_THROUGHPUT = flags.DEFINE_integer("throughput_requests", 0, "Requests at once, prompts uniform in 32..2048, 128 new tokens; 0 skips.",
                                   flag_values=_FLAGS)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Runs of which the median is taken.", lower_bound=1, flag_values=_FLAGS)
_PROFILE = flags.DEFINE_bool("profile", False, "Profile some decode steps of each batch size (GPU).", flag_values=_FLAGS)
_MAX_MODEL_LEN = flags.DEFINE_integer("max_model_len", None, "Engine setting; default: what the runs need.", lower_bound=2, flag_values=_FLAGS)
_PAGE_SIZE = flags.DEFINE_integer("page_size", None, "Engine setting.", flag_values=_FLAGS)
_MAX_NUM_BATCHED_TOKENS = flags.DEFINE_integer("max_num_batched_tokens", None, "Engine setting.", lower_bound=1, flag_values=_FLAGS)
_TOKEN_BUCKETS = flags.DEFINE_list("token_buckets", None, "Engine setting.", flag_values=_FLAGS)
_BURST = flags.DEFINE_integer("num_scheduler_steps", None, "Engine setting.", lower_bound=1, upper_bound=32, flag_values=_FLAGS)
_PARALLEL = flags.DEFINE_integer("tensor_parallel_size", 1, "Engine setting.", lower_bound=1, flag_values=_FLAGS)
_ATTENTION = flags.DEFINE_string("attention_implementation", "auto", "Engine setting.", flag_values=_FLAGS)
_HF_PYTHON = flags.DEFINE_string("hf_python", None, "Interpreter with torch and transformers: runs the peer beside, on the same prompts' size.",
                                 flag_values=_FLAGS)
_HF_MODEL = flags.DEFINE_string("hf_model", None, "What the peer loads: Hugging Face folder or .gguf file; default: --model.",
                                flag_values=_FLAGS)
_NAME = flags.DEFINE_string("name", None, "Name of the JSON file; default: from model and device.", flag_values=_FLAGS)
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Folder of the JSON file; default: bench/results in a checkout, else the current one.",
                                  flag_values=_FLAGS)


def make_engine(dtype: str, max_num_seqs: int) -> "LLM":
    """An LLM for the flags, on prompts given as ids."""
    import jaxinfer
    from jaxinfer.engine.load import random_model
    from jaxinfer.models.shapes import SHAPES, quantized

    longest = max([_PROMPT_LEN.value + _MAX_TOKENS.value, *[int(t) + 2 for t in _TTFT_LENS.value], 2048 + 128 if _THROUGHPUT.value else 0])
    settings: dict[str, Any] = {
        "dtype": dtype, "max_num_seqs": max_num_seqs, "enable_prefix_caching": False, "page_size": _PAGE_SIZE.value,
        "max_model_len": _MAX_MODEL_LEN.value or -(-longest // 64) * 64, "attention_implementation": _ATTENTION.value,
        "max_num_batched_tokens": _MAX_NUM_BATCHED_TOKENS.value, "num_scheduler_steps": _BURST.value,
        "token_buckets": tuple(map(int, _TOKEN_BUCKETS.value)) if _TOKEN_BUCKETS.value else None}
    if _SHAPE.value is None:
        return jaxinfer.LLM(str(_MODEL.value), **settings, tensor_parallel_size=_PARALLEL.value)
    if _SHAPE.value not in SHAPES:
        raise app.UsageError(f"--shape={_SHAPE.value}: must be one of {', '.join(SHAPES)}.")
    config = SHAPES[_SHAPE.value] if _QUANTIZATION.value is None else quantized(SHAPES[_SHAPE.value], _QUANTIZATION.value)
    return jaxinfer.LLM.from_model(random_model(config, dtype=dtype, seed=0, tensor_parallel_size=_PARALLEL.value), **settings)


def random_prompts(llm: "LLM", lengths: list[int], seed: int) -> list[dict[str, list[int]]]:
    """Prompts of the given lengths, ids drawn over the valid vocabulary."""
    rng = np.random.default_rng(seed)
    top = llm.engine.resolved.num_valid_tokens
    return [{"prompt_token_ids": rng.integers(min(100, top // 2), top, n).tolist()} for n in lengths]


def decode_row(llm: "LLM", batch: int) -> dict[str, Any]:
    """Decode rate of `batch` sequences, taken over steps in which all of them decode."""
    import jaxinfer

    params = jaxinfer.SamplingParams(temperature=0, max_tokens=_MAX_TOKENS.value, ignore_eos=True)
    rates, shares, host = [], [], []
    for i in range(_REPEATS.value + 1):
        llm.reset_metrics()
        llm.generate(random_prompts(llm, [_PROMPT_LEN.value] * batch, seed=i), params)
        m = llm.metrics()
        if i:  # the first run warms caches up
            rates.append(m["decode_tokens_per_s"])
            shares.append(m["roofline_share"])
            host.append(m["host_ms_per_step"])
    return {"batch": batch, "decode_tokens_per_s": statistics.median(rates), "spread": (max(rates) - min(rates)) / statistics.median(rates),
            "share_of_bandwidth": None if shares[0] is None else statistics.median(shares), "host_ms_per_step": statistics.median(host)}


def profile_decode(llm: "LLM", batch: int, steps: int = 8) -> dict[str, Any]:
    """The hottest kernels of `steps` decode steps, or as many bursts, at a context of the prompt's length."""
    num_prefill_steps = -(-batch * _PROMPT_LEN.value // llm.engine.resolved.max_num_batched_tokens)
    return profile_steps(llm, random_prompts(llm, [_PROMPT_LEN.value] * batch, seed=99), steps, skip=4,
                         max_tokens=(steps + 24) * llm.engine.resolved.num_scheduler_steps + num_prefill_steps)


def profile_mixed(llm: "LLM", num_requests: int, steps: int = 4) -> dict[str, Any]:
    """The hottest kernels of `steps` steps in the midst of the throughput run, while prompts and decodes share them."""
    return profile_steps(llm, throughput_prompts(llm, num_requests), steps, skip=0, max_tokens=128)


def profile_steps(llm: "LLM", prompts: list[dict[str, list[int]]], steps: int, *, skip: int, max_tokens: int) -> dict[str, Any]:
    """Profiles `steps` steps: with `skip`, from when every request has that many tokens; else from when half of them have one."""
    import jaxinfer

    params = jaxinfer.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    groups = [llm.groups.make(p, params) for p in prompts]
    for group in groups:
        llm.groups.add(group)
    requests = [r for group in groups for r in group.requests]
    while sum(len(r.output_token_ids) >= max(skip, 1) for r in requests) < (len(requests) if skip else len(requests) // 2):
        llm.engine.step()

    def work() -> None:
        for _ in range(steps):
            llm.engine.step()

    num_before = llm.engine.metrics.num_steps
    figures = profiling.profile(work, top=16)
    num_steps = llm.engine.metrics.num_steps - num_before
    while llm.engine.has_work:
        llm.engine.step()
    for group in groups:
        llm.groups.finish(group)
    if figures:
        figures["busy_ms_per_step"] = figures["busy_ms"] / num_steps
        figures["kernels_per_step"] = figures["num_kernels"] / num_steps
    return figures


def ttft_row(llm: "LLM", prompt_len: int) -> dict[str, Any]:
    """Time to first token of one prompt on an idle engine."""
    import jaxinfer

    params = jaxinfer.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    times = []
    for i in range(_REPEATS.value + 2):
        (out,) = llm.generate(random_prompts(llm, [prompt_len], seed=i), params)
        assert out.metrics.ttft_s is not None
        times.append(1e3 * out.metrics.ttft_s)
    return {"prompt": prompt_len, "ttft_ms": statistics.median(times[2:])}


def throughput_prompts(llm: "LLM", num_requests: int) -> list[dict[str, list[int]]]:
    """Prompts of 32 to 2048 tokens, every length as likely."""
    return random_prompts(llm, np.random.default_rng(0).integers(32, 2049, num_requests).tolist(), seed=1)


def throughput_row(llm: "LLM", num_requests: int) -> dict[str, Any]:
    """Requests a second with all of them queued at once."""
    import jaxinfer

    params = jaxinfer.SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
    prompts = throughput_prompts(llm, num_requests)
    runs = []
    for _ in range(2):
        llm.reset_metrics()
        start = time.perf_counter()
        llm.generate(prompts, params)
        seconds = time.perf_counter() - start
        runs.append((seconds, report.phases(llm.engine.metrics, seconds)))
    (seconds, phases), num_prompt_tokens = min(runs, key=lambda run: run[0]), sum(len(p["prompt_token_ids"]) for p in prompts)
    return {"requests": num_requests, "requests_per_s": num_requests / seconds,
            "tokens_per_s": (num_prompt_tokens + 128 * num_requests) / seconds, **phases}


def peer_rows() -> list[dict[str, Any]]:
    """Rows of the transformers peer, run as a child process with this run's sizes."""
    # -P: this folder's own modules must not stand in for that interpreter's packages.
    command = [str(_HF_PYTHON.value), "-P", str(Path(__file__).parent / "hf_peer.py"), f"--model={_HF_MODEL.value or _MODEL.value}",
               f"--dtypes={','.join(_DTYPES.value)}", f"--batch_sizes={','.join(_BATCH_SIZES.value)}", f"--prompt_len={_PROMPT_LEN.value}",
               f"--max_tokens={_MAX_TOKENS.value}", f"--repeats={_REPEATS.value}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise app.UsageError(f"the peer failed under --hf_python={_HF_PYTHON.value}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])["rows"]


def run_dtype(dtype: str, runs: list[dict[str, Any]], save: Callable[[], Any]) -> None:
    """All runs of one dtype on one engine: an entry of `runs`, which grows from `save` to `save`."""
    batches = [int(b) for b in _BATCH_SIZES.value]
    llm = make_engine(dtype, max(batches))
    figures: dict[str, Any] = {"dtype": dtype, "engine": llm.engine.describe(), "startup_s": llm.startup_s,
                               "num_scheduler_steps": llm.engine.resolved.num_scheduler_steps,
                               "warm_up_s": llm.engine.warm_up.seconds, "num_executables": llm.engine.warm_up.num_executables,
                               "memory_bytes": llm.metrics()["memory_bytes"]}
    runs.append(figures)
    figures["decode"], figures["ttft"] = [], []
    for batch in batches:
        figures["decode"].append(decode_row(llm, batch))
        save()
    print(report.table(figures["decode"]), flush=True)
    for length in _TTFT_LENS.value:
        figures["ttft"].append(ttft_row(llm, int(length)))
        save()
    print(report.table(figures["ttft"]), flush=True)
    if _THROUGHPUT.value:
        figures["throughput"] = throughput_row(llm, _THROUGHPUT.value)
        print(figures["throughput"], flush=True)
        save()
    figures["profile"] = {}
    for name in [*map(str, batches), *(["mixed"] if _THROUGHPUT.value else [])] if _PROFILE.value else []:
        p = profile_mixed(llm, _THROUGHPUT.value) if name == "mixed" else profile_decode(llm, int(name))
        figures["profile"][name] = p
        print(f"batch {name}:", {k: v for k, v in p.items() if k != "kernels"})
        print(report.table(p.get("kernels", [])), flush=True)
        save()
    figures["num_compiles_after_warmup"] = llm.metrics()["num_compiles_after_warmup"]
    save()
    print(f"{dtype}: start {llm.startup_s:.1f} s, warm-up {figures['warm_up_s']:.1f} s, {figures['num_compiles_after_warmup']} compiles "
          f"after warm-up, {figures['memory_bytes'] / 1e9:.2f} GB")


def main(argv: list[str]) -> None:
    if (_MODEL.value is None) == (_SHAPE.value is None):
        raise app.UsageError("give exactly one of --model and --shape.")
    if _QUANTIZATION.value is not None and _SHAPE.value is None:
        raise app.UsageError("--quantization needs --shape: a checkpoint is quantised already, or by python -m convert.quantize.")
    folder = None if _OUTPUT_DIR.value is None else cli.expanded("output_dir", _OUTPUT_DIR.value)
    figures: dict[str, Any] = {"model": _MODEL.value and Path(_MODEL.value).name, "shape": _SHAPE.value,
                               "quantization": _QUANTIZATION.value, "prompt_len": _PROMPT_LEN.value,
                               "max_tokens": _MAX_TOKENS.value, "repeats": _REPEATS.value}
    device = report.environment()["device"].split(" (")[0].replace(" ", "-").lower()
    quantization = "" if _QUANTIZATION.value is None else f"-{_QUANTIZATION.value}"
    subject = f"{_SHAPE.value}{quantization}" if _SHAPE.value else Path(str(_MODEL.value)).name

    def save() -> Path:
        return report.write(_NAME.value or f"offline-{subject}-{device}", figures, folder)

    figures["runs"] = []
    for dtype in _DTYPES.value:
        run_dtype(dtype, figures["runs"], save)
    if _HF_PYTHON.value:
        figures["peer"] = peer_rows()
        print(report.table(figures["peer"]))
    print(f"written to {save()}")


def entry() -> None:
    """Console entry."""
    sys.exit(cli.run(main, _FLAGS))


if __name__ == "__main__":
    entry()
