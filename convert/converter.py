"""Converts one checkpoint: open, plan, stream, commit. Holds no format: readers, tables and the writer do the work."""

import dataclasses
import json
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

import jaxinfer
from convert import hub, verify
from convert.dequantized import DequantizedSource
from convert.families import FAMILIES, TIED
from convert.formats import Scheme, TensorSpec, read_scheme
from convert.gguf_reader import GGUFSource
from convert.hashing import FileHasher
from convert.hf_reader import HFSource
from convert.interruption import Interruption
from convert.mapping import Entry, Plan, check_tied_copies, check_zero_biases, fill, make_plan
from convert.progress import MemoryMeter, Progress
from convert.quantized import check_head, fuse, matrix_params, module_of, packed_tensors, quantization_facts, read_formats, with_quantized_head
from convert.source import DTYPES, Source
from convert.writer import CheckpointWriter, check_output
from jaxinfer.checkpoint import LAYOUT_VERSION, MANIFEST
from jaxinfer.errors import CheckpointError, ConfigError, UnsupportedModelError
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.registry import abstract_params, read_model_config
from jaxinfer.quant import HEAD, QuantConfig

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What is converted, and into what."""

    source: Source
    name: str
    """What the user calls the source: the hub's id with its commit, or the name of the file or folder."""
    model: ModelConfig
    plan: Plan
    dtype: str
    sizes: Mapping[str, int]
    """Bytes of every parameter that is written."""
    scheme: Scheme | None
    """How the source is quantised."""
    packed: Mapping[str, Mapping[str, TensorSpec]]
    """Source weight -> the tensors that stand for it."""


def convert(source: str | Path, output: str | Path, *, dtype: str = "auto", overwrite: bool = False, progress: bool = True,
            resume: bool = False, verify_logits: bool = False) -> Path:
    """Converts a Hugging Face folder or a GGUF file into a checkpoint folder that jaxinfer loads.

    Everything that headers tell is checked before any weight is read. The folder appears whole or not at all: an exception, an
    interruption or a full disk leaves nothing that loads, and without `resume` nothing at all.

    Args:
      source: a Hugging Face folder (config.json with safetensors or .bin shards), a .gguf file, or an id of the Hugging Face hub
        (org/name, org/name@revision), of which the needed files are downloaded.
      output: the folder to make; it may exist when it is empty.
      dtype: bfloat16, float16, float32, or auto: what most of the source's weights are stored in, bfloat16 for a quantised GGUF file.
      overwrite: replace a checkpoint at `output` once the new one is complete.
      progress: show a bar, or a line now and then, on stderr.
      resume: an interruption keeps what is complete beside the output, and a run with `resume` and the same source, output and dtype
        takes it over after comparing its checksums.
      verify_logits: before the folder appears, compare its logits with those of an independent float32 computation from the source
        (convert/verify.py), and record the result in the manifest.

    Returns:
      The output folder.

    Raises:
      ConfigError: an unknown dtype, an output that is or holds the source, or an unknown home folder.
      CapacityError: the machine's memory does not hold the model for `verify_logits`.
      CheckpointError: the source is incomplete, damaged or not what its config says, or the output cannot be written.
      UnsupportedModelError: an architecture, a config attribute, a tensor type or a file format that is not implemented.
      TokenizerError: a GGUF file's tokenizer cannot be built.
    """
    output_path = Path(os.path.abspath(expanded(output)))
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(f"dtype is {dtype!r}, must be one of auto, {', '.join(DTYPES)}")
    if (local := expanded(source)).exists() and local.resolve().is_relative_to(output_path.resolve()):
        raise ConfigError(f"the output {output_path} is or holds the source {local}: choose another --output")
    check_output(output_path, overwrite=overwrite)
    source_path, name = _locate(source)
    start = time.monotonic()
    with MemoryMeter() as meter, Interruption() as interruption:
        job = prepare(open_source(source_path), name, dtype)
        if verify_logits:
            verify.check_possible(plain_source(job), num_params=sum(map(math.prod, job.plan.shapes.values())), dtype=job.dtype)
        num_bytes = _write(job, output_path, overwrite=overwrite, progress=progress, resume=resume, verify_logits=verify_logits,
                           interruption=interruption)
    seconds = time.monotonic() - start
    logger.info("%s: %s, %d tensors, %.0f MB as %s in %.1f s (%.0f MB/s), peak anonymous memory %s", output_path, job.model.architecture,
                len(job.sizes), num_bytes / 1e6, _described(job), seconds, num_bytes / 1e6 / seconds, meter)
    return output_path


