"""`--resume`: what is complete is taken over after its checksums are compared, in another process too; all else is made again."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import pytest

from convert import converter, journal, writer
from convert.converter import convert
from jaxinfer.checkpoint import read_manifest
from jaxinfer.errors import CheckpointError
from tests.convert.checkpoints import expected, hf_config, hf_tensors, write_hf
from tests.convert.test_convert import ROOT, assert_bitwise

CONFIG = hf_config(tied=True)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(writer, "BATCH_BYTES", 1 << 14)
    return write_hf(tmp_path / "hf", CONFIG, hf_tensors(CONFIG))


def interrupt(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, after: int = 20, **settings: Any) -> Path:
    """A conversion that Ctrl-C ends at the given tensor; returns what it leaves."""
    real, calls = converter.fill, 0

    def fill(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == after:
            raise KeyboardInterrupt
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(converter, "fill", fill)
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "out", progress=False, resume=True, **settings)
    return tmp_path / "out.partial-resume"


def count_fills(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    real, names = converter.fill, list[str]()
    monkeypatch.setattr(converter, "fill", lambda target, part, src: (names.append(part.source), real(target, part, src)))
    return names


def finish(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Resumes, checks the whole result, and returns the tensors that were read."""
    names = count_fills(monkeypatch)
    folder = convert(source, tmp_path / "out", progress=False, resume=True)
    assert_bitwise(folder, expected(CONFIG, hf_tensors(CONFIG), ml_dtypes.bfloat16))
    assert sorted(path.name for path in tmp_path.iterdir() if path != source) == ["out"]
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "manifest.json", "params"]
    return names


def test_what_is_complete_is_not_done_again(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = interrupt(tmp_path, source, monkeypatch)
    batches = json.loads((partial / "journal.json").read_text())["batches"]
    done = {path for batch in batches for path in batch["tensors"]}
    assert 0 < len(done) < len(expected(CONFIG, hf_tensors(CONFIG), ml_dtypes.bfloat16))
    assert not (tmp_path / "out").exists()
    interrupt(tmp_path, source, monkeypatch, after=4)  # interrupted again
    more = {path for batch in json.loads((partial / "journal.json").read_text())["batches"] for path in batch["tensors"]}
    assert more >= done
    names = finish(tmp_path, source, monkeypatch)
    total = len(hf_tensors(CONFIG))
    assert 0 < len(names) < total - len(done) + 1 and "model.embed_tokens.weight" not in names


def test_a_whole_run_without_interruption(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(finish(tmp_path, source, monkeypatch)) == len(hf_tensors(CONFIG))


def test_a_damaged_batch_is_made_again(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    partial = interrupt(tmp_path, source, monkeypatch)
    victim = max((path for path in partial.rglob("ocdbt.process_0/d/*")), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    (partial / "stray").write_text("x")
    with caplog.at_level("INFO", logger="convert"):
        finish(tmp_path, source, monkeypatch)
    assert "tensors are there and whole" in caplog.text


@pytest.mark.parametrize("damage", ["journal", "absent", "other source", "other dtype"])
def test_what_cannot_be_taken_over_is_begun_anew(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    partial = interrupt(tmp_path, source, monkeypatch, **({"dtype": "float16"} if damage == "other dtype" else {}))
    if damage == "journal":
        (partial / "journal.json").write_text('{"what": ')
    elif damage == "absent":
        (partial / "journal.json").unlink()
    elif damage == "other source":
        os.utime(source / "model.safetensors", (1, 1))
    assert len(finish(tmp_path, source, monkeypatch)) == len(hf_tensors(CONFIG))


def test_without_a_complete_batch_nothing_is_kept(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(tmp_path, source, monkeypatch, after=1)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_interrupted_while_it_finishes(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orbax has begun to merge: nothing can be taken over, and nothing is left."""
    with monkeypatch.context() as patch:
        patch.setattr(writer, "file_crc32", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "out", progress=False, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_full_disk_keeps_what_is_complete(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = writer.ocp.partial.save, 0

    def save(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise OSError(28, "No space left on device")
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(writer.ocp.partial, "save", save)
        with pytest.raises(CheckpointError, match="the disk is full.: free the disk and continue .*partial-resume"):
            convert(source, tmp_path / "out", progress=False, resume=True)
    assert len(finish(tmp_path, source, monkeypatch)) < len(hf_tensors(CONFIG))


def test_two_writers_do_not_meet(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = interrupt(tmp_path, source, monkeypatch)
    other = journal.Journal(partial, "other")
    other._lock = other._acquire()
    with pytest.raises(CheckpointError, match="is being written by another process"):
        convert(source, tmp_path / "out", progress=False, resume=True)
    os.close(other._lock)
    finish(tmp_path, source, monkeypatch)


def test_a_run_without_resume_names_what_is_left(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch,
                                                 caplog: pytest.LogCaptureFixture) -> None:
    partial = interrupt(tmp_path, source, monkeypatch)
    convert(source, tmp_path / "out", progress=False)
    assert "give --resume to continue it, or remove it" in caplog.text and partial.exists()
    shutil.rmtree(partial)


def test_a_killed_process_is_continued_by_another(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = ("import sys, time, convert.__main__ as m, convert.converter as c, convert.writer as w\n"
            "w.BATCH_BYTES = 1 << 14\nreal = c.fill\n"
            "def fill(*a):\n    time.sleep(0.1); real(*a)\n"
            "c.fill = fill\nsys.exit(m.main())")
    arguments = [f"--model={source}", f"--output={tmp_path / 'out'}", "--resume", "--noprogress"]
    process = subprocess.Popen([sys.executable, "-c", slow, *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "JAX_PLATFORMS": "cpu"})
    path, deadline = tmp_path / "out.partial-resume" / "journal.json", time.monotonic() + 60
    while not (path.exists() and len(json.loads(path.read_text())["batches"]) > 2) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert len(finish(tmp_path, source, monkeypatch)) < len(hf_tensors(CONFIG))
    assert read_manifest(tmp_path / "out")["dtype"] == "bfloat16"
