"""What of bench.aot needs no compile for a GPU: reading dumps, judging figures by budgets, which cases there are and who compiles them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from bench.aot import __main__ as program
from bench.aot import compiling, reading
from bench.aot.cases import all_cases

pytestmark = pytest.mark.usefixtures("own_environment")
BUDGETS = json.loads(program.BUDGETS.read_text())
CASES = all_cases()
STEP = """\
001: kCopy         [source       | next=002 (1)] kCopy
002: kCommandBuffer [prev=001 | next=006]
    003: kCustomKernel [source | next=004] fusion grid: [1, 1, 1]
    004: kConditional [prev=003 | next=005]
      branch 0:
        004: kGemm [source | sink] kGemm
    005: kCustomCall [prev=004 | sink] kCustomCall
006: kWhile        [prev=002 | sink]
condition:
    007: kCustomKernel [source | sink] compare grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source | sink]
        008: kCustomCall [source | next=009] kCustomCall
        009: kCustomCall [prev=008 | sink] kCustomCall
010: kCustomCall   [prev=006 | sink] kCustomCall
"""
NO_BUFFERS = "001: kCustomKernel [source | next=002] fusion\n002: kCustomCall [prev=001 | sink] kCustomCall\n"


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program names jax's platform for its process; the tests behind get theirs back."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def write_dump(folder: Path, module: int, before: str, after: str | None, *, age: int = 0) -> None:
    for name, text in (("thunk_sequence", before), ("thunk_sequence_after_thunk_passes", after), ("thunk_metadata", "001: kNone")):
        if text is not None:
            path = folder / f"module_{module:04}.jit_step.{name}.txt"
            path.write_text(text)
            os.utime(path, (1e9 - age, 1e9 - age))


def test_launches_are_counted_in_and_out_of_command_buffers(tmp_path: Path) -> None:
    write_dump(tmp_path, 1, NO_BUFFERS, STEP)
    assert reading.launches(reading.thunks(tmp_path)) == {"command_buffers": 2, "launches_inside": 5, "launches_outside": 3, "host_loops": 1}


def test_where_the_passes_changed_nothing_the_first_sequence_is_read(tmp_path: Path) -> None:
    write_dump(tmp_path, 1, NO_BUFFERS, None)
    assert reading.launches(reading.thunks(tmp_path)) == {"command_buffers": 0, "launches_inside": 0, "launches_outside": 2, "host_loops": 0}


def test_the_last_module_counts_even_where_only_an_earlier_one_was_changed(tmp_path: Path) -> None:
    write_dump(tmp_path, 1, STEP, STEP, age=5)
    write_dump(tmp_path, 2, NO_BUFFERS, None)
    assert reading.thunks(tmp_path) == NO_BUFFERS


def test_a_dump_without_thunks_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "module_0001.jit_step.something_else.txt").write_text(STEP)
    with pytest.raises(FileNotFoundError, match=r"no \*\.thunk_sequence\.txt.*it holds module_0001\.jit_step\.something_else\.txt"):
        reading.thunks(tmp_path)


def test_copies_of_a_mib_and_more_are_found() -> None:
    hlo = """
  %copy.1 = bf16[600,4,64,128]{3,2,1,0} copy(%p0)
  %small = f32[128]{0} copy(%p1)
  %edge = u8[1048576]{0} copy(%p1)
  %below = u8[1048575]{0} copy(%p1)
  %t = f32[1024,1024]{0,1} transpose(%p2), dimensions={1,0}
  %copy-start.1 = (f16[2048,512]{1,0}, f16[2048,512]{1,0}, u32[]) copy-start(%p3)
  %fusion = bf16[600,4,64,128]{3,2,1,0} fusion(%copy.1), kind=kLoop, calls=%fused_copy
