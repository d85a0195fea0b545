"""Writes a quantised model as a converted checkpoint: another checkpoint's folder with some weights replaced. Quantises nothing itself."""

import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import jaxinfer
from convert.formats.matrix import QuantizedMatrix
from convert.hf_reader import TOKENIZER_FILES
from convert.quantized import matrix_params, quantization_facts
from convert.source import DTYPES, read_json
from convert.writer import CheckpointWriter
from jaxinfer.checkpoint import read_manifest, read_param, verify_files
from jaxinfer.errors import CheckpointError, ConfigError
from jaxinfer.models.registry import abstract_params, read_model_config
from jaxinfer.quant import EMBEDDING, HEAD, QuantConfig, QuantFormat

COPIED = (*TOKENIZER_FILES, "generation_config.json")


def write_quantized(base: str | Path, output: str | Path, items: Iterable[tuple[str, QuantizedMatrix | np.ndarray]], *, method: str,
                    facts: Mapping[str, Any], overwrite: bool = False) -> Path:
    """Writes the checkpoint `base` again with quantised matrices in place of weights.

    Args:
      base: a converted, unquantised checkpoint: gives config, tokenizer, and every parameter that `items` do not give.
      output: the folder to make; it appears whole or not at all.
      items: each once, in any order, taken one at a time: a module such as layers.0.mlp.down with its matrix [K, n], n being the
        module's output dimensions flattened in their order (qkv [K, G + 2, H], gate_up [2, F]); embedding and lm_head with a matrix
        [D, V], where lm_head unties a model with tied embeddings: the head is a copy beside the embedding; or a parameter such as
        layers.0.mlp_norm.weight with an array of its shape, cast to the checkpoint's dtype.
      method: awq, gptq or rtn, for the config.
      facts: what the manifest's `quantization` is to say beside the config: calibration data and its hash, seed, errors.
      overwrite: replace a checkpoint at `output` once the new one is complete.

    Returns:
      The output folder.

    Raises:
      CheckpointError: the base is damaged or quantised already, an item is unknown, misshapen, given twice or not finite, or the output
        cannot be written.
      ConfigError: no module was quantised, or groups do not divide a module's inputs.
    """
    base, output = Path(base), Path(os.path.abspath(output))
    manifest, config = read_manifest(base), read_json(base / "config.json")
    if output.resolve() == base.resolve():
        raise ConfigError(f"the output {output} is the checkpoint that is to be quantised: choose another --output")
    if manifest["quantization"] is not None:
        raise CheckpointError(f"{base} is quantised already: quantise the checkpoint that it was made from")
    verify_files(base, manifest)
    shapes = {name: tuple(spec["shape"]) for name, spec in manifest["tensors"].items()}
    model = read_model_config(config).untied()
    formats: dict[str, QuantFormat | None] = dict.fromkeys(model.quantizable())
    table_shape = model.dim, model.vocab_size
    with CheckpointWriter(output, overwrite=overwrite) as writer:
        given = set[str]()
        for name, value in items:
            weight = f"{name}.weight" if isinstance(value, QuantizedMatrix) else name
            known = name in formats if isinstance(value, QuantizedMatrix) else name in shapes
            if weight in given or not known:
                raise CheckpointError(f"{name} is given twice, or is nothing of {base} that can be quantised or replaced: correct the caller")
            given.add(weight)
            if isinstance(value, QuantizedMatrix):
                formats[name] = value.format
                _submit(writer, matrix_params(name, value, out_shape=table_shape if name in (HEAD, EMBEDDING) else shapes[weight]))
            else:
                _submit(writer, {name: _replacement(name, value, shapes[name], DTYPES[manifest["dtype"]])})
        quantization = QuantConfig.of(method, formats)
        for name in shapes:
            if name not in given:
                _submit(writer, {name: read_param(base, manifest, name)})
        for name in COPIED:
            if (base / name).is_file():
                shutil.copyfile(base / name, writer.folder / name)
        config, num_params = {**config, "quantization_config": quantization.to_json()}, manifest["num_params"]
        if formats[HEAD] is not None and config.get("tie_word_embeddings"):
            config["tie_word_embeddings"] = False
            num_params += math.prod(table_shape)
        _check_complete(config, manifest["dtype"], writer.done)
        writer.write_json("config.json", config)
        writer.commit({
            "jaxinfer_version": jaxinfer.__version__, "source": manifest["source"], "architecture": manifest["architecture"],
            "dtype": manifest["dtype"], "num_params": num_params,
            "quantization": {**json.loads(json.dumps(dict(facts))), **quantization_facts(quantization)},
            "end_token_ids": manifest["end_token_ids"], "verification": None})
    return output


def _submit(writer: CheckpointWriter, params: Mapping[str, np.ndarray]) -> None:
    for name, value in params.items():
        buffer = writer.allocate(value.shape, value.dtype)
        buffer[...] = value
        writer.submit(name, buffer)


def _replacement(name: str, value: np.ndarray, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """The array in the checkpoint's dtype, of its shape, and finite."""
    cast = np.asarray(value).astype(dtype)
    if cast.shape != shape or not np.isfinite(cast.astype(np.float32)).all():
        raise CheckpointError(f"{name}: an array of shape {list(shape)} whose values stay finite in {dtype.name} is needed, got "
                              f"{list(cast.shape)}: nothing is saved")
    return cast


def _check_complete(config: Mapping[str, Any], dtype: str, written: frozenset[str]) -> None:
    wanted = set(abstract_params(read_model_config(config), dtype))
    assert written == wanted, f"written and needed parameters differ: {sorted(written ^ wanted)[:5]}"
