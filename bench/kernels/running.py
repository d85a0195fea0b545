"""Measures the items of a group and keeps what came of each: a line, or by name the reason why there is none. Knows no kernel."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir

from bench import report
from bench.kernels.rows import Ceilings, Check, Item, LeftOut, Line, Row, Settings, find_line, line
from bench.kernels.timing import device_seconds
from pallas_kernels.dispatch import Implementation, KernelError, Target, current_target

# What tracing, compiling or running somebody's kernel may raise; XLA's own errors are RuntimeErrors.
FAILURES = (KernelError, ValueError, TypeError, RuntimeError, AssertionError, ImportError, AttributeError, LookupError, OSError, ir.MLIRError)

PEER = "peer"
NOT_MOSAIC = ("xla", "jax_triton", "reference")  # implementations that are compiled for the device that is there, whatever --arch says


@dataclasses.dataclass(kw_only=True)
class Results:
    """What a run has found so far."""

    settings: Settings
    ceilings: Ceilings
    lines: list[Line] = dataclasses.field(default_factory=list)
    left_out: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    failed: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    checks: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """For the result file."""
        return {"arch": self.settings.arch, "path": path_of(self.settings), "page_size": self.settings.page_size,
                "ceilings": dataclasses.asdict(self.ceilings), "rows": self.lines, "checks": self.checks, "left_out": self.left_out,
                "failed": self.failed}

    @property
    def is_good(self) -> bool:
        """Our own rows all ran and all checks hold; peers may fail, and goals may be missed."""
        return not any(not f["is_peer"] for f in self.failed) and all(c["ok"] for c in self.checks)


def run_group(items: Iterable[Item], results: Results, show: Callable[[str], None], save: Callable[[], Any] = lambda: None) -> None:
    """Measures one group's items in order; calls `save` after each."""
    firsts: dict[tuple[str, str], jax.Array] = {}
    lines: list[Line] = []
    for item in items:
        _take(item, lines, firsts, results, show)
        save()


def _take(item: Item, lines: list[Line], firsts: dict[tuple[str, str], jax.Array], results: Results, show: Callable[[str], None]) -> None:
    """Measures one item of a group whose lines so far are `lines`."""
    name = {"op": item.op, "shape": item.shape}
    if isinstance(item, LeftOut):
        results.left_out.append(dataclasses.asdict(item))
        show(f"left out: {item.op} {item.shape} {item.implementation}: {item.reason}")
        return
    try:
        if isinstance(item, Check):
            results.checks.append(name | item.evaluate(lines))
            show(f"check: {results.checks[-1]}")
            return
        is_first = all(find_line([x], **name) is None or x["path"] == PEER for x in lines)
        lines.append(measure(item if is_first else dataclasses.replace(item, goal=None), results, firsts))
    except FAILURES as error:
        failure = name | {"implementation": getattr(item, "implementation", "check"), "is_peer": getattr(item, "is_peer", False),
                          "reason": reason_of(error)}
        results.failed.append(failure)
        show(f"FAILED: {failure}")
        return
    results.lines.append(lines[-1])
    show(report.table(lines[-1:]).splitlines()[-1])


def measure(row: Row, results: Results, firsts: dict[tuple[str, str], jax.Array]) -> Line:
    """One row's line; `firsts` holds the result of each shape's first implementation, to compare with."""
    given: dict[str, Any] = {"path": row_path(row, results.settings), "ceilings": results.ceilings}
    if row.seconds is not None:
        seconds, by = row.seconds()
        return line(row, seconds=seconds, by=by, **given)
    seconds, by, num_kernels, result = device_seconds(row, rotate=not results.settings.tiny)
    if not row.compares:
        return line(row, seconds=seconds, by=by, num_kernels=num_kernels, **given)
    first = firsts.setdefault((row.op, row.shape), result)
    difference = float(jnp.max(jnp.abs(result.reshape(first.shape).astype(jnp.float32) - first.astype(jnp.float32))))
    return line(row, seconds=seconds, by=by, num_kernels=num_kernels, max_diff=difference, **given)


def reason_of(error: BaseException) -> str:
    """An error's kind and the beginning of what it says, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def target_of(settings: Settings) -> Target:
    """The target that the kernels are lowered for."""
    target = current_target()
    return dataclasses.replace(target, compute_capability=(8, 0)) if settings.arch == "80" and target.platform == "gpu" else target


def path_of(settings: Settings) -> str:
    """The architecture path of our own kernels, such as 'sm_90', 'sm_80 on sm_90' or 'cpu'."""
    there, lowered = current_target().compute_capability, target_of(settings).compute_capability
    if there is None or lowered is None:
        return current_target().platform
    name = "sm_{}{}".format
    return name(*there) if there == lowered else f"{name(*lowered)} on {name(*there)}"


def row_path(row: Row, settings: Settings) -> str:
    """The path of a row: --arch concerns Mosaic kernels alone, peers have none of ours."""
    if row.is_peer:
        return PEER
    return path_of(dataclasses.replace(settings, arch=None) if row.implementation in NOT_MOSAIC else settings)


def is_sm_80(settings: Settings) -> bool:
    """Whether the goals of the sm_80 path hold."""
    return target_of(settings).compute_capability == (8, 0)


def supported(op: str, shape: str, impls: Sequence[Implementation[Any]], spec: Any, settings: Settings,
              without: Sequence[str] = ("reference",)) -> Iterator[str | LeftOut]:
    """Names of an op's implementations that can do a case, in the order of its table, and why the others cannot.

    Args:
      impls: the op's IMPLS.
      spec: the case's static facts.
      without: implementations that are of no interest here.
    """
    for impl in impls:
        if impl.name in without:
            continue
        refusal = impl.supports(spec, target_of(settings))
        yield impl.name if refusal is None else LeftOut(op=op, shape=shape, implementation=impl.name, reason=refusal.reason)
