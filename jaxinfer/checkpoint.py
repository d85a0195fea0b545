"""The converted checkpoint on disk: its manifest's schema, its checks, and the restore of its parameters. Never writes one.

Layout of a folder (convert/writer.py makes it; manifest.json is written last, so a folder without one is not a checkpoint):

    manifest.json   what it is, where it came from, every tensor, every parameter file with its size and checksum
    params/         Orbax, one flat dict {dotted path: array}
    config.json     Hugging Face's form; generation_config.json and the tokenizer's files beside it

Importing this module imports neither jax nor orbax.
"""

import concurrent.futures
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.errors import CheckpointError

if TYPE_CHECKING:
    import jax
    import numpy as np

FORMAT = "jaxinfer-checkpoint"
LAYOUT_VERSION = 1
MANIFEST = "manifest.json"
PARAMS = "params"
DTYPES = ("bfloat16", "float16", "float32")
INTEGER_DTYPES = ("int16", "int32")
"""Of packed integers and permutations: see jaxinfer/quant.py."""
CHUNK_BYTES = 1 << 22

_FIELDS: dict[str, tuple[type, ...]] = {
    "layout_version": (int,), "jaxinfer_version": (str,), "source": (dict,), "architecture": (str,), "dtype": (str,), "num_params": (int,),
    "tensors": (dict,), "params_files": (dict,), "quantization": (dict, type(None)), "end_token_ids": (list,),
    "verification": (dict, type(None)),
}


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a converted checkpoint, checked against its schema and against the sizes of the parameter files.

    Args:
      path: the checkpoint's folder.

    Returns:
      The manifest: format, layout_version, jaxinfer_version, source {kind, name, files [{name, bytes, sha256}]}, architecture, dtype,
      num_params, tensors {dotted path: {shape, dtype}}, params_files {relative name: {bytes, crc32}}, quantization, end_token_ids,
      verification.

    Raises:
      CheckpointError: no such folder, no manifest, a damaged or newer one, or a parameter file that is missing or cut short.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder: expected a checkpoint made by python -m convert")
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a converted checkpoint, or an unfinished one (it has no {MANIFEST}): "
                              f"run python -m convert --model=SOURCE --output={folder}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read ({error}): convert the checkpoint again") from None
    _check_schema(folder, manifest)
    for name, facts in manifest["params_files"].items():
        _check_size(folder / name, facts["bytes"])
    return manifest


def restore_params(path: str | os.PathLike[str], abstract: "Mapping[str, jax.ShapeDtypeStruct]", *,
                   verify: bool = True) -> "dict[str, jax.Array]":
    """Restores exactly the named parameters, straight to their requested dtype and sharding.

    Args:
      path: the checkpoint's folder.
      abstract: dotted path -> shape, dtype and, where the array is to be placed, sharding; None places it on the default device.
      verify: read every parameter file once first and compare its checksum, in threads. About the time of one read of the files,
        which the restore then finds in the page cache.

    Returns:
      dotted path -> array, with the keys and order of `abstract`. A stored dtype that differs is cast while reading (round to nearest
      even).

    Raises:
      CheckpointError: a parameter is missing, extra or has another shape than requested (all are named), or a file is damaged.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    _check_tensors(folder, manifest["tensors"], abstract)
    if verify:
        verify_files(folder, manifest)
    import jax
    import orbax.checkpoint.experimental.v1 as ocp

    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    targets = {name: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=spec.sharding or default) for name, spec in abstract.items()}
    try:
        restored = ocp.load((folder / PARAMS).absolute(), targets)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CheckpointError(f"{folder / PARAMS} cannot be restored ({str(error):.300}): it is damaged, convert it again") from error
    return {name: restored[name] for name in abstract}


def read_param(path: str | os.PathLike[str], manifest: Mapping[str, Any], name: str) -> "np.ndarray":
    """One parameter as it is stored, on the host; nothing else is read.

    Args:
      path: the checkpoint's folder.
      manifest: of `read_manifest`.
      name: dotted path, one of the manifest's tensors.

    Returns:
      An array of the manifest's shape and dtype, which must not be written to.

    Raises:
      CheckpointError: the parameter cannot be read, or is stored with another shape or dtype.
    """
    import jax
    import numpy as np
    import orbax.checkpoint.experimental.v1 as ocp

    folder, spec = Path(path), manifest["tensors"][name]
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    try:
        with context:
            target = jax.ShapeDtypeStruct(tuple(spec["shape"]), spec["dtype"], sharding=sharding)
            loaded = ocp.load((folder / PARAMS).absolute(), {name: target})
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CheckpointError(f"{folder / PARAMS} holds no {name} that can be restored ({str(error):.300}): convert it again") from error
    value = loaded.get(name)  # a partial restore gives an absent parameter's target back
    if not isinstance(value, jax.Array):
        raise CheckpointError(f"{folder / PARAMS} holds no {name}, which {MANIFEST} lists: convert it again")
    return np.asarray(value)


def verify_files(path: str | os.PathLike[str], manifest: Mapping[str, Any]) -> None:
    """Compares the checksum of every parameter file with the manifest. Raises CheckpointError for the first that differs."""
    folder = Path(path)
    files = manifest["params_files"]
    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for name, checksum in zip(files, pool.map(lambda name: file_crc32(folder / name), files), strict=True):
            if checksum != files[name]["crc32"]:
                raise CheckpointError(f"{folder / name} is damaged: its checksum is {checksum:08x}, the manifest says "
                                      f"{files[name]['crc32']:08x}: copy the checkpoint or convert it again")


def file_crc32(path: Path) -> int:
    """CRC-32 of a file's bytes, read in chunks."""
    checksum = 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                checksum = zlib.crc32(chunk, checksum)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    return checksum


