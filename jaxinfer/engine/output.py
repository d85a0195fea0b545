"""From sampled ids to text and log-probabilities: stop ids, stop strings, a grammar's end, length, and what may be shown while a request
still runs. No jax."""

import dataclasses
from collections.abc import Sequence

from jaxinfer.engine.logprobs import HostLogprobs
from jaxinfer.request import FinishReason, PositionLogprobs, Request
from jaxinfer.tokenizer import IncrementalDetokenizer, Tokenizer


@dataclasses.dataclass(kw_only=True)
class _Text:
    """One request's text so far."""

    detokenizer: IncrementalDetokenizer | None
    text: str = ""
    stop_reason: int | str | None = None
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float = 0.0
    prompt_logprobs: list[PositionLogprobs | None] | None = None


class OutputProcessor:
    """Keeps the text of every live request and decides when it ends. Without a tokenizer texts stay empty."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._live: dict[str, _Text] = {}
        self._token_texts: dict[int, str] = {}

    def start(self, request: Request) -> None:
        """Begins a request's text."""
        detokenizer = None
        if self._tokenizer is not None:
            detokenizer = IncrementalDetokenizer(self._tokenizer, request.params.skip_special_tokens)
        self._live[request.request_id] = _Text(
            detokenizer=detokenizer, logprobs=None if request.params.logprobs is None else [],
            prompt_logprobs=[None] * len(request.prompt_token_ids) if request.scores_prompt else None)

    def push(self, request: Request, token_id: int, *, finite: bool, logprobs: tuple[HostLogprobs, int] | None = None) -> FinishReason | None:
        """Takes the next sampled token, not yet in request.output_token_ids; says whether the request ends with it.

        Args:
          request: a live one.
          token_id: what was sampled.
          finite: False where the token means nothing.
          logprobs: (the step's log-probabilities, the request's row), needed where the request wants them.
        """
        state = self._live[request.request_id]
        if not finite:
            return FinishReason.ERROR
        if state.logprobs is not None:
            assert logprobs is not None and request.params.logprobs is not None, request.request_id
            entry = logprobs[0].at(logprobs[1], token_id, request.params.logprobs, self._token_text)
            state.logprobs.append(entry)
            state.cumulative_logprob += entry[token_id].logprob
        if token_id in request.stop_token_ids:
            state.stop_reason = token_id
            if request.params.include_stop_str_in_output and state.detokenizer is not None:
                state.text += state.detokenizer.push(token_id)
            self._flush(state)
            return FinishReason.STOP
        ends_by_grammar = request.grammar is not None and request.grammar.accept(token_id)
        if ends_by_grammar and request.grammar.error is not None:
            return FinishReason.ERROR
        ends_by_length = request.num_tokens + 1 >= request.max_total_len
        if state.detokenizer is not None:
            seen = len(state.text)
            ends = ends_by_length or ends_by_grammar
            state.text += state.detokenizer.push(token_id) + (state.detokenizer.flush() if ends else "")
            may_stop = len(request.output_token_ids) + 1 > request.params.min_tokens
            if may_stop and self._cut_at_stop_string(state, request, seen):
                return FinishReason.STOP
        if ends_by_grammar:
            return FinishReason.STOP
        return FinishReason.LENGTH if ends_by_length else None

    def expire(self, request: Request) -> None:
        """Ends the text of a request that its deadline ended: nothing follows what it held back."""
        state = self._live[request.request_id]
        self._flush(state)
        state.stop_reason = "deadline"

    def text(self, request: Request) -> tuple[str, int | str | None]:
        """(text, stop reason). While the request runs, text that may be the start of a stop string is held back."""
        state = self._live[request.request_id]
        if request.is_finished or not request.params.stop or request.params.include_stop_str_in_output:
            return state.text, state.stop_reason
        return state.text[:len(state.text) - _held_back(state.text, request.params.stop)], None

    def push_prompt(self, request: Request, start: int, num_tokens: int, logprobs: HostLogprobs) -> None:
        """Takes log-probabilities of the prompt tokens at [start, start + num_tokens); of no use once the request has ended."""
        state = self._live.get(request.request_id)
        if state is None or state.prompt_logprobs is None:
            return
        num = request.params.prompt_logprobs or 0
        for i in range(num_tokens):
            state.prompt_logprobs[start + i] = logprobs.at(i, request.prompt_token_ids[start + i], num, self._token_text)

    def logprobs(self, request: Request) -> tuple[list[PositionLogprobs] | None, float | None]:
        """(one entry an output token, their sum), or None each where none are wanted."""
        state = self._live[request.request_id]
        return (None, None) if state.logprobs is None else (list(state.logprobs), state.cumulative_logprob)

    def prompt_logprobs(self, request: Request) -> list[PositionLogprobs | None] | None:
        """One entry a prompt token, None for the first and for those not computed yet; None where none are wanted."""
        return self._live[request.request_id].prompt_logprobs

    def _token_text(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def end(self, request: Request) -> None:
        """Forgets a request."""
        self._live.pop(request.request_id, None)

    def _flush(self, state: _Text) -> None:
        if state.detokenizer is not None:
            state.text += state.detokenizer.flush()

    def _cut_at_stop_string(self, state: _Text, request: Request, seen: int) -> bool:
        """Ends the text at the earliest stop string that the text beyond `seen` completes: before it, or after it where it is wanted."""
        best: tuple[int, str] | None = None
        for stop in request.params.stop or ():
            at = state.text.find(stop, max(seen - len(stop) + 1, 0))
            if at >= 0 and (best is None or at < best[0]):
                best = (at, stop)
        if best is None:
            return False
        end = best[0] + (len(best[1]) if request.params.include_stop_str_in_output else 0)
        state.text, state.stop_reason = state.text[:end], best[1]
        return True


def _held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    longest = max(len(stop) for stop in stops) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
