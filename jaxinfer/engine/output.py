"""From sampled ids to text: stop ids, stop strings, length, and what may be shown while a request still runs. No jax."""

import dataclasses
from collections.abc import Sequence

from jaxinfer.request import FinishReason, Request
from jaxinfer.tokenizer import IncrementalDetokenizer, Tokenizer


@dataclasses.dataclass(kw_only=True)
class _Text:
    """One request's text so far."""

    detokenizer: IncrementalDetokenizer | None
    text: str = ""
    stop_reason: int | str | None = None


class OutputProcessor:
    """Keeps the text of every live request and decides when it ends. Without a tokenizer texts stay empty."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._live: dict[str, _Text] = {}

    def start(self, request: Request) -> None:
        """Begins a request's text."""
        detokenizer = None
        if self._tokenizer is not None:
            detokenizer = IncrementalDetokenizer(self._tokenizer, request.params.skip_special_tokens)
        self._live[request.request_id] = _Text(detokenizer=detokenizer)

    def push(self, request: Request, token_id: int, *, finite: bool) -> FinishReason | None:
        """Takes the next sampled token, not yet in request.output_token_ids; says whether the request ends with it."""
        state = self._live[request.request_id]
        if not finite:
            return FinishReason.ERROR
        if token_id in request.stop_token_ids:
            state.stop_reason = token_id
            self._flush(state)
            return FinishReason.STOP
        ends_by_length = request.num_tokens + 1 >= request.max_total_len
        if state.detokenizer is not None:
            seen = len(state.text)
            state.text += state.detokenizer.push(token_id) + (state.detokenizer.flush() if ends_by_length else "")
            if self._cut_at_stop_string(state, request, seen):
                return FinishReason.STOP
        return FinishReason.LENGTH if ends_by_length else None

    def text(self, request: Request) -> tuple[str, int | str | None]:
        """(text, stop reason). While the request runs, text that may be the start of a stop string is held back."""
        state = self._live[request.request_id]
        if request.is_finished or not request.params.stop:
            return state.text, state.stop_reason
        return state.text[:len(state.text) - _held_back(state.text, request.params.stop)], None

    def end(self, request: Request) -> None:
        """Forgets a request."""
        self._live.pop(request.request_id, None)

    def _flush(self, state: _Text) -> None:
        if state.detokenizer is not None:
            state.text += state.detokenizer.flush()

    def _cut_at_stop_string(self, state: _Text, request: Request, seen: int) -> bool:
        """Ends the text before the earliest stop string that the text beyond `seen` completes."""
        best: tuple[int, str] | None = None
        for stop in request.params.stop or ():
            at = state.text.find(stop, max(seen - len(stop) + 1, 0))
            if at >= 0 and (best is None or at < best[0]):
                best = (at, stop)
        if best is None:
            return False
        state.text, state.stop_reason = state.text[:best[0]], best[1]
        return True


def _held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    longest = max(len(stop) for stop in stops) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
