"""Quantisation methods side by side on one calibration: held-out perplexity of each, in one pass over the layers, writing no checkpoint.

  python -m bench.quantisation --model=DIR [--methods=rtn,gptq,awq] [--group_sizes=128,32] [--calibration=english,code]
      [--num_samples=64 --max_len=512 --num_eval_samples=16 --compute_dtype=bfloat16]

Calibration and held-out text come from bench/texts.py. For each kind of calibration text the unquantised activations go through the
layers once, and every variant is made from the same Gram matrices; each variant carries the held-out windows of both kinds along.
"""

import dataclasses
import itertools
import math
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from bench import report, texts
from convert.progress import MemoryMeter
from convert.quantise.calibration import read_windows
from convert.quantise.grid import GridSpec
from convert.quantise.layer import FloatModel, InputStatistics, Params, batch_rows, forward, input_widths, layer_graph, on_device, token_losses
from convert.quantise.methods import LayerResult, QuantiseConfig, quantise_layer
from convert.quantise.run import layer_statistics, open_float
from convert.source import DTYPES
from jaxinfer import cli
from jaxinfer.tokenizer import Tokenizer

_FLAGS = flags.FlagValues()  # its own: other commands have flags of these names
_MODEL = flags.DEFINE_string("model", None, "A converted, unquantised checkpoint.", required=True, flag_values=_FLAGS)
_METHODS = flags.DEFINE_list("methods", ["rtn", "gptq", "awq"], "Methods.", flag_values=_FLAGS)
_GROUP_SIZES = flags.DEFINE_list("group_sizes", ["128"], "Group sizes, column for one group a column.", flag_values=_FLAGS)
_CALIBRATION = flags.DEFINE_list("calibration", list(texts.KINDS), "Kinds of calibration text, one pass each.", flag_values=_FLAGS)
_SYMMETRIC = flags.DEFINE_bool("symmetric", False, "Without zero points.", flag_values=_FLAGS)
_NUM_SAMPLES = flags.DEFINE_integer("num_samples", 64, "Calibration windows.", 1, flag_values=_FLAGS)
_MAX_LEN = flags.DEFINE_integer("max_len", 512, "Tokens of a window.", 2, flag_values=_FLAGS)
_NUM_EVAL = flags.DEFINE_integer("num_eval_samples", 16, "Held-out windows of each kind.", 1, flag_values=_FLAGS)
_SEED = flags.DEFINE_integer("seed", 0, "Of the choice of windows.", 0, flag_values=_FLAGS)
_COMPUTE_DTYPE = flags.DEFINE_enum("compute_dtype", "float32", ["float32", "bfloat16"], "Of activations.", flag_values=_FLAGS)
_NAME = flags.DEFINE_string("name", None, "The result's file name; default accuracy-quantisation-<model>.", flag_values=_FLAGS)


@dataclasses.dataclass(kw_only=True, eq=False)
class Variant:
    """One way of quantising, and the held-out windows on their way through its layers."""

    name: str
    settings: QuantiseConfig | None
    """None leaves the model as it is."""
    states: dict[str, np.ndarray]
    """Kind of text -> float32 [S, T, D]."""
    seconds: float = 0.0
    errors: list[float] = dataclasses.field(default_factory=list)


def layer_after(model: FloatModel, index: int, params: Params, statistics: Mapping[str, InputStatistics],
                variant: Variant) -> Mapping[str, Any]:
    """The layer as the variant's checkpoint would hold it."""
    if variant.settings is None:
        return params
    start = time.perf_counter()
    dtype = np.dtype(DTYPES[model.manifest["dtype"]])
    result: LayerResult = quantise_layer(f"layers.{index}", params, statistics, variant.settings, model.config, dtype)
    variant.seconds += time.perf_counter() - start
    variant.errors += result.errors.values()
    shapes = model.manifest["tensors"]
    weights = {f"{name}.weight": matrix.dequantized().reshape(shapes[f"layers.{index}.{name}.weight"]["shape"])
               for name, matrix in result.matrices.items()}
    return {path: value.astype(dtype) for path, value in result.others.items()} | weights


