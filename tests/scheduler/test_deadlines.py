"""Deadlines and aborts in every phase: the pages return, the others are not disturbed."""

import functools
from collections.abc import Callable

import pytest

from jaxinfer.request import FinishReason, Request, RequestStatus
from jaxinfer.scheduler import HashedPrefixCache
from jaxinfer.scheduler.policies import POLICIES
from tests.scheduler.simulator import Setup, Simulator, check_output, expected_output, make_request


def lasting(name: str, num_prompt: int, num_output: int) -> Request:
    for seed in range(10_000):
        request = make_request(name, [len(name), 1 + seed % 49, 1 + seed // 49 % 49, *([5] * (num_prompt - 3))], num_output)
        if len(expected_output(request)) == num_output:
            return request
    raise AssertionError("no such prompt")


PHASES: dict[str, Callable[[Request], bool]] = {
    "waiting": lambda r: r.status is RequestStatus.WAITING and r.num_preemptions == 0,
    "in prefill": lambda r: 0 < r.num_computed_tokens < len(r.prompt_token_ids),
    "first token in flight": lambda r: r.num_in_flight == 1 and not r.output_token_ids,
    "decoding": lambda r: len(r.output_token_ids) >= 3,
    "preempted": lambda r: r.status is RequestStatus.WAITING and r.num_preemptions > 0,
    "preempted with tokens in flight": lambda r: r.status is RequestStatus.WAITING and r.num_preemptions > 0 and r.num_in_flight > 0,
    "running again": lambda r: r.status is RequestStatus.RUNNING and r.num_preemptions > 0,
}


@pytest.mark.parametrize("by", ["abort", "deadline"])
@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("phase", PHASES)
def test_a_request_ends_in_any_phase_and_nobody_else_notices(phase: str, policy: str, by: str) -> None:
    def run(end_at: int | None) -> tuple[Simulator, Request, list[Request], int | None]:
        """`end_at`: the step at which the request ends; None looks for the first one in the phase."""
        sim = Simulator(Setup(max_num_seqs=3, max_num_batched_tokens=8, capacity=13, page_size=4, depth=2, policy=policy, grace_tokens=0),
                        functools.partial(HashedPrefixCache, enable_page_copies=True))
        one, others = lasting("one", 12, 24), [lasting("other " * i, 6 + i, 24) for i in (1, 2)]
        for request in (others[0], one, others[1]):
            sim.add(request, deadline=float(end_at + 1) if end_at is not None and by == "deadline" and request is one else None)
        while sim.scheduler.has_unfinished or sim.in_flight:
            if end_at is None and PHASES[phase](one):
                return sim, one, others, sim.num_steps
            if end_at == sim.num_steps and by == "abort":
                assert PHASES[phase](one) and sim.scheduler.abort("one") and not sim.scheduler.abort("one")
                sim.scheduler.check_invariants()
            sim.step()
            if end_at is not None and sim.num_steps > end_at:
                assert one.finish_reason is FinishReason.ABORT and not one.pages
        sim.run_to_end()
        return sim, one, others, end_at

    end_at = run(None)[-1]
    assert end_at is not None, "never came into this phase"
    sim, one, others, _ = run(end_at)
    for request in (one, *others):
        check_output(request)
    assert sim.scheduler.pop_expired() == ([one] if by == "deadline" else []) and sim.scheduler.pop_expired() == []
    assert all(r.finish_reason is FinishReason.LENGTH for r in others)


def test_a_deadline_that_comes_after_the_end_changes_nothing_and_ids_can_be_used_again() -> None:
    sim = Simulator(Setup(max_num_seqs=2, max_num_batched_tokens=8, capacity=13, page_size=4))
    first, second = lasting("a", 4, 3), lasting("a", 4, 9)
    sim.add(first, deadline=6.0)
    for _ in range(3):
        sim.step()
    assert first.finish_reason is FinishReason.LENGTH
    sim.add(second)
    sim.run_to_end()
    assert sim.clock.now > 6 and second.finish_reason is FinishReason.LENGTH and sim.scheduler.stats().num_expired == 0


def test_requests_behind_a_refused_one_proceed() -> None:
    from jaxinfer.errors import RequestError

    sim = Simulator(Setup(max_num_seqs=2, max_num_batched_tokens=8, capacity=4, page_size=4))
    sim.scheduler.add(make_request("before", [1] * 5, 3))
    with pytest.raises(RequestError, match=r"12 prompt and 8 output tokens.*max_model_len is 17|may take 20 tokens, max_model_len is 17"):
        sim.scheduler.add(make_request("never", [1] * 12, 8))
    sim.scheduler.add(make_request("behind", [2] * 5, 3))
    plan = sim.scheduler.next()
    assert plan is not None and [row.request.request_id for row in plan.rows] == ["before", "behind"]
