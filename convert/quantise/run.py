"""Quantises one checkpoint: calibrate and quantise a layer at a time, choose what stays at 8 bits, evaluate, write. Holds no arithmetic."""

import dataclasses
import json
import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxinfer
from convert.formats.matrix import QuantizedMatrix
from convert.interruption import Interruption
from convert.progress import MemoryMeter
from convert.quantise import folding, memory
from convert.quantise import report as reporting
from convert.quantise.calibration import TokenWindows, read_windows
from convert.quantise.grid import round_nearest
from convert.quantise.layer import (
    LINEARS,
    SENSITIVITY_TOKENS,
    FloatModel,
    InputStatistics,
    Params,
    batch_rows,
    input_widths,
    layer_graph,
    mirrored,
    observe,
    on_device,
    sensitivities,
    zero_statistics,
)
from convert.quantise.methods import LayerResult, QuantiseConfig, flat, quantise_layer
from convert.quantise.perplexity import layerwise_perplexity
from convert.quantise.store import LayerStore
from convert.quantise.vocabulary import Table, head_weight, quantise_embedding, quantise_head
from convert.quantized_checkpoint import write_quantized
from convert.source import DTYPES, read_json
from convert.writer import check_output
from jaxinfer.checkpoint import read_manifest
from jaxinfer.errors import CheckpointError, ConfigError
from jaxinfer.models.registry import read_model_config
from jaxinfer.quant import EMBEDDING, HEAD, check_groups
from jaxinfer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts:
    """What is calibrated and evaluated on."""

    calibration: Path | None
    """None only for rtn, whose errors are then those of the weights alone."""
    num_samples: int = 128
    """S: calibration windows."""
    max_len: int = 512
    """T: tokens of a window, in calibration and evaluation."""
    seed: int = 0
    """Of the choice of windows."""
    evaluation: Path | None = None
    """Held-out text for perplexity before and after; None measures none."""
    num_eval_samples: int = 32
    """Evaluation windows."""


def quantise(model: str | Path, output: str | Path, *, settings: QuantiseConfig, texts: Texts, overwrite: bool = False,
             resume: bool = False) -> dict[str, Any]:
    """Quantises a converted checkpoint into another one.

    Activations are the unquantised model's; each layer's Gram matrices serve every method. Equal arguments on equal hardware give
    equal bits, also where a run with `resume` was interrupted and continued.

    Args:
      model: a converted, unquantised checkpoint.
      output: the folder to make; it appears whole or not at all, with quantization_report.json and, where matplotlib is installed,
        quantization_report.png beside the parameters.
      settings: how.
      texts: calibration and evaluation.
      overwrite: replace a checkpoint at `output` once the new one is complete.
      resume: an interruption keeps the finished layers beside the output, and a run with equal arguments continues there.

    Returns:
      The report.

    Raises:
      CheckpointError: the model is no unquantised converted checkpoint, or the output exists or cannot be written.
      ConfigError: texts or groups that do not fit.
      CapacityError: the plan exceeds the memory that is free.
      NonFiniteError: a layer without a finite loss, named; nothing is saved.
    """
    start = time.monotonic()
    output_path = Path(output).expanduser().absolute()
    check_output(output_path, overwrite=overwrite)
    float_model = open_float(model, settings)
    if output_path.resolve() == float_model.path.resolve():
        raise ConfigError(f"the output {output_path} is the checkpoint that is to be quantised: choose another --output.")
    if (texts.calibration or texts.evaluation) and texts.max_len > float_model.config.max_position_embeddings:
        raise ConfigError(f"max_len = {texts.max_len}: the model was made for {float_model.config.max_position_embeddings} positions, and what "
                          "it computes behind them is no guide to its weights: lower --max_len.")
    calibration, evaluation = _windows(float_model.path, settings, texts)
    num_samples = max((len(windows.tokens) for windows in (calibration, evaluation) if windows is not None), default=1)
    num_tables = sum(bits is not None for bits in (settings.lm_head_bits, settings.embedding_bits))
    plan = memory.plan_memory(float_model.config, method=settings.method, num_tables=num_tables, num_samples=num_samples,
                              max_len=texts.max_len)
    logger.info("%s: %d layers, %s; memory: %s", float_model.path.name, float_model.config.num_layers, settings, plan)
    memory.require_memory(plan, memory.available_bytes())
    # What no layer's result depends on may change from an interrupted run to the one that resumes it.
    of_layers = dataclasses.replace(settings, num_int8=0, lm_head_bits=None, embedding_bits=None)
    what = json.dumps([jaxinfer.__version__, float_model.manifest["params_files"], dataclasses.asdict(of_layers),
                       calibration and calibration.source, jax.devices()[0].device_kind])
    with MemoryMeter() as meter, Interruption() as interruption, LayerStore(output_path, what=what, resume=resume) as store:
        x = quantise_layers(float_model, settings, calibration, store, interruption)
        errors = {f"layers.{i}.{name}": error for i in range(store.next_layer) for name, error in store.layer(i).errors.items()}
        kept = tuple(sorted(errors, key=lambda name: -errors[name])[:settings.num_int8])
        tables = _tables(float_model, settings, x)
        errors |= {name: table.error for name, table in tables.items()}
        calibrated_s = time.monotonic() - start
        perplexity = None if evaluation is None else _perplexities(float_model, evaluation, store, settings, kept, tables)
        facts = {"settings": dataclasses.asdict(settings), "calibration": calibration and calibration.source,
                 "evaluation": evaluation and evaluation.source, "kept_int8": list(kept), "perplexity": perplexity}
        interruption.check()
        write_quantized(float_model.path, output_path, _items(float_model, store, settings, kept, tables), method=settings.method, facts=facts,
                        overwrite=overwrite)
        store_facts = {f"layers.{i}": store.layer(i).facts for i in range(store.next_layer)}
        store.finish()
    report = {"model": float_model.path.name, **facts, "errors": errors, "choices": store_facts, "calibration_s": round(calibrated_s, 1),
              "total_s": round(time.monotonic() - start, 1), "peak_bytes": meter.peak_bytes, "planned_peak_bytes": plan.peak}
    reporting.write(report, output_path)
    logger.info("%s: %s in %.0f s, peak anonymous memory %s (planned %.0f MB)", output_path, settings.method, report["total_s"], meter,
                plan.peak / 1e6)
    return report


