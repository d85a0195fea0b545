"""Which rows of a mixed step's hidden states give log-probabilities of prompt tokens, and whose they are. numpy only, no jax."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxinfer.request import Request
from jaxinfer.scheduler.plan import ScheduledRow, SchedulePlan

NUM_SCORES = 128  # prompt tokens scored in one call


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreCall:
    """One call's work, of one request."""

    request: Request
    start: int
    """Position of the first prompt token that is scored."""
    num_tokens: int
    rows: np.ndarray     # [NUM_SCORES] int32; 0 in padding
    targets: np.ndarray  # [NUM_SCORES] int32; 0 in padding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
    """A call and its TokenLogprobs, still on the device."""

    call: ScoreCall
    logprobs: Any


def wants_scores(row: ScheduledRow) -> bool:
    """The row computes positions whose next token is one of a prompt to be scored."""
    return row.request.scores_prompt and row.start < len(row.request.prompt_token_ids) - 1


def score_calls(plan: SchedulePlan) -> Iterator[ScoreCall]:
    """The calls that a plan's step must be followed by."""
    if plan.num_prefill_tokens == 0:
        return
    packed = 0
    for row in plan.rows:
        if wants_scores(row):
            prompt = row.request.prompt_token_ids
            stop = min(row.start + row.num_tokens, len(prompt) - 1)
            for start in range(row.start, stop, NUM_SCORES):
                n = min(NUM_SCORES, stop - start)
                rows, targets = np.zeros(NUM_SCORES, np.int32), np.zeros(NUM_SCORES, np.int32)
                rows[:n] = np.arange(n) + packed + start - row.start
                targets[:n] = prompt[start + 1:start + 1 + n]
                yield ScoreCall(request=row.request, start=start + 1, num_tokens=n, rows=rows, targets=targets)
        packed += row.num_tokens
