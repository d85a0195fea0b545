"""Keeps Ctrl-C and SIGTERM from getting lost while a checkpoint is converted. Decides nothing about what they do."""

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class Interruption:
    """While entered, an exception that a signal's handler raises ends the work for certain, if a little later.

    Python runs a handler between any two instructions, in callbacks too, and there it prints the exception and drops it; jax has
    such a callback in every garbage collection. So what a handler raises is noted, and `check` raises it anew. Handlers that are set
    when this is entered keep their meaning. Outside the main thread, where no handler runs, it does nothing.
    """

    def __init__(self) -> None:
        self._raised: BaseException | None = None
        self._previous: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def __enter__(self) -> "Interruption":
        self._hook = sys.unraisablehook
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                previous = signal.getsignal(number)
                if callable(previous):
                    self._previous[number] = previous
                    signal.signal(number, self._handle)
        if self._previous:
            sys.unraisablehook = self._unraisable
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        if self._previous:
            sys.unraisablehook = self._hook

    def check(self) -> None:
        """Raises what a handler raised and nobody saw."""
        if self._raised is not None:
            raise self._raised

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            self._previous[number](number, frame)
        except BaseException as error:
            self._raised = error
            raise

    def _unraisable(self, dropped: "sys.UnraisableHookArgs") -> None:
        """Keeps quiet about what `check` will raise."""
        if self._raised is None or dropped.exc_value is not self._raised:
            self._hook(dropped)
