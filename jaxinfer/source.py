"""From what a user calls a model to a converted checkpoint: the one place where jaxinfer runs a conversion by itself."""

import hashlib
import logging
import os
from pathlib import Path

from jaxinfer.errors import CheckpointError

logger = logging.getLogger(__name__)

CACHE = Path("~/.cache/jaxinfer/checkpoints")


def converted_checkpoint(model: str, *, dtype: str, cache: Path | None = None) -> Path:
    """A converted checkpoint folder for `model`, converting into `cache` where it is not one yet.

    Args:
      model: converted folder, Hugging Face folder, .gguf file, or an id of the Hugging Face hub (org/name, org/name@revision). A path
        that exists goes before an id.
      dtype: dtype to convert to; auto keeps the source's.
      cache: where conversions are kept, keyed by the source's path, files, sizes and times.

    Raises:
      CheckpointError: there is no such file, folder or model, the hub cannot be reached, it is none of these kinds, or it or the
        cache cannot be accessed.
    """
    try:
        return _find(model, dtype, cache)
    except OSError as e:
        raise CheckpointError(f"model = {_shown(model)}: {_shown(str(e.filename or model))} cannot be accessed ({e.strerror or e}). "
                              "Check the path and its permissions.") from e


def _find(model: str, dtype: str, cache: Path | None) -> Path:
    path = _expanded(Path(model))
    if not model or not path.exists():
        from convert import hub

        if not hub.is_model_id(model):
            raise CheckpointError(f"model = {_shown(model)}: no such file or folder. Give a converted checkpoint, a Hugging Face folder, a "
                                  ".gguf file or an id of the Hugging Face hub (org/name).")
        return _converted(hub.download(model), model.replace("/", "--").replace("@", "--"), dtype, cache, source=model)
    if (path / "manifest.json").is_file():
        return path
    is_gguf = path.is_file() and path.suffix == ".gguf"
    if not is_gguf and not (path / "config.json").is_file():
        raise CheckpointError(f"model = {model!r}: neither a converted checkpoint (no manifest.json) nor a Hugging Face folder (no "
                              "config.json) nor a .gguf file.")
    return _converted(path, path.stem if path.is_file() else path.name, dtype, cache, source=path)


def _converted(path: Path, name: str, dtype: str, cache: Path | None, *, source: str | Path) -> Path:
    """The conversion of a local source in the cache, made now where it is not there."""
    from convert.converter import convert

    target = _expanded(cache or CACHE) / f"{name}-{_digest(path, dtype)}"
    if not (target / "manifest.json").is_file():
        logger.info("converting %s into %s (once; later runs start from there)", source, target)
        _make_writable(target.parent)
        convert(source, target, dtype=dtype)
    return target


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as e:
        raise CheckpointError(f"{_shown(str(path))}: the home folder that ~ stands for is not known. Write the path in full, or set "
                              "HOME.") from e


def _make_writable(cache: Path) -> None:
    problem: str | None = None
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        problem = e.strerror
    if problem is None and not os.access(cache, os.W_OK | os.X_OK):
        problem = "no permission to write"
    if problem is not None:
        raise CheckpointError(f"the folder of converted checkpoints, {str(cache)!r}, cannot be written ({problem}). Make it writable, or "
                              "convert with python -m convert --model=... --output=... and give that folder as the model.")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 200 else text[:200] + "...")


def _digest(path: Path, dtype: str) -> str:
    """Changes whenever a source file does."""
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file())
    stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return hashlib.sha256(repr((str(path.resolve()), stats, dtype)).encode()).hexdigest()[:16]
