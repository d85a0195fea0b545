"""A conversation at a terminal: reads lines, streams answers, keeps the history. Knows no flags."""

import signal
import sys
import types
from collections.abc import Iterator
from typing import Any, Protocol

from jaxinfer.errors import RequestError
from jaxinfer.request import RequestOutput
from jaxinfer.sampling.params import SamplingParams

HELP = "Commands: /reset forgets the conversation, /exit or Ctrl-D ends, /help shows this, Ctrl-C stops an answer."


class Streams(Protocol):
    """What is needed of an LLM."""

    def stream(self, prompt: Any, params: SamplingParams | None = None, *, priority: int = 0,
               deadline_s: float | None = None) -> Iterator[RequestOutput]: ...


class Interrupt:
    """While entered, the first Ctrl-C only sets `requested`, so that the engine is left between two steps; a second one raises."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> "Interrupt":
        self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


def print_stream(llm: Streams, prompt: Any, params: SamplingParams, *, priority: int = 0,
                 deadline_s: float | None = None) -> tuple[RequestOutput | None, bool]:
    """Prints one completion as it grows, then ends the line.

    Returns:
      (the last output, None if none came; whether Ctrl-C stopped it).
    """
    shown, output = 0, None
    stream = llm.stream(prompt, params, priority=priority, deadline_s=deadline_s)
    with Interrupt() as interrupt:
        try:
            for output in stream:
                text = output.outputs[0].text
                print(text[shown:], end="", flush=True)
                shown = len(text)
                if interrupt.requested:
                    break
        finally:
            close = getattr(stream, "close", None)
            if close is not None:
                close()  # withdraws the request
    print(flush=True)
    return output, interrupt.requested


class Conversation:
    """The loop of --chat."""

    def __init__(self, llm: Streams, params: SamplingParams, system: str | None) -> None:
        self._llm, self._params = llm, params
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = list(self._opening)
        self.num_answers = 0

    def run(self) -> None:
        """Reads and answers until the input ends or /exit."""
        _enable_line_editing()
        if sys.stdin.isatty():
            print(HELP, file=sys.stderr)
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "")
            except EOFError:
                return
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /exit ends)", file=sys.stderr)
                continue
            if not self._take(line.strip()):
                return

    def _take(self, line: str) -> bool:
        """Handles one line; False ends the conversation."""
        if line == "/exit":
            return False
        if line == "/reset":
            self.messages = list(self._opening)
            print("(conversation forgotten)", file=sys.stderr)
        elif line == "/help":
            print(HELP, file=sys.stderr)
        elif line.startswith("/") and line[1:].isalpha():
            print(f"unknown command {line!r}. {HELP}", file=sys.stderr)
        elif line:
            self._answer(line)
        return True

    def _answer(self, text: str) -> None:
        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            output, stopped = print_stream(self._llm, asked, self._params)
        except RequestError as e:
            print(f"error: {e}\n(this turn was dropped; /reset starts anew)", file=sys.stderr)
            return
        if stopped:
            print("(stopped)", file=sys.stderr)
        if output is not None and output.outputs[0].text:
            self.messages = [*asked, {"role": "assistant", "content": output.outputs[0].text}]
            self.num_answers += 1


def _enable_line_editing() -> None:
    try:
        import readline  # noqa: F401  importing it gives input() a history and editing
    except ImportError:
        return  # a Python built without it: plain lines
