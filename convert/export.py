"""Writes a converted checkpoint back as a Hugging Face folder: the conversion's tables, run backwards.

    python -m convert.export --model=DIR --output=DIR --format=hf

Every tensor goes under the name, shape and row order that the model's own library knows; the bits are those of the checkpoint. Tied
embeddings are stored once. Reads no source and computes nothing.
"""

import dataclasses
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from convert.hf_reader import INDEX, SINGLE, TOKENIZER_FILES
from convert.mapping import Entry, Part, row_blocks
from convert.progress import MemoryMeter, Progress
from convert.safetensors_file import SafetensorsWriter
from convert.source import read_json
from convert.staging import make_partial, partial_folder, publish, remove_tree, require_space, sync_tree, write_error, write_json
from jaxinfer import cli
from jaxinfer.checkpoint import read_manifest, read_param, verify_files
from jaxinfer.errors import CheckpointError, ConfigError, UnsupportedModelError

logger = logging.getLogger(__name__)

MAX_SHARD_BYTES = 5_000_000_000
COPIED = (*TOKENIZER_FILES, "generation_config.json")
CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tensor:
    """One tensor of the export: where it comes from and its Hugging Face shape."""

    entry: Entry
    part: Part
    shape: tuple[int, ...]
    num_bytes: int


def export(model: str | Path, output: str | Path, *, max_shard_bytes: int = MAX_SHARD_BYTES, progress: bool = True) -> Path:
    """Writes a converted checkpoint as a Hugging Face folder: config, generation config, tokenizer files, safetensors.

    A checkpoint converted from a Hugging Face folder with its own dtype comes back bitwise: the same names, shapes, dtypes and bits
    (without derived buffers and without a redundant copy of tied embeddings). The folder appears whole or not at all.

    Args:
      model: a converted checkpoint.
      output: the folder to make; it must not exist, or be empty.
      max_shard_bytes: tensors go to a new file when one would grow beyond this; a larger tensor has a file of its own.
      progress: show a bar, or a line now and then, on stderr.

    Returns:
      The output folder.

    Raises:
      CheckpointError: the checkpoint is damaged or not what its config says, or the output exists or cannot be written.
      UnsupportedModelError: its weights are quantised, or its architecture has no table.
      ConfigError: the output is, holds or is held by the checkpoint, or `max_shard_bytes` is not positive.
    """
    source, output = Path(model).expanduser(), Path(os.path.abspath(Path(output).expanduser()))
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes is {max_shard_bytes}, must be at least 1")
    if source.resolve().is_relative_to(output.resolve()) or output.resolve().is_relative_to(source.resolve()):
        raise ConfigError(f"the output {output} is, holds or lies in the checkpoint {source}: choose another --output")
    if output.is_symlink() or output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(f"{output} exists and is not an empty folder: an export replaces nothing, choose another --output")
    start = time.monotonic()
    with MemoryMeter() as meter:
        manifest = read_manifest(source)
        config = read_json(source / "config.json")
        tensors = _plan(source, manifest, config)
        verify_files(source, manifest)
        num_files = _make_folder(source, manifest, config, tensors, output, max_shard_bytes, progress)
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    seconds = time.monotonic() - start
    logger.info("%s: %s, %d tensors, %.0f MB as %s in %d files, %.1f s (%.0f MB/s), peak anonymous memory %s", output,
                manifest["architecture"], len(tensors), num_bytes / 1e6, manifest["dtype"], num_files, seconds,
                num_bytes / 1e6 / seconds, meter)
    return output


def _make_folder(source: Path, manifest: dict[str, Any], config: dict[str, Any], tensors: Sequence[_Tensor], output: Path,
                 max_shard_bytes: int, progress: bool) -> int:
    """Writes the folder beside its place and moves it there; whatever ends this early removes it. Returns the number of weight files."""
    folder = partial_folder(output)
    try:
        make_partial(folder, output)
        num_bytes = sum(tensor.num_bytes for tensor in tensors)
        require_space(folder, output, num_bytes)
        for name in COPIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        write_json(folder / "config.json", _stating_dtype(config, manifest["dtype"]))
        num_files = _write(source, manifest, tensors, folder, max_shard_bytes, Progress(len(tensors), num_bytes, enabled=progress))
        sync_tree(folder)
        publish(folder, output)
        return num_files
    except OSError as error:
        raise write_error(output, error) from error
    finally:
        if folder.exists():
            remove_tree(folder)


