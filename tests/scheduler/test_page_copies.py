"""Hits that end within a page: the newcomer computes on in a copy, and no shared page is ever written."""

import functools

import pytest

from jaxinfer.scheduler import HashedPrefixCache
from tests.scheduler.simulator import Setup, Simulator, check_output, expected_output, make_request

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]  # 11 tokens: two pages of four and three tokens


def simulator(*, copies: bool = True, page_size: int = 4, depth: int = 0, max_num_seqs: int = 4, capacity: int = 32) -> Simulator:
    return Simulator(Setup(max_num_seqs=max_num_seqs, max_num_batched_tokens=32, capacity=capacity, page_size=page_size, depth=depth),
                     functools.partial(HashedPrefixCache, enable_page_copies=copies))


def first_row(sim: Simulator, name: str, prompt: list[int], max_tokens: int = 3, salt: str = "") -> tuple[int, int, int]:
    """(start, tokens computed, pages copied) of the step that begins a request; it then runs to its end."""
    request = make_request(name, prompt, max_tokens, salt=salt)
    sim.add(request)
    plan = sim.step()
    assert plan is not None and plan.rows[-1].request is request and request.num_cached_tokens == plan.rows[-1].start
    sim.run_to_end()
    check_output(request)
    return plan.rows[-1].start, plan.rows[-1].num_tokens, len(plan.page_copies)


@pytest.mark.parametrize("length", range(1, 12))
@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16])
def test_a_prompt_that_was_there_costs_its_last_token(length: int, page_size: int) -> None:
    sim = simulator(page_size=page_size)
    assert first_row(sim, "a", PROMPT[:length]) == (0, length, 0)
    start, num_tokens, num_copies = first_row(sim, "b", PROMPT[:length])
    assert (start, num_tokens) == (length - 1, 1) and num_copies <= ((length - 1) % page_size > 0)


def test_without_copies_whole_pages_are_shared_and_plans_ask_for_nothing() -> None:
    sim = simulator(copies=False)
    first_row(sim, "a", PROMPT)
    assert first_row(sim, "b", PROMPT) == (8, 3, 0)


@pytest.mark.parametrize(("prompt", "expected"), [
    (PROMPT[:10] + [7, 7], (10, 2, 1)),        # differs within the last page
    (PROMPT[:6] + [7, 7, 7], (6, 3, 1)),       # within a full one
    ([*PROMPT, 8, 8, 8], (11, 3, 1)),          # goes on
    ([7, *PROMPT], (0, 12, 0)),
])
def test_a_hit_goes_as_far_as_the_tokens_are_alike(prompt: list[int], expected: tuple[int, int, int]) -> None:
    sim = simulator()
    first_row(sim, "a", PROMPT, max_tokens=1)
    assert first_row(sim, "b", prompt) == expected
    assert first_row(sim, "c", prompt, salt="tenant") == (0, len(prompt), 0)


def test_a_few_tokens_are_not_worth_a_copy() -> None:
    sim = simulator(page_size=32)
    first_row(sim, "a", [1] * 3 + [2] * 20)
    assert first_row(sim, "b", [1] * 3 + [3] * 20) == (0, 23, 0)
    assert first_row(sim, "c", [1] * 3 + [2] + [3] * 20) == (4, 20, 1)
    assert first_row(sim, "d", [1] * 3) == (2, 1, 1)  # all that there is to save


@pytest.mark.parametrize("depth", [0, 2])
def test_completions_of_one_prompt_share_its_full_pages_and_copy_the_last_while_the_first_writes_on(depth: int) -> None:
    sim = simulator(depth=depth)
    requests = [make_request(f"r{i}", PROMPT, 9) for i in range(4)]
    sim.add(requests[0])
    sim.step()
    for request in requests[1:]:
        sim.add(request)
    plan = sim.step()
    assert plan is not None and [(row.start, row.num_tokens) for row in plan.rows[-3:]] == [(10, 1)] * 3
    assert len(plan.page_copies) == 3 and len({page for page, _ in plan.page_copies}) == 1
    assert sim.pages.capacity - sim.pages.num_free == 2 + 4
    sim.run_to_end()
    for request in requests:
        check_output(request)


def test_a_copy_that_turns_out_equal_is_not_kept_beside_the_first() -> None:
    sim = simulator()
    short = make_request("short", PROMPT[:9], 9)
    output = expected_output(short)
    long = make_request("long", [*PROMPT[:9], output[0]], 8)
    first_row(sim, "first", PROMPT[:8], max_tokens=1)  # so that neither waits for what both begin with
    for request in (short, long):
        sim.add(request)
    plan = sim.step()
    assert plan is not None and len(plan.rows) == 2 and len(output) > 4  # so both fill their third page
    sim.run_to_end()
    num_known = 9 + len(output)
    assert sim.pages.num_cached == -(-(num_known - 1) // 4)


def test_a_page_may_be_copied_and_handed_out_in_one_step() -> None:
    sim = simulator(capacity=4)
    first_row(sim, "a", PROMPT[:7], max_tokens=1)
    request = make_request("b", PROMPT[:7], 9)
    sim.add(request)
    sim.add(make_request("c", [8] * 9, 1))
    sim.run_to_end()
    check_output(request)
    assert request.num_cached_tokens == 6


def test_the_page_to_copy_may_be_the_very_page_handed_out() -> None:
    sim = simulator(capacity=2, max_num_seqs=1)
    first_row(sim, "a", PROMPT[:7], max_tokens=1)
    assert sim.pages.num_cached == 2
    assert first_row(sim, "b", PROMPT[:7], max_tokens=2) == (6, 1, 0)


def test_tokens_of_a_page_to_copy_are_not_trusted_after_an_error() -> None:
    from jaxinfer.request import FinishReason

    sim = simulator()
    bad = make_request("bad", PROMPT, 4)
    sim.add(bad)
    plan = sim.scheduler.next()
    assert plan is not None and len(sim.pages.retained_pages()) == 3
    sim.scheduler.apply(plan, [3], [FinishReason.ERROR])
    sim.scheduler.check_invariants()
    assert not sim.pages.retained_pages()
    assert first_row(sim, "good", PROMPT) == (0, 11, 0)
