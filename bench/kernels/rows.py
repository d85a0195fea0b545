"""What a timed call is, and the arithmetic of its line in the table. Runs nothing on a device."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

type Arrays = tuple[Any, ...]
type Rows = tuple[tuple[int, int], ...]
"""(new tokens, keys in the cache with them) of each sequence."""
type Line = dict[str, Any]

GOAL_UNITS = ("TB/s", "TFLOP/s", "us", "of ceiling")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What the command line says that the shapes depend on."""

    tiny: bool = False
    """Small shapes, to try the program on a CPU."""
    page_size: int = 64
    """Z, tokens a page."""
    arch: str | None = None
    """"80": Mosaic kernels are lowered as for sm_80, whatever the device."""
    shapes: tuple[str, ...] = ()
    """Only items whose shape's name begins with one of these; none: all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goal:
    """The figure that a row must show, and the one to reach for."""

    must: float
    reach: float | None = None
    unit: str
    """TB/s or TFLOP/s (at least), us (at most), or of ceiling (a share of the row's ceiling, at least)."""

    def __post_init__(self) -> None:
        assert self.unit in GOAL_UNITS, f"a goal in {self.unit}: known are {GOAL_UNITS}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What the device does at best, measured in the same run."""

    bytes_per_s: float
    """Device-to-device copy, bytes read and written."""
    flops_per_s: float
    """A square bfloat16 matmul on random data."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A call to time."""

    op: str
    shape: str
    implementation: str
    function: Callable[..., Any]
    """The call; it may import what it needs, since an import that fails is recorded like any other failure."""
    make: Callable[[int], Arrays]
    """Operands number i; the same i gives the same values to every implementation."""
    num_bytes: float = 0
    """Bytes that must be moved."""
    num_flops: float = 0
    """Floating-point operations that must be done; 0 where none count."""
    unit: str = "TB/s"
    """The rate that the row is judged by: TB/s of num_bytes, or TFLOP/s of num_flops."""
    goal: Goal | None = None
    """Only a shape's first row of ours is held to it: rows come in the order of the op's table, and the first is what the op takes."""
    donated: tuple[int, ...] = ()
    """Operands written in place, the first ones; the function returns them first and they go into the next call."""
    is_peer: bool = False
    """Somebody else's: it has no goal, and a failure of it is not ours."""
    seconds: Callable[[], tuple[float, str]] | None = None
    """Times the call by other means, such as another process, and says which; `function` and `make` are then not called."""
    compares: bool = True
    """The first result is held against that of the shape's first implementation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A row that cannot be had here, with the reason."""

    op: str
    shape: str
    implementation: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """Figures that follow from lines measured before, or that are no times at all."""

    op: str
    shape: str
    evaluate: Callable[[list[Line]], dict[str, Any]]
    """From the lines of the group so far to figures, of which `ok` says whether they are good enough."""


type Item = Row | LeftOut | Check


def attention_pairs(rows: Rows) -> float:
    """Query-key pairs under the causal mask, of queries that are their rows' last tokens."""
    return float(sum(q * kv - q * (q - 1) / 2 for q, kv in rows))


def attention_work(rows: Rows, *, heads: int, kv_heads: int, head_dim: int, item_bytes: int = 2) -> dict[str, Any]:
    """num_flops (two products a pair) and num_bytes (keys and values once) of attention."""
    return {"num_flops": 4 * attention_pairs(rows) * heads * head_dim,
            "num_bytes": 2.0 * sum(kv for _, kv in rows) * kv_heads * head_dim * item_bytes}


def is_met(goal: Goal, *, seconds: float, rate: float, of_ceiling: float | None) -> bool | None:
    """Whether a goal is met; None where the ceiling that it refers to is not known."""
    if goal.unit == "us":
        return seconds * 1e6 <= goal.must
    if goal.unit == "of ceiling":
        return None if of_ceiling is None else of_ceiling >= goal.must
    return rate >= goal.must


def line(row: Row, *, seconds: float, by: str, path: str, ceilings: Ceilings, num_kernels: float | None = None,
         max_diff: float | None = None) -> Line:
    """A row's line in the table. The same keys for every row, so that lines stack.

    Args:
      seconds: device time of one call.
      by: how it was taken.
      path: architecture that the kernels were lowered for.
      num_kernels: device kernels in one call, where a profile counted them.
      max_diff: largest difference from the shape's first implementation.
    """
    amount, ceiling = (row.num_flops, ceilings.flops_per_s) if row.unit == "TFLOP/s" else (row.num_bytes, ceilings.bytes_per_s)
    rate = amount / seconds / 1e12
    of_ceiling = None if math.isnan(ceiling) else amount / seconds / ceiling
    goal = row.goal
    return {
        "op": row.op, "shape": row.shape, "implementation": row.implementation, "path": path, "us": seconds * 1e6, "by": by,
        "kernels": num_kernels, "MB": row.num_bytes / 1e6, "GFLOP": row.num_flops / 1e9, "rate": rate, "unit": row.unit,
        "of_ceiling": of_ceiling, "must": goal and goal.must, "reach": goal and goal.reach, "goal_unit": goal and goal.unit,
        "met": goal and is_met(goal, seconds=seconds, rate=rate, of_ceiling=of_ceiling), "max_diff": max_diff}


def find_line(lines: list[Line], **facts: Any) -> Line | None:
    """The first line that has all the facts."""
    return next((x for x in lines if all(x[key] == value for key, value in facts.items())), None)


def mixed_figures(*, mixed_us: float, decodes_us: float, prompts_us: float) -> dict[str, Any]:
    """How a mixed call compares with its decodes and its prompts run apart.

    The rate of its prefill part is that of the prompts in the time that the decodes leave of it.
    """
    left_us = mixed_us - decodes_us
    kept = prompts_us / left_us if left_us > 0 else None  # None: the whole takes no longer than its decodes alone
    over = mixed_us / (decodes_us + prompts_us)
    return {"mixed_us": mixed_us, "decodes_us": decodes_us, "prompts_us": prompts_us, "time_over_parts": over, "prefill_rate_kept": kept,
            "time_ok": over <= 1.1, "rate_ok": kept is None or kept >= 0.9}
