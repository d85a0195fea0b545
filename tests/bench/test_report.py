"""What benchmarks say of an engine's own counters."""

from pathlib import Path

import pytest

from bench.report import phases, require_folder, write
from jaxinfer.engine.metrics import EngineMetrics
from jaxinfer.errors import ConfigError


def test_a_file_is_the_old_one_or_the_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("name", {"rows": [1]}, tmp_path / "folder")
    before = path.read_bytes()

    def ended(self: Path, text: str) -> int:
        self.write_bytes(text.encode()[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", ended)
    with pytest.raises(ConfigError, match=r"name\.json cannot be written \(No space left on device\): name another folder"):
        write("name", {"rows": [1, 2]}, tmp_path / "folder")
    assert path.read_bytes() == before


def test_a_folder_that_cannot_be_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be made \(.*\): name another folder"):
        require_folder(tmp_path / "file" / "folder")


def test_phases_part_a_run_by_what_its_steps_did() -> None:
    metrics = EngineMetrics(decode_read_bytes=1, kv_token_bytes=1, read_bytes_per_s=None, num_steps=12, num_decode_steps=8, decode_seconds=2.0,
                            num_prefill_tokens=600)
    assert phases(metrics, 5.0) == {
        "prompt_tokens_per_s_of_mixed_steps": 200.0, "mixed_step_ms": 750.0, "num_mixed_steps": 4, "decode_step_ms": 250.0}
    idle = EngineMetrics(decode_read_bytes=1, kv_token_bytes=1, read_bytes_per_s=None)
    assert set(phases(idle, 0.0).values()) == {None, 0}
