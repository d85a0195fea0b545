"""What the scheduler hands out: one step's plan, as frozen data, and its counters. No arrays, no padding (engine/pack.py does that).

Holds no decisions. Plain Python: never imports jax.
"""

import dataclasses
from typing import NamedTuple

from jaxinfer.request import Request

PageUpdate = tuple[int, int, int]
"""(slot, entry, page): a write to the device's page table."""
PageCopy = tuple[int, int]
"""(source, destination)."""
PageSave = tuple[int, int]
"""(page, host page)."""
PageLoad = tuple[int, int]
"""(host page, page)."""


class ScheduledRow(NamedTuple):
    """Tokens of one sequence in a step: positions [start, start + num_tokens).

    A tuple, since one is made for each sequence in each step and a frozen dataclass takes three times as long.
    """

    request: Request
    slot: int
    """Row of the device's page table. Kept here since a preempted request has lost its own when the step is read."""
    start: int
    """Position of the first token computed."""
    num_tokens: int
    token_ids: tuple[int, ...]
    """The tokens; () where from_device."""
    from_device: bool
    """The single token is the one that the slot sampled last, which the host has not seen."""
    samples: bool
    """The row reaches the end of the sequence, so that a token is sampled after it."""

    @property
    def kv_len(self) -> int:
        """Tokens in the sequence's pages once the step has run; also the position of the sampled token."""
        return self.start + self.num_tokens


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SchedulePlan:
    """One step. The device must run plans in the order in which next() gave them."""

    rows: tuple[ScheduledRow, ...]
    """Decode rows first, then prefill chunks. A sequence has one row at most."""
    page_updates: tuple[PageUpdate, ...]
    """Page-table writes that must be done before the step, in any number (an admission brings all its cached pages at once).

    Entries that a slot's former sequence left beyond what the new one reads stay as they are: kv_lens bounds every read.
    """
    num_tokens: int
    num_prefill_tokens: int
    """Tokens of the prefill chunks."""
    preempted: tuple[str, ...]
    """Ids of requests that lost their pages for this step's sake, or since the plan before."""
    page_copies: tuple[PageCopy, ...] = ()
    """Pages to be copied over all layers after the steps before and before this one writes. All sources are read first, or
    one copy after the other in this order: both are right. Empty unless the prefix cache was made with enable_page_copies."""
    page_saves: tuple[PageSave, ...] = ()
    """Pages to be read into host memory after the steps before and before this plan writes anything, by a copy too. Empty without a
    HostPages, as are the loads."""
    page_loads: tuple[PageLoad, ...] = ()
    """Pages to be written from host memory, as the saves of this plan and of those before left it, after all saves and copies and
    before the step."""

    @property
    def is_decode_only(self) -> bool:
        """Every row has one token."""
        return self.num_tokens == len(self.rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerStats:
    """Counters since the start, and the present load."""

    num_waiting: int
    num_running: int
    num_free_pages: int
    """Cached ones included."""
    num_cached_pages: int
    num_preemptions: int
    num_prompt_tokens: int
    """Prompt tokens of the requests admitted so far, each counted once."""
    num_cached_tokens: int
    """Of those, tokens taken from the prefix cache."""
    num_recomputed_tokens: int
    """Tokens that preempted requests must compute again: what the prefix cache or the host kept for them is not counted."""
    num_swapped_tokens: int = 0
    """Tokens of preempted requests that came back from host memory."""
    num_host_pages: int = 0
    """Host pages that hold tokens of requests that wait."""
    num_expired: int = 0
    """Requests ended at their deadline."""


@dataclasses.dataclass(kw_only=True, slots=True)
class Draft:
    """A plan under construction."""

    budget: int
    """Tokens that may still be scheduled."""
    decodes: list[ScheduledRow] = dataclasses.field(default_factory=list)
    prefills: list[ScheduledRow] = dataclasses.field(default_factory=list)
    updates: list[PageUpdate] = dataclasses.field(default_factory=list)
    copies: list[PageCopy] = dataclasses.field(default_factory=list)
    loads: list[PageLoad] = dataclasses.field(default_factory=list)
    kept: set[str] = dataclasses.field(default_factory=set)
    """Ids of the requests that do not give way in this plan: they have a row, or were admitted by it."""
