"""A quantised model against its original on a text of the user's own: where it drifts, by how much, and what to try next.

  python -m jaxinfer.diagnose --model=ORIGINAL --quantized=DIR --text=FILE [--calibration=FILE] [--output=FILE.json] [--plot=FILE.png]

For every layer: mean, standard deviation and kurtosis of the hidden state in both models, their cosine and relative error; for the whole
model KL divergence a token, agreement of the likeliest token, and perplexity. Changes no checkpoint.
"""

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from jaxinfer import cli
from jaxinfer.checkpoint import read_manifest
from jaxinfer.drift import StageFigures, diagnose
from jaxinfer.engine.load import load
from jaxinfer.errors import ConfigError
from jaxinfer.quant import GROUP_SIZES, METHODS_OF
from jaxinfer.source import converted_checkpoint
from jaxinfer.textfile import differences, profile, read_text
from jaxinfer.tokenizer import Tokenizer


def token_windows(tokenizer: Tokenizer, text: str, *, max_len: int, num_windows: int) -> np.ndarray:
    """The first windows of a text: int32 [S, T].

    Raises:
      ConfigError: the text is shorter than one window of at least 2 tokens.
    """
    ids = tokenizer.encode(text)
    if len(ids) < 2:
        raise ConfigError(f"the text has {len(ids)} tokens: give at least 2.")
    length = min(max_len, len(ids))
    count = min(num_windows, len(ids) // length)
    return np.array(ids[:count * length], np.int32).reshape(count, length)


def advice(figures: Mapping[str, Any], quantization: Mapping[str, Any], unlike: Sequence[str]) -> list[str]:
    """What to try next, the likeliest help first. Names no flag that `python -m convert.quantize` refuses under the checkpoint's method."""
    said = []
    method, group = quantization.get("method"), quantization.get("group_size", quantization.get("weights", {}).get("group_size"))
    rise = figures["perplexity"]["quantized"] / figures["perplexity"]["original"] - 1
    flagged_names = [stage.name for stage in figures["stages"] if stage.flags]
    shrunk = [stage.name for stage in figures["stages"] if any("shrank" in flag for flag in stage.flags)]
    if unlike:
        said.append("The calibration text differs from this one: quantise again with text like what the model will meet "
                    f"({'; '.join(unlike)}).")
    clipped = bool(method in METHODS_OF["clip"] and quantization.get("settings", {}).get("clip", True))
    remedies = ["--noclip (clipping goes too far there)"] * clipped + ["a smaller --group_size"] * (group != min(GROUP_SIZES))
    if shrunk and remedies:
        said.append(f"Hidden states shrank in {', '.join(shrunk)}: try {', or '.join(remedies)}.")
    tables = [flag for flag, bits in (("--lm_head", "lm_head_bits"), ("--embedding", "embedding_bits"))
              if quantization.get("settings", {}).get(bits) == 4]
    layers = [name for name in flagged_names if name.startswith("layer ")]
    if layers:
        said.append(f"{', '.join(layers)} stand out: keep the worst linears at 8 bits with --keep_int8=auto:{2 * len(layers)}.")
    if tables and (rise > 0.02 or len(layers) < len(flagged_names)):
        said.append(f"Vocabulary head or embedding is at 4 bits: try {' and '.join(f'{flag}=int8' for flag in tables)}, or none.")
    if rise > 0.02 and group != 32:
        said.append(f"Perplexity rose by {100 * rise:.1f} %: try --group_size=32, which costs about half a bit a weight.")
    if rise > 0.02 and method == "rtn":
        said.append("The weights were rounded to nearest: quantise with --method=awq or gptq.")
    if not said:
        said.append(f"Nothing stands out: perplexity {100 * rise:+.2f} %, the likeliest token agrees at "
                    f"{100 * figures['top1_agreement']:.1f} % of the positions.")
    return said


def table(stages: Sequence[StageFigures]) -> str:
    """The stages as aligned text."""
    lines = [f"{'stage':>12} {'mean':>19} {'std':>19} {'kurtosis':>19} {'cosine':>9} {'rel. error':>10}  flags"]
    for s in stages:
        pairs = " ".join(f"{a:9.4g} {b:9.4g}" for a, b in (s.mean, s.std, s.kurtosis))
        lines.append(f"{s.name:>12} {pairs} {s.cosine:9.6f} {s.relative_error:10.4g}  {'; '.join(s.flags)}".rstrip())
    return "\n".join(lines)


def plot(figures: Mapping[str, Any], path: Path) -> None:
    """Relative error, cosine and standard deviations by stage, as a picture.

    Raises:
      ConfigError: matplotlib is not installed, or the file cannot be written or is of a kind that it does not know.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'jaxinfer[bench]', or leave --plot out.")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    stages = figures["stages"]
    figure = Figure(figsize=(8, 8), layout="constrained")
    FigureCanvasAgg(figure)
    error, cosine, std = figure.subplots(3, 1, sharex=True)
    error.semilogy([s.relative_error or float("nan") for s in stages], marker=".")
    cosine.plot([s.cosine for s in stages], marker=".")
    for i, label in enumerate(("original", "quantised")):
        std.semilogy([s.std[i] for s in stages], marker=".", label=label)
    std.legend()
    for axes, label in ((error, "relative error"), (cosine, "cosine"), (std, "standard deviation")):
        axes.set_ylabel(label)
    std.set_xticks(range(len(stages)), [s.name for s in stages], rotation=90)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be written ({error}): choose another --plot, such as figures.png.") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Console entry; takes arguments without the program's name."""
    values = flags.FlagValues()
    flags.DEFINE_string("model", None, "The original: a converted checkpoint, or what generate takes.", flag_values=values)
    flags.DEFINE_string("quantized", None, "What was quantised from it.", flag_values=values)
    flags.DEFINE_string("text", None, "Text to compare on.", flag_values=values)
    flags.DEFINE_string("calibration", None, "The text that it was calibrated on, to say how the two differ.", flag_values=values)
    flags.DEFINE_integer("max_len", 512, "Tokens of a window.", 2, flag_values=values)
    flags.DEFINE_integer("num_windows", 8, "Windows of the text.", 1, flag_values=values)
    flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16", "float16"], "To run both in.", flag_values=values)
    flags.DEFINE_string("output", None, "JSON file for the figures.", flag_values=values)
    flags.DEFINE_string("plot", None, "PNG file for the figures; needs matplotlib.", flag_values=values)
    return cli.run(lambda _: _run(values), values, argv, __doc__)


def _run(values: flags.FlagValues) -> None:
    given: dict[str, Any] = values.flag_values_dict()
    for name in ("model", "quantized", "text"):
        if not given[name]:
            raise app.UsageError(f"--{name} is needed")
    text = read_text(cli.expanded("text", given["text"]))
    paths = [converted_checkpoint(given[name], dtype="auto") for name in ("model", "quantized")]
    windows = token_windows(Tokenizer.from_dir(paths[0]), text, max_len=given["max_len"], num_windows=given["num_windows"])
    original, quantised = (load(path, dtype=given["dtype"]) for path in paths)
    figures = diagnose(original, quantised, windows)
    quantization = read_manifest(paths[1])["quantization"] or {}
    unlike: list[str] = []
    if given["calibration"]:
        unlike = differences(profile(read_text(cli.expanded("calibration", given["calibration"]))), profile(text))
    next_steps = advice(figures, quantization, unlike)
    print(table(figures["stages"]))
    print(f"\nKL {figures['kl_per_token']:.4g} nats a token, likeliest token equal at {100 * figures['top1_agreement']:.2f} % of "
          f"{figures['num_tokens']} positions, perplexity {figures['perplexity']['original']:.4f} -> {figures['perplexity']['quantized']:.4f}")
    if given["calibration"]:
        print("\nCalibration text and this text: " + ("; ".join(unlike) or "alike"))
    print("\nWhat to try next:\n" + "\n".join(f"- {line}" for line in next_steps))
    if given["output"]:
        stages = [dataclasses.asdict(stage) for stage in figures["stages"]]
        _write(cli.expanded("output", given["output"]), {**figures, "stages": stages, "text_differences": unlike, "advice": next_steps})
    if given["plot"]:
        plot(figures, cli.expanded("plot", given["plot"]))


def _write(path: Path, value: Mapping[str, Any]) -> None:
    try:
        path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): choose another --output.") from None


if __name__ == "__main__":
    sys.exit(main())
