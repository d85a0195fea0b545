"""Each example runs to its end and shows what it promises."""

import pytest


def test_sample_score_update(capsys: pytest.CaptureFixture[str]) -> None:
    from examples.sample_score_update import main

    history = main(["--rounds=6"])
    out = capsys.readouterr().out
    assert len(history) == 6 and history[-1] > history[0] + 0.15
    assert "16 of 16 weights are shared" in out and out.count("0 compiles for their exchange") == 6
