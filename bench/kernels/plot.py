"""A picture of one result file of bench.kernels: every row's share of the device's ceiling, ours beside the peers'. Measures nothing."""

import dataclasses
import importlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.kernels.rows import Line

OURS, PEER, MUST = "tab:blue", "tab:gray", "tab:red"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bar:
    """One row of the table as it is drawn."""

    label: str
    share: float
    """Of the ceiling, 0 to about 1."""
    text: str
    is_peer: bool
    must: float | None
    """The goal as a share of the ceiling; None where the row has none."""


def bars(lines: list[Line]) -> dict[str, list[Bar]]:
    """Op -> its bars, shape by shape in the order of the table. Rows without a known ceiling have no share and are left out."""
    out: dict[str, list[Bar]] = {}
    for x in lines:
        if x["of_ceiling"] is not None:
            text = f"{x['us']:.4g} us, {x['rate']:.3g} {x['unit']}"
            out.setdefault(x["op"], []).append(Bar(label=f"{x['shape']}  {x['implementation']}", share=x["of_ceiling"], text=text,
                                                   is_peer=x["path"] == "peer", must=must_share(x)))
    return out


def must_share(x: Line) -> float | None:
    """A line's goal as a share of its ceiling; None without one."""
    if x["must"] is None:
        return None
    if x["goal_unit"] == "of ceiling":
        return x["must"]
    if x["goal_unit"] == "us":
        return x["of_ceiling"] * x["us"] / x["must"]
    return x["of_ceiling"] * x["must"] / x["rate"] if x["rate"] else None


def title(figures: dict[str, Any]) -> str:
    """What was measured, on what, and the ceilings."""
    run, ceilings = figures["environment"], figures["ceilings"]
    return (f"{run['device']}, path {figures['path']}, jax {run['jax']}, commit {run['commit']}, {run['date']}\n"
            f"ceilings: copy {ceilings['bytes_per_s'] / 1e12:.3g} TB/s, bfloat16 matmul {ceilings['flops_per_s'] / 1e12:.4g} TFLOP/s")


def draw(result: Path) -> Path | None:
    """Draws a result file as a PNG beside it; None where matplotlib is not installed or no row has a share."""
    if find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed (pip install 'jaxinfer[bench]', then python -m bench.kernels --plot=FILE.json)")
        return None
    figures = json.loads(result.read_text())
    if not {"environment", "ceilings", "path", "rows"} <= set(figures):
        print(f"no plot: {result} is no result file of bench.kernels, or one from before it measured ceilings: run it again")
        return None
    groups = bars(figures["rows"])
    if not groups:
        print("no plot: no row of the file has a share of a ceiling")
        return None
    importlib.import_module("matplotlib").use("Agg")  # no window, wherever it runs
    pyplot = importlib.import_module("matplotlib.pyplot")
    counts = [len(group) for group in groups.values()]
    figure, axes = pyplot.subplots(len(groups), 1, figsize=(13, 1.2 * len(groups) + 0.24 * sum(counts)), squeeze=False,
                                   gridspec_kw={"height_ratios": [n + 1 for n in counts]}, layout="constrained")
    figure.suptitle(title(figures), fontsize=9)
    for axis, (op, group) in zip(axes[:, 0], groups.items(), strict=True):
        _draw_group(axis, op, group)
    output = result.with_suffix(".png")
    figure.savefig(output, dpi=110)
    pyplot.close(figure)
    return output


def _draw_group(axis: Any, op: str, group: list[Bar]) -> None:
    places = list(range(len(group)))
    axis.barh(places, [b.share for b in group], color=[PEER if b.is_peer else OURS for b in group], height=0.7)
    for place, bar in zip(places, group, strict=True):
        axis.text(bar.share, place, f" {bar.text}", va="center", fontsize=7)
        if bar.must is not None:
            axis.plot([bar.must] * 2, [place - 0.45, place + 0.45], color=MUST, linewidth=1.5)
    axis.set_yticks(places, [b.label for b in group], fontsize=7)
    axis.set_xlim(0, max(1.25, *(b.share * 1.25 for b in group)))
    axis.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axis.invert_yaxis()
    axis.set_title(f"{op}: share of the ceiling (blue ours, gray peers, red what it must reach)", fontsize=8, loc="left")
    axis.tick_params(axis="x", labelsize=7)
