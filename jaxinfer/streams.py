"""Deltas on their way from the thread that steps an engine to a consumer on an event loop. Neither side waits for the other.

    engine's thread: push() leaves what is new and goes on        event loop: take() has all that was left since, merged
"""

import asyncio
import dataclasses
import threading
from collections.abc import Iterable, Sequence

from jaxinfer.errors import JaxInferError
from jaxinfer.groups import Group
from jaxinfer.request import CompletionDelta, PositionLogprobs, Request


@dataclasses.dataclass(kw_only=True)
class _Gain:
    """What one completion gained and nobody took yet, and how much of it was seen in all."""

    texts: list[str] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    num_chars_seen: int = 0
    num_tokens_seen: int = 0
    end: CompletionDelta | None = None
    """The last delta, without its text and ids."""
    is_new: bool = False


class Stream:
    """One prompt's deltas on their way to one consumer.

    Args:
      loop: the consumer's.
      arrival_time: of the prompt, seconds on the monotonic clock.
    """

    def __init__(self, *, loop: asyncio.AbstractEventLoop, arrival_time: float) -> None:
        self.loop = loop
        self.arrival_time = arrival_time
        self.group: Group | None = None
        """Set once the prompt has been read, before the stream is opened."""
        self.is_aborted = False
        """Somebody asked for its end."""
        self.is_withdrawn = False
        """The consumer is gone: whatever comes is for nobody."""
        self._news = asyncio.Event()
        self._lock = threading.Lock()  # over all below; held for moments only
        self._is_signalled = False
        self._gains: dict[int, _Gain] = {}
        self._error: JaxInferError | None = None
        self._num_ended = 0

    @property
    def requests(self) -> list[Request]:
        assert self.group is not None, "the prompt has not been read"
        return self.group.requests

    @property
    def is_done(self) -> bool:
        """The consumer has taken the last delta of every completion."""
        return self._num_ended == len(self.requests)

    async def take(self) -> list[CompletionDelta]:
        """Waits for news and takes it: at most one delta a completion.

        Raises:
          JaxInferError: what the stream failed with, once all before it is taken.
        """
        if self._error is None:
            await self._news.wait()
            self._news.clear()
        with self._lock:
            self._is_signalled = False
            deltas = [self._delta(index, gain) for index, gain in self._gains.items() if gain.is_new]
            if not deltas and self._error is not None:
                raise self._error
        self._num_ended += sum(delta.finished for delta in deltas)
        return deltas

    def _delta(self, index: int, gain: _Gain) -> CompletionDelta:
        assert self.group is not None
        first, text, ids = self.requests[0], "".join(gain.texts), tuple(gain.token_ids)
        if gain.end is not None:
            delta = dataclasses.replace(gain.end, text=text, token_ids=ids, logprobs=gain.logprobs)
        else:
            delta = CompletionDelta(request_id=self.group.request_id, index=index, text=text, token_ids=ids, logprobs=gain.logprobs,
                                    prompt_token_ids=first.prompt_token_ids, num_cached_tokens=first.num_cached_tokens)
        gain.texts, gain.token_ids, gain.is_new = [], [], False
        gain.logprobs = None if gain.logprobs is None else []
        return delta

    def push(self, request: Request, text: str, logprobs: Sequence[PositionLogprobs] | None, end: CompletionDelta | None) -> bool:
        """Adds what a completion has beyond what was pushed before. Called by the engine's thread.

        Args:
          request: the completion's.
          text: all that may be shown of it.
          logprobs: one entry a token, where wanted.
          end: its last delta without text and ids, once it has ended.

        Returns:
          Whether the consumer must be woken: otherwise it has been, and has not taken anything since.
        """
        with self._lock:
            gain = self._gains.setdefault(request.sample_index, _Gain(logprobs=None if logprobs is None else []))
            ids = request.output_token_ids[gain.num_tokens_seen:]
            if logprobs is not None and gain.logprobs is not None:
                gain.logprobs += logprobs[gain.num_tokens_seen:]
            gain.texts.append(text[gain.num_chars_seen:])
            gain.token_ids += ids
            gain.num_chars_seen, gain.num_tokens_seen = len(text), gain.num_tokens_seen + len(ids)
            gain.end, gain.is_new = end, True
            signalled, self._is_signalled = self._is_signalled, True
            return not signalled

    def fail(self, error: JaxInferError) -> None:
        """Ends the stream with an error. Called by any thread."""
        with self._lock:
            self._error = self._error or error
        wake(self.loop, [self])

    def notice(self) -> None:
        """Lets take() go on. Called on the loop."""
        self._news.set()


def wake(loop: asyncio.AbstractEventLoop, streams: Sequence[Stream]) -> bool:
    """Wakes the consumers of one loop; False if it is closed."""
    try:
        loop.call_soon_threadsafe(_notice, streams)
    except RuntimeError:  # asyncio's answer where the loop is closed
        return False
    return True


def _notice(streams: Iterable[Stream]) -> None:
    for stream in streams:
        stream.notice()
