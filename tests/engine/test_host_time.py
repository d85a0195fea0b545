"""What a step costs the host: packing is cheap, and right with words kept from step to step; bench.host measures every phase."""

import dataclasses
import time

import numpy as np

from jaxinfer.engine.pack import SlotWords, pack
from jaxinfer.state import StepLayout
from tests.engine.test_pack import make_plan, row

NUM_ROWS = 64


def best_of(function, num_runs=30):
    """Shortest seconds of a call: what it takes where nothing else runs."""
    times = []
    for _ in range(num_runs):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def test_packing_a_decode_step_of_64_takes_a_fraction_of_a_millisecond():
    layout = StepLayout(num_tokens=NUM_ROWS, num_rows=NUM_ROWS, num_updates=NUM_ROWS, null_slot=NUM_ROWS, decode_only=True)
    plan = make_plan(*(row(i, 100 + i, [], from_device=True, temperature=0.5) for i in range(NUM_ROWS)))
    words = SlotWords(NUM_ROWS)
    first = pack(plan, layout, [], words)
    assert best_of(lambda: pack(plan, layout, [], words)) < 0.5e-3
    np.testing.assert_array_equal(pack(plan, layout, [], words), first)


def test_words_of_a_slot_follow_its_request():
    layout = StepLayout(num_tokens=4, num_rows=4, num_updates=4, null_slot=4, decode_only=True)
    words = SlotWords(4)
    for temperature in (0.5, 0.25, 0.0):  # one request after the other in the same slot
        plan = make_plan(row(2, 60, [], from_device=True, temperature=temperature))
        kept, anew = pack(plan, layout, [], words), pack(plan, layout, [])
        np.testing.assert_array_equal(kept, anew)
        assert layout.view(kept, "sampling.temperature")[0] == temperature


def test_a_repeated_step_is_packed_as_if_anew():
    from jaxinfer.engine.pack import pack_again

    layout = StepLayout(num_tokens=4, num_rows=4, num_updates=4, null_slot=4, decode_only=True)
    rows = [row(2, 60, [7], top_k=3, temperature=1.0), row(0, 63, [], from_device=True)]
    first = pack(make_plan(*rows), layout, [(2, 0, 5), (0, 3, 6)])
    nexts = make_plan(*(r._replace(start=r.start + 1, token_ids=(), from_device=True) for r in rows))
    for updates in ((), ((0, 4, 9),)):
        plan = dataclasses.replace(nexts, page_updates=updates)
        again, anew = pack_again(first, plan, layout), pack(plan, layout, updates)
        layout.view(again, "token_ids")[0] = 0  # left over, and never looked at
        np.testing.assert_array_equal(again, anew)


def test_the_benchmark_measures_every_phase(tmp_path):
    import json
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-m", "bench.host", "--running=4", "--steps=12", f"--output_dir={tmp_path}"],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads((tmp_path / "host.json").read_text())
    (measured,) = figures["rows"]
    phases = [measured[f"{phase}_ms"] for phase in ("schedule", "pack", "dispatch", "texts", "apply")]
    assert min(phases) > 0 and measured["total_ms"] > 0 and len(figures["profiles"]["4"]) == 15


def test_serving_counts_from_arrival(make_llm):
    from bench import serving

    requests, seconds = serving.serve(make_llm(), [0.0, 0.0, 0.05, 0.2], [5, 40, 33, 2], max_tokens=4, seed=0)
    assert seconds >= 0.2 and [len(r.prompt_token_ids) for r in requests] == [5, 40, 33, 2]
    arrivals = [r.arrival_time - requests[0].arrival_time for r in requests]
    np.testing.assert_allclose(arrivals, [0.0, 0.0, 0.05, 0.2], atol=1e-6)
    for r in requests:
        assert len(r.output_token_ids) == 4 and r.arrival_time < r.first_token_time <= r.finish_time
