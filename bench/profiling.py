"""Reads a jax profile: which kernels took the device's time, and how long the device waited between them."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def profile(work: Callable[[], Any], *, top: int = 10) -> dict[str, Any]:
    """Runs `work` under jax's profiler.

    Args:
      work: must wait for the device before it returns.
      top: how many kernels to name.

    Returns:
      busy_ms (union of kernel times), span_ms (first kernel's start to last kernel's end), gap_share (1 - busy/span), num_kernels, and
      `kernels`: the hottest by total time with their calls. Empty where the profile holds no GPU plane (a CPU run).
    """
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            work()
        (path,) = Path(folder).rglob("*.xplane.pb")
        return summarise(jax.profiler.ProfileData.from_file(str(path)), top=top)


def summarise(data: Any, *, top: int) -> dict[str, Any]:
    """The figures of `profile` from jax.profiler.ProfileData."""
    events = [(e.start_ns, e.duration_ns, e.name) for plane in data.planes if plane.name.startswith("/device:GPU")
              for line in plane.lines if line.name.startswith("Stream") for e in line.events]
    if not events:
        return {}
    events.sort()
    busy, end = 0.0, events[0][0]
    for start, duration, _ in events:
        busy += max(start + duration - max(start, end), 0)
        end = max(end, start + duration)
    span = end - events[0][0]
    totals: dict[str, list[float]] = {}
    for _, duration, name in events:
        entry = totals.setdefault(name, [0.0, 0])
        entry[0] += duration
        entry[1] += 1
    hottest = sorted(totals.items(), key=lambda kv: -kv[1][0])[:top]
    return {"busy_ms": busy / 1e6, "span_ms": span / 1e6, "gap_share": 1 - busy / span if span else 0.0, "num_kernels": len(events),
            "kernels": [{"kernel": name[:90], "calls": int(n), "total_us": t / 1e3, "each_us": t / 1e3 / n} for name, (t, n) in hottest]}
