"""Reads what one compilation left behind: ptxas's figures, shared memory, copies in the HLO, launches in and out of command buffers.

What is not there is an error, never a count of 0. Judges nothing: bench/aot/__main__.py does.
"""

import glob
import os
import re
from pathlib import Path
from typing import Any

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "s64": 8, "u64": 8, "f16": 2, "bf16": 2, "f32": 4}
BIG_COPY_BYTES = 1 << 20


def mosaic_kernels(folder: Path) -> dict[str, dict[str, int]]:
    """Kernel name -> registers, spill bytes and shared memory, the worst of its instances, from MOSAIC_GPU_DUMP_TO's files."""
    kernels: dict[str, dict[str, int]] = {}
    for file in glob.glob(f"{folder}/*.ptxas"):
        text = Path(file).read_text()
        launch = Path(file.removesuffix(".ptxas") + ".before_layout_inference.txt")
        dynamic = re.search(r"dynamic_shared_memory_size %c(\d+)_i32", launch.read_text()) if launch.exists() else None
        found = {
            "registers": _largest(r"Used (\d+) registers", text),
            "spill_bytes": _largest(r"(\d+) bytes spill stores", text) + _largest(r"(\d+) bytes spill loads", text),
            "shared_bytes": _largest(r"(\d+) bytes smem", text) + (int(dynamic[1]) if dynamic else 0),
        }
        name = re.sub(r"_\d+$", "", os.path.basename(file).removesuffix(".ptxas"))
        worst = kernels.setdefault(name, found)
        kernels[name] = {key: max(worst[key], found[key]) for key in found}
    return kernels


def _largest(pattern: str, text: str) -> int:
    return max((int(x) for x in re.findall(pattern, text)), default=0)


def copies(hlo: str) -> list[str]:
    """Copies and transposes of at least a MiB in the optimised HLO, by shape."""
    big = []
    for kind, shape in re.findall(r"= \(?(\w+)\[([\d,]*)\][^=\n]*? (?:copy|transpose|copy-start)\(", hlo):  # copy-start gives a tuple
        size = _BYTES.get(kind, 4)
        for length in filter(None, shape.split(",")):
            size *= int(length)
        if size >= BIG_COPY_BYTES:
            big.append(f"{kind}[{shape}]")
    return big


def thunks(folder: Path) -> str:
    """The thunks of the module compiled last, as they run.

    Raises:
      FileNotFoundError: XLA has written none into its dump folder.
    """
    found = sorted(glob.glob(f"{folder}/*.thunk_sequence.txt"), key=os.path.getmtime)
    if not found:
        raise FileNotFoundError(f"{folder}: XLA wrote no *.thunk_sequence.txt, so launches cannot be counted; it holds "
                                f"{', '.join(sorted(os.listdir(folder))) or 'nothing'}. Does this XLA name its dumps otherwise?")
    after_passes = Path(found[-1].removesuffix(".txt") + "_after_thunk_passes.txt")  # only written where the passes change something
    return (after_passes if after_passes.exists() else Path(found[-1])).read_text()


def launches(thunks: str) -> dict[str, int]:
    """Command buffers, launches inside them, and launches left outside, branches and loop bodies included."""
    counts = {"command_buffers": 0, "launches_inside": 0, "launches_outside": 0, "host_loops": 0}
    depth: int | None = None
    for line in thunks.splitlines():
        found = re.match(r"( *)\d+: k(\w+)", line)
        if not found:
            continue
        indent, kind = len(found[1]), found[2]
        if depth is not None and indent <= depth:
            depth = None
        if kind == "CommandBuffer":
            counts["command_buffers"] += 1
            depth = indent if depth is None else depth
        elif kind in ("While", "Conditional"):
            counts["host_loops"] += depth is None
        else:
            counts["launches_inside" if depth is not None else "launches_outside"] += 1
    return counts


def summary(compiled: Any, *, mosaic: Path, xla: Path) -> dict[str, Any]:
    """All figures of one compilation."""
    memory = compiled.memory_analysis()
    return {
        "temp_bytes": memory.temp_size_in_bytes, "argument_bytes": memory.argument_size_in_bytes, "aliased_bytes": memory.alias_size_in_bytes,
        "big_copies": copies(compiled.as_text()), "kernels": mosaic_kernels(mosaic), **launches(thunks(xla))}
