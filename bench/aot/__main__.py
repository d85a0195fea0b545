"""Runs the compiles in child processes, prints a table a target, and fails where a case breaks its budget or has none."""

import concurrent.futures
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from bench import report
from bench.aot.compiling import TARGETS, chip, shared_limit
from jaxinfer import cli

MAX_PROCESSES = 4  # at a time; a process takes one core and up to 4 GB
MIN_SHARED = 8     # cases of a target from which on two processes share them, so that no core waits for the last target
BUDGETS = Path(__file__).parent / "budgets.json"
LIMITED = ("big_copies", "command_buffers", "host_loops", "launches_inside", "launches_outside", "temp_bytes")
"""What every entry of budgets.json limits. A limit is the most, of all targets, that a case may take."""
KNOWN_TARGETS = tuple(sorted(path.stem for path in TARGETS.glob("*.txtpb")))


def main(argv: Sequence[str] | None = None) -> int:
    """Console entry; exit code 1 where a case does not compile, breaks a budget or has none."""
    values = flags.FlagValues()
    flags.DEFINE_list("targets", list(KNOWN_TARGETS), f"Of {', '.join(KNOWN_TARGETS)}.", flag_values=values, module_name="What")
    flags.DEFINE_string("cases", "", "Only cases whose name holds this text.", flag_values=values, module_name="What")
    flags.DEFINE_string("json", None, "Write all figures here.", flag_values=values, module_name="What")
    return cli.run(lambda _: _run(values), values, argv, __doc__)


def _run(values: flags.FlagValues) -> int:
    os.environ["JAX_PLATFORMS"] = "cpu"  # of this process, which compiles nothing; bench/aot/compiling.py sets the children's
    from bench.aot.cases import all_cases

    start, num_cores = time.perf_counter(), os.cpu_count() or 1
    targets, part = list(values["targets"].value or ()), str(values["cases"].value)
    unknown = [t for t in targets if t not in KNOWN_TARGETS] or ([] if targets else ["(none)"])
    names = [name for name in all_cases() if part in name]
    if unknown or not names:
        raise app.UsageError(f"--targets={','.join(unknown)}: known are {', '.join(KNOWN_TARGETS)}." if unknown
                             else f"--cases={part}: no case's name holds that.")
    if values["json"].value and not Path(values["json"].value).absolute().parent.is_dir():
        raise app.UsageError(f"--json={values['json'].value}: there is no such folder. Make it, or name another file.")
    budgets = json.loads(BUDGETS.read_text())
    figures: dict[str, Any] = {}
    problems: list[str] = []
    with concurrent.futures.ThreadPoolExecutor(min(MAX_PROCESSES, num_cores)) as pool:
        own = to_compile(targets, names)
        jobs = {target: [pool.submit(_compile, target, share) for share in shares(own[target])] for target in targets}
        for target, futures in jobs.items():
            parts = [future.result() for future in futures]
            found = {name: f for figures_of, _ in parts for name, f in figures_of.items()}
            figures[target] = {name: found[name] for name in names if name in found}
            problems += [f"[{target}] {crash}" for _, crash in parts if crash]
            problems += [f"[{target}] {name}: {p}" for name, f in figures[target].items() for p in check(f, budgets.get(name), target)]
            print(table(target, figures[target]), flush=True)
            if len(own[target]) < len(names):
                print(f"The other {len(names) - len(own[target])} cases are kernels, the same as those of a target above with this chip.")
    seconds = time.perf_counter() - start
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    if values["json"].value:
        Path(values["json"].value).write_text(json.dumps({
            "environment": report.environment(), "num_cores": num_cores, "seconds": round(seconds, 1),
            "cpu_seconds": round(children.ru_utime + children.ru_stime, 1), "problems": problems, "targets": figures}, indent=1) + "\n")
    print("\n".join(problems) or f"{sum(map(len, figures.values()))} compiles within their budgets")
    print(f"{seconds:.0f} s on {num_cores} cores")
    return 1 if problems else 0


