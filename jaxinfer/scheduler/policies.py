"""In which order waiting requests are admitted, and who may interrupt whom: one row of POLICIES a policy.

Decides nothing else: who is admitted when, and who gives way for pages, is the scheduler's. Plain Python: never imports jax.

Aging costs nothing, since a linear one cancels out: a request whose rank falls by `now - arrival` with time keeps its place
against all others, so that a key of `rank + arrival` never needs to be taken anew. It also bounds the wait: only those that
arrive within a fixed time after a request (the difference of their ranks in seconds) can come before it.
"""

import dataclasses
from collections.abc import Callable

from jaxinfer.errors import ConfigError
from jaxinfer.request import Request

PolicyKey = Callable[[Request, float], tuple[float, ...]]
"""(request, seconds on the monotonic clock) -> sort key; the smallest is admitted first.

Taken when the request enters the queue, new or preempted, and kept while it waits. Ties go to the request added first.
"""

PRIORITY_AGING_S = 10.0
"""Seconds of waiting that are worth one class of priority."""
AGING_TOKENS_PER_S = 256.0
"""Prompt tokens that one second of waiting outweighs, where prompts compete by length or by cached length."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """How a scheduler ranks requests."""

    key: PolicyKey
    uses_priority: bool = False
    """Request.priority is a class: where pages run out, larger numbers give way first."""
    interrupts: bool = False
    """A waiting request takes slot and pages of running ones of a larger priority number and a larger key. Running requests
    stand in the order of their keys, so the first of all can neither be interrupted nor lose its pages."""
    cached_token_s: float = 0.0
    """Seconds by which each prompt token in the prefix cache advances a request, looked up as others are admitted."""


def fcfs(request: Request, now: float) -> tuple[float, ...]:
    """First come, first served. A preempted request keeps its arrival time, so it goes ahead of all later ones."""
    return (request.arrival_time,)


def priority(request: Request, now: float) -> tuple[float, ...]:
    """Smaller Request.priority first; each PRIORITY_AGING_S of waiting is worth a class."""
    return (request.priority + request.arrival_time / PRIORITY_AGING_S,)


def shortest_prompt(request: Request, now: float) -> tuple[float, ...]:
    """Fewer prompt tokens first; each second of waiting is worth AGING_TOKENS_PER_S of them."""
    return (request.arrival_time + len(request.prompt_token_ids) / AGING_TOKENS_PER_S,)


POLICIES: dict[str, Policy] = {
    "fcfs": Policy(key=fcfs),
    "priority": Policy(key=priority, uses_priority=True),
    "preemptive": Policy(key=priority, uses_priority=True, interrupts=True),
    "shortest_prompt": Policy(key=shortest_prompt),
    "longest_cached_prefix": Policy(key=fcfs, cached_token_s=1 / AGING_TOKENS_PER_S),
}


def register_policy(name: str, key: PolicyKey, *, uses_priority: bool = False, interrupts: bool = False) -> None:
    """Makes a policy of one's own available under `scheduling_policy`.

    Whether it starves anybody is the key's affair: adding the arrival time to a bounded rank is enough that it does not.

    Args:
      name: a new one.
      key: see PolicyKey. Where `interrupts`, it must not depend on the clock.
      uses_priority: see Policy.
      interrupts: see Policy.

    Raises:
      ConfigError: the name is taken.
    """
    if name in POLICIES:
        raise ConfigError(f"scheduling policy {name!r} exists already: choose another name than {', '.join(sorted(POLICIES))}.")
    POLICIES[name] = Policy(key=key, uses_priority=uses_priority, interrupts=interrupts)


def find_policy(name: str) -> Policy:
    """The policy of that name.

    Raises:
      ConfigError: no such policy.
    """
    if name not in POLICIES:
        raise ConfigError(f"scheduling_policy = {name!r}: must be one of {', '.join(sorted(POLICIES))}.")
    return POLICIES[name]
