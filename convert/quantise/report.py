"""The report of a quantisation beside its parameters: JSON always, a picture where matplotlib is installed. Measures nothing."""

import importlib.util
import logging
from pathlib import Path
from typing import Any

from convert.quantise.layer import LINEARS
from convert.staging import write_json

logger = logging.getLogger(__name__)

JSON, PICTURE = "quantization_report.json", "quantization_report.png"


def write(report: dict[str, Any], folder: Path) -> None:
    """Writes the report into a finished checkpoint's folder."""
    write_json(folder / JSON, report)
    if importlib.util.find_spec("matplotlib") is None:
        logger.info("no %s: matplotlib is not installed (pip install 'jaxinfer[bench]')", PICTURE)
        return
    draw(report, folder / PICTURE)


def draw(report: dict[str, Any], path: Path) -> None:
    """Error of every linear by layer; for awq the ratios and the spread of scales; perplexity before and after in the title."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    awq = report["settings"]["method"] == "awq"
    figure = Figure(figsize=(8, 9 if awq else 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3 if awq else 1, 1, sharex=True, squeeze=False)[:, 0]
    for name in LINEARS:
        axes[0].semilogy(_by_layer(report["errors"], name), label=name, marker=".")
        if awq:
            choices = [report["choices"][f"layers.{i}"][name] for i in range(len(report["choices"]))]
            axes[1].plot([choice["ratio"] if choice["ratio"] is not None else float("nan") for choice in choices], ".", label=name)
            axes[2].semilogy([choice["scale_max"] / choice["scale_min"] for choice in choices], ".", label=name)
    axes[0].set_ylabel("relative output error")
    if awq:
        axes[1].set_ylabel("ratio r, where the rule has one")
        axes[2].set_ylabel("largest / smallest scale")
    axes[0].legend()
    axes[-1].set_xlabel("layer")
    perplexity = report["perplexity"]
    measured = "" if perplexity is None else f", perplexity {perplexity['before']:.3f} -> {perplexity['after']:.3f}"
    grid = report["settings"]["grid"]
    figure.suptitle(f"{report['model']}: {report['settings']['method']}, {grid['bits']} bits, groups of {grid['group_size']}{measured}")
    figure.savefig(path, dpi=120)


def _by_layer(errors: dict[str, float], linear: str) -> list[float]:
    return [error for name, error in errors.items() if name.endswith(f".{linear}")]
