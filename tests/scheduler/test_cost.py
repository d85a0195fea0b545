"""Host time of the scheduler: small beside a device step, whatever the length of the sequences."""

import time

import pytest

from jaxinfer.scheduler import HashedPrefixCache, PageAllocator, Scheduler
from tests.scheduler.simulator import make_request


def step_seconds(num_running: int, num_steps: int = 100) -> list[float]:
    """Seconds of next() + apply() in decode steps of num_running sequences, one step ahead."""
    pages = PageAllocator(num_running * 40, 16)
    scheduler = Scheduler(max_num_seqs=num_running, max_num_batched_tokens=8192, max_model_len=4096, pages=pages,
                          prefix_cache=HashedPrefixCache(pages))
    for index in range(num_running):
        scheduler.add(make_request(f"r{index}", [index + 1] * 64, 2 * num_steps))
    tokens, finish = [7] * num_running, [None] * num_running
    in_flight = [plan for plan in (scheduler.next(),) if plan is not None]
    while scheduler.num_waiting:
        in_flight.append(plan := scheduler.next())
        assert plan is not None
    seconds = []
    for _ in range(num_steps):
        start = time.perf_counter()
        plan = scheduler.next()
        oldest = in_flight.pop(0)
        scheduler.apply(oldest, tokens[:len(oldest.rows)], finish[:len(oldest.rows)])
        seconds.append(time.perf_counter() - start)
        assert plan is not None and len(plan.rows) == num_running and plan.is_decode_only
        in_flight.append(plan)
    return sorted(seconds)


@pytest.mark.parametrize("num_running", [64, 128])
def test_a_decode_step_costs_little(num_running: int) -> None:
    seconds = min((step_seconds(num_running) for _ in range(3)), key=lambda runs: runs[len(runs) // 2])
    print(f"{num_running} running: median {1e6 * seconds[len(seconds) // 2]:.0f} us, best {1e6 * seconds[0]:.0f} us")
    assert seconds[len(seconds) // 4] < 1e-3, seconds  # a third of it is usual; the limit leaves room for busy machines


def test_a_request_that_found_no_room_is_not_looked_up_again_in_vain() -> None:
    pages = PageAllocator(400, 16)
    cache = HashedPrefixCache(pages)
    scheduler = Scheduler(max_num_seqs=8, max_num_batched_tokens=8192, max_model_len=8192, pages=pages, prefix_cache=cache)
    for index in range(300):
        scheduler.add(make_request(f"r{index}", [index + 1] * 4000, 200, arrival=index))
    searched: list[str] = []
    match = cache.match
    cache.match = lambda request: searched.append(request.request_id) or match(request)  # type: ignore[method-assign]
    for _ in range(50):
        plan = scheduler.next()
        assert plan is not None and [row.request.request_id for row in plan.rows] == ["r0"]
    assert searched == ["r0", "r1"]
    assert scheduler.abort("r0") and scheduler.num_waiting == 299
    plan = scheduler.next()
    assert plan is not None and [row.request.request_id for row in plan.rows] == ["r1"] and searched == ["r0", "r1", "r1", "r2"]