"""
    assert reading.copies(hlo) == ["bf16[600,4,64,128]", "u8[1048576]", "f32[1024,1024]", "f16[2048,512]"]


def test_figures_of_a_kernel_are_the_worst_of_its_instances(tmp_path: Path) -> None:
    for number, (registers, spills, shared) in enumerate(((40, 0, 4096), (96, 8, 1024))):
        (tmp_path / f"decode_{number}.ptxas").write_text(
            f"ptxas info    : {spills} bytes stack frame, {spills} bytes spill stores, {spills} bytes spill loads\n"
            f"ptxas info    : Used {registers} registers, used 1 barriers, 16 bytes smem\n")
        (tmp_path / f"decode_{number}.before_layout_inference.txt").write_text(f"dynamic_shared_memory_size %c{shared}_i32")
    assert reading.mosaic_kernels(tmp_path) == {"decode": {"registers": 96, "spill_bytes": 16, "shared_bytes": 4112}}


def figures(**changes: Any) -> dict[str, Any]:
    return {"temp_bytes": 100, "aliased_bytes": 64, "donated_bytes": 64, "big_copies": ["bf16[600]"], "command_buffers": 1,
            "launches_inside": 60, "launches_outside": 2, "host_loops": 1, "is_step": True, "expected_kernels": ["attention", "int4_matmul"],
            "kernels": {name: {"registers": 96, "spill_bytes": 0, "shared_bytes": 1024} for name in ("decode_attention", "int4_matmul_wgmma")},
            **changes}


BUDGET = {"temp_bytes": 100, "big_copies": 1, "command_buffers": 1, "launches_inside": 60, "launches_outside": 2, "host_loops": 1}


def kernel(**changes: int) -> dict[str, Any]:
    return figures()["kernels"] | {"int4_matmul_wgmma": {"registers": 96, "spill_bytes": 0, "shared_bytes": 1024, **changes}}


def test_figures_at_their_limits_pass() -> None:
    assert set(BUDGET) == set(program.LIMITED)
    assert program.check(figures(), BUDGET, "h200") == []
    assert program.check(figures(is_step=False, command_buffers=0, launches_inside=0), BUDGET, "h200") == []


@pytest.mark.parametrize("name", program.LIMITED)
def test_one_more_than_the_budget_fails(name: str) -> None:
    more = ["bf16[600]", "bf16[601]"] if name == "big_copies" else BUDGET[name] + 1
    assert program.check(figures(**{name: more}), BUDGET, "h200") == [f"{name} = {more}, the budget is {BUDGET[name]}"]


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no launches": ({"launches_inside": 0, "launches_outside": 0}, "launches nothing, or XLA's dump was not understood"),
    "no command buffer": ({"command_buffers": 0}, "a whole step without a command buffer: 2 launches, each by itself"),
    "spills": ({"kernels": kernel(spill_bytes=8)}, "int4_matmul_wgmma spills 8 bytes"),
    "shared memory": ({"kernels": kernel(shared_bytes=232449)}, "int4_matmul_wgmma takes 232449 bytes of shared memory, the target has 232448"),
    "a copy in place of donation": ({"aliased_bytes": 60}, "only 60 of 64 donated bytes are reused in place"),
    "no kernel": ({"kernels": {}, "expected_kernels": ["attention"]},
                  "no kernel of ours has attention in its name: XLA does its work, or it was not seen; there are none"),
    "another kernel": ({"kernels": {"decode_attention": kernel()["decode_attention"]}},
                       "no kernel of ours has int4_matmul in its name: XLA does its work, or it was not seen; there are decode_attention"),
}


@pytest.mark.parametrize(("changes", "problem"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_fails_within_the_budget_too(changes: dict[str, Any], problem: str) -> None:
    assert program.check(figures(**changes), BUDGET, "h200") == [problem]


def test_a_step_whose_command_buffer_was_lost_fails(tmp_path: Path) -> None:
    """As XLA_FLAGS=--xla_gpu_enable_command_buffer= leaves it: every launch by itself, and no second file of thunks."""
    launch = "{0:03}: kCustomKernel [prev | next] fusion\n"
    write_dump(tmp_path, 1, "".join(map(launch.format, range(1, 381))), None)
    lost = figures(**reading.launches(reading.thunks(tmp_path)), big_copies=[], temp_bytes=0, expected_kernels=[])
    assert program.check(lost, BUDGETS["step-decode-q-b8"], "h200") == [
        "a whole step without a command buffer: 380 launches, each by itself", "launches_outside = 380, the budget is 0"]


@pytest.mark.parametrize(("budget", "found"), [
    (None, "has no entry in budgets.json"), ({}, "the entry limits  in"),
    ({k: v for k, v in BUDGET.items() if k != "temp_bytes"}, "the entry limits big_copies, command_buffers, host_loops, launches_"),
    (BUDGET | {"tmp_bytes": 1}, "temp_bytes, tmp_bytes in budgets.json: exactly big_copies, "),
], ids=("none", "empty", "one missing", "one unknown"))
def test_a_case_whose_budget_does_not_limit_everything_fails(budget: dict[str, int] | None, found: str) -> None:
    (problem,) = program.check(figures(), budget, "h200")
    assert found in problem


def test_every_case_has_a_budget_and_every_budget_a_case() -> None:
    assert list(CASES) == list(BUDGETS)
    assert all(set(budget) == set(program.LIMITED) for budget in BUDGETS.values())


@pytest.mark.parametrize("name", CASES)
def test_a_cases_name_says_what_it_is(name: str) -> None:
    case = CASES[name]()
    assert case.is_step == name.startswith(("step-", "burst-"))
    assert bool(case.kernels) == (case.is_step or name.startswith("kernel-"))
    if case.is_step:
        budget = BUDGETS[name]
        assert budget["command_buffers"] == 1 or case.num_devices > 1
        assert 1 in case.donated and ("int4" in name) == any(key.endswith(".packed") for key in case.arguments[0])
        assert budget["host_loops"] == name.startswith("burst-")


def test_kernels_are_compiled_once_for_targets_of_one_chip() -> None:
    a100, twin = "a100-40gb", "a100-80gb"
    assert compiling.chip(a100) == compiling.chip(twin) != compiling.chip("h200")
    names = ["kernel-norm-d896", "pages-gather-b8", "step-decode-q-b8"]
    assert program.to_compile([a100, twin, "h200"], names) == {a100: names, twin: names[1:], "h200": names}
    assert program.to_compile([twin], names) == {twin: names}


@pytest.mark.parametrize("count", [0, 1, program.MIN_SHARED - 1, program.MIN_SHARED, 91])
def test_processes_share_all_cases_of_a_target(count: int) -> None:
    names = [str(i) for i in range(count)]
    shares = program.shares(names)
    assert sorted(sum(shares, []), key=int) == names and all(shares) and len(shares) == (0 if not count else 1 + (count >= program.MIN_SHARED))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the child processes find for the cases whose names hold norm; a test may change it. `crash` is what a child says at its end."""
    norm = figures(kernels={"rms_norm": kernel()["int4_matmul_wgmma"]}, expected_kernels=["rms_norm"], is_step=False, big_copies=[],
                   temp_bytes=0, command_buffers=0, launches_inside=0, launches_outside=1, host_loops=0, python_seconds=0.1, seconds=0.2)
    found: dict[str, Any] = {"norm": norm, "crash": None}
    monkeypatch.setattr(program, "_compile", lambda target, names: ({} if found["crash"] else dict.fromkeys(names, norm), found["crash"]))
    return found


