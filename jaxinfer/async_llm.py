"""The asyncio facade: deltas as they come. The event loop never waits for the engine, nor the engine for a consumer."""

import asyncio
import concurrent.futures
import functools
import itertools
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.config import SERVING_SCHEDULER_STEPS
from jaxinfer.errors import RequestError
from jaxinfer.llm import LLM
from jaxinfer.request import CompletionDelta
from jaxinfer.sampling.params import SamplingParams

if TYPE_CHECKING:
    from jaxinfer.engine.load import LoadedModel
    from jaxinfer.groups import Messages, Prompt
    from jaxinfer.streams import Stream
    from jaxinfer.tokenizer import Tokenizer


class AsyncLLM:
    """A model ready to generate for many tasks at once, whose requests share every step.

        async with AsyncLLM(model="DIR") as llm:
            async for delta in llm.generate("Hello", SamplingParams(max_tokens=64)):
                print(delta.text, end="")

    A thread of its own steps the engine. Starting blocks for as long as LLM does: on a running loop, use asyncio.to_thread.

    Args:
      model: as LLM takes it.
      settings: fields of EngineConfig. num_scheduler_steps is 1 where it is left open: a request that comes during a burst would wait
        for its end and for the one behind it, and deltas would come several tokens at a time. Where few requests share short steps
        (int4, a small model) and the first token may wait for as many steps, 8 is faster.

    Raises:
      ConfigError, CheckpointError, CapacityError: as LLM does.
    """

    def __init__(self, model: str | Path, **settings: Any) -> None:
        self._start(LLM(model, **_for_serving(settings)))

    @classmethod
    def from_model(cls, model: "LoadedModel", *, tokenizer: "Tokenizer | None" = None, **settings: Any) -> "AsyncLLM":
        """An AsyncLLM over weights that are already on the device; they are shared, not copied."""
        return cls.from_llm(LLM.from_model(model, tokenizer=tokenizer, **_for_serving(settings)))

    @classmethod
    def from_llm(cls, llm: LLM) -> "AsyncLLM":
        """Serves an LLM's engine, in bursts where the LLM was made for them. The LLM must not be used directly until shutdown(); then it
        can be again."""
        made = cls.__new__(cls)
        made._start(llm)
        return made

    def _start(self, llm: LLM) -> None:
        from jaxinfer.stepper import Stepper

        self._llm = llm
        self.engine, self.config, self.tokenizer = llm.engine, llm.config, llm.tokenizer
        self._reader = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="jaxinfer-reader")  # one: prompts keep their order
        self._open: dict[str, Stream] = {}
        self._numbers = itertools.count()
        self._stepper = Stepper(llm.engine, llm.groups)
        weakref.finalize(self, self._stepper.stop)  # also before the interpreter exits

    async def generate(self, prompt: "Prompt", params: SamplingParams | None = None, *, request_id: str | None = None, priority: int = 0,
                       deadline_s: float | None = None) -> AsyncGenerator[CompletionDelta]:
        """Completes one prompt; yields what is new, for each of its n completions apart.

        A consumer that falls behind gets larger deltas. One that stops (its task is cancelled, or it closes or drops the generator)
        withdraws the request, and its pages are free before the next step.

        Args:
          prompt: a text, or a mapping {"prompt_token_ids": [...]}, {"prompt": "..."} or {"messages": [...]}.
          params: default SamplingParams().
          request_id: names it for abort(); default a number.
          priority: as in LLM.generate.
          deadline_s: as in LLM.generate.

        Yields:
          At least one delta a completion; the last one of each has `finished`.

        Raises:
          RequestError: the prompt cannot be served, or the request_id is in use.
          EngineError: a step failed, the engine is asleep, or this AsyncLLM was shut down.
        """
        from jaxinfer.engine.requests import read_params
        from jaxinfer.streams import Stream

        self._stepper.check()
        loop = asyncio.get_running_loop()
        stream = Stream(loop=loop, arrival_time=time.monotonic())
        name = self._register(stream, request_id)
        try:
            read = functools.partial(self._llm.groups.make, prompt, read_params(params, 1)[0], request_id=name, priority=priority,
                                     deadline_s=deadline_s)
            stream.group = await loop.run_in_executor(self._reader, read)
            self._stepper.open(stream)
            if stream.is_aborted:
                self._stepper.abort(stream)
            while not stream.is_done:
                for delta in await stream.take():
                    yield delta
        finally:
            self._stepper.withdraw(stream)
            if self._open.get(name) is stream:
                del self._open[name]

    def chat(self, messages: "Messages", params: SamplingParams | None = None, *, request_id: str | None = None, priority: int = 0,
             deadline_s: float | None = None) -> AsyncGenerator[CompletionDelta]:
        """Answers one conversation, a list of {"role", "content"}, through the model's chat template; else as generate."""
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
            raise RequestError(f"messages of type {type(messages).__name__}: give a list of {{'role': ..., 'content': ...}}.")
        return self.generate({"messages": messages}, params, request_id=request_id, priority=priority, deadline_s=deadline_s)

    async def abort(self, request_id: str) -> bool:
        """Ends a request where it stands: its consumer gets what there is, with the finish reason "abort".

        Returns:
          Whether it was still being served.
        """
        stream = self._open.get(request_id)
        if stream is None:
            return False
        stream.is_aborted = True
        if stream.group is None:  # generate does it once the prompt is read
            return True
        return await asyncio.wrap_future(self._stepper.abort(stream))

    async def update_weights(self, params: Mapping[str, Any], *, wait: bool = False) -> None:
        """LLM.update_weights between two steps. wait: once all open requests have ended; those that come meanwhile queue behind it."""
        await self._between_steps(functools.partial(self._llm.update_weights, params), wait)

    async def sleep(self, level: int = 1, *, wait: bool = False) -> None:
        """LLM.sleep. wait: as for update_weights; but those that come meanwhile are refused, as all are while asleep."""
        await self._between_steps(functools.partial(self._llm.sleep, level), wait)

    async def wake(self) -> None:
        """LLM.wake."""
        await self._between_steps(self._llm.wake, False)

    async def _between_steps(self, work: Callable[[], None], when_idle: bool) -> None:
        await asyncio.wrap_future(self._stepper.call(work, when_idle=when_idle))

    def metrics(self) -> dict[str, Any]:
        """LLM.metrics."""
        return self._llm.metrics()

    def reset_metrics(self) -> None:
        """LLM.reset_metrics."""
        self._llm.reset_metrics()

    def check_health(self) -> None:
        """Raises EngineError where nothing can be served any more: a step failed, or this AsyncLLM was shut down."""
        self._stepper.check()

    async def shutdown(self) -> None:
        """Ends the thread. What is open ends with the finish reason "abort"; later calls get an EngineError."""
        await asyncio.to_thread(self._stepper.stop)
        self._reader.shutdown(wait=False)

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    def _register(self, stream: "Stream", request_id: str | None) -> str:
        """The request's name, now taken."""
        if request_id is None:
            request_id = next(name for name in map(str, self._numbers) if name not in self._open)
        elif not isinstance(request_id, str) or not request_id:
            raise RequestError(f"request_id = {request_id!r}: must be a text that is not empty.")
        elif request_id in self._open and not self._open[request_id].loop.is_closed():  # a closed loop lets nobody withdraw
            raise RequestError(f"request_id = {request_id!r} belongs to a request that is being served: choose another or wait for its end.")
        self._open[request_id] = stream
        return request_id


def _for_serving(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with what is left open and differs from LLM's choice."""
    given = settings.get("num_scheduler_steps")
    return {**settings, "num_scheduler_steps": SERVING_SCHEDULER_STEPS if given is None else given}
