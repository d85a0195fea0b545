"""What the scheduler's choices cost and save, on a modelled device: buckets under a bimodal load, victims in a pool too small, swaps.

  python -m bench.scheduling [--name=scheduling] [--seed=0] [--output_dir=DIR]
Plain Python: no model, no device, no jax. A step takes STEP_S + TOKEN_S * tokens, padded to the engine's token buckets, and PAGE_S for
each page moved to the host or back before it, so all figures but the host's times follow from the seed. JSON goes to --output_dir.
"""

import dataclasses
import datetime
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from bench import report
from jaxinfer import cli
from jaxinfer.config import EngineConfig
from jaxinfer.request import FinishReason, Request
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.scheduler import HashedPrefixCache, HostPages, NullPrefixCache, PageAllocator, PrefixCache, SchedulePlan, Scheduler
from jaxinfer.scheduler.policies import POLICIES

STEP_S = 0.004      # a 7B model in bf16: its weights are read once a step
TOKEN_S = 20e-6     # and 50 000 prompt tokens/s
TOKEN_BUCKETS = (128, 512, 2048)
MAX_NUM_SEQS = 256
PAGE_SIZE = 16
PAGE_S = 60e-6      # 0.9 MB of a 7B model in bf16 (28 layers of 4 KV heads) at 15 GB/s, one way
SHARED_LEN = 256


@dataclasses.dataclass(kw_only=True)
class Run:
    """One load through one scheduler."""

    requests: list[Request]
    num_tokens: int = 0
    num_padded: int = 0
    num_steps: int = 0
    host_s: float = 0.0
    num_preemptions: int = 0
    num_pages_moved: int = 0


class Device:
    """A clock that steps move on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def run(self, plan: SchedulePlan) -> int:
        """Passes the plan's time; returns the tokens that it was padded to."""
        edges = [2**i for i in range(MAX_NUM_SEQS.bit_length())] if plan.is_decode_only else TOKEN_BUCKETS
        padded = next((edge for edge in edges if edge >= plan.num_tokens), plan.num_tokens)
        self.now += STEP_S + TOKEN_S * padded + PAGE_S * num_moved(plan)
        return padded


def num_moved(plan: SchedulePlan) -> int:
    """Pages that go to the host or come back."""
    return len(plan.page_saves) + len(plan.page_loads)


def make_request(name: str, rng: random.Random, num_prompt: int, num_output: int, *, arrival: float, prefix: Sequence[int] = (),
                 priority: int = 0) -> Request:
    """A request that runs to its full length, its prompt random after the prefix."""
    prompt = (*prefix, *(rng.randrange(1, 50_000) for _ in range(num_prompt - len(prefix))))
    return Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(max_tokens=num_output), arrival_time=arrival,
                   max_total_len=num_prompt + num_output, stop_token_ids=frozenset(), seed=0, priority=priority)


def serve(requests: Sequence[Request], *, num_pages: int, cache: bool, **settings: Any) -> Run:
    """Runs requests, given by arrival, to their end."""
    device, pages = Device(), PageAllocator(num_pages + 1, PAGE_SIZE)
    prefix_cache: PrefixCache = HashedPrefixCache(pages) if cache else NullPrefixCache()
    scheduler = Scheduler(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=TOKEN_BUCKETS[-1], max_model_len=8192, pages=pages,
                          prefix_cache=prefix_cache, clock=device, **settings)
    run, pending, next_token = Run(requests=list(requests)), list(reversed(requests)), 50_000
    while pending or scheduler.has_unfinished:
        while pending and pending[-1].arrival_time <= device.now:
            scheduler.add(pending.pop())
        start = time.perf_counter()
        plan = scheduler.next()
        run.host_s += time.perf_counter() - start
        if plan is None:
            device.now = pending[-1].arrival_time
            continue
        run.num_padded += device.run(plan)
        run.num_tokens += plan.num_tokens
        run.num_steps += 1
        run.num_pages_moved += num_moved(plan)
        tokens = list(range(next_token, next_token + len(plan.rows)))  # no two alike, so that nothing generated is shared
        next_token += len(plan.rows)
        finish = [FinishReason.LENGTH if row.samples and row.kv_len + 1 == row.request.max_total_len else None for row in plan.rows]
        start = time.perf_counter()
        scheduler.apply(plan, tokens, finish)
        run.host_s += time.perf_counter() - start
    stats = scheduler.stats()
    run.num_preemptions = stats.num_preemptions
    return run


