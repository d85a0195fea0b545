"""The host memory that preempted requests' pages wait in, and the moves there and back that plans ask for.

Which page holds whose tokens is the scheduler's affair (jaxinfer/scheduler/host_pages.py); this knows contents only.
"""

import collections
import itertools
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from jaxinfer.engine.compiled import CompiledSteps
from jaxinfer.engine.hardware import ram_bytes
from jaxinfer.engine.page_moves import MAX_CALLS_AHEAD, NUM_PAGES_MOVED
from jaxinfer.errors import CapacityError
from jaxinfer.scheduler.pages import NULL_PAGE
from jaxinfer.scheduler.plan import SchedulePlan


class _Save(NamedTuple):
    """A call that reads pages."""

    plan: SchedulePlan
    host_pages: tuple[int, ...]
    rows: jax.Array
    """[NUM_PAGES_MOVED, 2, L, K, Z, H], those of host_pages first."""


class SwappedPages:
    """Does the saves and loads of plans, in the order of the plans.

    A save is dispatched before its plan's step and taken in after that step: nobody waits for it, but for a load that wants it sooner and
    where MAX_CALLS_AHEAD are under way already.

    Args:
      num_pages: of the host; none of them takes memory before it is used.
      steps: the executables, which own the device's state.

    Raises:
      CapacityError: the machine has not that much memory.
    """

    def __init__(self, num_pages: int, steps: CompiledSteps) -> None:
        r = steps.resolved
        shape = (num_pages, 2, r.model.num_layers, r.model.num_kv_heads, r.page_size, r.model.head_dim)
        num_bytes, ram = int(np.prod(shape)) * r.kv_dtype.itemsize, ram_bytes()
        try:
            if num_bytes > ram:
                raise MemoryError
            self._rows = np.empty(shape, r.kv_dtype)
        except MemoryError:
            raise CapacityError(f"swap_space_bytes = {r.engine.swap_space_bytes}: {num_pages} pages take {num_bytes / 1e9:.2f} GB, which this "
                                f"machine of {ram / 1e9:.2f} GB does not give: lower it, or leave it at 0.") from None
        self._steps = steps
        self._under_way: collections.deque[_Save] = collections.deque()

    def save(self, plan: SchedulePlan) -> None:
        """Dispatches the plan's saves."""
        for chunk in itertools.batched(plan.page_saves, NUM_PAGES_MOVED):
            if len(self._under_way) == MAX_CALLS_AHEAD:
                self._land()
            pages, host_pages = zip(*chunk, strict=True)
            self._under_way.append(_Save(plan, host_pages, self._steps.read_pages(pages)))

    def load(self, plan: SchedulePlan) -> None:
        """Dispatches the plan's loads; first waits for what they want of saves under way."""
        wanted = {host_page for host_page, _ in plan.page_loads}
        while any(not wanted.isdisjoint(save.host_pages) for save in self._under_way):
            self._land()  # the oldest: of two saves to one host page the later one counts
        for number, chunk in enumerate(itertools.batched(plan.page_loads, NUM_PAGES_MOVED)):
            if number and number % MAX_CALLS_AHEAD == 0:
                jax.block_until_ready(self._steps.state)
            host_pages, pages = zip(*chunk, strict=True)
            self._steps.write_pages(pages, self._rows[list(host_pages)])

    def land(self, plan: SchedulePlan) -> None:
        """Takes in what a plan has saved whose tokens are here: the device has read it before."""
        while self._under_way and self._under_way[0].plan is plan:
            self._land()

    def forget(self) -> None:
        """Nobody waits any more: lets go of what is under way."""
        self._under_way.clear()

    def _land(self) -> None:
        save = self._under_way.popleft()
        self._rows[list(save.host_pages)] = np.asarray(save.rows)[:len(save.host_pages)]

    def tokens_per_page(self) -> float:
        """Prefill tokens in the time of one page's way out and back, as measured now, on the null page: HostPages.tokens_per_page.

        The tokens are those of the largest bucket, where one costs least.
        """
        host_pages = [i % len(self._rows) for i in range(NUM_PAGES_MOVED)]
        plan = SchedulePlan(rows=(), page_updates=(), num_tokens=0, num_prefill_tokens=0, preempted=(),
                            page_saves=tuple((NULL_PAGE, i) for i in host_pages), page_loads=tuple((i, NULL_PAGE) for i in host_pages))

        def there_and_back() -> None:
            self.save(plan)
            self.load(plan)
            jax.block_until_ready(self._steps.state)

        per_page = _seconds(there_and_back) / NUM_PAGES_MOVED
        return per_page / (_seconds(self._steps.run_largest) / self._steps.run_largest())


def _seconds(run: Callable[[], object]) -> float:
    """Of the quickest of three runs after a first one, whose memory is new: others may have had the machine in some."""
    run()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
