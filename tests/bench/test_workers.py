"""A run of bench.kernels shared among processes: order, what fails, a process that dies, and who has the device when."""

import dataclasses
import fcntl
import functools
import multiprocessing
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bench.kernels import __main__ as program
from bench.kernels import workers
from bench.kernels.groups import GROUPS
from bench.kernels.rows import Check, Goal, Item, LeftOut, Line, Settings
from bench.kernels.running import Results, run_group
from pallas_kernels import Unsupported
from tests.bench.test_kernels import CEILINGS, TINY, row


def ones(_: int) -> tuple[jax.Array]:
    return (jnp.ones(8),)


def add(x: jax.Array, *, n: float) -> jax.Array:
    return x + n


def refuse(_: jax.Array) -> Any:
    raise Unsupported("no tiles")


def die(_: jax.Array) -> Any:
    os._exit(7)


def torch_seconds() -> tuple[float, str]:
    return os.getpid(), "elsewhere"


def names(lines: list[Line]) -> dict[str, Any]:
    return {"ok": True, "seen": [f"{x['shape']} {x['implementation']}" for x in lines]}


def lowered_for(_: list[Line]) -> dict[str, Any]:
    from jax.experimental.mosaic.gpu import utils

    return {"ok": utils._infer_arch() == (8, 0)}


def mixed_group(_: Settings) -> Iterator[Item]:
    """The small shape first, as the groups have it; a goal, a failure, a peer, a difference, rows timed elsewhere."""
    goal = Goal(must=1e9, unit="us")
    for shape, num_bytes in (("small", 1e3), ("large", 1e9)):
        base = functools.partial(row, shape=shape, num_bytes=num_bytes, make=ones, goal=goal)
        yield LeftOut(op="op", shape=shape, implementation="absent", reason="not installed")
        yield base(implementation="theirs", function=refuse, is_peer=True, goal=None)
        yield base(implementation="refused", function=refuse)
        yield base(function=functools.partial(add, n=1))
        yield base(implementation="xla", function=functools.partial(add, n=3))
        yield base(implementation="torch", seconds=torch_seconds, is_peer=True, goal=None)
    yield Check(op="op", shape="both", evaluate=names)


def deadly_group(_: Settings) -> Iterator[Item]:
    """The second row ends its process, which then has the device."""
    for shape in ("deadly", "other"):
        base = functools.partial(row, op="dying", shape=shape, make=ones)
        yield base()
        yield base(implementation="xla", function=die if shape == "deadly" else functools.partial(add, n=0))
        yield base(implementation="peer", is_peer=True, function=functools.partial(add, n=0))
    yield Check(op="dying", shape="both", evaluate=names)
    yield Check(op="dying", shape="both", evaluate=lowered_for)


def unlike(entry: dict[str, Any]) -> dict[str, Any]:
    """What of an entry is the same in each run."""
    return {key: value for key, value in entry.items() if key not in ("us", "rate", "of_ceiling")}


def test_a_shared_run_finds_what_a_single_one_finds_and_a_dead_process_costs_its_shape() -> None:
    alone, shared = (Results(settings=dataclasses.replace(TINY, arch="80"), ceilings=CEILINGS) for _ in range(2))
    run_group(mixed_group(TINY), alone, lambda text: None)
    shown: list[str] = []
    saved: list[int] = []
    workers.run_groups([mixed_group, deadly_group], shared, shown.append, lambda: saved.append(len(shared.outcomes)), processes=2)
    assert not multiprocessing.active_children()
    assert saved == list(range(1, 22)) and len(shown) == 21  # each item as it comes

    mine, dying = shared.outcomes[:len(alone.outcomes)], shared.outcomes[len(alone.outcomes):]
    assert [(o.kind, unlike(o.entry)) for o in mine] == [(o.kind, unlike(o.entry)) for o in alone.outcomes]
    lines = [o.entry for o in mine if o.kind == "lines"]
    assert [(x["implementation"], x["met"], x["max_diff"]) for x in lines] == 2 * [("ours", True, 0), ("xla", None, 2), ("torch", None, None)]
    assert lines[2]["us"] == lines[5]["us"] != os.getpid() * 1e6  # in one process, and not in this

    reason = "its process ended (code 7)"
    assert [(o.kind, o.entry.get("implementation"), o.entry.get("reason")) for o in dying] == [
        ("lines", "ours", None), ("failed", "xla", reason), ("failed", "peer", reason),
        ("lines", "ours", None), ("lines", "xla", None), ("lines", "peer", None), ("checks", None, None), ("checks", None, None)]
    assert [o.entry["is_peer"] for o in dying[1:3]] == [False, True] and not shared.is_good
    assert dying[-2].entry["seen"] == ["deadly ours", "other ours", "other xla", "other peer"]
    assert dying[-1].entry["ok"]  # --arch holds there too