def run_layers(model: FloatModel, x: np.ndarray, variants: list[Variant], dtype: str) -> float:
    """Takes calibration windows `x` and every variant's states through all layers; returns the seconds that statistics took."""
    config, spent, rows = model.config, 0.0, batch_rows(x.shape[1])
    for index in range(config.num_layers):
        start = time.perf_counter()
        params, graph = on_device(model.layer(index), "float32"), layer_graph(config, index)
        statistics = jax.block_until_ready(layer_statistics(model, index, on_device(params, dtype), x))
        spent += time.perf_counter() - start
        for variant in variants:
            after = on_device(layer_after(model, index, params, statistics, variant), dtype)
            for state, at in itertools.product(variant.states.values(), range(0, _NUM_EVAL.value, rows)):
                out = forward(jnp.asarray(state[at:at + rows], dtype), after, config=config, graph=graph)
                state[at:at + rows] = np.asarray(out, np.float32)
        print(f"layer {index} (last: {config.num_layers - 1}): {time.perf_counter() - start:.1f} s", flush=True)
    return spent


def perplexities(model: FloatModel, variant: Variant, tokens: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Kind of text -> perplexity, after the last layer."""
    config = model.config
    head = jnp.asarray(model.read("embedding.weight" if config.tie_embeddings else "lm_head.weight"), jnp.float32)
    norm = jnp.asarray(model.read("final_norm.weight"), jnp.float32)
    found = {}
    for kind, state in variant.states.items():
        total = sum(float(token_losses(jnp.asarray(window[:-1]), norm, head, jnp.asarray(ids[1:]), eps=config.norm_eps).sum())
                    for window, ids in zip(state, tokens[kind], strict=True))
        found[kind] = math.exp(total / (state.shape[0] * (state.shape[1] - 1)))
    return found


def _windows(model: FloatModel, kind: str, split: str, count: int) -> np.ndarray:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{kind}-{split}.jsonl"
        texts.write(kind, split, path)
        return read_windows(path, Tokenizer.from_dir(model.path), num_samples=count, max_len=_MAX_LEN.value, seed=_SEED.value).tokens


def _settings() -> dict[str, QuantiseConfig]:
    found = {}
    for method, size in itertools.product(_METHODS.value, _GROUP_SIZES.value):
        grid = GridSpec(bits=4, group_size=None if size == "column" else int(size), symmetric=_SYMMETRIC.value)
        found[f"{method} g{size}"] = QuantiseConfig(method=method, grid=grid)
    return found


def main(argv: list[str]) -> None:
    settings = _settings()
    for value in settings.values():
        model = open_float(_MODEL.value, value)
    if set(_CALIBRATION.value) - set(texts.KINDS):
        raise app.UsageError(f"--calibration={','.join(_CALIBRATION.value)}: kinds are {', '.join(texts.KINDS)}")
    held_out = {kind: _windows(model, kind, "heldout", _NUM_EVAL.value) for kind in texts.KINDS}
    rows: list[dict[str, Any]] = []
    for kind in _CALIBRATION.value:
        chosen: dict[str, QuantiseConfig | None] = {"unquantised": None, **settings} if not rows else dict(settings)
        variants = [Variant(name=name, settings=value, states={key: model.embed(tokens) for key, tokens in held_out.items()})
                    for name, value in chosen.items()]
        with MemoryMeter() as meter:
            spent = run_layers(model, model.embed(_windows(model, kind, "calibration", _NUM_SAMPLES.value)), variants, _COMPUTE_DTYPE.value)
            for variant in variants:
                found = perplexities(model, variant, held_out)
                rows.append({"variant": variant.name, "calibration": kind if variant.settings else None,
                             **{f"ppl_{key}": value for key, value in found.items()},
                             **{f"rise_{key}_pct": 100 * (value / rows[0][f"ppl_{key}"] - 1) if rows else 0.0 for key, value in found.items()},
                             "mean_error": float(np.mean(variant.errors)) if variant.errors else 0.0, "statistics_s": spent,
                             "quantise_s": variant.seconds, "peak_mb": (meter.peak_bytes or 0) / 1e6})
        print(report.table(rows), flush=True)
    report.write(_NAME.value or f"accuracy-quantisation-{model.path.name}", {
        "model": model.path.name, "source": model.manifest["source"]["name"], "num_samples": _NUM_SAMPLES.value, "max_len": _MAX_LEN.value,
        "num_eval_samples": _NUM_EVAL.value, "seed": _SEED.value, "compute_dtype": _COMPUTE_DTYPE.value, "symmetric": _SYMMETRIC.value,
        "input_widths": input_widths(model.config), "rows": rows})


if __name__ == "__main__":
    sys.exit(cli.run(main, _FLAGS))
