"""Writes a converted checkpoint back as a Hugging Face folder: the conversion's tables, run backwards.

    python -m convert.export --model=DIR --output=DIR --format=hf|awq|gptq|gptq_v2

hf is for plain weights, awq (AutoAWQ's gemm layout), gptq and gptq_v2 (AutoGPTQ's and GPTQModel's layouts) for quantised ones.
Every tensor goes under the name, shape and row order that the model's own library knows; the bits are those of the checkpoint. Tied
embeddings are stored once. Reads no source and computes nothing.
"""

import dataclasses
import itertools
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import app, flags

from convert.formats import EXPORTS
from convert.hf_reader import INDEX, SINGLE, TOKENIZER_FILES
from convert.mapping import Entry, Part, row_blocks
from convert.progress import MemoryMeter, Progress
from convert.quantized import module_of, with_quantized_head
from convert.quantized_export import export_config, export_parts, export_specs
from convert.safetensors_file import ITEM_BYTES, SafetensorsWriter
from convert.source import read_json
from convert.staging import make_partial, partial_folder, publish, remove_tree, require_space, sync_tree, write_error, write_json
from jaxinfer import cli
from jaxinfer.checkpoint import read_manifest, read_param, verify_files
from jaxinfer.errors import CheckpointError, ConfigError, UnsupportedModelError
from jaxinfer.quant import HEAD

if TYPE_CHECKING:
    from jaxinfer.models.config import ModelConfig

logger = logging.getLogger(__name__)

