"""Runs the compiles, a child process a target, prints the table and fails where a budget is broken."""

import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from bench import report
from bench.aot.compiling import TARGETS, shared_limit
from jaxinfer import cli

MAX_PROCESSES = 4  # targets at a time; a process takes one core and up to 4 GB
BUDGETS = Path(__file__).parent / "budgets.json"
KNOWN_TARGETS = tuple(sorted(path.stem for path in TARGETS.glob("*.txtpb")))


def main(argv: Sequence[str] | None = None) -> int:
    """Console entry; exit code 1 where a case does not compile or breaks a budget."""
    values = flags.FlagValues()
    flags.DEFINE_list("targets", list(KNOWN_TARGETS), f"Of {', '.join(KNOWN_TARGETS)}.", flag_values=values, module_name="What")
    flags.DEFINE_string("cases", "", "Only cases whose name holds this text.", flag_values=values, module_name="What")
    flags.DEFINE_string("json", None, "Write all figures here.", flag_values=values, module_name="What")
    return cli.run(lambda _: _run(values), values, argv, __doc__)


def _run(values: flags.FlagValues) -> int:
    from bench.aot.cases import all_cases

    targets, part = list(values["targets"].value or ()), str(values["cases"].value)
    unknown = [t for t in targets if t not in KNOWN_TARGETS]
    names = [name for name in all_cases() if part in name]
    if unknown or not names:
        raise app.UsageError(f"--targets={','.join(unknown)}: known are {', '.join(KNOWN_TARGETS)}." if unknown
                             else f"--cases={part}: no case's name holds that.")
    budgets = json.loads(BUDGETS.read_text())
    figures: dict[str, Any] = {}
    problems: list[str] = []
    with concurrent.futures.ThreadPoolExecutor(min(MAX_PROCESSES, os.cpu_count() or 1)) as pool:
        for target, (found, crash) in zip(targets, pool.map(lambda target: _compile(target, names), targets), strict=True):
            figures[target] = found
            problems += [crash] if crash else []
            problems += [f"[{target}] {name}: {p}" for name, f in found.items() for p in check(f, budgets.get(name, {}), target)]
            print(table(target, found), flush=True)
    if values["json"].value:
        Path(values["json"].value).write_text(json.dumps(figures, indent=1) + "\n")
    print("\n".join(problems) or f"{sum(map(len, figures.values()))} compiles within their budgets")
    return 1 if problems else 0


def _compile(target: str, names: list[str]) -> tuple[dict[str, Any], str | None]:
    """(figures, None), or ({}, what went wrong): an instruction that the target lacks aborts the child."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "bench.aot.compiling", target, str(output), *names]
        done = subprocess.run(command, check=False)
        if done.returncode or not output.exists():
            return {}, f"[{target}] the compiling process ended with code {done.returncode}; its last lines above say at which case"
        return json.loads(output.read_text()), None


def check(figures: dict[str, Any], budget: dict[str, Any], target: str) -> list[str]:
    """What a case breaks: spills, shared memory, copies of the pool, donation not used, or its own budget."""
    problems = []
    for kernel, k in figures["kernels"].items():
        if k["spill_bytes"]:
            problems.append(f"{kernel} spills {k['spill_bytes']} bytes")
        if k["shared_bytes"] > shared_limit(target):
            problems.append(f"{kernel} takes {k['shared_bytes']} bytes of shared memory, the target has {shared_limit(target)}")
    if figures["aliased_bytes"] < figures["donated_bytes"]:
        problems.append(f"only {figures['aliased_bytes']} of {figures['donated_bytes']} donated bytes are reused in place")
    for name, limit in budget.items():
        value = len(figures[name]) if isinstance(figures[name], list) else figures[name]
        if value > limit:
            problems.append(f"{name} = {figures[name]}, the budget is {limit}")
    return problems


def table(target: str, figures: dict[str, Any]) -> str:
    """One line a case, and one a kernel of it."""
    rows = []
    for name, f in figures.items():
        kernels = "; ".join(f"{k} {v['registers']} regs, {v['spill_bytes']} B spills, {v['shared_bytes'] / 1024:.0f} KiB"
                            for k, v in f["kernels"].items())
        rows.append({"case": name, "temp MB": f["temp_bytes"] / 1e6, "launches": f["launches_inside"] + f["launches_outside"],
                     "outside graphs": f["launches_outside"], "host loops": f["host_loops"], "big copies": len(f["big_copies"]),
                     "python s": f["python_seconds"], "s": f["seconds"], "kernels": kernels})
    return f"\n{target}\n{report.table(rows)}"


if __name__ == "__main__":
    sys.exit(main())