def _check_schema(folder: Path, manifest: Any) -> None:
    """Format, version, and the type of every field that a reader uses."""
    where = folder / MANIFEST
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise CheckpointError(f"{where} has format {found!r}, expected {FORMAT!r}: convert the checkpoint with python -m convert")
    version = manifest.get("layout_version")
    if version != LAYOUT_VERSION:
        raise CheckpointError(f"{where} has layout_version {version!r}, this version reads {LAYOUT_VERSION}: convert the checkpoint again")
    for name, types in _FIELDS.items():
        if name not in manifest or type(manifest[name]) not in types:
            raise CheckpointError(f"{where} has {name} = {manifest.get(name)!r:.80}, expected {types[0].__name__}: "
                                  "the manifest is damaged, convert the checkpoint again")
    damaged = [name for name, spec in manifest["tensors"].items() if not _is_tensor(spec)]
    damaged += [name for name, facts in manifest["params_files"].items() if not _is_params_file(name, facts)]
    if damaged or manifest["dtype"] not in DTYPES or not all(type(token_id) is int for token_id in manifest["end_token_ids"]):
        what = f"entries {', '.join(damaged[:5])}" if damaged else "dtype or end_token_ids"
        raise CheckpointError(f"{where} has damaged {what}: convert the checkpoint again")


def _is_tensor(spec: Any) -> bool:
    return (isinstance(spec, dict) and spec.get("dtype") in (*DTYPES, *INTEGER_DTYPES) and isinstance(spec.get("shape"), list)
            and all(type(size) is int and size > 0 for size in spec["shape"]))


def _is_params_file(name: str, facts: Any) -> bool:
    """Relative, inside params/, with its size and checksum."""
    parts = Path(name).parts
    return (isinstance(facts, dict) and type(facts.get("bytes")) is int and type(facts.get("crc32")) is int
            and parts[:1] == (PARAMS,) and ".." not in parts)


def _check_size(path: Path, num_bytes: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path} is missing ({error.strerror}): copy the checkpoint again, whole, or convert it again") from None
    if found != num_bytes:
        raise CheckpointError(f"{path} has {found} bytes, the manifest says {num_bytes}: copy the checkpoint again, or convert it again")


def _check_tensors(folder: Path, tensors: Mapping[str, Any], abstract: "Mapping[str, jax.ShapeDtypeStruct]") -> None:
    """The stored and the requested parameters must be the same, by name and shape."""
    problems = [f"{name} is missing" for name in abstract if name not in tensors]
    problems += [f"{name} is not a parameter of this model" for name in tensors if name not in abstract]
    for name, spec in abstract.items():
        if name in tensors and list(spec.shape) != tensors[name]["shape"]:
            problems.append(f"{name} has shape {tensors[name]['shape']}, the model needs {list(spec.shape)}")
    if problems:
        shown = "; ".join(problems[:10]) + ("; ..." if len(problems) > 10 else "")
        raise CheckpointError(f"{folder} does not fit its config in {len(problems)} parameters: {shown}: convert the checkpoint again")
