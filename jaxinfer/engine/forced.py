"""Implementations that the settings name: read from them, and refused, before anything compiles, where one cannot do what it is named for."""

import dataclasses
from collections.abc import Callable

from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError
from jaxinfer.layers.forced import ForcedKernels
from pallas_kernels.dispatch import Choice, KernelError, Target, Unsupported


def forced_kernels(engine: EngineConfig) -> ForcedKernels:
    """The implementations named: the setting norm_implementation says `norm`, and so on."""
    named = {field.name: getattr(engine, f"{field.name}_implementation") for field in dataclasses.fields(ForcedKernels)}
    return ForcedKernels(**{op: None if name == "auto" else name for op, name in named.items()})


def choice_of(op: str, choose: Callable[..., Choice], spec: object, target: Target, forced: ForcedKernels, *, where: str) -> Choice:
    """Which implementation a call takes, and why.

    Args:
      op: a field of ForcedKernels.
      choose: the op's function of spec, target and a forced name.
      spec: the static facts of the call.
      target: where it will run.
      forced: the implementations that the settings name.
      where: the call in a message, such as 'bucket 8'.

    Raises:
      ConfigError: the op has no implementation of the name that its setting gives, or one that cannot do this call.
    """
    name = getattr(forced, op)
    try:
        return choose(spec, target, implementation=name)
    except KernelError as error:
        place = f" in {where}" if isinstance(error, Unsupported) else ""
        raise ConfigError(f"{op}_implementation = {name!r}{place}: {error.reason} 'auto' lets it choose.") from error
