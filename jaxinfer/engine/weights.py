"""The weights of a live engine: exchanged without a compile, put to sleep and woken. Decides nothing about requests: none runs meanwhile."""

import dataclasses
import difflib
import logging
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxinfer.engine.compiled import CompiledSteps
from jaxinfer.engine.load import LoadedModel
from jaxinfer.engine.placement import lying_as
from jaxinfer.errors import CapacityError, CheckpointError, ConfigError, EngineError
from jaxinfer.scheduler.pages import PageAllocator

logger = logging.getLogger(__name__)

_MAX_NAMED = 20  # wrong tensors that one message names


class Weights:
    """Owns the engine's reference to its model, and hands the executables the weights that they run on.

    Awake: `model` and the executables share the same arrays. Asleep: neither has any, and the device's state is freed.

    Args:
      model: what the engine was started with.
      steps: its executables.
      pages: its pool; all of it is free whenever a method is called.
    """

    def __init__(self, model: LoadedModel, steps: CompiledSteps, pages: PageAllocator) -> None:
        self.model = model
        self._steps = steps
        self._pages = pages
        self._specs = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in model.params.items()}
        self._level = 0
        self._on_host: dict[str, np.ndarray] = {}

    @property
    def is_asleep(self) -> bool:
        return self._level > 0

    def check_awake(self) -> None:
        """Raises EngineError while asleep."""
        if self._level:
            first = "update_weights(params) with all weights, then " if self._level == 2 else ""
            raise EngineError(f"this LLM is asleep (level {self._level}): call {first}wake() before it is used.")

    def update(self, params: Mapping[str, Any]) -> None:
        """Exchanges all or some weights; see LLM.update_weights. Asleep at level 2 they are kept for wake()."""
        if self._level == 1:
            self.check_awake()
        self._check(params)
        start = time.perf_counter()
        with self._steps.aside():
            placed = {name: _placed(x, self._specs[name]) for name, x in params.items()}
        self._use({**self.model.params, **placed})
        self._forget_prefixes()
        logger.info("%d of %d weights exchanged in %.3f s", len(placed), len(self._specs), time.perf_counter() - start)

    def sleep(self, level: int) -> None:
        """Frees the device's state and lets go of the weights; level 1 copies them to the host first."""
        if level not in (1, 2) or isinstance(level, bool):
            raise ConfigError(f"sleep level = {level!r}: must be 1 (weights move to host memory) or 2 (weights are dropped).")
        self.check_awake()
        if level == 1:
            self._on_host = {name: np.asarray(x) for name, x in self.model.params.items()}
        self._forget_prefixes()
        self._steps.free_state()
        self._use({})
        self._level = level

    def wake(self) -> None:
        """Brings back the weights and an empty device state; where that fails, the engine stays asleep."""
        if not self._level:
            return
        missing = [name for name in self._specs if name not in self.model.params and name not in self._on_host]
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise EngineError(f"sleep(level=2) dropped the weights and {len(missing)} of {len(self._specs)} are missing "
                              f"({', '.join(missing[:5])}{more}): call update_weights(params) with them before wake().")
        before = self.model.params
        try:
            self._use({name: before[name] if name in before else jax.device_put(self._on_host[name], spec.sharding)
                       for name, spec in self._specs.items()})
            jax.block_until_ready(self.model.params)
            self._steps.renew_state()
        except (jax.errors.JaxRuntimeError, CapacityError) as error:
            self._use(before)
            raise CapacityError(f"the engine stays asleep, since its weights ({sum(map(_nbytes, self._specs.values())) / 1e9:.2f} GB) and its "
                                f"KV pool ({self._steps.resolved.memory.kv_bytes / 1e9:.2f} GB) do not fit beside what else is on the device: "
                                f"free some of that and call wake() again. ({' '.join(str(error).split())[:300]})") from error
        self._on_host, self._level = {}, 0

    def _use(self, params: dict[str, jax.Array]) -> None:
        self.model = dataclasses.replace(self.model, params=params)
        self._steps.params = params

    def _forget_prefixes(self) -> None:
        """Empties the prefix cache, whose pages are of the weights before."""
        assert self._pages.num_free == self._pages.capacity, "a sequence owns pages though nothing runs"
        self._pages.evict_all()

    def _check(self, params: Mapping[str, Any]) -> None:
        """Refuses what is not exactly of the shapes and dtypes that the executables were compiled for."""
        if not isinstance(params, Mapping) or not params:
            raise CheckpointError(f"weights of type {type(params).__name__} with {len(params) if isinstance(params, Mapping) else 'no'} names: "
                                  "give a mapping from dotted path to array, such as llm.engine.model.params, or a part of it.")
        problems = [problem for name, x in params.items() if (problem := self._problem(name, x)) is not None]
        if problems:
            more = f"; and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
            raise CheckpointError(f"{len(problems)} of {len(params)} weights do not fit this engine, and none was taken: "
                                  f"{'; '.join(problems[:_MAX_NAMED])}{more}. Give arrays of the shapes and dtypes in llm.engine.model.params.")

    def _problem(self, name: Any, x: Any) -> str | None:
        """Why an array cannot take a weight's place."""
        spec = self._specs.get(name)
        if spec is None:
            near = difflib.get_close_matches(str(name), self._specs, n=1)
            return f"{name!r} is not part of the model" + (f" (did you mean {near[0]!r}?)" if near else "")
        if not isinstance(x, jax.Array | np.ndarray):
            return f"{name} is a {type(x).__name__} instead of an array"
        if isinstance(x, jax.core.Tracer):
            return f"{name} is traced: call update_weights outside jit"
        if tuple(x.shape) != spec.shape:
            return f"{name} has the shape {list(x.shape)} instead of {list(spec.shape)}"
        if x.dtype != spec.dtype:
            return f"{name} has the dtype {x.dtype} instead of {spec.dtype}"
        if isinstance(x, jax.Array) and x.is_deleted():
            return f"{name} was deleted, as donated arrays are"
        return None


def _placed(x: jax.Array | np.ndarray, spec: jax.ShapeDtypeStruct) -> jax.Array:
    """The array's own buffers where they lie as the executables expect them, else a copy that does."""
    if not isinstance(x, jax.Array):
        return jax.device_put(np.array(x), spec.sharding)  # a CPU's device would share the caller's memory
    seen = lying_as(x, spec.sharding)
    return jax.device_put(x, spec.sharding) if seen is None else seen


def _nbytes(spec: jax.ShapeDtypeStruct) -> int:
    return int(np.prod(spec.shape)) * spec.dtype.itemsize