def _plan(source: Path, manifest: dict[str, Any], config: dict[str, Any]) -> list[_Tensor]:
    """Every tensor of the export in the order of the parameters, checked against the config and the manifest."""
    import jax.numpy as jnp

    from convert.families import FAMILIES
    from jaxinfer.models.registry import abstract_params, read_model_config

    if manifest["quantization"] is not None:
        raise UnsupportedModelError(f"{source} holds quantised weights, which --format=hf cannot express: export the unquantised checkpoint")
    model = read_model_config(config)
    if model.architecture not in FAMILIES or model.architecture != manifest["architecture"]:
        raise UnsupportedModelError(f"{source} is a {manifest['architecture']} whose config.json says {model.architecture}; export knows "
                                    f"{', '.join(FAMILIES)}, and the two must agree: convert the checkpoint again")
    shapes = {name: spec.shape for name, spec in abstract_params(model, jnp.dtype(manifest["dtype"])).items()}
    stored = {name: tuple(spec["shape"]) for name, spec in manifest["tensors"].items()}
    if stored != shapes:
        wrong = sorted(name for name in stored.keys() | shapes.keys() if stored.get(name) != shapes.get(name))
        raise CheckpointError(f"{source} does not fit its config in {len(wrong)} parameters ({', '.join(wrong[:5])}): convert it again")
    if any(spec["dtype"] != manifest["dtype"] for spec in manifest["tensors"].values()):
        raise CheckpointError(f"{source} has parameters that are not {manifest['dtype']}: its manifest is damaged, convert it again")
    item_bytes = jnp.dtype(manifest["dtype"]).itemsize
    tensors = []
    for entry in FAMILIES[model.architecture](model):
        for part in entry.parts:
            shape = part.source_shape(shapes[entry.target])
            tensors.append(_Tensor(entry=entry, part=part, shape=shape, num_bytes=item_bytes * math.prod(shape)))
    return tensors


def _stating_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The config with the dtype that the weights have, wherever it states one."""
    return {key: dtype if key in ("dtype", "torch_dtype") and value is not None else value for key, value in config.items()}


def _write(source: Path, manifest: dict[str, Any], tensors: Sequence[_Tensor], folder: Path, max_shard_bytes: int, bar: Progress) -> int:
    """Writes the safetensors files, and their index when there is more than one. Returns their number."""
    shards = _split(tensors, max_shard_bytes)
    names = [SINGLE] if len(shards) == 1 else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    parameter, array = "", np.empty(0)
    for name, shard in zip(names, shards, strict=True):
        header = {tensor.part.source: (CODES[manifest["dtype"]], tensor.shape) for tensor in shard}
        with SafetensorsWriter(folder / name, header) as file:
            for tensor in shard:
                if tensor.entry.target != parameter:
                    del array  # before the next is read: one parameter at a time
                    parameter = tensor.entry.target
                    array = read_param(source, manifest, parameter)
                for start, stop in row_blocks(tensor.shape, tensor.part.row_unit(tensor.part.row_view(array))):
                    file.write(extract(array, tensor.part, start, stop))
                bar.advance(tensor.num_bytes)
    bar.close()
    if len(shards) > 1:
        weight_map = {tensor.part.source: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(tensor.num_bytes for tensor in tensors)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    return len(shards)


def _split(tensors: Sequence[_Tensor], max_shard_bytes: int) -> list[list[_Tensor]]:
    """Tensors in order, cut where a file would pass the limit."""
    shards: list[list[_Tensor]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.num_bytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(tensor)
        room -= tensor.num_bytes
    return shards


def extract(parameter: np.ndarray, part: Part, start: int, stop: int) -> np.ndarray:
    """Rows [start, stop) of the source tensor that filled this part of a parameter: the inverse of mapping.fill."""
    view = part.row_view(parameter)
    unit = part.row_unit(view)
    block = view[start // unit:stop // unit]
    return block if part.layout == "same" else block.reshape(stop - start, *view.shape[view.ndim - (part.layout == "transposed"):])


def main(argv: Sequence[str] | None = None) -> int:
    """Console entry; takes arguments without the program's name."""
    values = flags.FlagValues()
    flags.DEFINE_string("model", None, "The converted checkpoint.", flag_values=values)
    flags.DEFINE_string("output", None, "Folder to make. It appears only when complete; nothing is ever replaced.", flag_values=values)
    flags.DEFINE_enum("format", "hf", ["hf"], "What to write: hf is a Hugging Face folder with safetensors.", flag_values=values)
    flags.DEFINE_integer("max_shard_bytes", MAX_SHARD_BYTES, "Largest safetensors file, bytes.", 1, flag_values=values)
    flags.DEFINE_bool("progress", True, "Show progress on stderr.", flag_values=values)
    return cli.run(lambda _: _run(values), values, argv, __doc__)


def _run(values: flags.FlagValues) -> None:
    given: dict[str, Any] = values.flag_values_dict()
    for name in ("model", "output"):
        if not given[name]:
            raise app.UsageError(f"--{name} is needed")
        cli.expanded(name, given[name])
    os.environ["JAX_PLATFORMS"] = "cpu"  # the host's work; a GPU is left alone
    export(given["model"], given["output"], max_shard_bytes=given["max_shard_bytes"], progress=given["progress"])


if __name__ == "__main__":
    sys.exit(main())