def to_compile(targets: list[str], names: list[str]) -> dict[str, list[str]]:
    """Target -> its cases. A case that is one kernel is not compiled again for a target with the chip of an earlier one."""
    chips = [chip(target) for target in targets]
    return {target: [name for name in names if not (name.startswith("kernel-") and chips[i] in chips[:i])]
            for i, target in enumerate(targets)}


def shares(names: list[str]) -> list[list[str]]:
    """The cases of each process of a target; neighbours take about as long, so they are dealt out in turn."""
    return [names[::2], names[1::2]] if len(names) >= MIN_SHARED else [names] if names else []


def _compile(target: str, names: list[str]) -> tuple[dict[str, Any], str | None]:
    """(figures, None), or ({}, what went wrong): an instruction that the target lacks aborts the child."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "bench.aot.compiling", target, str(output), *names]
        done = subprocess.run(command, check=False)
        if done.returncode or not output.exists():
            return {}, f"the compiling process of {names[0]} and {len(names) - 1} more cases ended with code {done.returncode}; its last " \
                       "lines above say at which case"
        return json.loads(output.read_text()), None


def check(figures: dict[str, Any], budget: dict[str, int] | None, target: str) -> list[str]:
    """What a case breaks: spills, shared memory, donation not used, kernels, launches or command buffers missing, or its own budget."""
    problems = []
    for kernel, k in figures["kernels"].items():
        if k["spill_bytes"]:
            problems.append(f"{kernel} spills {k['spill_bytes']} bytes")
        if k["shared_bytes"] > shared_limit(target):
            problems.append(f"{kernel} takes {k['shared_bytes']} bytes of shared memory, the target has {shared_limit(target)}")
    problems += [f"no kernel of ours has {part} in its name: XLA does its work, or it was not seen; there are "
                 f"{', '.join(figures['kernels']) or 'none'}"
                 for part in figures["expected_kernels"] if not any(part in kernel for kernel in figures["kernels"])]
    if figures["aliased_bytes"] < figures["donated_bytes"]:
        problems.append(f"only {figures['aliased_bytes']} of {figures['donated_bytes']} donated bytes are reused in place")
    if not figures["launches_inside"] + figures["launches_outside"]:
        problems.append("launches nothing, or XLA's dump was not understood")
    if figures["is_step"] and not figures["command_buffers"]:
        problems.append(f"a whole step without a command buffer: {figures['launches_outside']} launches, each by itself")
    return problems + _over_budget(figures, budget)


def _over_budget(figures: dict[str, Any], budget: dict[str, int] | None) -> list[str]:
    if budget is None or set(budget) != set(LIMITED):
        found = "has no entry" if budget is None else f"the entry limits {', '.join(sorted(budget))}"
        return [f"{found} in budgets.json: exactly {', '.join(LIMITED)} must be limited"]
    values = {name: len(figures[name]) if isinstance(figures[name], list) else figures[name] for name in LIMITED}
    return [f"{name} = {figures[name]}, the budget is {budget[name]}" for name, value in values.items() if value > budget[name]]


def table(target: str, figures: dict[str, Any]) -> str:
    """One line a case, and one a kernel of it."""
    rows = []
    for name, f in figures.items():
        kernels = "; ".join(f"{k} {v['registers']} regs, {v['spill_bytes']} B spills, {v['shared_bytes'] / 1024:.0f} KiB"
                            for k, v in f["kernels"].items())
        rows.append({"case": name, "temp MB": f["temp_bytes"] / 1e6, "launches": f["launches_inside"] + f["launches_outside"],
                     "outside graphs": f["launches_outside"], "graphs": f["command_buffers"], "host loops": f["host_loops"],
                     "big copies": len(f["big_copies"]), "python s": f["python_seconds"], "s": f["seconds"], "kernels": kernels})
    return f"\n{target}\n{report.table(rows)}"


if __name__ == "__main__":
    sys.exit(main())
