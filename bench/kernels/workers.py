"""Shares a run's items among processes: each traces and compiles our Mosaic kernels by itself, all else is done in turns (turns.py).

A job is all rows of an op and shape, since they are held against each other. Rows that another program times are one job together, for each
worker would start that program anew. A check waits for the lines of its group. A worker sends back what came of each item as it comes; the
parent alone keeps it, in the groups' order however the jobs went. What a worker that dies still owed has failed.
"""

import contextlib
import functools
import multiprocessing
import signal
import tempfile
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import connection
from typing import Any, NamedTuple

import jax

from bench.kernels.rows import Ceilings, Check, Item, LeftOut, Line, Row, Settings
from bench.kernels.running import FAILURES, Outcome, Results, failure, is_mosaic, lower_for, reason_of, take
from bench.kernels.timing import compiled
from bench.kernels.turns import turn
from pallas_kernels.dispatch import current_target

type Group = Callable[[Settings], Iterable[Item]]
type Place = tuple[int, int]
"""Of an item: the number of its group in this run, and its own in the group."""

SPAWN = multiprocessing.get_context("spawn")  # what a fork inherits of CUDA does not work
ENDING_S = 10  # for a worker that has closed its pipe


class Job(NamedTuple):
    """Items for one worker, one after the other."""

    places: tuple[Place, ...]
    lines: tuple[Line, ...] = ()
    """Those of the group, for a check."""


class Worker:
    """A process and the job that it has, as the parent sees them."""

    def __init__(self, *given: Any) -> None:
        self.pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=work, args=(theirs, *given), daemon=True)
        self.process.start()
        theirs.close()  # open here, it would hide that the process ended
        self.owed: list[Place] = []

    def begin(self, job: Job) -> None:
        """Hands it a job."""
        self.owed = list(job.places)
        with contextlib.suppress(OSError):  # it has ended: `answer` will say so
            self.pipe.send(job)

    def answer(self) -> tuple[Place, Outcome] | None:
        """An item of its job with what came of it; None where the process ended instead."""
        try:
            place, outcome = self.pipe.recv()
        except (EOFError, OSError):
            return None
        self.owed.remove(place)
        return place, outcome

    def end(self, within_s: float = 0) -> int | None:
        """Its exit code; killed where it does not end by itself."""
        self.process.join(within_s)
        self.process.kill()
        self.process.join()
        return self.process.exitcode


def run_groups(groups: Sequence[Group], results: Results, show: Callable[[str], None], save: Callable[[], Any] = lambda: None, *,
               processes: int) -> None:
    """Measures the groups' items in as many processes, which end with the call; calls `save` after each item.

    Args:
      groups: functions at the top of their modules, where the workers find them.
    """
    items = {(g, i): item for g, group in enumerate(groups) for i, item in enumerate(group(results.settings))}
    found: dict[Place, Outcome] = {}

    def keep(place: Place, outcome: Outcome) -> None:
        found[place] = outcome
        results.outcomes = [found[p] for p in sorted(found)]
        show(outcome.text())
        save()

    jobs, checks = row_jobs(items, results.ceilings), [p for p, item in items.items() if isinstance(item, Check)]
    with tempfile.NamedTemporaryFile() as lock:
        hire = functools.partial(Worker, groups, results.settings, results.ceilings, lock.name)
        crew = [hire() for _ in range(min(processes, len(jobs) + len(checks)))]
        try:
            for place, item in items.items():
                if isinstance(item, LeftOut):
                    keep(place, take(item, [], {}, results))
            while len(found) < len(items):
                ready = [check for check in checks if all(p in found or p in checks for p in items if p[0] == check[0])]
                checks = [check for check in checks if check not in ready]
                jobs = [*[Job((check,), lines_of(check[0], found)) for check in ready], *jobs]
                for worker in crew:
                    if jobs and not worker.owed:
                        worker.begin(jobs.pop(0))
                answering = connection.wait([worker.pipe for worker in crew if worker.owed])
                for worker in [worker for worker in crew if worker.pipe in answering]:
                    if answer := worker.answer():
                        keep(*answer)
                        continue
                    reason = f"its process ended (code {worker.end(ENDING_S)})"
                    crew[crew.index(worker)] = hire()
                    for place in worker.owed:
                        keep(place, failure(items[place], reason))
        finally:
            for worker in crew:
                worker.end()


def row_jobs(items: dict[Place, Item], ceilings: Ceilings) -> list[Job]:
    """The jobs of all rows. What runs longest comes first, so that no worker ends late."""
    jobs: dict[tuple[str, str] | None, list[Place]] = {}
    seconds: dict[tuple[str, str] | None, float] = {}
    for place, item in items.items():
        if isinstance(item, Row):
            key = None if item.seconds else (item.op, item.shape)
            jobs.setdefault(key, []).append(place)
            seconds[key] = seconds.get(key, 0) + item.num_bytes / ceilings.bytes_per_s + item.num_flops / ceilings.flops_per_s
    return [Job(tuple(jobs[key])) for key in sorted(jobs, key=seconds.__getitem__, reverse=True)]


def lines_of(group: int, found: dict[Place, Outcome]) -> tuple[Line, ...]:
    """A group's lines, in its order."""
    return tuple(found[p].entry for p in sorted(found) if p[0] == group and found[p].kind == "lines")


def work(pipe: Any, groups: Sequence[Group], settings: Settings, ceilings: Ceilings, lock: str) -> None:
    """A worker's life: does jobs until there is nobody to send them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's affair, which ends its workers
    lower_for(settings)
    with turn(lock):
        current_target()  # sets this process up on the device
    items_of = functools.cache(lambda group: list(groups[group](settings)))
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            job: Job = pipe.recv()
            lines = list(job.lines)
            firsts: dict[tuple[str, str], jax.Array] = {}
            results = Results(settings=settings, ceilings=ceilings)
            for group, number in job.places:
                pipe.send(((group, number), outcome_of(items_of(group)[number], lines, firsts, results, lock)))


def outcome_of(item: Item, lines: list[Line], firsts: dict[tuple[str, str], jax.Array], results: Results, lock: str) -> Outcome:
    """`take` in a turn of this process, which compiles before if that keeps the device free."""
    try:
        run = compiled(item) if isinstance(item, Row) and is_mosaic(item) else None
    except FAILURES as error:
        return failure(item, reason_of(error))
    with turn(lock):
        return take(item, lines, firsts, results, run)