def test_the_largest_shapes_come_first_and_what_is_timed_elsewhere_is_one_job() -> None:
    items = {(0, i): item for i, item in enumerate(mixed_group(TINY))}
    jobs = workers.row_jobs(items, CEILINGS)
    assert [[p[1] for p in job.places] for job in jobs] == [[7, 8, 9, 10], [5, 11], [1, 2, 3, 4]]


@pytest.mark.parametrize(("implementation", "is_peer", "is_free"), [
    ("mosaic", False, True), ("xla", False, False), ("dequantize", False, False), ("mosaic", True, False)])
def test_only_our_own_kernels_compile_while_another_has_the_device(tmp_path: Path, implementation: str, is_peer: bool, is_free: bool) -> None:
    traced: list[bool] = []
    made: list[bool] = []

    def nobody_has_it() -> bool:
        with open(tmp_path / "lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    def function(x: jax.Array) -> jax.Array:
        traced.append(nobody_has_it())
        return x + 1

    def make(i: int) -> tuple[jax.Array]:
        out = jnp.full(8, i)
        if not isinstance(out, jax.core.Tracer):
            made.append(nobody_has_it())
        return (out,)

    results = Results(settings=dataclasses.replace(TINY, tiny=False), ceilings=CEILINGS)
    item = row(implementation=implementation, is_peer=is_peer, function=function, make=make)
    outcome = workers.outcome_of(item, [], {}, results, str(tmp_path / "lock"))
    assert outcome.kind == "lines" and made and not any(made)
    assert traced == [is_free]  # once: what was compiled is what was timed


def test_ctrl_c_ends_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Any) -> Any:
        assert len(multiprocessing.active_children()) == 2
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "connection", types.SimpleNamespace(wait=interrupted))
    with pytest.raises(KeyboardInterrupt):
        workers.run_groups([mixed_group], Results(settings=TINY, ceilings=CEILINGS), lambda text: None, processes=2)
    assert not multiprocessing.active_children()


def test_the_command_shares_its_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_groups(groups: Any, results: Results, show: Any, save: Any, *, processes: int) -> None:
        assert [group.args for group in groups] == [(GROUPS["norm"],), (GROUPS["int4"],)]
        assert processes == 3 and results.ceilings.bytes_per_s > 0
        show("shared")
        assert save() == tmp_path / "kernels-cpu-tiny.json"

    walked: list[bool] = []

    def known_items(settings: Settings) -> list[Item]:
        walked.append(os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE") == "false")
        return list(GROUPS["norm"](settings))

    monkeypatch.setattr(program, "run_groups", run_groups)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE")
    assert program.main(["--tiny", "--processes=3", "--ops=norm,int4", f"--folder={tmp_path}"]) == 0
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE")
    monkeypatch.setattr(program, "GROUPS", {"norm": known_items, "int4": GROUPS["int4"]})
    assert program.main(["--tiny", "--processes=2", "--ops=norm", "--shapes=u"]) != 0
    assert walked == [True], "jax was asked for its devices before they were to be shared"
    assert program.main(["--processes=0"]) != 0