def run(tmp_path: Path) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "aot.json"
    code = program.main(["--cases=kernel-norm", "--targets=a100-80gb,h200", f"--json={path}"])
    return code, json.loads(path.read_text())


def test_the_file_says_when_where_and_how_long(compiled: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, written = run(tmp_path)
    names = [name for name in CASES if "kernel-norm" in name]
    assert code == 0 and f"{2 * len(names)} compiles within their budgets" in capsys.readouterr().out
    assert {"date", "commit", "device", "jax"} <= set(written["environment"]) and written["num_cores"] == os.cpu_count()
    assert written["seconds"] >= 0 and written["cpu_seconds"] >= 0 and written["problems"] == []
    assert {target: list(found) for target, found in written["targets"].items()} == {"a100-80gb": names, "h200": names}


def test_a_broken_budget_or_a_crash_is_exit_code_1(compiled: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiled["norm"]["launches_outside"] = 2
    code, written = run(tmp_path)
    assert code == 1 and "[h200] kernel-norm-d896: launches_outside = 2, the budget is 1" in capsys.readouterr().out
    assert len(written["problems"]) == 2 * sum("kernel-norm" in name for name in CASES)
    compiled["crash"] = "the compiling process ended with code -6"
    code, written = run(tmp_path)
    assert code == 1 and written["problems"] == [f"[{t}] {compiled['crash']}" for t in ("a100-80gb", "h200")]


def test_a_target_or_a_case_that_is_not_known_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--targets=a100-20gb"]) == 2 and program.main(["--cases=nothing-like-it"]) == 2
    assert program.main(["--targets="]) == 2 and program.main(["--json=/no/such/folder/figures.json"]) == 2
    message = capsys.readouterr().err
    assert "--targets=a100-20gb: known are a100-40gb, a100-80gb, h200." in message
    assert "--cases=nothing-like-it: no case's name holds that." in message