def expanded(path: str | Path) -> Path:
    """The path with ~ and ~user replaced.

    Raises:
      ConfigError: a home folder that is not known.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path}: the home folder that ~ stands for is not known: write the path in full") from error


def _locate(source: str | Path) -> tuple[Path, str]:
    """(local path, name to record) of what the user named; downloads what is not on this machine."""
    path = expanded(source)
    if path.exists():
        return path, path.resolve().name
    if hub.is_model_id(str(source)):
        path = hub.download(str(source))
        return path, f"{str(source).partition('@')[0]}@{path.name}"
    raise CheckpointError(f"{source} does not exist: give a Hugging Face folder or a .gguf file on this machine, or an id such as org/name")


def open_source(path: Path) -> Source:
    """The reader for a path, opened: its headers are read and checked. Raises as `convert` does."""
    if path.is_dir():
        if is_converted(path):
            raise CheckpointError(f"{path} is already a converted checkpoint: use it as it is")
        return HFSource(path)
    if path.suffix == ".gguf":
        return GGUFSource(path)
    raise UnsupportedModelError(f"{path} is neither a folder nor a .gguf file: give a Hugging Face folder or a .gguf file")


def is_converted(path: Path) -> bool:
    """Whether a path is a checkpoint folder of ours, and no Hugging Face folder that happens to hold a manifest."""
    return (path / MANIFEST).exists() and not (path / "model.safetensors").exists()


def prepare(source: Source, name: str, dtype: str) -> Job:
    """Reads the config and plans the conversion of an opened source. Raises as `convert` does."""
    scheme = read_scheme(source.config)
    _check_sizes(source, num_per_element=1 if scheme is None else 32 // scheme.bits)
    model = read_model_config({name: value for name, value in source.config.items() if name != "quantization_config"})
    if model.architecture not in FAMILIES:
        raise UnsupportedModelError(f"{source.path} is a {model.architecture}; conversion knows {', '.join(FAMILIES)}")
    dtype = source.natural_dtype if dtype == "auto" else dtype
    quantized_head = scheme is not None and scheme.is_quantized(HEAD)
    if quantized_head and model.tie_embeddings:
        logger.info("%s: its embeddings are tied, but its vocabulary head is quantised: the checkpoint holds both", source.path)
        model = model.untied()
    shapes: Mapping[str, tuple[int, ...]] = {path: spec.shape for path, spec in abstract_params(model, jnp.dtype(dtype)).items()}
    entries = FAMILIES[model.architecture](model)
    if scheme is not None:
        check_head(source, scheme)
    if quantized_head:
        entries, shapes = with_quantized_head(entries, shapes)
    packed = {} if scheme is None else packed_tensors(scheme, entries, shapes, model.projections(), source.tensors)
    plan = make_plan(source, entries, shapes, architecture=model.architecture, tied=TIED if model.tie_embeddings else None, packed=packed)
    check_tied_copies(source, plan)
    check_zero_biases(source, plan)
    if scheme is not None:
        formats = read_formats(source, scheme, entries, packed, model.projections())
        model = dataclasses.replace(model, quantization=QuantConfig.of(scheme.name, formats))
    for name in plan.ignored:
        logger.info("ignored %s: the config determines it", name)
    for copy, original in plan.tied_copies:
        logger.info("dropped %s: it equals %s, to which the config ties it", copy, original)
    for bias in plan.zero_biases:
        logger.info("dropped %s: it is zero, and the model has no such bias", bias)
    sizes = {path: math.prod(spec.shape) * spec.dtype.itemsize for path, spec in abstract_params(model, jnp.dtype(dtype)).items()}
    return Job(source=source, name=name, model=model, plan=plan, dtype=dtype, sizes=sizes, scheme=scheme, packed=packed)


def _check_sizes(source: Source, *, num_per_element: int) -> None:
    """Refuses config sizes that the source cannot hold, with so many weights in an element, before anything is built from them."""
    num_elements = num_per_element * sum(math.prod(info.shape) for info in source.tensors.values())
    limits = {"num_hidden_layers": len(source.tensors)}
    for key in ("num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                "head_dim"):
        value, limit = source.config.get(key), limits.get(key, num_elements)
        if type(value) is int and value > limit:
            raise CheckpointError(f"{source.path}: the config says {key} = {value}, but the checkpoint has only "
                                  f"{len(source.tensors)} tensors with {num_elements} elements: fetch the missing files again")


def _write(job: Job, output: Path, *, overwrite: bool, progress: bool, resume: bool, verify_logits: bool,
           interruption: Interruption) -> int:
    """Writes the checkpoint; returns the parameters' bytes."""
    num_bytes = sum(job.sizes.values())
    what = _fingerprint(job) if resume else None
    with CheckpointWriter(output, overwrite=overwrite, resume=what) as writer, FileHasher(job.source.files) as hasher:
        done = writer.done
        writer.require_space(num_bytes - sum(job.sizes[target] for target in done))
        end_token_ids = job.source.write_tokenizer(writer.folder)
        if not (writer.folder / "tokenizer_config.json").exists() and not (writer.folder / "tokenizer.json").exists():
            logger.warning("%s has no tokenizer files: the checkpoint will take token ids only", job.source.path)
        quantization = job.model.quantization
        stated: dict[str, Any] = {} if quantization is None else {"quantization_config": quantization.to_json()}
        if job.source.config.get("tie_word_embeddings") and not job.model.tie_embeddings:
            stated["tie_word_embeddings"] = False
        writer.write_json("config.json", {**job.source.config, **stated})
        if job.source.generation_config is not None:
            writer.write_json("generation_config.json", job.source.generation_config)
        bar = Progress(len(job.sizes), num_bytes, enabled=progress)
        for entry in job.plan.entries:
            interruption.check()
            _write_entry(job, entry, writer, bar, done)
        bar.close()
        files = hasher.result()
        interruption.check()
        writer.commit({
            "jaxinfer_version": jaxinfer.__version__,
            "source": {"kind": job.source.kind, "name": job.name, "files": files},
            "architecture": job.model.architecture,
            "dtype": job.dtype,
            "num_params": sum(map(math.prod, job.plan.shapes.values())),
            "quantization": None if quantization is None else quantization_facts(quantization),
            "end_token_ids": sorted(end_token_ids | _declared_end_ids(job.source)),
            "verification": None,
        }, (lambda folder: _verify(job, folder, interruption)) if verify_logits else None)
    return num_bytes


