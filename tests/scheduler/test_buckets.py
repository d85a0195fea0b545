"""Length buckets: short requests do not wait behind long ones, and long ones do not starve."""

import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.scheduler.admission import MAX_OVERTAKES
from jaxinfer.scheduler.buckets import LengthBuckets
from jaxinfer.scheduler.policies import POLICIES
from tests.scheduler.simulator import Setup, Simulator, check_output, make_request


def simulator(*, max_num_seqs: int = 8, budget: int = 16, capacity: int = 64, buckets: tuple[int, ...] = (4, 16), share: float = 0.5,
              policy: str = "fcfs", max_prefill_rows: int | None = None) -> Simulator:
    return Simulator(Setup(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, capacity=capacity, page_size=4, policy=policy,
                           length_buckets=buckets, long_prefill_share=share, max_prefill_rows=max_prefill_rows))


def add(sim: Simulator, name: str, num_prompt: int, max_tokens: int = 1, priority: int = 0) -> None:
    prompt = [1 + (sum(map(ord, name)) + i * i) % 49 for i in range(num_prompt)]
    sim.add(make_request(name, prompt, max_tokens, arrival=sim.clock.now, priority=priority))


def rows(sim: Simulator) -> list[tuple[str, int]]:
    plan = sim.step()
    assert plan is not None
    return [(row.request.request_id, row.num_tokens) for row in plan.rows]


def test_edges_are_the_longest_lengths_of_their_buckets() -> None:
    buckets = LengthBuckets((4, 16), None, max_num_batched_tokens=16, max_rows=100)
    assert [buckets.of(n) for n in (1, 4, 5, 16, 17, 900)] == [0, 0, 1, 1, 2, 2] and buckets.caps == (16, 4, 1)
    assert LengthBuckets((4, 16), (3, 2), max_num_batched_tokens=16, max_rows=100).caps == (3, 2, 2)
    off = LengthBuckets((), None, max_num_batched_tokens=16, max_rows=5)
    assert off.of(1) == off.of(9999) == 0 and off.caps == (5,)


@pytest.mark.parametrize(("edges", "caps", "message"), [
    ((4, 4), None, r"length_buckets = \(4, 4\): must be strictly increasing"),
    ((0, 4), None, r"length_buckets = \(0, 4\)"),
    ((4, 8), (1,), r"length_bucket_caps = \(1,\): must be one number >= 1 for each of the 2 length_buckets"),
    ((4, 8), (1, 0), r"length_bucket_caps = \(1, 0\)"),
])
def test_impossible_buckets_are_refused(edges: tuple[int, ...], caps: tuple[int, ...] | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LengthBuckets(edges, caps, max_num_batched_tokens=16, max_rows=8)


def test_a_long_prompt_leaves_half_of_the_step_to_short_ones_and_takes_what_they_do_not_need() -> None:
    sim = simulator()
    add(sim, "long", 60)
    assert rows(sim) == [("long", 16)]  # nobody else wants anything
    for index in range(3):
        add(sim, f"s{index}", 4)
    assert rows(sim) == [("s0", 4), ("s1", 4), ("long", 8)]
    assert rows(sim) == [("s2", 4), ("long", 12)]
    assert rows(sim) == [("long", 16)]
    sim.run_to_end()


def test_short_ones_are_admitted_past_a_long_one_whose_bucket_is_full() -> None:
    sim = simulator(budget=16)
    for name in ("long 1", "long 2"):
        add(sim, name, 40)
    for index in range(6):
        add(sim, f"s{index}", 4)
    assert rows(sim) == [("s0", 4), ("s1", 4), ("long 1", 8)]
    first = [request.request_id for request in sim.first_rows]
    sim.run_to_end()
    assert first + ["s2", "s3", "s4", "s5", "long 2"] == [request.request_id for request in sim.first_rows]


def test_without_buckets_everybody_waits() -> None:
    sim = simulator(buckets=())
    add(sim, "long", 40)
    add(sim, "short", 4)
    assert [rows(sim) for _ in range(3)] == [[("long", 16)], [("long", 16)], [("long", 8), ("short", 4)]]


def test_a_share_of_one_gives_the_oldest_all_that_it_wants() -> None:
    sim = simulator(share=1.0)
    add(sim, "long", 40)
    sim.step()
    add(sim, "short", 4)
    assert [rows(sim), rows(sim)] == [[("long", 16)], [("short", 4), ("long", 8)]]


def test_a_row_is_kept_for_the_oldest() -> None:
    sim = simulator(max_prefill_rows=2)
    add(sim, "long", 40)
    sim.step()
    for index in range(3):
        add(sim, f"s{index}", 3)
    assert [rows(sim), rows(sim)] == [[("s0", 3), ("long", 13)], [("s1", 3), ("long", 11)]]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize(("max_num_seqs", "capacity"), [(4, 64), (8, 16)])
def test_a_long_prompt_does_not_starve_under_a_flood_of_short_ones(policy: str, max_num_seqs: int, capacity: int) -> None:
    sim = simulator(policy=policy, max_num_seqs=max_num_seqs, capacity=capacity)
    for index in range(10):
        add(sim, f"before {index}", 3, 6)
    add(sim, "long", 50, 4)
    add(sim, "longer", 57, 4)
    for step in range(300):
        for part in range(3):  # more than is served
            add(sim, f"flood {step} {part}", 3, 6)
        sim.step()
        if not any(r.request_id in ("long", "longer") for r in [*sim.scheduler._waiting, *sim.scheduler._running.requests.values()]):
            break
    assert step < 30 + 6 * MAX_OVERTAKES // 4 + 60
    sim.run_to_end()
    for request in sim.first_rows:
        check_output(request)


def test_only_so_many_overtake_one_that_finds_no_pages() -> None:
    sim = simulator(max_num_seqs=4, capacity=16, budget=64)
    add(sim, "holder", 20, 30)
    sim.step()
    add(sim, "long", 50)
    for index in range(2 * MAX_OVERTAKES):
        add(sim, f"s{index}", 3)
    sim.run_to_end(max_steps=2000)
    order = [request.request_id for request in sim.first_rows]
    assert MAX_OVERTAKES < order.index("long") <= 1 + MAX_OVERTAKES + 4  # those admitted in its own step have their rows before it
