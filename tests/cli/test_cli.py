"""Flags made from dataclass fields, and a command over absl's global flags."""

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from absl import app, flags

from jaxinfer import cli
from jaxinfer.config import EngineConfig
from jaxinfer.sampling.params import SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """Not a help text."""

    count: int = 3
    """How many;
    over two lines."""
    share: float | None = None
    """A share."""
    names: str | Sequence[str] | None = None
    on: bool = dataclasses.field(default=True, metadata={"help": "From metadata."})


def parsed(*argv: str) -> dict[str, Any]:
    values = flags.FlagValues()
    cli.define_fields(values, Example, "Example", rename={"on": "enabled"}, aliases={"number": "count"})
    cli.parse(values, argv)
    return cli.field_values(values, Example, rename={"on": "enabled"})


def test_help_comes_from_metadata_or_docstring() -> None:
    assert cli.field_help(Example) == {"count": "How many; over two lines.", "share": "A share.", "names": "", "on": "From metadata."}
    for cls in (EngineConfig, SamplingParams):
        assert all(cli.field_help(cls).values()), f"a field of {cls.__name__} has no sentence"


def test_values_by_type() -> None:
    assert parsed() == {"count": 3, "share": None, "names": None, "on": True}
    assert parsed("--number=4", "--share=0.5", "--names=a", "--names=b,c", "--noenabled") == {
        "count": 4, "share": 0.5, "names": ["a", "b,c"], "on": False}
    assert parsed("--share=0.5", "--share=None")["share"] is None


@pytest.mark.parametrize("argv, message", [
    ("--count=none", "must be an integer"), ("--share=x", "must be a number or none"), ("--count=", "must be an integer"),
    ("--enabled=maybe", "boolean"), ("--cuont=1", "Did you mean: count"),
])
def test_wrong_values(argv: str, message: str) -> None:
    with pytest.raises(flags.Error, match=message):
        parsed(argv)


def test_positional_arguments_are_refused() -> None:
    with pytest.raises(app.UsageError, match="unexpected argument 'x'"):
        parsed("--count=1", "x")


def test_a_command_over_the_global_flags() -> None:
    code = '''
"""Says hello."""
from absl import flags
from jaxinfer import cli
cli.define_engine_flags()
cli.define_sampling_flags()
flags.DEFINE_string("shape", None, "A shape.")
def main(argv):
    assert len(argv) == 1
    print(cli.engine_config().page_size, flags.FLAGS.shape)
raise SystemExit(cli.run(main))
'''
    def ran(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=60)

    assert ran("--shape=Q", "--page_size=16").stdout == "16 Q\n"
    shown = ran("--help").stdout
    assert "Command:\n  --shape\n" in shown and "logtostderr" not in shown and "Sampling:" in shown
    assert ran("--page_size=1").returncode == 2


def test_help_needs_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    def asked(*argv: str) -> int:
        values = flags.FlagValues()
        flags.DEFINE_string("model", None, "Needed.", required=True, flag_values=values)
        return cli.run(lambda _: None, values, argv, "Says hello.")

    assert asked("--help") == 0 and "Says hello." in capsys.readouterr().out
    assert asked() == 2 and "--model" in capsys.readouterr().err
