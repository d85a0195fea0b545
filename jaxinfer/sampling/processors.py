"""Logit processors that users register: pure functions which become part of the sampler's executable. Their registry, and their stage.

They come after rules and penalties and before temperature. What is barred stays barred, whatever a processor gives it.
"""

import dataclasses
import keyword
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.errors import ConfigError, RequestError
from jaxinfer.sampling.params import MAX_PROCESSOR_NUMBER
from jaxinfer.state import NUM_RECENT, PROMPT_BIT, SamplingState, SlotTables


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessorContext:
    """What a processor may look at beside the logits. Rows that did not ask for it hold any values."""

    counts: jax.Array         # [B, V] int32; times that the output holds a token
    in_prompt: jax.Array      # [B, V] bool; the prompt holds it
    recent_tokens: jax.Array  # [B, NUM_RECENT - 1] int32; the output's last tokens, the last one last; -1 before the output's first
    num_outputs: jax.Array    # [B] int32; tokens of the output so far
    prompt_lens: jax.Array    # [B] int32


type ProcessorFunction = Callable[[jax.Array, Mapping[str, jax.Array], ProcessorContext], jax.Array]
"""(logits [B, V] float32, -inf where barred; parameters by name, each [B] float32; context) -> logits [B, V] float32.

Pure and traceable; each row's logits depend on that row alone. A token is barred by -inf."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogitsProcessor:
    """A registered processor."""

    name: str
    function: ProcessorFunction
    params: tuple[tuple[str, float | None], ...]
    """(name, default) of each parameter; None: a request must give it."""


_REGISTERED: dict[str, LogitsProcessor] = {}


def register_logits_processor(name: str, function: ProcessorFunction, params: Mapping[str, float | None] | None = None) -> None:
    """Makes a processor available to requests, as SamplingParams(logits_processors={name: {parameter: number}}).

    It is compiled into the sampler of every engine that starts from now on; engines that run already do not have it.

    Args:
      name: a new one, as an identifier.
      function: see ProcessorFunction.
      params: parameter -> default; None where a request must give a number.

    Raises:
      ConfigError: the name is taken or no identifier, or a default is no number.
    """
    params = dict(params or {})
    if name in _REGISTERED:
        raise ConfigError(f"logits processor {name!r} exists already: choose another name than {', '.join(sorted(_REGISTERED))}.")
    for given in (name, *params):
        if not isinstance(given, str) or not given.isidentifier() or keyword.iskeyword(given):
            raise ConfigError(f"logits processor {name!r}: {given!r} must be an identifier.")
    for key, default in params.items():
        if default is not None and (isinstance(default, bool) or not isinstance(default, int | float)
                                    or not abs(default) <= MAX_PROCESSOR_NUMBER):
            raise ConfigError(f"logits processor {name!r}: the default {default!r:.80} of {key!r} must be a finite number in "
                              f"[-{MAX_PROCESSOR_NUMBER:g}, {MAX_PROCESSOR_NUMBER:g}], or None where a request must give one.")
    if not callable(function):
        raise ConfigError(f"logits processor {name!r}: a {type(function).__name__} is no function.")
    _REGISTERED[name] = LogitsProcessor(name=name, function=function, params=tuple(params.items()))


def registered_processors() -> "ProcessorTable":
    """The processors registered so far."""
    return ProcessorTable(processors=tuple(_REGISTERED.values()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessorTable:
    """The processors of one engine, and how a slot's words hold their parameters. Hashable: static under jit.

        words   on | p0 | p1 | on | p0 | ...      one processor after the other; on is 1 where the request asks for it
    """

    processors: tuple[LogitsProcessor, ...]

    @property
    def num_words(self) -> int:
        """Words of a slot; one, unused, without processors: XLA crashes on an empty array in a program over several CPU devices."""
        return max(sum(1 + len(p.params) for p in self.processors), 1)

    def check_functions(self, vocab_size: int) -> None:
        """Traces every function once, on two rows.

        Raises:
          ConfigError: a function that cannot be traced, or does not give float32 logits of the same shape.
        """
        rows = 2
        logits, counts, one = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (
            ((rows, vocab_size), jnp.float32), ((rows, vocab_size), jnp.int32), ((rows,), jnp.int32)))
        recent, number = jax.ShapeDtypeStruct((rows, NUM_RECENT - 1), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.float32)
        for p in self.processors:
            def call(logits: jax.Array, numbers: dict[str, jax.Array], counts: jax.Array, recent: jax.Array, one: jax.Array,
                     function: ProcessorFunction = p.function) -> jax.Array:
                return function(logits, numbers, ProcessorContext(counts=counts, in_prompt=counts > 0, recent_tokens=recent, num_outputs=one,
                                                                  prompt_lens=one))

            try:
                out = jax.eval_shape(call, logits, {key: number for key, _ in p.params}, counts, recent, one)
            except (TypeError, ValueError, LookupError, AttributeError) as error:  # jax's own are TypeErrors and ValueErrors
                raise ConfigError(f"logits processor {p.name!r} cannot be traced ({type(error).__name__}: {str(error):.200}): it must be a "
                                  f"pure jax function of logits {logits.shape} and of parameters {number.shape} each.") from error
            shape, dtype = getattr(out, "shape", None), getattr(out, "dtype", None)
            if (shape, dtype) != (logits.shape, logits.dtype):
                raise ConfigError(f"logits processor {p.name!r} gives {dtype} {shape} for float32 logits {logits.shape}: it must give the same "
                                  "shape and dtype.")

    def check(self, given: Mapping[str, Mapping[str, float]] | None) -> None:
        """Checks what a request asks for.

        Raises:
          RequestError: an unknown processor or parameter, or a parameter that is missing.
        """
        known = {p.name: dict(p.params) for p in self.processors}
        for name, values in (given or {}).items():
            if name not in known:
                listed = ", ".join(sorted(known)) or "none"
                raise RequestError(f"logits_processors: {name!r} is not one of this engine's ({listed}): register it by "
                                   "jaxinfer.register_logits_processor before the engine starts.")
            for key in values:
                if key not in known[name]:
                    raise RequestError(f"logits_processors: {name!r} has no parameter {key!r}: known are "
                                       f"{', '.join(known[name]) or 'none'}.")
            missing = [key for key, default in known[name].items() if default is None and key not in values]
            if missing:
                raise RequestError(f"logits_processors: {name!r} needs {' and '.join(missing)}: give a number for each.")

    def words(self, given: Mapping[str, Mapping[str, float]] | None) -> np.ndarray:
        """[num_words] float32 of a request whose mapping has passed check()."""
        out: list[float] = []
        for p in self.processors:
            values = (given or {}).get(p.name)
            out += [float(values is not None), *((values or {}).get(key, default or 0.0) for key, default in p.params)]
        return np.asarray(out or [0.0], np.float32)

    def apply(self, logits: jax.Array, sampling: SamplingState, slots: SlotTables) -> jax.Array:
        """The logits after the processors that each row asks for, in the order of registration; other rows keep theirs bit for bit.

        Args:
          logits: [B, V] float32, -inf where barred.
          sampling: per-row settings.
          slots: counts, recent tokens and parameters of the rows' slots.

        Returns:
          [B, V] float32.
        """
        start = 0
        for p in self.processors:
            logits = self._apply_one(p, start, logits, sampling, slots)
            start += 1 + len(p.params)
        return logits

    def _apply_one(self, p: LogitsProcessor, start: int, logits: jax.Array, sampling: SamplingState, slots: SlotTables) -> jax.Array:
        words = jnp.asarray(slots.rules.processor_words)[sampling.slots, start:start + 1 + len(p.params)]
        on = (sampling.has_processors > 0) & (words[:, 0] != 0)

        def process(x: jax.Array) -> jax.Array:
            with jax.named_scope(p.name):
                numbers = {key: words[:, 1 + i] for i, (key, _) in enumerate(p.params)}
                return jnp.where(on[:, None] & (x > -jnp.inf), p.function(x, numbers, context_of(sampling, slots)), x)

        return lax.cond(jnp.any(on), process, lambda x: x, logits)


NO_PROCESSORS = ProcessorTable(processors=())


def context_of(sampling: SamplingState, slots: SlotTables) -> ProcessorContext:
    """The context of a step's rows."""
    counts = slots.counts[sampling.slots]
    position = sampling.position[:, None] - jnp.arange(NUM_RECENT - 1, 0, -1)  # the step has written over the column of the oldest
    recent = slots.recent_tokens[sampling.slots[:, None], position % NUM_RECENT]
    return ProcessorContext(
        counts=counts & (PROMPT_BIT - 1), in_prompt=(counts & PROMPT_BIT) != 0,
        recent_tokens=jnp.where(position >= sampling.prompt_lens[:, None], recent, -1),
        num_outputs=sampling.position - sampling.prompt_lens, prompt_lens=sampling.prompt_lens)
