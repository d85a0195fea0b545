"""Fills a slot's sampling tables when a request that needs them takes it over, and the masks of rows under a grammar before each of
their tokens. Knows when; sampling/rules.py and engine/structured.py know what."""

import numpy as np

from jaxinfer.engine.compiled import CompiledSteps
from jaxinfer.engine.structured import Grammar
from jaxinfer.request import Request
from jaxinfer.sampling.rules import recent_tokens, token_counts, token_rules
from jaxinfer.scheduler.plan import ScheduledRow, SchedulePlan


class SlotWriter:
    """Remembers which stay of which request a slot's tables describe.

    A request that comes back after a preemption is written anew, with all its output: the scheduler admits it only when none of
    its tokens is in flight, so that from then on the device counts each sampled token once. Plain requests cost nothing.
    """

    def __init__(self, steps: CompiledSteps, *, vocab_size: int) -> None:
        self._steps = steps
        self._vocab_size = vocab_size
        self._stays: dict[int, tuple[Request, int]] = {}  # slot -> (request, its preemptions before this stay)

    def write(self, plan: SchedulePlan) -> None:
        """Writes the tables of the plan's rows that began their stay with it. Must precede the plan's own step."""
        for row in plan.rows:
            request = row.request
            if not (request.params.is_counted or request.params.has_rules):
                continue
            stay = (request, request.num_preemptions)
            if self._stays.get(row.slot) != stay:
                self._stays[row.slot] = stay
                self._write(row.slot, request)

    def write_masks(self, plan: SchedulePlan) -> None:
        """Writes the masks of the plan's rows that sample under a grammar. Must precede the plan's sampling, and may follow its step:
        so the masks are made while the step runs. No token of such a row is in flight: the host has read all before."""
        rows = [row for row in plan.rows if row.samples and row.request.grammar is not None]
        if rows:
            masks = Grammar.masks([(row.request.grammar, is_early(row)) for row in rows])
            self._steps.write_masks(np.asarray([row.slot for row in rows], np.int32), masks)

    def _write(self, slot: int, request: Request) -> None:
        params, prompt, output = request.params, request.prompt_token_ids, request.output_token_ids
        if params.has_rules:
            rules = token_rules(params, request.bad_word_ids, request.end_token_ids | request.stop_token_ids, vocab_size=self._vocab_size,
                                processors=self._steps.processors)
            self._steps.write_rules(slot, recent_tokens(len(prompt), output), rules)
        if params.is_counted:
            self._steps.write_counts(slot, token_counts(prompt, output, vocab_size=self._vocab_size))


def is_early(row: ScheduledRow) -> bool:
    """min_tokens still holds for the token that the row samples."""
    return row.kv_len - len(row.request.prompt_token_ids) < row.request.params.min_tokens