def percentile(values: Sequence[float], percent: int) -> float:
    """By nearest rank."""
    return sorted(values)[max(0, -(-len(values) * percent // 100) - 1)]


def bimodal(seed: int, *, num_requests: int = 800, rate: float = 28.0, long_share: float = 0.5) -> list[Request]:
    """Poisson arrivals of prompts of 32 and of 2048 tokens."""
    rng, now, requests = random.Random(seed), 0.0, []
    for index in range(num_requests):
        now += rng.expovariate(rate)
        num_prompt = 2048 if rng.random() < long_share else 32
        requests.append(make_request(f"r{index}", rng, num_prompt, rng.randrange(8, 64), arrival=now))
    return requests


def bucketing(seed: int) -> list[dict[str, Any]]:
    """The same bimodal load with length buckets off and on, at about 65 and 93 % of what the device can do."""
    rows = []
    for rate, name, edges in ((rate, name, edges) for rate in (28.0, 40.0)
                              for name, edges in (("off", ()), ("on", EngineConfig().length_buckets))):
        run = serve(bimodal(seed, rate=rate), num_pages=16_384, cache=False, length_buckets=edges)
        row: dict[str, Any] = {"requests_per_s": rate, "buckets": name}
        for kind, members in (("short", [r for r in run.requests if len(r.prompt_token_ids) == 32]),
                              ("long", [r for r in run.requests if len(r.prompt_token_ids) > 32])):
            ttft = [1e3 * (r.first_token_time - r.arrival_time) for r in members if r.first_token_time is not None]
            latency = [1e3 * (r.finish_time - r.arrival_time) for r in members if r.finish_time is not None]
            for p in (50, 95):
                row[f"{kind}_ttft_p{p}_ms"] = percentile(ttft, p)
                row[f"{kind}_latency_p{p}_ms"] = percentile(latency, p)
        row["padding_percent"] = 100 * (run.num_padded - run.num_tokens) / run.num_padded
        row["num_steps"] = run.num_steps
        row["makespan_s"] = max(r.finish_time or 0.0 for r in run.requests)
        rows.append(row)
    return rows


def burst(seed: int, *, num_requests: int = 64, shared: bool) -> list[Request]:
    """Requests of mixed lengths at once; half of them behind one system prompt where `shared`."""
    rng = random.Random(seed)
    system = [rng.randrange(1, 50_000) for _ in range(SHARED_LEN)]
    return [make_request(f"r{i}", rng, rng.randrange(SHARED_LEN + 32, 1024), rng.randrange(64, 512), arrival=0.0,
                         prefix=system if shared and i % 2 else (), priority=0) for i in range(num_requests)]


def preemption(seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Bursts in half of the pages that they need at once: means of what is computed again, by choice of victim and readmission."""
    rows = []
    for shared in (False, True):
        for cache in (False, True):
            for cost_aware in (False, True):
                for grace in (0, 64):
                    runs = [serve(burst(s, shared=shared), num_pages=half_of_need(burst(s, shared=shared), shared), cache=cache,
                                  cost_aware_preemption=cost_aware, preemption_grace_tokens=grace) for s in seeds]
                    rows.append({"prefixes": "shared" if shared else "none", "cache": cache, "victim": "cheapest" if cost_aware else "last",
                                 "grace_tokens": grace, **means(runs)})
    return rows


def swapping(seeds: Sequence[int]) -> list[dict[str, Any]]:
    """The same bursts, the pages of those who give way dropped, or moved to a host that has as many again as the pool."""
    rows = []
    for shared in (False, True):
        for cache in (False, True):
            for swap in (False, True):
                runs = []
                for s in seeds:
                    num_pages = half_of_need(burst(s, shared=shared), shared)
                    host_pages = HostPages(num_pages if swap else 0, tokens_per_page=2 * PAGE_S / TOKEN_S)
                    runs.append(serve(burst(s, shared=shared), num_pages=num_pages, cache=cache, host_pages=host_pages))
                rows.append({"prefixes": "shared" if shared else "none", "cache": cache, "preemption by": "swap" if swap else "recompute",
                             **means(runs), "pages_moved": sum(run.num_pages_moved for run in runs) / len(runs)})
    return rows


def means(runs: Sequence[Run]) -> dict[str, float]:
    """Preemptions, tokens computed beyond those that each request needs once, and time, a run."""
    useful = sum(r.num_tokens - 1 - r.num_cached_tokens for run in runs for r in run.requests)
    return {"preemptions": sum(run.num_preemptions for run in runs) / len(runs),
            "extra_percent": 100 * (sum(run.num_tokens for run in runs) - useful) / useful,
            "makespan_s": sum(max(r.finish_time or 0.0 for r in run.requests) for run in runs) / len(runs)}


def half_of_need(requests: Sequence[Request], shared: bool) -> int:
    """Half of the pages that the requests would fill all at once, a shared prefix once."""
    saved = (len(requests) // 2 - 1) * SHARED_LEN // PAGE_SIZE if shared else 0
    return (sum(-(-r.max_total_len // PAGE_SIZE) for r in requests) - saved) // 2


def host_times() -> list[dict[str, Any]]:
    """Median host time of next() plus apply() in decode steps, by policy."""
    rows = []
    for policy in POLICIES:
        for num_running in (64, 128):
            pages = PageAllocator(num_running * 40, PAGE_SIZE)
            scheduler = Scheduler(max_num_seqs=num_running, max_num_batched_tokens=8192, max_model_len=4096, pages=pages,
                                  prefix_cache=HashedPrefixCache(pages), policy=policy, length_buckets=EngineConfig().length_buckets)
            rng = random.Random(0)
            for index in range(num_running):
                scheduler.add(make_request(f"r{index}", rng, 64, 300, arrival=0.0))
            seconds: list[float] = []
            while len(seconds) < 200:
                start = time.perf_counter()
                plan = scheduler.next()
                assert plan is not None, "the requests are longer than the measurement"
                scheduler.apply(plan, [7] * len(plan.rows), [None] * len(plan.rows))
                if plan.is_decode_only and len(plan.rows) == num_running:
                    seconds.append(time.perf_counter() - start)
            rows.append({"policy": policy, "running": num_running, "median_us": 1e6 * statistics.median(seconds)})
    return rows


def write(name: str, figures: dict[str, Any], folder: Path | None = None) -> Path:
    """As report.write(), which would load jax for its version."""
    folder = folder or report.default_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    environment = {"device": f"modelled, on {report.cpu_name()}", "python": platform.python_version(), "commit": report.commit(),
                   "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")}
    path.write_text(json.dumps({"environment": environment, **figures}, indent=1) + "\n")
    return path


def measure(seed: int) -> dict[str, Any]:
    """All figures, printed as they come."""
    figures: dict[str, Any] = {"model": {"step_s": STEP_S, "token_s": TOKEN_S, "token_buckets": TOKEN_BUCKETS, "page_s": PAGE_S}, "seed": seed}
    figures["bucketing"] = rows = bucketing(seed)
    print("Prompts of 32 and 2048 tokens, Poisson arrivals:")
    for off, on in zip(rows[::2], rows[1::2], strict=True):
        print(f"{off['requests_per_s']:.0f} requests/s")
        print(report.table([{"figure": key, "off": off[key], "on": on[key], "on/off": on[key] / off[key]} for key in list(off)[2:]]))
    figures["preemption"] = preemption(range(seed, seed + 8))
    print("\nBursts of 64 in half of the pages that they need, mean of 8:")
    print(report.table(figures["preemption"]))
    figures["swapping"] = swapping(range(seed, seed + 8))
    print("\nThe same bursts, preempted by recompute or by swap:")
    print(report.table(figures["swapping"]))
    figures["host"] = host_times()
    print("\nHost time of a decode step:")
    print(report.table(figures["host"]))
    return figures


if __name__ == "__main__":
    _NAME = flags.DEFINE_string("name", "scheduling", "Name of the JSON file.")
    _SEED = flags.DEFINE_integer("seed", 0, "Of arrivals and lengths.")
    _OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Folder of the JSON file; default: bench/results in a checkout, else the current "
                                      "one.")

    def main(argv: list[str]) -> None:
        """Checks the folder before the work."""
        folder = None if _OUTPUT_DIR.value is None else cli.expanded("output_dir", _OUTPUT_DIR.value)
        print(f"written to {write(_NAME.value, measure(_SEED.value), folder)}")

    sys.exit(cli.run(main))
