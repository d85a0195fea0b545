"""A request's host state, from arrival to its last token, and what is handed back. Plain Python: never imports jax."""

import dataclasses
import enum
import time
from typing import Any

from jaxinfer.errors import RequestError
from jaxinfer.sampling.params import SamplingParams

_PRIORITIES = range(-2**31, 2**31)
_MAX_DEADLINE_S = 1e9


class FinishReason(enum.StrEnum):
    """Why a completion ended."""

    STOP = "stop"        # an end token, a stop id or a stop string
    LENGTH = "length"    # max_tokens or the model's length limit
    ABORT = "abort"      # withdrawn by the caller, or at its deadline
    ERROR = "error"      # the model produced non-finite logits


class RequestStatus(enum.StrEnum):
    """Where a request stands in the scheduler."""

    WAITING = "waiting"      # queued: owns no slot and no page (new, or preempted)
    RUNNING = "running"      # owns a slot and pages
    FINISHED = "finished"    # owns nothing any more


@dataclasses.dataclass(kw_only=True, eq=False)
class Request:
    """One sequence to complete (a prompt with n > 1 becomes n requests). Mutable; changed by the scheduler alone."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_total_len: int
    """Prompt plus output tokens at most: min(prompt + max_tokens, max_model_len)."""
    stop_token_ids: frozenset[int]
    """Ids that end this request: the model's end tokens (unless ignore_eos) and the request's own."""
    seed: int
    """Seed of the random stream, resolved: in [0, 2**32)."""
    sample_index: int = 0
    """Which of the prompt's n completions this is."""
    end_token_ids: frozenset[int] = frozenset()
    """The model's end tokens, which min_tokens bars even where ignore_eos takes them out of stop_token_ids."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not be generated."""
    grammar: Any = None
    """Where its structured output stands (engine/structured.py:Grammar); None where it has none."""
    scores_prompt: bool = False
    """The log-probabilities of the prompt's tokens are wanted. Such a request needs a cache_salt of its own: tokens that come from
    the prefix cache pass through no step."""
    priority: int = 0
    """Smaller runs first, under the policies that look at it."""
    deadline_s: float | None = None
    """Seconds from arrival at which it ends wherever it stands; None: never."""
    cache_salt: str = ""
    """Prefix-cache entries are shared only between equal salts."""
    arrival_time: float = dataclasses.field(default_factory=time.monotonic)
    """Seconds on the monotonic clock."""

    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    """Sampled tokens that the host has seen."""
    slot: int | None = None
    """Row of the device's page table, while running."""
    pages: list[int] = dataclasses.field(default_factory=list)
    """Pages in order: page i holds positions [i*Z, (i+1)*Z)."""
    num_computed_tokens: int = 0
    """Tokens whose K/V is in the pages, or will be once the steps in flight are done."""
    num_in_flight: int = 0
    """Tokens sampled by steps that the host has not read yet."""
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache at first admission."""
    num_preemptions: int = 0
    first_token_time: float | None = None
    finish_time: float | None = None

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and the output that the host has seen."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def waits_for_tokens(self) -> bool:
        """A token can be sampled only when the host has read the one before: the grammar decides what may follow it."""
        return self.grammar is not None

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Known tokens at positions [start, stop)."""
        assert 0 <= start <= stop <= self.num_tokens, (start, stop, self.num_tokens)
        p = len(self.prompt_token_ids)
        return [*self.prompt_token_ids[start:stop], *self.output_token_ids[max(start - p, 0):max(stop - p, 0)]]


def read_priority(given: Any) -> int:
    """A request's priority from what a caller gives.

    Raises:
      RequestError: it is no integer, or out of range.
    """
    if isinstance(given, bool) or not isinstance(given, int) or given not in _PRIORITIES:
        raise RequestError(f"priority = {_shown(given)}: must be an integer in [{_PRIORITIES.start}, {_PRIORITIES.stop}); smaller is "
                           "more urgent.")
    return given


def read_deadline_s(given: Any) -> float | None:
    """Seconds that a request has from its arrival on, from what a caller gives; None: no deadline.

    Raises:
      RequestError: it is no number above 0, or no finite one.
    """
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given <= _MAX_DEADLINE_S:
        raise RequestError(f"deadline_s = {_shown(given)}: must be a number of seconds in (0, {_MAX_DEADLINE_S:.0e}]; leave it out for a "
                           "request without a deadline.")
    return float(given)


def _shown(value: Any) -> str:
    """A value for a message; an integer may be too long to be written out."""
    if isinstance(value, int) and value.bit_length() > 63:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)[:80]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestMetrics:
    """Times of one completion in seconds from its arrival."""

    ttft_s: float | None
    """Arrival to first token."""
    latency_s: float | None
    """Arrival to last token."""
    num_preemptions: int


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability under the model's own distribution (before temperature, penalties, biases and bars)."""

    logprob: float
    rank: int
    """1 for the likeliest token. Beyond the likeliest ones that were asked for, equal ones count as before it."""
    decoded_token: str | None
    """The token by itself as text; None without a tokenizer."""


type PositionLogprobs = dict[int, Logprob]
"""Token id -> log-probability, at one position: the token that stands there first, then the likeliest ones, best first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One completion, whole or so far."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    """The stop id or stop string that ended it, where one did; "deadline" where it ended with ABORT at its deadline."""
    logprobs: list[PositionLogprobs] | None = None
    """One entry an output token, where SamplingParams.logprobs asks for them."""
    cumulative_logprob: float | None = None
    """Sum of the sampled tokens' log-probabilities, where logprobs are asked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionDelta:
    """What one completion gained since the delta before; the deltas' texts and ids, joined, are those of CompletionOutput."""

    request_id: str
    index: int
    """Which of the prompt's n completions this is."""
    text: str
    """Empty while a character is incomplete or a stop string may have begun."""
    token_ids: tuple[int, ...]
    logprobs: list[PositionLogprobs] | None
    """One entry for each of token_ids, where SamplingParams.logprobs asks for them."""
    prompt_token_ids: tuple[int, ...]
    num_cached_tokens: int
    finish_reason: FinishReason | None = None
    """Set in the completion's last delta, as are those below."""
    stop_reason: int | str | None = None
    """As CompletionOutput.stop_reason."""
    cumulative_logprob: float | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    """As RequestOutput.prompt_logprobs, with completion 0."""
    error: str | None = None
    """What went wrong, where finish_reason is ERROR."""
    metrics: RequestMetrics | None = None
    """This completion's times."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """What a caller gets for one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int
    metrics: RequestMetrics
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    """One entry a prompt token, None for the first, where SamplingParams.prompt_logprobs asks for them; so far, while it runs."""
    error: str | None = None
    """Why nothing could be generated, where a batch went on past a bad request."""

    @property
    def finished(self) -> bool:
        return all(o.finish_reason is not None for o in self.outputs)
