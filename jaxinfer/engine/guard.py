"""Keeps an engine whole: one caller at a time, no interrupt in the middle of a step, and no use after a step that failed. No jax."""

import contextlib
import signal
import threading
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from jaxinfer.errors import EngineError


class Guard:
    """A context round every use of an engine's state.

    A caller that finds another one inside is refused, not kept waiting. Ctrl-C is put off until the engine is whole again (a second
    one is not). After an exception of `breaks` the state is half changed: every later use is refused, and the message names the cause.

    Args:
      surroundings: makes a context that every use is inside of, too.
    """

    def __init__(self, surroundings: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext) -> None:
        self.surroundings = surroundings
        self._lock = threading.Lock()
        self._cause: BaseException | None = None

    @property
    def is_broken(self) -> bool:
        return self._cause is not None

    def using(self, *spared: type[BaseException]) -> "_Use":
        """The context; an exception breaks the engine unless its type is spared.

        Raises:
          EngineError: on entry, where the engine is broken or in use.
        """
        return _Use(self, spared, refuses=True)

    def if_free(self) -> "_Use":
        """The context that refuses nobody: it gives False, and nothing may be done in it, where the engine is in use."""
        return _Use(self, (), refuses=False)

    def enter(self, *, refuses: bool) -> bool:
        """Takes the engine; says whether it could. Raises as `using`, if it is to refuse."""
        if refuses:
            self._check()
        free = self._lock.acquire(blocking=False)
        if refuses and not free:
            raise EngineError("this LLM is being used by another caller: it serves one thread at a time. Give all prompts to one generate, "
                              "put a lock round the LLM, or give each thread an LLM of its own (LLM.from_model shares the weights).")
        return free

    def leave(self) -> None:
        self._lock.release()

    def _check(self) -> None:
        if self._cause is not None:
            what = f"{type(self._cause).__name__}: {' '.join(str(self._cause).split())[:300]}".rstrip(": ")
            raise EngineError(f"this LLM stopped for good when a step failed ({what}). Make a new one: LLM.from_model(llm.engine.model, "
                              "tokenizer=llm.tokenizer) shares the weights.") from self._cause

    def breaks(self, cause: BaseException) -> None:
        if self._cause is None:
            self._cause = cause


class _Use:
    def __init__(self, guard: Guard, spared: tuple[type[BaseException], ...], *, refuses: bool) -> None:
        self._guard, self._spared, self._refuses = guard, spared, refuses
        self._entered = False
        self._surroundings = guard.surroundings()
        self._interrupts = _DeferredInterrupts()

    def __enter__(self) -> bool:
        self._interrupts.start()
        try:
            self._entered = self._guard.enter(refuses=self._refuses)
        except EngineError:
            self._interrupts.end()
            raise
        self._surroundings.__enter__()
        return self._entered

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        self._surroundings.__exit__(kind, error, trace)
        if self._entered:
            if error is not None and not isinstance(error, self._spared):
                self._guard.breaks(error)
            self._guard.leave()
        self._interrupts.end()


class _DeferredInterrupts:
    """Holds SIGINT back from its handler, which Python calls in the main thread only: elsewhere there is nothing to do."""

    def __init__(self) -> None:
        self._previous: Any = None
        self._pending: tuple[int, types.FrameType | None] | None = None

    def start(self) -> None:
        if threading.current_thread() is threading.main_thread() and callable(previous := signal.getsignal(signal.SIGINT)):
            self._previous = previous
            signal.signal(signal.SIGINT, self._handle)

    def end(self) -> None:
        """Gives the handler back, and the interrupt that came meanwhile."""
        if self._previous is None:
            return
        previous, self._previous = self._previous, None
        signal.signal(signal.SIGINT, previous)
        if self._pending is not None:
            previous(*self._pending)

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        if self._pending is not None:
            self._previous(number, frame)
        self._pending = (number, frame)