def open_float(model: str | Path, settings: QuantiseConfig) -> FloatModel:
    """The checkpoint to quantise, its groups checked. Raises as `quantise` does."""
    path = Path(model).expanduser()
    manifest = read_manifest(path)
    if manifest["quantization"] is not None:
        raise CheckpointError(f"{path} is quantised already: quantise the checkpoint that it was made from.")
    config = read_model_config(read_json(path / "config.json"))
    for name, k in input_widths(config).items():
        check_groups(f"every layer's {name}", k, settings.grid.group_size)
    if settings.num_int8 > config.num_layers * len(LINEARS):
        raise ConfigError(f"keep_int8 = auto:{settings.num_int8}: the model has {config.num_layers * len(LINEARS)} linears: give no more.")
    return FloatModel(path=path, manifest=manifest, config=config)


def _windows(path: Path, settings: QuantiseConfig, texts: Texts) -> tuple[TokenWindows | None, TokenWindows | None]:
    """(calibration, evaluation)."""
    if texts.calibration is None and settings.method != "rtn":
        raise ConfigError(f"{settings.method} needs calibration text: give --calibration=FILE.jsonl or FILE.txt.")
    if texts.calibration is None and texts.evaluation is None:
        return None, None
    tokenizer = Tokenizer.from_dir(path)
    calibration = texts.calibration and read_windows(
        texts.calibration, tokenizer, num_samples=texts.num_samples, max_len=texts.max_len, seed=texts.seed)
    if calibration and len(calibration.tokens) < texts.num_samples:
        logger.warning("%s holds %d windows of %d tokens, fewer than the %d asked for", texts.calibration, len(calibration.tokens),
                       texts.max_len, texts.num_samples)
    evaluation = texts.evaluation and read_windows(
        texts.evaluation, tokenizer, num_samples=texts.num_eval_samples, max_len=texts.max_len, seed=texts.seed)
    return calibration or None, evaluation or None


def quantise_layers(model: FloatModel, settings: QuantiseConfig, calibration: TokenWindows | None, store: LayerStore,
                    interruption: Interruption) -> np.ndarray | None:
    """Runs the windows through one layer after another and stores each layer's result. Returns the last layer's output [S, T, D]."""
    config, begun, first = model.config, time.monotonic(), store.next_layer
    x = store.inputs()
    if x is None and calibration is not None:
        assert first == 0, f"the layers before {first} are there, but not what layer {first} reads"
        x = model.embed(calibration.tokens)
    for index in range(first, config.num_layers):
        interruption.check()
        params = on_device(model.layer(index), "float32")
        statistics = layer_statistics(model, index, on_device(params, settings.compute_dtype), x)
        result = quantise_layer(f"layers.{index}", params, statistics, settings, config, DTYPES[model.manifest["dtype"]])
        store.add(result, x)
        passed = time.monotonic() - begun
        left = passed / (index + 1 - first) * (config.num_layers - index - 1)
        logger.info("layer %d (last: %d): relative output error %s; %.0f s, %.0f s left", index, config.num_layers - 1,
                    ", ".join(f"{name.split('.')[1]} {error:.2e}" for name, error in result.errors.items()), passed, left)
    return x


