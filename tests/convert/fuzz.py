"""Damages checkpoints at random and uses them: each case must succeed or end with a typed error, soon, and leave no partial checkpoint.

  python -m tests.convert.fuzz --cases=2000 [--seed=0] [--target=NAME]

A case takes one file of one kind of checkpoint, damages it (cut short, bits flipped, bytes replaced, a piece removed, doubled or zeroed), then
converts, inspects, loads or exports the checkpoint. tests/convert/test_fuzz.py runs the first cases.
"""

import dataclasses
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from absl import flags

import jaxinfer
from convert.converter import convert
from convert.export import export
from convert.inspect import inspect
from jaxinfer import cli
from jaxinfer.errors import JaxInferError
from jaxinfer.tokenizer import Tokenizer
from tests.convert.checkpoints import hf_config, hf_tensors, write_gguf, write_hf
from tests.convert.test_torch_file import BIN_TINY

TIME_LIMIT_S = 20
FIXTURES = BIN_TINY.parent


@dataclasses.dataclass(frozen=True)
class Target:
    """One file to damage and what is then done with the checkpoint that it belongs to."""

    name: str
    file: Path
    use: Callable[[Path], Any]
    """Called with the folder where an output may be made."""


class TooSlow(BaseException):
    """A case passed its time limit."""


def make_targets(root: Path) -> list[Target]:
    """Whole checkpoints of every kind, and their files."""
    config = hf_config("LlamaForCausalLM", tied=True, num_hidden_layers=1)
    small = {name: value for name, value in hf_tensors(config, np.float32).items()}
    write_gguf(root / "m.gguf", {**config, "num_hidden_layers": 2}, hf_tensors({**config, "num_hidden_layers": 2}, np.float32))
    converted = convert(root / "m.gguf", root / "converted", progress=False)
    hf = write_hf(root / "hf", config, small, shards=2)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(converted / name, hf / name)
    (hf / "generation_config.json").write_text('{"eos_token_id": [3, 4], "temperature": 0.7, "do_sample": true}')
    binary = Path(shutil.copytree(BIN_TINY, root / "bin"))
    qwen = Path(shutil.copytree(FIXTURES / "qwen1_tiny", root / "qwen1"))

    def use(source: Path) -> Callable[[Path], None]:
        def run(folder: Path) -> None:
            inspect(source)
            convert(source, folder / "out", progress=False)
        return run

    def use_tokenizer(folder: Path) -> None:
        inspect(hf)
        tokenizer = Tokenizer.from_dir(convert(hf, folder / "out", progress=False))
        tokenizer.decode(tokenizer.encode("Hello  the\nworld 123"))

    def use_converted(folder: Path) -> None:
        inspect(converted)
        export(converted, folder / "out", progress=False)
        jaxinfer.load(converted)

    rows = [("gguf", root / "m.gguf", use(root / "m.gguf")), ("safetensors", hf / "model-00001-of-00002.safetensors", use(hf)),
            ("index", hf / "model.safetensors.index.json", use(hf)), ("config", hf / "config.json", use(hf)),
            ("qwen1 config", qwen / "config.json", use(qwen)), ("bin", binary / "pytorch_model-00001-of-00002.bin", use(binary)),
            ("bin index", binary / "pytorch_model.bin.index.json", use(binary)),
            ("generation config", hf / "generation_config.json", use(hf)), ("tokenizer", hf / "tokenizer.json", use_tokenizer),
            ("tokenizer config", hf / "tokenizer_config.json", use_tokenizer)]
    rows += [(f"converted {path.name[:20]}", path, use_converted)
             for path in (converted / "manifest.json", converted / "config.json", *sorted((converted / "params").rglob("*")))
             if path.is_file() and path.stat().st_size]
    return [Target(*row) for row in rows]


