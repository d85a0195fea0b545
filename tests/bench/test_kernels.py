"""What of bench.kernels needs no GPU: the arithmetic of lines, goals and checks, what is kept of a failure, every group on small shapes."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.kernels import __main__ as program
from bench.kernels import mixed, plot, torch_peers
from bench.kernels.groups import GROUPS
from bench.kernels.operands import dense, page_table, paged
from bench.kernels.rows import (
    Ceilings,
    Check,
    Goal,
    Item,
    LeftOut,
    Row,
    Settings,
    attention_pairs,
    attention_work,
    find_line,
    line,
    mixed_figures,
)
from bench.kernels.running import Results, run_group
from bench.kernels.timing import device_seconds
from pallas_kernels import Unsupported, ragged_paged_attention
from pallas_kernels.ragged_paged_attention import reference

CEILINGS = Ceilings(bytes_per_s=4e12, flops_per_s=700e12)
TINY = Settings(tiny=True)


def row(**changes: Any) -> Row:
    base: dict[str, Any] = {"op": "op", "shape": "s", "implementation": "ours", "function": lambda x: x + 1,
                            "make": lambda i: (jnp.full(8, i, jnp.float32),), "num_bytes": 4e6, "num_flops": 7e9}
    return Row(**base | changes)


def line_of(row: Row, us: float, ceilings: Ceilings = CEILINGS) -> dict[str, Any]:
    return line(row, seconds=us / 1e6, by="wall", path="sm_90", ceilings=ceilings)


def test_attention_work_counts_pairs_and_bytes() -> None:
    rows = ((1, 5), (3, 3), (2, 7))
    pairs = sum(pos + 1 for q, kv in rows for pos in range(kv - q, kv))
    assert attention_pairs(rows) == pairs
    work = attention_work(rows, heads=6, kv_heads=2, head_dim=16)
    assert work == {"num_flops": 4 * pairs * 6 * 16, "num_bytes": 2 * 15 * 2 * 16 * 2}


GOALS = {
    "TB/s": ("TB/s", Goal(must=3.9, reach=4.2, unit="TB/s"), 1.0, 1.05),           # 4e6 bytes in 1 us are 4 TB/s
    "TFLOP/s": ("TFLOP/s", Goal(must=500, unit="TFLOP/s"), 13.9, 14.1),            # 7e9 in 14 us are 500 TFLOP/s
    "us": ("TB/s", Goal(must=2.5, unit="us"), 2.5, 2.6),
    "of ceiling": ("TB/s", Goal(must=0.85, unit="of ceiling"), 1.17, 1.18),        # 1 us is the ceiling
}


@pytest.mark.parametrize(("unit", "goal", "met_us", "missed_us"), GOALS.values(), ids=GOALS.keys())
def test_goals_are_judged_in_their_unit(unit: str, goal: Goal, met_us: float, missed_us: float) -> None:
    met, missed = (line_of(row(goal=goal, unit=unit), us) for us in (met_us, missed_us))
    assert met["met"] is True and missed["met"] is False and (met["must"], met["goal_unit"]) == (goal.must, goal.unit)
    share = plot.must_share(met)  # the mark in the picture: on one side of a bar that meets the goal, on the other of one that does not
    assert share is not None and met["of_ceiling"] >= share * (1 - 1e-9) and missed["of_ceiling"] < share


def test_a_line_holds_rate_and_share_of_the_right_ceiling() -> None:
    by_bytes, by_flops = line_of(row(), 2.0), line_of(row(unit="TFLOP/s"), 20.0)
    assert (by_bytes["rate"], by_bytes["of_ceiling"]) == pytest.approx((2.0, 0.5))
    assert (by_flops["rate"], by_flops["of_ceiling"]) == pytest.approx((350.0, 0.5))
    assert by_bytes["met"] is None and list(by_bytes) == list(by_flops)
    unknown = line_of(row(goal=Goal(must=0.5, unit="of ceiling")), 1.0, Ceilings(bytes_per_s=math.nan, flops_per_s=math.nan))
    assert unknown["of_ceiling"] is None and unknown["met"] is None
    assert find_line([by_bytes, by_flops], unit="TFLOP/s") is by_flops and find_line([by_bytes], op="other") is None


@pytest.mark.parametrize(("mixed_us", "prompts_us", "time_ok", "rate_ok"), [
    (100.0, 60.0, True, True), (106.0, 60.0, True, True), (109.0, 60.0, True, False), (111.0, 60.0, False, False), (30.0, 60.0, True, True),
    (12.0, 1000.0, True, True)])
def test_mixed_figures_hold_the_parts_together(mixed_us: float, prompts_us: float, time_ok: bool, rate_ok: bool) -> None:
    figures = mixed_figures(mixed_us=mixed_us, decodes_us=40.0, prompts_us=prompts_us)
    assert (figures["time_ok"], figures["rate_ok"]) == (time_ok, rate_ok)
    json.dumps(figures, allow_nan=False)


def test_parts_that_were_not_timed_do_not_pass() -> None:
    lines = [line_of(row(op="mixed", shape=f"x: {part}"), us) for part, us in (("whole", 10.0), ("decodes", 4.0))]
    assert mixed.compare_parts(lines, name="x", is_judged=True) == {"check": "parts", "ok": False, "reason": "not timed: prompts"}
    slow = [*lines, line_of(row(op="mixed", shape="x: prompts"), 4.0)]
    assert not mixed.compare_parts(slow, name="x", is_judged=True)["ok"] and mixed.compare_parts(slow, name="x", is_judged=False)["ok"]


ROWS = ((1, 5), (9, 9), (3, 40))
HEADS = {"heads": 4, "kv_heads": 2, "head_dim": mixed.HEAD_DIM, "page_size": 16}


def test_every_page_belongs_to_one_row_and_poison_fills_only_what_nobody_wrote() -> None:
    table = page_table(3, (5, 33, 16), 16)
    assert sorted(table[table > 0]) == [1, 2, 3, 4, 5] and [(r > 0).sum() for r in table] == [1, 3, 1]
    clean = paged(0, ROWS, **HEADS)
    poisoned = mixed.poison(clean, ROWS, 16)
    num_written = sum(kv for _, kv in ROWS) * 2 * mixed.HEAD_DIM
    assert int(jnp.isfinite(poisoned[1]).sum()) == num_written and bool(jnp.isnan(poisoned[2][0]).all())
    run = [np.asarray(ragged_paged_attention(*arrays, scale=mixed.SCALE)) for arrays in (clean, poisoned)]
    assert run[0].tobytes() == run[1].tobytes()


def test_the_naive_form_agrees_with_the_oracle_and_a_wrong_row_is_found() -> None:
    operands = paged(1, ROWS, num_padding=2, **HEADS)
    truth = np.asarray(reference.ragged_paged_attention(operands[0].astype(jnp.float32), *operands[1:], scale=mixed.SCALE))
    naive = mixed.naive_attention(operands, ROWS)
    np.testing.assert_allclose(naive, truth, rtol=0, atol=0.05)
    assert max(f["of_budget"] for f in mixed.row_errors(naive, truth, naive, ROWS)) < 1
    wrong = truth.copy()
    wrong[12] *= 1.2  # in the last row, whose values are small beside the first's
    assert [f["of_budget"] > 1 for f in mixed.row_errors(wrong, truth, truth, ROWS)] == [False, False, True]
    wrong[0, 0, 0] = np.nan
    assert next(mixed.row_errors(wrong, truth, naive, ROWS))["of_budget"] == math.inf


def test_dense_twins_hold_the_pages_values() -> None:
    operands = paged(2, ((7, 7), (7, 7)), **HEADS)
    q, k, v = dense(operands, 2, 7)
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=mixed.SCALE)
    got = ragged_paged_attention(*operands, scale=mixed.SCALE)
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(expected, np.float32).reshape(got.shape), rtol=0, atol=0.03)


def test_operands_written_in_place_go_into_the_next_call() -> None:
    seen: list[int] = []

    def step(count: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        jax.debug.callback(lambda n: seen.append(int(n)), count[0])
        return count + 1, x * 2

    timing = device_seconds(row(function=step, donated=(0,), make=lambda i: (jnp.zeros(4, jnp.int32), jnp.ones(4))), rotate=False)
    assert seen == list(range(len(seen))) and len(seen) > 16 and timing.by == "wall" and float(timing.result[0]) == 1.0


def failing(error: Exception) -> Callable[..., Any]:
    def function(*_: Any) -> Any:
        raise error
    return function


def group_results(*items: Item) -> Results:
    results = Results(settings=TINY, ceilings=CEILINGS)
    run_group(items, results, lambda text: None)
    return results


def test_what_fails_or_is_left_out_is_kept_by_name() -> None:
    left_out = LeftOut(op="op", shape="s", implementation="absent", reason="not installed")
    peer = row(implementation="theirs", function=failing(ImportError("no module named theirs")), is_peer=True)
    timed = row(implementation="elsewhere", seconds=lambda: (1e-6, "cuda graph"), is_peer=True)
    results = group_results(left_out, peer, row(), timed, row(implementation="other", function=lambda x: x + 3))
    assert results.left_out == [dataclasses.asdict(left_out)] and results.is_good
    assert results.failed == [{"op": "op", "shape": "s", "implementation": "theirs", "is_peer": True,
                               "reason": "ImportError: no module named theirs"}]
    assert [(x["implementation"], x["path"], x["by"], x["max_diff"]) for x in results.lines] == [
        ("ours", "cpu", "wall", 0.0), ("elsewhere", "peer", "cuda graph", None), ("other", "cpu", "wall", 2.0)]


def test_only_what_the_op_takes_is_held_to_the_goal() -> None:
    goal = Goal(must=1e9, unit="us")
    results = group_results(row(is_peer=True, implementation="theirs"), row(goal=goal), row(implementation="other", goal=goal),
                            row(shape="t", implementation="other", goal=goal))
    assert [x["met"] for x in results.lines] == [None, True, None, True]


BAD = {"own": row(function=failing(Unsupported("no tiles"))), "check": Check(op="op", shape="s", evaluate=lambda lines: {"ok": False}),
       "broken check": Check(op="op", shape="s", evaluate=failing(ValueError("broken")))}


@pytest.mark.parametrize("item", BAD.values(), ids=BAD.keys())
def test_our_own_failure_makes_the_run_bad_and_does_not_end_it(item: Item) -> None:
    results = group_results(item, row())
    assert not results.is_good and len(results.lines) == 1


@pytest.mark.parametrize("op", GROUPS)
def test_every_group_runs_on_small_shapes(op: str) -> None:
    results = group_results(*GROUPS[op](TINY))
    assert results.is_good and results.lines and not results.failed
    assert all(x["us"] > 0 and x["rate"] > 0 for x in results.lines)
    assert all(x["max_diff"] is None or x["max_diff"] < 0.1 for x in results.lines)
    json.dumps(results.figures(), allow_nan=False)


def test_a_run_that_is_ended_keeps_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(settings: Settings) -> Iterator[Item]:
        yield row()
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "GROUPS", {"ended": ended})
    with pytest.raises(KeyboardInterrupt):
        program.run(TINY, ["ended"], "name", tmp_path)
    figures = json.loads((tmp_path / "name.json").read_text())
    assert [x["op"] for x in figures["rows"]] == ["op"] and figures["path"] == "cpu" and figures["ceilings"]["bytes_per_s"] > 0


def test_only_the_shapes_asked_for(tmp_path: Path) -> None:
    assert program.main(["--tiny", "--ops=flash,norm,write", "--shapes=full,t4 d256 +", f"--folder={tmp_path}"]) == 0
    figures = json.loads((tmp_path / "kernels-cpu-tiny.json").read_text())
    assert {(x["op"], x["shape"]) for x in figures["rows"]} == {("flash", "full t40 4/2"), ("norm", "t4 d256 + residual")}


def test_what_the_command_line_cannot_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--ops=norm,other"]) != 0
    assert "--ops=other: must be some of decode, prefill" in capsys.readouterr().err
    assert program.main(["--ops="]) != 0
    assert "--ops=: must be some of decode, prefill" in capsys.readouterr().err
    assert program.main(["--tiny", "--ops=norm,write", "--shapes=t,u9"]) != 0
    assert "--shapes=u9: no shape of --ops=norm,write begins so; there are t4 d256, t4 d256 + residual, t4 k2." in capsys.readouterr().err
    for empty in ("", ",", "t4 k2,"):
        assert program.main(["--tiny", "--ops=norm,write", f"--shapes={empty}"]) != 0
        assert f"--shapes={empty}: an empty name, with which every shape begins" in capsys.readouterr().err
    assert program.main(["--page_size=0"]) != 0
    assert "should be one of <16|32|64|96|128>" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert program.main(["--tiny", "--ops=norm", f"--folder={tmp_path}/file/folder"]) != 0
    assert "cannot be made" in capsys.readouterr().err
    assert program.main([f"--plot={tmp_path}/none.json"]) == 1
    assert "none.json: there is no such file. Give a result file of this program." in capsys.readouterr().err


def figures() -> dict[str, Any]:
    ours, theirs = line_of(row(goal=Goal(must=3.0, unit="TB/s")), 1.25), line_of(row(implementation="theirs", is_peer=True), 2.0)
    return {"environment": {"device": "NVIDIA H200", "jax": "0.11.2", "date": "today", "commit": "abc"}, "path": "sm_90",
            "ceilings": dataclasses.asdict(CEILINGS), "rows": [ours, theirs | {"path": "peer"}, ours | {"op": "second", "of_ceiling": None}]}


def test_bars_follow_the_table() -> None:
    (ours, theirs), = plot.bars(figures()["rows"]).values()
    assert (ours.label, ours.is_peer, theirs.is_peer) == ("s  ours", False, True)
    assert (ours.share, ours.must, theirs.must) == (pytest.approx(0.8), pytest.approx(0.75), None) and ours.text == "1.25 us, 3.2 TB/s"
    assert "NVIDIA H200, path sm_90" in plot.title(figures()) and "copy 4 TB/s" in plot.title(figures())


def test_a_picture_stands_beside_the_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "result.json"
    file.write_text(json.dumps(figures()))
    assert plot.draw(file) == tmp_path / "result.png" and (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")
    file.write_text(json.dumps(figures() | {"rows": []}))
    assert plot.draw(file) is None


def test_a_file_of_something_else_is_not_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: name)
    (tmp_path / "other.json").write_text('{"rows": []}')
    assert plot.draw(tmp_path / "other.json") is None and "other.json is no result file of bench.kernels" in capsys.readouterr().out


def test_without_matplotlib_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    assert plot.draw(tmp_path / "any.json") is None
    assert capsys.readouterr().out == ("no plot: matplotlib is not installed (pip install 'jaxinfer[bench]', then python -m bench.kernels "
                                       "--plot=FILE.json)\n")


def test_torch_is_left_out_by_name_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = torch_peers.sdpa_cases(1, 8, 8, 4, 2, 64, 0.125, causal=True) | torch_peers.norm_case(4, 64, 1e-6)
    monkeypatch.setattr(torch_peers, "find_spec", lambda name: None)
    items = list(torch_peers.peers(row, "op", "s", cases))
    assert [(i.implementation, getattr(i, "reason", None)) for i in items] == [(name, "torch is not installed") for name in cases]
    monkeypatch.setattr(torch_peers, "find_spec", lambda name: name)
    assert all(isinstance(i, Row) and i.is_peer and i.seconds is not None for i in torch_peers.peers(row, "op", "s", cases))


@pytest.mark.skipif(find_spec("torch") is not None, reason="asks a process without torch")
def test_the_other_process_answers_with_its_error() -> None:
    child = torch_peers.Child()
    for _ in range(2):  # an error does not end it
        with pytest.raises(torch_peers.TorchError, match="ModuleNotFoundError: No module named 'torch'"):
            child.ask(torch_peers.norm_case(4, 64, 1e-6)["torch rms_norm"])
    child._process.kill()
    child._process.wait()
    with pytest.raises(torch_peers.TorchError, match="torch's process ended"):
        child.ask({})
