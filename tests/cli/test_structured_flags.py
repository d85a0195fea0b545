"""Structured output and processors from the command line and from JSON Lines."""

import json
from pathlib import Path

import pytest
from absl import app, flags

from jaxinfer import cli
from jaxinfer.jsonl import BadLine, Entry, read_prompts
from jaxinfer.sampling.params import SamplingParams, StructuredOutputsParams


def parsed(*argv: str) -> SamplingParams:
    values = flags.FlagValues()
    cli.define_sampling_flags(values)
    cli.parse(values, argv)
    return cli.sampling_params(values)


def test_flags(tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "g.lark"
    schema.write_text('{"type": "string"}')
    grammar.write_text('start: "a"')
    assert parsed().structured_outputs is None
    for flag, asked in ((f"--json_schema={schema}", {"json": {"type": "string"}}), ("--regex=[a,b]+", {"regex": "[a,b]+"}),
                        ('--choice=yes,"no, never"', {"choice": ["yes", "no, never"]}), (f"--grammar={grammar}", {"grammar": 'start: "a"'})):
        assert parsed(flag).guide == StructuredOutputsParams(**asked), flag


@pytest.mark.parametrize(("argv", "message"), [
    (["--regex=a", "--choice=b"], "has regex and choice"),
    (["--json_schema=/none/such"], "--json_schema=/none/such cannot be read: No such file"),
    (["--grammar={binary}"], "cannot be read: it is not UTF-8"),
])
def test_wrong_flags(argv: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(app.UsageError, match=message):
        parsed(*(a.format(binary=tmp_path / "binary") for a in argv))


def test_lines(tmp_path: Path) -> None:
    lines = [{"prompt": "a", "structured_outputs": {"json": {"type": "integer"}}}, {"prompt": "a", "logits_processors": {"p": {"x": 1}}},
             {"prompt": "a", "structured_outputs": {"json": {}, "regex": "a"}}, {"prompt": "a", "structured_outputs": 3}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    one, two, three, four = read_prompts(tmp_path / "in.jsonl", SamplingParams(structured_outputs={"regex": "b"}))
    assert isinstance(one, Entry) and one.params.guide == StructuredOutputsParams(json={"type": "integer"})
    assert isinstance(two, Entry) and two.params.logits_processors == {"p": {"x": 1}} and two.params.guide == StructuredOutputsParams(regex="b")
    assert isinstance(three, BadLine) and "has json and regex" in three.message
    assert isinstance(four, BadLine) and "structured_outputs = 3: has the wrong type" in four.message