def damage(data: bytes, rng: np.random.Generator) -> bytes:
    """One random damage; most of them in the first bytes, where headers are."""
    changed = bytearray(data)
    reach = len(data) if rng.random() < 0.5 else min(len(data), 4096)
    start = int(rng.integers(max(1, reach)))
    length = int(rng.integers(1, 65))
    kind = int(rng.integers(7))
    if kind == 0:
        del changed[start:]
    elif kind in (1, 2):
        for _ in range(int(rng.integers(1, 4)) if kind == 2 else 1):
            changed[int(rng.integers(max(1, reach)))] ^= 1 << int(rng.integers(8))
    elif kind == 3:
        changed[start:start + length] = rng.bytes(length)
    elif kind == 4:
        del changed[start:start + length]
    elif kind == 5:
        changed[start:start] = changed[start:start + length]
    else:
        changed[start:start + length] = bytes(length)
    return bytes(changed)


def run_case(target: Target, seed: int, root: Path) -> str:
    """Runs one case; returns 'whole' or the typed error's name. Raises AssertionError for what must not happen."""
    whole, rng = target.file.read_bytes(), np.random.default_rng(seed)
    folder = root / "work"
    folder.mkdir()
    target.file.write_bytes(damage(whole, rng))
    signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT_S)
    try:
        target.use(folder)
        return "whole"
    except JaxInferError as error:
        assert str(error), "an error says nothing"
        left = [path.name for path in folder.iterdir() if path.name != "out"]
        assert not left, f"left behind: {left}"
        if (folder / "out").exists():  # made whole, and refused only when it was read
            assert (folder / "out" / "manifest.json").exists() or (folder / "out" / "config.json").exists(), "a partial checkpoint is left"
        return type(error).__name__
    except BaseException as error:
        shutil.copy(target.file, root / f"failed-{target.name.replace(' ', '-')}-{seed}")
        trace = traceback.format_exc()[-1500:]
        raise AssertionError(f"{target.name}, seed {seed}: {type(error).__name__}: {str(error)[:200]}\n{trace}") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        target.file.write_bytes(whole)
        shutil.rmtree(folder)


def run(num_cases: int, seed: int, root: Path, only: str | None = None) -> tuple[dict[str, Counter[str]], list[str]]:
    """Runs cases in turn over all targets; returns target -> outcomes, and the failures."""
    previous = signal.signal(signal.SIGALRM, _too_slow)
    logging.getLogger("convert").setLevel(logging.ERROR)
    try:
        targets = [target for target in make_targets(root) if only is None or target.name == only]
        outcomes, failures = {target.name: Counter[str]() for target in targets}, list[str]()
        for i in range(num_cases):
            target = targets[i % len(targets)]
            try:
                outcomes[target.name][run_case(target, seed + i, root)] += 1
            except AssertionError as error:
                outcomes[target.name]["FAILED"] += 1
                failures.append(str(error))
        return outcomes, failures
    finally:
        signal.signal(signal.SIGALRM, previous)
        logging.getLogger("convert").setLevel(logging.NOTSET)


def _too_slow(number: int, frame: FrameType | None) -> None:
    raise TooSlow(f"more than {TIME_LIMIT_S} s")


def main(argv: Sequence[str] | None = None) -> int:
    """Console entry; takes arguments without the program's name."""
    values = flags.FlagValues()
    flags.DEFINE_integer("cases", 2000, "How many.", 1, flag_values=values)
    flags.DEFINE_integer("seed", 0, "Of the first case; each next one has the next seed.", flag_values=values)
    flags.DEFINE_string("target", None, "Damage this kind of file only.", flag_values=values)
    return cli.run(lambda _: _run(values), values, argv, __doc__)


def _run(values: flags.FlagValues) -> int:
    given: dict[str, Any] = values.flag_values_dict()
    os.environ["JAX_PLATFORMS"] = "cpu"
    logging.getLogger("absl").setLevel(logging.ERROR)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outcomes, failures = run(given["cases"], given["seed"], Path(folder), given["target"])
    for name, counts in outcomes.items():
        print(f"{name:32} " + ", ".join(f"{outcome} {count}" for outcome, count in counts.most_common()))
    for failure in failures[:20]:
        print("\nFAILED " + failure)
    print(f"\n{given['cases']} cases in {time.monotonic() - start:.0f} s, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