def _tables(model: FloatModel, settings: QuantiseConfig, x: np.ndarray | None) -> dict[str, Table]:
    """Vocabulary head and embedding, rounded, where they are to be; `x` is the last layer's output."""
    begun, tables = time.monotonic(), dict[str, Table]()
    if settings.lm_head_bits is not None:
        tables[HEAD] = quantise_head(model, settings, x)
        if model.config.tie_embeddings:
            logger.info("%s: its embeddings are tied; the quantised head is a copy beside the embedding", model.path.name)
    if settings.embedding_bits is not None:
        tables[EMBEDDING] = quantise_embedding(model, settings)
    for name, table in tables.items():
        logger.info("%s at %d bits: relative error %.2e; %.0f s", name, table.matrix.bits, table.error, time.monotonic() - begun)
    return tables


def layer_statistics(model: FloatModel, index: int, params: Params, x: np.ndarray | None) -> dict[str, InputStatistics]:
    """What the layer's linears read, and how its output answers; `x` [S, T, D] becomes the layer's output. Without text all count alike."""
    config, statistics = model.config, zero_statistics(model.config)
    if x is None:
        return {name: dataclasses.replace(zero, gram=jnp.eye(len(zero.gram)), magnitude=jnp.ones_like(zero.magnitude))
                for name, zero in statistics.items()}
    graph, rows, dtype = layer_graph(config, index), batch_rows(x.shape[1]), params["attention.qkv.weight"].dtype
    first = jnp.asarray(x[:batch_rows(x.shape[1], SENSITIVITY_TOKENS)], dtype)
    answers = sensitivities(first, params, config=config, graph=graph)
    for start in range(0, len(x), rows):
        out, statistics = observe(jnp.asarray(x[start:start + rows], dtype), params, statistics, config=config, graph=graph)
        x[start:start + rows] = np.asarray(out)
    return {name: dataclasses.replace(mirrored(statistics[name]), sensitivity=answer) for name, answer in answers.items()}


def final_matrices(model: FloatModel, index: int, result: LayerResult, settings: QuantiseConfig,
                   kept: tuple[str, ...]) -> dict[str, QuantizedMatrix]:
    """A layer's matrices, those of `kept` rounded to 8 bits anew, with the layer's scales."""
    chosen = [name for name in LINEARS if f"layers.{index}.{name}" in kept]
    if not chosen:
        return result.matrices
    params = on_device(model.layer(index), "float32")
    if result.scales:
        norms = {path: jnp.asarray(result.others[path]) for path in folding.NORMS.values()}
        params = folding.fold(params, norms, {name: jnp.asarray(scale) for name, scale in result.scales.items()},
                              config=model.config)
    spec = dataclasses.replace(settings.grid, bits=8)
    return result.matrices | {name: round_nearest(flat(params[f"{name}.weight"]), spec=spec).matrix(spec) for name in chosen}


def _perplexities(model: FloatModel, evaluation: TokenWindows, store: LayerStore, settings: QuantiseConfig, kept: tuple[str, ...],
                  tables: Mapping[str, Table]) -> dict[str, float]:
    """Held-out perplexity of the model as it was and as it will be."""
    def quantised(index: int) -> Params:
        result = store.layer(index)
        stored = {path: value.astype(DTYPES[model.manifest["dtype"]]) for path, value in result.others.items()}
        weights = {f"{name}.weight": matrix.dequantized().reshape(model.manifest["tensors"][f"layers.{index}.{name}.weight"]["shape"])
                   for name, matrix in final_matrices(model, index, result, settings, kept).items()}
        return on_device(stored | weights, dtype)

    dtype = settings.compute_dtype
    before = layerwise_perplexity("the original", model, evaluation.tokens, lambda index: on_device(model.layer(index), dtype),
                                  embed=model.embed, head=head_weight(model), dtype=dtype)
    head = tables.get(HEAD, tables.get(EMBEDDING) if model.config.tie_embeddings else None)
    after = layerwise_perplexity("the quantised model", model, evaluation.tokens, quantised,
                                 embed=tables[EMBEDDING].embed if EMBEDDING in tables else model.embed,
                                 head=head_weight(model) if head is None else head.weight(), dtype=dtype)
    logger.info("held-out perplexity %.4f before, %.4f after (%+.2f %%)", before, after, 100 * (after / before - 1))
    return {"before": before, "after": after}


def _items(model: FloatModel, store: LayerStore, settings: QuantiseConfig, kept: tuple[str, ...],
           tables: Mapping[str, Table]) -> Iterator[tuple[str, QuantizedMatrix | np.ndarray]]:
    """What replaces the base checkpoint's parameters."""
    for index in range(store.next_layer):
        result = store.layer(index)
        for name, matrix in final_matrices(model, index, result, settings, kept).items():
            yield f"layers.{index}.{name}", matrix
        if result.scales:
            for path, value in result.others.items():
                yield f"layers.{index}.{path}", value
    for name, table in tables.items():
        yield name, table.matrix
