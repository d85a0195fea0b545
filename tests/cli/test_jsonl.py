"""Result files hold whatever a line brought with it."""

import json
from pathlib import Path

from jaxinfer.jsonl import ResultFile


def test_half_characters_come_back_as_they_were_given(tmp_path: Path) -> None:
    record = {"id": "a\ud800b", "prompt": "日本 🦊 \udfff"}
    with ResultFile(tmp_path / "out.jsonl") as file:
        file.write(record)
        file.write({"id": 2})
    lines = (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [record, {"id": 2}] and "日本 🦊" in lines[0]
