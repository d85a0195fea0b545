"""The thread that steps an engine for consumers on event loops. Decides nothing about requests; what it finds goes into their streams.

    event loop                             engine's thread
    open, withdraw, abort, call -- commands --> carried out between two steps
    Stream.take() <-- one wake-up a step and loop -- Stream.push() of what progressed
"""

import asyncio
import collections
import concurrent.futures
import functools
import queue
import threading
from collections.abc import Callable, Iterable

from jaxinfer.engine.engine import Engine
from jaxinfer.errors import EngineError, JaxInferError
from jaxinfer.groups import Groups, times
from jaxinfer.request import CompletionDelta, FinishReason, Request
from jaxinfer.streams import Stream, wake

type _Command = tuple[Callable[[], None], Callable[[JaxInferError], None]]
"""(the work, who is told that it will not be done)."""


class Stepper:
    """Owns the thread. Its public methods may be called by any thread and wait for nothing, but for stop(wait=True).

    The thread ends by stop(), which aborts what is open, or by an exception in a step, which every open stream then gets as an
    EngineError; afterwards every call is refused with an EngineError that says so.
    """

    def __init__(self, engine: Engine, groups: Groups) -> None:
        self._engine = engine
        self._groups = groups
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}  # by the engine's request ids; the thread's own, as are the next two
        self._when_idle: collections.deque[_Command] = collections.deque()
        self._held_back: list[Stream] = []  # opened while something waits for the engine to be idle
        self._is_stopping = False
        self._lock = threading.Lock()
        self._refusal: str | None = None
        self._cause: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="jaxinfer-engine", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises EngineError where the thread has ended."""
        if self._refusal is not None:
            raise self._refused()

    def open(self, stream: Stream) -> None:
        """Queues a stream's requests; a refusal comes through the stream."""
        self._submit(functools.partial(self._open_or_hold_back, stream), stream.fail)

    def withdraw(self, stream: Stream) -> None:
        """The consumer is gone, or is done: what still runs for it ends. Never refused."""
        stream.is_withdrawn = True
        self._commands.put((functools.partial(self._withdraw, stream), lambda error: None))

    def abort(self, stream: Stream) -> concurrent.futures.Future[bool]:
        """Ends what still runs of an opened stream; its consumer gets the last deltas. Gives whether anything did."""
        return self.call(functools.partial(self._abort, stream))

    def call[R](self, work: Callable[[], R], *, when_idle: bool = False) -> concurrent.futures.Future[R]:
        """Has the thread do some work between two steps, or once nothing runs; streams opened meanwhile then wait for it."""
        future: concurrent.futures.Future[R] = concurrent.futures.Future()
        command = functools.partial(_fulfil, future, work), functools.partial(_refuse, future)
        self._submit(functools.partial(self._when_idle.append, command) if when_idle else command[0], command[1])
        return future

    def stop(self, *, wait: bool = True) -> None:
        """Ends the thread after its step; waits for that at most ten seconds, unless called by it."""
        self._commands.put((self._stop, lambda error: None))
        if wait and threading.current_thread() is not self._thread:
            self._thread.join(timeout=10)

    def _submit(self, work: Callable[[], None], refuse: Callable[[JaxInferError], None]) -> None:
        with self._lock:  # whatever is queued before _end() takes it is either done or refused
            self.check()
            self._commands.put((work, refuse))

    def _refused(self) -> EngineError:
        error = EngineError(self._refusal)
        error.__cause__ = self._cause
        return error

    # The thread.

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._carry_out_commands()
                if self._engine.has_work and not self._is_stopping:
                    self._publish(self._engine.step())
            for stream in dict.fromkeys(self._streams.values()):
                self._abort(stream)
        except BaseException as error:
            what = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".rstrip(": ")
            self._end(f"this AsyncLLM stopped for good when a step failed ({what}). Make a new one: AsyncLLM.from_model(model, "
                      "tokenizer=...) shares weights that are still there.", error)
            raise
        self._end("this AsyncLLM was shut down: make a new one.", None)

    def _carry_out_commands(self) -> None:
        """Does what was asked; where there is nothing else to do, waits until something is."""
        may_wait = not (self._engine.has_work or self._when_idle)
        while True:
            try:
                work, _ = self._commands.get(block=may_wait)
            except queue.Empty:
                break
            may_wait = False
            work()
        if self._when_idle and not self._engine.has_work:
            while self._when_idle:
                self._when_idle.popleft()[0]()
            held_back, self._held_back = self._held_back, []
            for stream in held_back:
                self._open(stream)

    def _open_or_hold_back(self, stream: Stream) -> None:
        if self._when_idle:
            self._held_back.append(stream)
        else:
            self._open(stream)

    def _open(self, stream: Stream) -> None:
        assert stream.group is not None
        if stream.is_withdrawn:
            return
        try:
            self._groups.add(stream.group, arrival_time=stream.arrival_time)
        except JaxInferError as error:
            self._groups.finish(stream.group)
            stream.fail(error)
            return
        self._streams |= {request.request_id: stream for request in stream.requests}

    def _withdraw(self, stream: Stream) -> None:
        if stream.group is not None and any([self._streams.pop(r.request_id, None) is not None for r in stream.requests]):
            self._groups.finish(stream.group)

    def _abort(self, stream: Stream) -> bool:
        if stream in self._held_back:
            self._held_back.remove(stream)
            self._open(stream)
        running = [r for r in stream.requests if r.request_id in self._streams]
        for request in running:
            self._engine.abort(request)
        self._publish(running)
        return bool(running)

    def _publish(self, requests: Iterable[Request]) -> None:
        """Pushes what progressed to its streams and wakes their consumers, once a loop."""
        woken: dict[asyncio.AbstractEventLoop, list[Stream]] = {}
        for request in requests:
            stream = self._streams.get(request.request_id)
            if stream is None:  # another caller's
                continue
            text, _ = self._engine.outputs.text(request)
            has_news = stream.push(request, text, self._engine.outputs.logprobs(request)[0], self._end_of(request, stream))
            if has_news or stream.loop.is_closed():  # who was woken and closed its loop before it looked is gone, too
                woken.setdefault(stream.loop, []).append(stream)
            if request.is_finished:
                del self._streams[request.request_id]
                if stream.group is not None and not any(r.request_id in self._streams for r in stream.requests):
                    self._groups.finish(stream.group)
        for loop, streams in woken.items():
            if not wake(loop, streams):
                for stream in streams:
                    self._withdraw(stream)

    def _end_of(self, request: Request, stream: Stream) -> CompletionDelta | None:
        """The last delta of a completion that has ended, without its text and ids."""
        if request.finish_reason is None or stream.group is None:
            return None
        outputs = self._engine.outputs
        error = self._groups.why_failed(request) if request.finish_reason is FinishReason.ERROR else None
        return CompletionDelta(
            request_id=stream.group.request_id, index=request.sample_index, text="", token_ids=(), logprobs=None,
            prompt_token_ids=request.prompt_token_ids, num_cached_tokens=stream.requests[0].num_cached_tokens,
            finish_reason=request.finish_reason, stop_reason=outputs.text(request)[1], cumulative_logprob=outputs.logprobs(request)[1],
            prompt_logprobs=outputs.prompt_logprobs(request), error=error, metrics=times([request]))

    def _stop(self) -> None:
        self._is_stopping = True

    def _end(self, refusal: str, cause: BaseException | None) -> None:
        """Tells everybody who still waits, and from now on everybody who comes."""
        with self._lock:
            self._refusal, self._cause = refusal, cause
        for stream in dict.fromkeys([*self._streams.values(), *self._held_back]):
            stream.fail(self._refused())
            self._withdraw(stream)
        for _, refuse in [*self._when_idle, *_taken(self._commands)]:
            refuse(self._refused())


def _taken(commands: queue.SimpleQueue[_Command]) -> list[_Command]:
    """All that a queue holds."""
    taken: list[_Command] = []
    while not commands.empty():
        taken.append(commands.get())
    return taken


def _fulfil[R](future: concurrent.futures.Future[R], work: Callable[[], R]) -> None:
    """Does a future's work; what it refuses is the caller's affair alone, any other exception ends the thread too."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except JaxInferError as error:
        future.set_exception(error)
        return
    except BaseException as error:
        future.set_exception(error)
        raise
    future.set_result(result)


def _refuse(future: concurrent.futures.Future, error: JaxInferError) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
