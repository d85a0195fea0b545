"""Measures the items of a group and keeps what came of each: a line, or by name the reason why there is none. Knows no kernel."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

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
TUNED = (*NOT_MOSAIC, "dequantize")  # implementations with work of XLA's in them, which as it compiles tries kernels on the device


class Outcome(NamedTuple):
    """What came of an item."""

    kind: str
    """The list of Results that it belongs to: lines, left_out, failed or checks."""
    entry: dict[str, Any]

    def text(self) -> str:
        """For whoever watches the run."""
        if self.kind == "lines":
            return report.table([self.entry]).splitlines()[-1]
        if self.kind == "left_out":
            return "left out: {op} {shape} {implementation}: {reason}".format(**self.entry)
        return f"{'FAILED' if self.kind == 'failed' else 'check'}: {self.entry}"


@dataclasses.dataclass(kw_only=True)
class Results:
    """What a run has found so far."""

    settings: Settings
    ceilings: Ceilings
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    """In the groups' order."""

    @property
    def lines(self) -> list[Line]:
        return self._entries("lines")

    @property
    def left_out(self) -> list[dict[str, Any]]:
        return self._entries("left_out")

    @property
    def failed(self) -> list[dict[str, Any]]:
        return self._entries("failed")

    @property
    def checks(self) -> list[dict[str, Any]]:
        return self._entries("checks")

    def _entries(self, kind: str) -> list[dict[str, Any]]:
        return [outcome.entry for outcome in self.outcomes if outcome.kind == kind]

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
        results.outcomes.append(take(item, lines, firsts, results))
        show(results.outcomes[-1].text())
        save()


def take(item: Item, lines: list[Line], firsts: dict[tuple[str, str], jax.Array], results: Results,
         run: Callable[..., Any] | None = None) -> Outcome:
    """Measures one item of a group.

    Args:
      lines: the group's so far, of which at least those of the item's shape; a line is added.
      firsts: the result of each shape's first implementation; one is added.
      results: of use are settings and ceilings.
      run: a row's function where it is compiled already.
    """
    name = {"op": item.op, "shape": item.shape}
    if isinstance(item, LeftOut):
        return Outcome("left_out", dataclasses.asdict(item))
    try:
        if isinstance(item, Check):
            return Outcome("checks", name | item.evaluate(lines))
        is_first = all(find_line([x], **name) is None or x["path"] == PEER for x in lines)
        lines.append(measure(item if is_first else dataclasses.replace(item, goal=None), results, firsts, run))
    except FAILURES as error:
        return failure(item, reason_of(error))
    return Outcome("lines", lines[-1])


def failure(item: Item, reason: str) -> Outcome:
    """An item of which there is no line, nor a check."""
    return Outcome("failed", {"op": item.op, "shape": item.shape, "implementation": getattr(item, "implementation", "check"),
                              "is_peer": getattr(item, "is_peer", False), "reason": reason})


def measure(row: Row, results: Results, firsts: dict[tuple[str, str], jax.Array], run: Callable[..., Any] | None = None) -> Line:
    """One row's line; `firsts` holds the result of each shape's first implementation, to compare with."""
    given: dict[str, Any] = {"path": row_path(row, results.settings), "ceilings": results.ceilings}
    if row.seconds is not None:
        seconds, by = row.seconds()
        return line(row, seconds=seconds, by=by, **given)
    seconds, by, num_kernels, result = device_seconds(row, rotate=not results.settings.tiny, run=run)
    if not row.compares:
        return line(row, seconds=seconds, by=by, num_kernels=num_kernels, **given)
    first = firsts.setdefault((row.op, row.shape), result)
    difference = float(jnp.max(jnp.abs(result.reshape(first.shape).astype(jnp.float32) - first.astype(jnp.float32))))
    return line(row, seconds=seconds, by=by, num_kernels=num_kernels, max_diff=difference, **given)


def reason_of(error: BaseException) -> str:
    """An error's kind and the beginning of what it says, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def lower_for(settings: Settings) -> None:
    """Has this process lower Mosaic kernels for the architecture of the settings."""
    if settings.arch:
        from jax.experimental.mosaic.gpu import utils

        utils._infer_arch = lambda: (8, 0)


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


def is_mosaic(item: Item) -> bool:
    """Whether the item is a row of our own Mosaic kernels and nothing else, which compiles without a look at the device's speed."""
    return isinstance(item, Row) and not item.is_peer and item.seconds is None and item.implementation not in TUNED


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
