"""The figures that bench.scheduling shows, on smaller loads: they depend on the seed alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import memory, scheduling
from jaxinfer.config import EngineConfig
from jaxinfer.request import Request


def ttft_p95(requests: list[Request], num_prompt: int) -> float:
    return scheduling.percentile([r.first_token_time - r.arrival_time for r in requests
                                  if len(r.prompt_token_ids) == num_prompt and r.first_token_time is not None], 95)


@pytest.mark.parametrize(("rate", "ratio"), [(28.0, 0.7), (40.0, 0.3)])  # the step that runs as one arrives must end in any case
def test_buckets_spare_short_prompts_the_wait_and_cost_long_ones_little(rate: float, ratio: float) -> None:
    off, on = (scheduling.serve(scheduling.bimodal(1, num_requests=250, rate=rate), num_pages=8192, cache=False, length_buckets=edges)
               for edges in ((), EngineConfig().length_buckets))
    assert ttft_p95(on.requests, 32) <= ratio * ttft_p95(off.requests, 32)
    assert ttft_p95(on.requests, 2048) <= 1.15 * ttft_p95(off.requests, 2048)
    assert on.num_padded - on.num_tokens <= 0.1 * on.num_padded and on.num_tokens == off.num_tokens
    assert max(r.finish_time or 0.0 for r in on.requests) <= 1.02 * max(r.finish_time or 0.0 for r in off.requests)


def test_the_cheaper_victims_cost_less_work_in_half_of_the_pages() -> None:
    extra = []
    for cost_aware in (False, True):
        runs = [scheduling.serve(burst, num_pages=scheduling.half_of_need(burst, False), cache=False, cost_aware_preemption=cost_aware)
                for burst in (scheduling.burst(seed, num_requests=32, shared=False) for seed in range(4))]
        extra.append(sum(run.num_tokens for run in runs) - sum(r.num_tokens - 1 for run in runs for r in run.requests))
        assert all(run.num_preemptions > 0 for run in runs)
    assert extra[1] < 0.95 * extra[0], extra


def test_swaps_cost_no_work_and_less_time_than_recompute() -> None:
    rows = {(row["prefixes"], row["cache"], row["preemption by"]): row for row in scheduling.swapping(range(2))}
    assert len(rows) == 8
    for prefixes, cache, by in rows:
        recompute, swap = rows[prefixes, cache, "recompute"], rows[prefixes, cache, "swap"]
        assert recompute["pages_moved"] == 0 < swap["pages_moved"] and swap["preemptions"] > 0
        assert swap["extra_percent"] < (0.5 if cache else 1e-9) < recompute["extra_percent"], (prefixes, cache, by)
        assert swap["makespan_s"] < recompute["makespan_s"]


def test_figures_are_written_without_jax(tmp_path: Path) -> None:
    path = scheduling.write("figures", {"seed": 3}, tmp_path)
    written = json.loads(path.read_text())
    assert written["seed"] == 3 and {"device", "python", "commit", "date"} <= written["environment"].keys()
    code = "import sys, bench.scheduling; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_a_shared_prefix_is_held_once_to_the_page() -> None:
    """1000 tokens fill 15 pages of 64, or 62 of 16; what is left of them shares a page, or two, with the 20 tokens of each request."""
    rows = {(row["page_size"], row["prefix_cache"]): row for row in memory.shared_rows(3)}
    assert rows[64, True]["pages"] == 15 + 64 and rows[64, False]["pages"] == 64 * 16
    assert rows[16, True]["pages"] == 62 + 64 * 2 and rows[16, False]["pages"] == 64 * 64
    for row in rows.values():
        assert row["prompt_tokens_computed"] + row["prompt_tokens_cached"] == row["prompt_tokens"] == 64 * 1020
        assert row["prompt_tokens_cached"] == (63 * 1000 if row["prefix_cache"] else 0)


def test_pages_waste_little() -> None:
    rows = {(row["page_size"], row["allocation"]): row["waste_percent"] for row in memory.waste_rows(3)}
    assert rows[16, "pages on demand"] < 1 and rows[64, "pages on demand"] < 5
    assert rows[64, "each request's own maximum"] > 15 and rows[64, "max_model_len"] > 60