def _write_entry(job: Job, entry: Entry, writer: CheckpointWriter, bar: Progress, done: frozenset[str]) -> None:
    """Queues one parameter, or those of one quantised module."""
    if entry.parts[0].source in job.packed:
        module = module_of(entry.target)
        names = [name for name in job.sizes if name.rpartition(".")[0] == module and not name.endswith(".bias")]
        if not done.issuperset(names):
            assert job.scheme is not None and job.model.quantization is not None
            quant_format = job.model.quantization.format_of(module)
            assert quant_format is not None, module
            shape = job.plan.shapes[entry.target]
            matrix = fuse(job.source, job.scheme, entry, shape, job.packed, quant_format)
            for name, value in matrix_params(module, matrix, out_shape=shape).items():
                if name not in done:
                    buffer = writer.allocate(value.shape, value.dtype)
                    buffer[...] = value
                    writer.submit(name, buffer)
    else:
        names = [entry.target]
        if entry.target not in done:
            buffer = writer.allocate(job.plan.shapes[entry.target], DTYPES[job.dtype])
            for part in entry.parts:
                fill(buffer, part, job.source)
            writer.submit(entry.target, buffer)
    for name in names:
        bar.advance(job.sizes[name])


def _verify(job: Job, folder: Path, interruption: Interruption) -> dict[str, Any]:
    result = verify.compare(plain_source(job), folder)
    interruption.check()
    return result


def plain_source(job: Job) -> Source:
    """The source, with float32 weights in the place of quantised ones."""
    if job.scheme is None:
        return job.source
    shapes = {part.source: part.source_shape(job.plan.shapes[entry.target])
              for entry in job.plan.entries for part in entry.parts if part.source in job.packed}
    return DequantizedSource(job.source, job.scheme, job.packed, shapes)


def _described(job: Job) -> str:
    return job.dtype if job.model.quantization is None else f"{job.dtype} and {job.model.quantization.weights}"


def _fingerprint(job: Job) -> str:
    """Everything that decides what is written; a source file counts by size and time of change."""
    files = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in job.source.files]
    shapes = {target: list(shape) for target, shape in job.plan.shapes.items()}
    quantization = None if job.model.quantization is None else quantization_facts(job.model.quantization)
    return json.dumps([jaxinfer.__version__, LAYOUT_VERSION, job.model.architecture, job.dtype, quantization, files, shapes])


def _declared_end_ids(source: Source) -> frozenset[int]:
    """eos_token_id of config and generation_config, each an id or a list."""
    ids: set[int] = set()
    for name, config in (("config.json", source.config), ("generation_config.json", source.generation_config or {})):
        value = config.get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        for item in values:
            if item is not None and (type(item) is not int or item < 0):
                raise CheckpointError(f"{source.path}: eos_token_id in {name} is {value!r:.80}, expected token ids: correct the file")
            if item is not None:
                ids.add(item)
    return frozenset(ids)
