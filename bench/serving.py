"""Latency under Poisson arrivals: the engine in this process, fed as requests come and stepped while it has any.

  python -m bench.serving --shape=Q --request_rate=20,30 [--num_requests=256] [--max_tokens=128] [--min_prompt_len=32 --max_prompt_len=2048]
  python -m bench.serving --model=DIR --request_rate=4
Prompts of random ids, lengths uniform, greedy, no early stop. TTFT counts from the moment of arrival, waiting included; TPOT is a
request's time from first to last token over the tokens after the first. A rate of 0 has all requests arrive at once. JSON goes to
--output_dir.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import app, flags

from bench import report
from jaxinfer import cli

if TYPE_CHECKING:
    from jaxinfer import LLM
    from jaxinfer.request import Request

_FLAGS = flags.FlagValues()  # its own: other commands have flags of these names
_MODEL = flags.DEFINE_string("model", None, "Converted checkpoint, Hugging Face folder or .gguf file.", flag_values=_FLAGS)
_SHAPE = flags.DEFINE_string("shape", None, "Random weights at this named shape instead (see jaxinfer/models/shapes.py).", flag_values=_FLAGS)
_DTYPE = flags.DEFINE_string("dtype", "bfloat16", "Engine setting.", flag_values=_FLAGS)
_RATES = flags.DEFINE_list("request_rate", ["0"], "Requests a second on average, one run each; 0: all at once.", flag_values=_FLAGS)
_NUM_REQUESTS = flags.DEFINE_integer("num_requests", 256, "Requests of a run.", lower_bound=1, flag_values=_FLAGS)
_MIN_PROMPT_LEN = flags.DEFINE_integer("min_prompt_len", 32, "Shortest prompt, tokens.", lower_bound=1, flag_values=_FLAGS)
_MAX_PROMPT_LEN = flags.DEFINE_integer("max_prompt_len", 2048, "Longest prompt, tokens.", lower_bound=1, flag_values=_FLAGS)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 128, "New tokens of a request.", lower_bound=2, flag_values=_FLAGS)
_SEED = flags.DEFINE_integer("seed", 0, "Of arrivals and prompts.", flag_values=_FLAGS)
_MAX_NUM_SEQS = flags.DEFINE_integer("max_num_seqs", None, "Engine setting.", lower_bound=1, flag_values=_FLAGS)
_MAX_NUM_BATCHED_TOKENS = flags.DEFINE_integer("max_num_batched_tokens", None, "Engine setting.", lower_bound=1, flag_values=_FLAGS)
_BURST = flags.DEFINE_integer("num_scheduler_steps", 1, "Engine setting.", lower_bound=1, upper_bound=32, flag_values=_FLAGS)
_NAME = flags.DEFINE_string("name", None, "Name of the JSON file; default: from model and device.", flag_values=_FLAGS)
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Folder of the JSON file; default: bench/results in a checkout, else the current one.",
                                  flag_values=_FLAGS)


def make_llm() -> "LLM":
    """An LLM for the flags, on prompts given as ids."""
    import jaxinfer
    from jaxinfer.engine.load import random_model
    from jaxinfer.models.shapes import SHAPES

    settings: dict[str, Any] = {
        "dtype": _DTYPE.value, "max_model_len": -(-(_MAX_PROMPT_LEN.value + _MAX_TOKENS.value) // 64) * 64, "enable_prefix_caching": False,
        "max_num_seqs": _MAX_NUM_SEQS.value, "max_num_batched_tokens": _MAX_NUM_BATCHED_TOKENS.value, "num_scheduler_steps": _BURST.value}
    if _SHAPE.value is None:
        return jaxinfer.LLM(str(_MODEL.value), **settings)
    if _SHAPE.value not in SHAPES:
        raise app.UsageError(f"--shape={_SHAPE.value}: must be one of {', '.join(SHAPES)}.")
    return jaxinfer.LLM.from_model(random_model(SHAPES[_SHAPE.value], dtype=_DTYPE.value, seed=0), **settings)


def serve(llm: "LLM", arrivals: Sequence[float], lengths: Sequence[int], *, max_tokens: int, seed: int) -> tuple[list["Request"], float]:
    """Runs requests that arrive at these seconds, with prompts of these lengths, to their ends: (requests, seconds that it took)."""
    import jaxinfer

    rng, top = np.random.default_rng(seed), llm.engine.resolved.num_valid_tokens
    params = jaxinfer.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    groups = [llm.groups.make({"prompt_token_ids": rng.integers(min(100, top // 2), top, n).tolist()}, params) for n in lengths]
    pending, start = list(zip(arrivals, groups, strict=True))[::-1], time.monotonic()
    while pending or llm.engine.has_work:
        now = time.monotonic() - start
        while pending and pending[-1][0] <= now:
            arrival, group = pending.pop()
            llm.groups.add(group, arrival_time=start + arrival)
        if llm.engine.has_work:
            llm.engine.step()
        else:
            time.sleep(max(pending[-1][0] - (time.monotonic() - start), 0.0))
    seconds = time.monotonic() - start
    for group in groups:
        llm.groups.finish(group)
    return [request for group in groups for request in group.requests], seconds


def rate_row(llm: "LLM", rate: float) -> dict[str, Any]:
    """Latencies in ms and throughput at one rate."""
    rng, n = np.random.default_rng(_SEED.value), _NUM_REQUESTS.value
    arrivals = np.cumsum(rng.exponential(1 / rate, n)) if rate else np.zeros(n)
    lengths = rng.integers(_MIN_PROMPT_LEN.value, _MAX_PROMPT_LEN.value + 1, n).tolist()
    llm.reset_metrics()
    requests, seconds = serve(llm, arrivals.tolist(), lengths, max_tokens=_MAX_TOKENS.value, seed=_SEED.value + 1)
    times = [(r.arrival_time, r.first_token_time, r.finish_time) for r in requests]
    ttft = [1e3 * (first - arrival) for arrival, first, _ in times if first is not None]
    tpot = [1e3 * (end - first) / (_MAX_TOKENS.value - 1) for _, first, end in times if first is not None and end is not None]
    assert len(ttft) == len(tpot) == n, "a request ended without a token"
    row: dict[str, Any] = {"request_rate": rate, "requests": n}
    for name, values in (("ttft", ttft), ("tpot", tpot)):
        row |= {f"{name}_p{p}_ms": float(np.percentile(values, p)) for p in (50, 95)}
    return row | {"requests_per_s": n / seconds, "tokens_per_s": (sum(lengths) + n * _MAX_TOKENS.value) / seconds,
                  "output_tokens_per_s": n * _MAX_TOKENS.value / seconds, **report.phases(llm.engine.metrics, seconds),
                  "num_preemptions": sum(r.num_preemptions for r in requests)}


def main(argv: list[str]) -> None:
    if (_MODEL.value is None) == (_SHAPE.value is None):
        raise app.UsageError("give exactly one of --model and --shape.")
    if _MIN_PROMPT_LEN.value > _MAX_PROMPT_LEN.value:
        raise app.UsageError(f"--min_prompt_len={_MIN_PROMPT_LEN.value} is more than --max_prompt_len={_MAX_PROMPT_LEN.value}.")
    folder = None if _OUTPUT_DIR.value is None else cli.expanded("output_dir", _OUTPUT_DIR.value)
    llm = make_llm()
    serve(llm, [0.0] * 4, [_MAX_PROMPT_LEN.value] * 4, max_tokens=2, seed=0)  # warms caches up
    figures: dict[str, Any] = {
        "model": _MODEL.value and Path(_MODEL.value).name, "shape": _SHAPE.value, "engine": llm.engine.describe(), "seed": _SEED.value,
        "prompt_lens": [_MIN_PROMPT_LEN.value, _MAX_PROMPT_LEN.value], "max_tokens": _MAX_TOKENS.value,
        "num_scheduler_steps": _BURST.value, "rows": []}
    for rate in _RATES.value:
        figures["rows"].append(rate_row(llm, float(rate)))
        print(report.table(figures["rows"][-1:]), flush=True)
    figures["num_compiles_after_warmup"] = llm.metrics()["num_compiles_after_warmup"]
    device = report.environment()["device"].split(" (")[0].replace(" ", "-").lower()
    subject = _SHAPE.value or Path(str(_MODEL.value)).name
    print(f"written to {report.write(_NAME.value or f'serving-{subject}-{device}', figures, folder)}")


def entry() -> None:
    """Console entry."""
    sys.exit(cli.run(main, _FLAGS))


if __name__ == "__main__":
    entry()
