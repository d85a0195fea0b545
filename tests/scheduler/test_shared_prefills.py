"""Requests that begin alike and come together: one computes what they share, the others wait for it and nobody else does."""

import functools

import pytest

from jaxinfer.scheduler import HashedPrefixCache
from jaxinfer.scheduler.policies import POLICIES
from tests.scheduler.simulator import Setup, Simulator, check_output, make_request

PROMPT = [1 + 7 * i % 40 for i in range(11)]  # two pages of four and three tokens
OTHER = [2 + 5 * i % 40 for i in range(11)]


def simulator(*, policy: str = "fcfs", budget: int = 64, depth: int = 0) -> Simulator:
    return Simulator(Setup(max_num_seqs=6, max_num_batched_tokens=budget, capacity=60, page_size=4, policy=policy, depth=depth),
                     functools.partial(HashedPrefixCache, enable_page_copies=True))


def rows(sim: Simulator) -> list[tuple[str, int, int]]:
    """(request, first position, tokens) of the next step."""
    plan = sim.step()
    assert plan is not None
    return [(row.request.request_id, row.start, row.num_tokens) for row in plan.rows]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("depth", [0, 2])
def test_the_completions_of_a_prompt_compute_it_once_and_delay_nobody_else(policy: str, depth: int) -> None:
    sim = simulator(policy=policy, depth=depth)
    requests = [*(make_request(f"a{i}", PROMPT, 9) for i in range(3)), make_request("b", OTHER, 9)]
    for request in requests:
        sim.add(request)
    assert sorted(rows(sim)) == [("a0", 0, 11), ("b", 0, 11)]
    assert {("a1", 10, 1), ("a2", 10, 1)} <= set(rows(sim))
    assert len({page for request in requests[:3] for page in request.pages}) == 2 + 3
    sim.run_to_end()
    for request in requests:
        check_output(request)
    assert [request.num_cached_tokens for request in requests] == [0, 10, 10, 0]


def test_the_wait_lasts_as_long_as_the_other_computes_what_is_shared() -> None:
    sim = simulator(budget=8)
    prompt = PROMPT + OTHER
    for name in ("a", "b"):
        sim.add(make_request(name, prompt, 3))
    assert [rows(sim) for _ in range(4)] == [[("a", 0, 8)], [("a", 8, 8)], [("a", 16, 6)], [("a", 22, 1), ("b", 21, 1)]]
    sim.run_to_end()


def test_it_ends_where_the_other_is_withdrawn_and_keeps_what_that_one_did() -> None:
    sim = simulator(budget=8)
    for name in ("a", "b", "c"):
        sim.add(make_request(name, PROMPT + OTHER, 3))
    assert rows(sim) == [("a", 0, 8)]
    assert sim.scheduler.abort("a") and sim.scheduler.abort("c")  # one that computes, one that waits for it
    sim.scheduler.check_invariants()
    assert rows(sim) == [("b", 8, 8)]
    sim.run_to_end()


@pytest.mark.parametrize(("prompt", "salt"), [(PROMPT, "tenant"), ([*PROMPT[:3], 49, *PROMPT[4:]], ""), (PROMPT[:4], "")])
def test_nobody_waits_where_less_than_a_page_would_be_shared(prompt: list[int], salt: str) -> None:
    sim = simulator()
    sim.add(make_request("a", PROMPT, 3))
    sim.add(make_request("b", prompt, 3, salt=salt))
    assert rows(sim) == [("a", 0, 11), ("b", 0, len(prompt))]
    sim.run_to_end()


def test_hits_are_admitted_by_what_they_leave_not_by_their_length() -> None:
    """A step of 16 tokens has room for one prompt of 11, and for three whose last tokens alone are left."""
    sim = Simulator(Setup(max_num_seqs=6, max_num_batched_tokens=16, capacity=60, page_size=4, length_buckets=(4, 8)),
                    functools.partial(HashedPrefixCache, enable_page_copies=True))
    for name in ("a", "b", "c", "d"):
        sim.add(make_request(name, PROMPT * 2, 9))
    assert rows(sim) == [("a", 0, 16)] and rows(sim) == [("a", 16, 6)]
    assert rows(sim)[-3:] == [("b", 21, 1), ("c", 21, 1), ("d", 21, 1)]
    sim.run_to_end()
