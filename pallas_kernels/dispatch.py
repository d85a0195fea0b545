"""Which implementation of an op runs, decided before anything is compiled. Computes nothing and never falls back on an exception."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import export
from jax.extend import backend as jex_backend

logger = logging.getLogger(__name__)


class KernelError(Exception):
    """Base of every error that a caller of this package can cause. `reason` is what it says without its advice on an op's arguments, for who
    has other arguments to advise on."""

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = message if reason is None else reason


class ContractError(KernelError, ValueError):
    """Arguments whose shapes, dtypes or values break an op's contract."""


class Unsupported(KernelError):
    """An implementation cannot do a case. `supports` returns it; a forced choice raises it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The device that a call will run on."""

    platform: str
    """'cpu' or 'gpu'."""
    compute_capability: tuple[int, int] | None
    """(8, 0) for an A100, (9, 0) for H100 and H200; None where the device has none."""
    device_kind: str
    """The device's name, for messages."""
    interpret: bool = False
    """GPU kernels run in Pallas's interpreter on the CPU, as their numeric tests do; False wherever speed matters."""

    @property
    def shared_memory_bytes(self) -> int:
        """Bytes of shared memory that one block may take: 163 KiB on sm_80, 99 KiB on sm_86/89, 227 KiB from sm_90 on, 0 without."""
        if self.compute_capability is None:
            return 0
        return {(8, 0): 163, (8, 7): 163, (8, 6): 99, (8, 9): 99}.get(self.compute_capability, 227) * 1024


def current_target() -> Target:
    """The target of a call made now: jax's default device, so `jax.default_device(...)` selects another one, absent GPUs included."""
    device = jex_backend.get_default_device()
    capability = getattr(device, "compute_capability", None)
    platform = "gpu" if device.platform in ("gpu", "cuda", "rocm") else device.platform
    # ROCm reports names such as gfx90a: no compute capability in the sense of this package.
    parsed = tuple(map(int, capability.split("."))) if isinstance(capability, str) and capability[:1].isdigit() else None
    return Target(platform=platform, compute_capability=(parsed[0], parsed[1]) if parsed else None, device_kind=device.device_kind)


def supports_unless[Spec](refusal: Callable[[Spec, Target], str | None]) -> Callable[[Spec, Target], Unsupported | None]:
    """`Implementation.supports` from a function that gives the reason why a case is refused, or None."""
    def supports(spec: Spec, target: Target) -> Unsupported | None:
        reason = refusal(spec, target)
        return None if reason is None else Unsupported(reason)

    return supports


def supports_all(spec: Any, target: Target) -> Unsupported | None:
    """`Implementation.supports` of one that does every case."""
    return None


def always_pays(spec: Any, target: Target) -> str | None:
    """`Implementation.pays` of one that is the best of those that can."""
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementation[Spec]:
    """One row of an op's IMPLS table, which is ordered: the first that supports a case, and pays there, runs."""

    name: str
    """Name for `implementation=...` and for reports."""
    reason: str
    """Why this row is chosen when it is."""
    supports: Callable[[Spec, Target], Unsupported | None]
    """None, or why this implementation cannot (or should not) do the case on the target."""
    run: Callable[..., Any]
    """The op itself: the op's array arguments, then `spec` and `target` by keyword."""
    pays: Callable[[Spec, Target], str | None] = always_pays
    """None, or why a later row does the case better. Asked where nobody forces a choice."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which implementation an op takes, and why; `rejected` lists those that stand before it in the table, with their reasons."""

    op: str
    implementation: str
    reason: str
    rejected: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        rejected = "".join(f"; not {name}: {reason}" for name, reason in self.rejected)
        return f"{self.op}: {self.implementation} ({self.reason}){rejected}"


@functools.lru_cache(maxsize=512)
def traced_once(run: Callable[..., Any], **static: Any) -> Callable[..., Any]:
    """`run` with its static arguments, as one function however often it is called.

    A model calls an op once a layer with the same shapes. Under an outer jit it is then traced once, and all layers' kernels are the
    same to the last byte, debug locations included: Mosaic GPU compiles one kernel, not one a layer (a 28-layer prefill step takes
    minutes otherwise).

    Args:
      run: an implementation's function of arrays.
      static: its keyword arguments, all hashable.
    """
    return jax.jit(functools.partial(run, **static))


# jax.export makes programs for other versions of jax to read, and vouches for no kernel's form there; these never leave the process.
_MOSAIC_CALL = export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")


def lowered_once[Result](run: Callable[..., Result]) -> Callable[..., Result]:
    """An implementation's `run` in Mosaic GPU, whose kernels are lowered once for all programs that call it through `traced_once`.

    A kernel takes 0.1 to 0.4 s of Python to lower, one thread at a time, and a program would lower all of its kernels anew: a loop over a
    step those of the step, a mixed batch the decode kernel that another batch has. So `run` becomes a program of its own (jax.export), which
    every caller embeds as it is. It cannot be batched or differentiated.

    Args:
      run: a function of arrays and static keywords, `target` among them. Interpreted kernels are no programs: they run in place.
    """
    @functools.wraps(run)
    def call(*arrays: Any, target: Target, **static: Any) -> Result:
        bound = functools.partial(run, target=target, **static)
        if target.interpret:
            return bound(*arrays)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
        program = export.export(jax.jit(bound), platforms=("cuda",), disabled_checks=(_MOSAIC_CALL,))(*shapes)
        result: Result = program.call(*arrays)
        return result

    return call


def choose[Spec](op: str, impls: Sequence[Implementation[Spec]], spec: Spec, target: Target,
                 forced: str | None) -> tuple[Choice, Implementation[Spec]]:
    """The first row of `impls` that supports `spec` on `target`, or the forced one.

    Args:
      op: name of the op, for the record.
      impls: the op's table, in order of preference.
      spec: the static facts of the call.
      target: where it will run.
      forced: name of the only row to consider; None for the automatic choice. A forced row never falls back.
    Returns:
      The recorded choice and the row.
    Raises:
      ContractError: no row has the forced name.
      Unsupported: the forced row cannot do the case, or none can.
    """
    names = [impl.name for impl in impls]
    if forced is not None and forced not in names:
        known = f"{op}: implementation = {forced!r} is unknown: give one of {', '.join(names)}"
        raise ContractError(f"{known}, or None to let the op choose.", f"{known}.")
    rejected: list[tuple[str, str]] = []
    for impl in impls:
        if forced is not None and impl.name != forced:
            continue
        refusal = impl.supports(spec, target)
        if refusal is None and forced is None and (reason := impl.pays(spec, target)) is not None:
            refusal = Unsupported(reason)
        if refusal is None:
            choice = Choice(op, impl.name, "asked for by name" if forced else impl.reason, tuple(rejected))
            logger.debug("%s for %s on %s", choice, spec, target)
            return choice, impl
        if forced is not None:
            fact = f"{op}: implementation = {forced!r} cannot do this case: {refusal.reason}."
            raise Unsupported(f"{fact} Give implementation=None to let the op choose among {', '.join(names)}.", fact)
        rejected.append((impl.name, refusal.reason))
    raise Unsupported(f"{op}: no implementation supports {spec} on {target.device_kind}: "
                      + "; ".join(f"{name}: {reason}" for name, reason in rejected) + ".")


def implementation_scope(op: str, implementation: str) -> Any:
    """The named scope of one call, so that profiles and HLO dumps show which implementation ran."""
    return jax.named_scope(f"{op}.{implementation}")
