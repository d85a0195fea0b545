"""Models of the Hugging Face hub: which files are asked for, and what is said when they cannot be had. No network: the hub is played."""

import json
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, RepositoryNotFoundError

from convert import hub
from convert.__main__ import main
from convert.converter import convert
from jaxinfer.checkpoint import read_manifest
from jaxinfer.errors import CheckpointError
from jaxinfer.source import converted_checkpoint
from tests.convert.checkpoints import hf_config, hf_tensors, write_hf
from tests.convert.test_torch_file import write_bin

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def respond(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://hub.test/org/name"))


@pytest.fixture
def snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Plays snapshot_download: hands out tmp_path / COMMIT and records what it was asked."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(repo_id: str, **settings: Any) -> str:
        calls.append({"repo_id": repo_id, **settings})
        return str(tmp_path / COMMIT)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_an_id_is_downloaded_and_converted(tmp_path: Path, snapshots: list[dict[str, Any]]) -> None:
    write_hf(tmp_path / COMMIT, hf_config(), hf_tensors(hf_config()), shards=2)
    folder = convert("org/name-7B@main", tmp_path / "out", progress=False)
    assert read_manifest(folder)["source"]["name"] == f"org/name-7B@{COMMIT}"
    assert len(snapshots) == 1
    assert (snapshots[0]["repo_id"], snapshots[0]["revision"]) == ("org/name-7B", "main")
    patterns = snapshots[0]["allow_patterns"]
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json", "model-*-of-*.safetensors"} <= set(patterns)
    assert not any(pattern.endswith((".py", ".bin", "*")) for pattern in patterns), "more than the needed files is asked for"


def test_bin_shards_are_asked_for_only_without_safetensors(tmp_path: Path, snapshots: list[dict[str, Any]]) -> None:
    folder = write_hf(tmp_path / COMMIT, hf_config(), {})
    (folder / "model.safetensors").unlink()
    write_bin(folder / "pytorch_model.bin", hf_tensors(hf_config()))
    convert("org/name", tmp_path / "out", progress=False)
    assert [call["revision"] for call in snapshots] == [None, None]
    assert "pytorch_model-*-of-*.bin" in snapshots[1]["allow_patterns"]


def test_llm_finds_an_id_once(tmp_path: Path, snapshots: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    write_hf(tmp_path / COMMIT, hf_config(), hf_tensors(hf_config()))
    monkeypatch.chdir(tmp_path)
    first = converted_checkpoint("org/name", dtype="auto", cache=tmp_path / "cache")
    assert first.name.startswith("org--name-") and read_manifest(first)["source"]["name"] == f"org/name@{COMMIT}"
    assert converted_checkpoint("org/name", dtype="auto", cache=tmp_path / "cache") == first
    write_hf(tmp_path / "org" / "name", hf_config(), hf_tensors(hf_config()))
    local = converted_checkpoint("org/name", dtype="auto", cache=tmp_path / "cache")  # a path that exists goes first
    assert local != first and read_manifest(local)["source"]["name"] == "name"
    with pytest.raises(CheckpointError, match="no such file or folder. Give a converted checkpoint"):
        converted_checkpoint("./org/absent", dtype="auto", cache=tmp_path / "cache")


@pytest.mark.parametrize(("error", "message"), [
    (LocalEntryNotFoundError("no connection"), "cannot be reached.*no connection.*--model=FOLDER"),
    (OfflineModeIsEnabled("offline mode"), "cannot be reached.*offline mode.*--model=FOLDER"),
    (RepositoryNotFoundError("404", response=respond(404)), "neither a path on this machine nor a model.*--model=FOLDER"),
    (GatedRepoError("403", response=respond(403)), "asks for a licence to be accepted.*hf auth login"),
    (HfHubHTTPError("500", response=respond(500)), "could not be downloaded.*run it again to continue"),
    (OSError(28, "No space left on device"), "could not be downloaded.*No space left"),
])
def test_what_the_hub_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], error: Exception,
                              message: str) -> None:
    def fail(*args: Any, **settings: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=f"org/name .*{message}"):
        convert("org/name", tmp_path / "out")
    assert main(["--model=org/name", f"--output={tmp_path / 'out'}"]) == 1
    assert "error: org/name " in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("text", "is_id"), [
    ("Qwen/Qwen2.5-7B-Instruct", True), ("a/b@refs/pr/1", True), ("a/b@v1.0", True), ("/a/b", False), ("./a/b", False), ("../b", False),
    ("~/b", False), ("a", False), ("a/b/c", False), ("a/", False), ("", False), ("a b/c", False)])
def test_what_is_an_id(text: str, is_id: bool) -> None:
    assert hub.is_model_id(text) is is_id
    if is_id:
        assert json.dumps(text)
