"""Prompt files bring settings and urgency for a line; result files hold whatever a line brought with it."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.jsonl import BadLine, Entry, ResultFile, read_prompts
from jaxinfer.sampling.params import SamplingParams


def test_half_characters_come_back_as_they_were_given(tmp_path: Path) -> None:
    record = {"id": "a\ud800b", "prompt": "日本 🦊 \udfff"}
    with ResultFile(tmp_path / "out.jsonl") as file:
        file.write(record)
        file.write({"id": 2})
    lines = (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [record, {"id": 2}] and "日本 🦊" in lines[0]


def test_a_line_may_bring_its_urgency(tmp_path: Path) -> None:
    lines = [{"prompt": "a", "priority": -2, "deadline_s": 3, "max_tokens": 5}, {"prompt": "b"}, {"prompt": "c", "deadline_s": None}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    items = read_prompts(tmp_path / "in.jsonl", SamplingParams())
    assert [(item.priority, item.deadline_s) for item in items if isinstance(item, Entry)] == [(-2, 3.0), (0, None), (0, None)]
    assert isinstance(items[0], Entry) and items[0].params == SamplingParams(max_tokens=5)


@pytest.mark.parametrize(("fields", "message"), [
    ({"priority": 1.5}, "priority = 1.5: must be an integer in"), ({"priority": None}, "priority = None"),
    ({"deadline_s": -1}, "deadline_s = -1: must be a number of seconds"), ({"deadline_s": "soon"}, "deadline_s = 'soon'"),
    ({"deadlines": 1}, "unknown field 'deadlines': known are prompt, messages, prompt_token_ids, id, priority, deadline_s, n"),
])
def test_a_bad_urgency_names_its_line(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps({"prompt": "b", **fields}))
    good, bad = read_prompts(tmp_path / "in.jsonl", SamplingParams())
    assert isinstance(good, Entry) and isinstance(bad, BadLine) and bad.line == 2 and message in bad.message