MAX_SHARD_BYTES = 5_000_000_000
COPIED = (*TOKENIZER_FILES, "generation_config.json")
CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tensor:
    """One tensor of the export: where it comes from, its name, and its Hugging Face shape."""

    entry: Entry
    part: Part
    name: str
    code: str
    """Its dtype, as safetensors names it."""
    shape: tuple[int, ...]
    packed: bool
    """Whether it is one of several tensors that stand for a quantised weight."""

    @property
    def num_bytes(self) -> int:
        return ITEM_BYTES[self.code] * math.prod(self.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job:
    """What is exported, and as what."""

    source: Path
    manifest: dict[str, Any]
    model: "ModelConfig"
    config: dict[str, Any]
    """config.json of the export."""
    target: str
    """hf, or a key of EXPORTS."""
    shapes: Mapping[str, tuple[int, ...]]
    """Parameter -> shape, as if none were quantised."""
    tensors: Sequence[_Tensor]


def export(model: str | Path, output: str | Path, *, target: str = "hf", max_shard_bytes: int = MAX_SHARD_BYTES,
           progress: bool = True) -> Path:
    """Writes a converted checkpoint as a Hugging Face folder: config, generation config, tokenizer files, safetensors.

    A checkpoint converted from a Hugging Face folder with its own dtype comes back bitwise: the same names, shapes, dtypes and bits
    (without derived buffers and without a redundant copy of tied embeddings); quantised weights come back with the integers, zero points
    and float16 scales that they have. The folder appears whole or not at all.

    Args:
      model: a converted checkpoint.
      output: the folder to make; it must not exist, or be empty.
      target: hf for plain weights, a key of convert.formats.EXPORTS (awq, gptq, gptq_v2) for quantised ones.
      max_shard_bytes: tensors go to a new file when one would grow beyond this; a larger tensor has a file of its own.
      progress: show a bar, or a line now and then, on stderr.

    Returns:
      The output folder.

    Raises:
      CheckpointError: the checkpoint is damaged or not what its config says, or the output exists or cannot be written.
      UnsupportedModelError: its weights are not of the kind that `target` holds, or its architecture has no table.
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
        job = _plan(source, manifest, read_json(source / "config.json"), target)
        verify_files(source, manifest)
        num_files = _make_folder(job, output, max_shard_bytes, progress)
    num_bytes = sum(tensor.num_bytes for tensor in job.tensors)
    seconds = time.monotonic() - start
    logger.info("%s: %s, %d tensors, %.0f MB as %s in %d files, %.1f s (%.0f MB/s), peak anonymous memory %s", output,
                manifest["architecture"], len(job.tensors), num_bytes / 1e6, manifest["dtype"] if target == "hf" else target, num_files,
                seconds, num_bytes / 1e6 / seconds, meter)
    return output


def _make_folder(job: _Job, output: Path, max_shard_bytes: int, progress: bool) -> int:
    """Writes the folder beside its place and moves it there; whatever ends this early removes it. Returns the number of weight files."""
    folder = partial_folder(output)
    try:
        make_partial(folder, output)
        num_bytes = sum(tensor.num_bytes for tensor in job.tensors)
        require_space(folder, output, num_bytes)
        for name in COPIED:
            if (job.source / name).is_file():
                shutil.copyfile(job.source / name, folder / name)
        write_json(folder / "config.json", job.config)
        num_files = _write(job, folder, max_shard_bytes, Progress(len(job.tensors), num_bytes, enabled=progress))
        sync_tree(folder)
        publish(folder, output)
        return num_files
    except OSError as error:
        raise write_error(output, error) from error
    finally:
        if folder.exists():
            remove_tree(folder)


def _plan(source: Path, manifest: dict[str, Any], config: dict[str, Any], target: str) -> _Job:
    """Every tensor of the export in the order of the parameters, checked against the config and the manifest."""
    import jax.numpy as jnp

    from convert.families import FAMILIES
    from jaxinfer.models.registry import abstract_params, read_model_config

    if manifest["quantization"] is not None and target == "hf":
        raise UnsupportedModelError(f"{source} holds quantised weights, which --format=hf cannot express: use --format="
                                    f"{' or '.join(EXPORTS)}, or export the unquantised checkpoint")
    model = read_model_config(config)
    if target != "hf" and (manifest["quantization"] is None or model.quantization is None):
        raise UnsupportedModelError(f"{source} holds no quantised weights, which --format={target} writes: quantise it, or use --format=hf")
    if model.architecture not in FAMILIES or model.architecture != manifest["architecture"]:
        raise UnsupportedModelError(f"{source} is a {manifest['architecture']} whose config.json says {model.architecture}; export knows "
                                    f"{', '.join(FAMILIES)}, and the two must agree: convert the checkpoint again")
    dtype = jnp.dtype(manifest["dtype"])
    needed = abstract_params(model, dtype)
    stored = {name: tuple(spec["shape"]) for name, spec in manifest["tensors"].items()}
    wrong = sorted(name for name in stored.keys() | needed.keys() if name not in needed or stored.get(name) != needed[name].shape)
    if wrong:
        raise CheckpointError(f"{source} does not fit its config in {len(wrong)} parameters ({', '.join(wrong[:5])}): convert it again")
    if any(spec.dtype.name != manifest["tensors"][name]["dtype"] for name, spec in needed.items()):
        raise CheckpointError(f"{source} has parameters that are not {manifest['dtype']}: its manifest is damaged, convert it again")
    plain = dataclasses.replace(model, quantization=None)
    entries = FAMILIES[model.architecture](plain)
    config = _stating_dtype({name: value for name, value in config.items() if name != "quantization_config"}, manifest["dtype"])
    if target != "hf":
        config["quantization_config"] = export_config(model, entries, target)
    shapes: Mapping[str, tuple[int, ...]] = {name: spec.shape for name, spec in abstract_params(plain, dtype).items()}
    if model.quantization is not None and model.quantization.format_of(HEAD) is not None:
        entries, shapes = with_quantized_head(entries, shapes)
    tensors = [tensor for entry in entries for tensor in _tensors(entry, shapes[entry.target], needed, config, manifest["dtype"], target)]
    return _Job(source=source, manifest=manifest, model=model, config=config, target=target, shapes=shapes, tensors=tensors)


def _tensors(entry: Entry, shape: tuple[int, ...], needed: Container[str], config: Mapping[str, Any], dtype: str,
             target: str) -> Iterator[_Tensor]:
    """The tensors that one parameter becomes, part by part."""
    scheme = None if entry.target in needed else EXPORTS[target].read_config(config["quantization_config"])
    for part in entry.parts:
        if scheme is None:
            yield _Tensor(entry=entry, part=part, name=part.source, code=CODES[dtype], shape=part.source_shape(shape), packed=False)
        else:
            for name, spec in export_specs(scheme, part, shape, target).items():
                yield _Tensor(entry=entry, part=part, name=name, code=spec.dtypes[0], shape=spec.shape, packed=True)


def _stating_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The config with the dtype that the weights have, wherever it states one."""
    return {key: dtype if key in ("dtype", "torch_dtype") and value is not None else value for key, value in config.items()}


def _write(job: _Job, folder: Path, max_shard_bytes: int, bar: Progress) -> int:
    """Writes the safetensors files, and their index when there is more than one. Returns their number."""
    shards = _split(job.tensors, max_shard_bytes)
    names = [SINGLE] if len(shards) == 1 else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    data = _data(job)
    for name, shard in zip(names, shards, strict=True):
        with SafetensorsWriter(folder / name, {tensor.name: (tensor.code, tensor.shape) for tensor in shard}) as file:
            for tensor in shard:
                for block in next(data):
                    file.write(block)
                bar.advance(tensor.num_bytes)
    bar.close()
    if len(shards) > 1:
        weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(tensor.num_bytes for tensor in job.tensors)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    return len(shards)


def _data(job: _Job) -> Iterator[Iterable[np.ndarray]]:
    """Blocks of rows of every tensor, in the job's order; one parameter is held at a time."""
    for entry, group in itertools.groupby(job.tensors, key=lambda tensor: tensor.entry):
        tensors = list(group)
        if tensors[0].packed:
            yield from _packed_data(job, entry, tensors)
            continue
        array = read_param(job.source, job.manifest, entry.target)
        for tensor in tensors:
            yield (extract(array, tensor.part, start, stop)
                   for start, stop in row_blocks(tensor.shape, tensor.part.row_unit(tensor.part.row_view(array))))
        del array


def _packed_data(job: _Job, entry: Entry, tensors: Sequence[_Tensor]) -> Iterator[list[np.ndarray]]:
    """The tensors of one quantised parameter."""
    module = module_of(entry.target)
    quant_format = None if job.model.quantization is None else job.model.quantization.format_of(module)
    assert quant_format is not None, module
    left = iter(tensors)
    for part, packed in export_parts(job.source, job.manifest, entry, quant_format, job.shapes[entry.target], job.target):
        for tensor in itertools.islice(left, len(packed)):
            assert tensor.part is part, (tensor.name, part.source)
            yield [packed[tensor.name.removeprefix(f"{module_of(part.source)}.")]]


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
    flags.DEFINE_enum("format", "hf", ["hf", "awq", "gptq", "gptq_v2"], "What to write, always as safetensors: hf plain weights; "
                      "awq (AutoAWQ gemm), gptq (AutoGPTQ v1) or gptq_v2 (GPTQModel) quantised ones.", flag_values=values)
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
    export(given["model"], given["output"], target=given["format"], max_shard_bytes=given["max_shard_bytes"], progress=given["progress"])


if __name__ == "__main__":
    sys.exit(main())
