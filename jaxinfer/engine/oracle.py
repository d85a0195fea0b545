"""Runs a function one operation after the other and finds the one where numbers first went wrong. Compiles no whole function; for
replays on a CPU, where a model takes seconds a step this way."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """Where NaN or infinity first appeared."""

    scope: str
    """The named scopes round the operation, for example layer_1/mlp/down."""
    operation: str
    """The operation, as jax names it."""
    cause: str
    """'NaN from finite inputs', or the argument that held it: 'its input weights layers.1.mlp.down.weight holds NaN'."""

    def __str__(self) -> str:
        return f"{self.scope or 'the top level'}: {self.operation}, {self.cause}"


@dataclasses.dataclass(kw_only=True)
class _Value:
    """An array under way, and why it is not finite, as far as that is known."""

    array: Any
    name: str | None = None
    """Of an argument."""
    origin: Origin | None = None


def run_traced(function: Callable[[dict[str, Any]], Any], args: dict[str, Any]) -> tuple[Any, list[Origin | None]]:
    """Calls a function of arrays, one operation after the other.

    Args:
      function: pure and traceable; returns a pytree of arrays.
      args: its argument, what a reader calls each -> a pytree of arrays. NaN or infinity in them is reported only where it reaches the result.

    Returns:
      (the result, one entry for each of its leaves in order: None where it is finite, or where its infinities come from constants of the
      function alone, else the first operation on the way to it whose result was not finite).
    """
    closed, out_shape = jax.make_jaxpr(function, return_shape=True)(args)
    values = [_Value(array=leaf, name=" ".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path))
              for path, leaf in jax.tree_util.tree_leaves_with_path(args)]
    outputs = _evaluate(closed.jaxpr, [_Value(array=c) for c in closed.consts], values, scope="")
    result = jax.tree.unflatten(jax.tree.structure(out_shape), [v.array for v in outputs])
    return result, [_origin_of(v, "", "result") if _non_finite(v.array) else None for v in outputs]


def _evaluate(jaxpr: Any, consts: Sequence[_Value], args: Sequence[_Value], *, scope: str) -> list[_Value]:
    """The outputs of a jaxpr; values are dropped after their last use."""
    values: dict[Any, _Value] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    last_use = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if not isinstance(v, core.Literal)}
    kept = {v for v in jaxpr.outvars if not isinstance(v, core.Literal)}

    def read(atom: Any) -> _Value:
        return _Value(array=atom.val) if isinstance(atom, core.Literal) else values[atom]

    for i, eqn in enumerate(jaxpr.eqns):
        inputs = [read(v) for v in eqn.invars]
        here = "/".join(part for part in (scope, str(eqn.source_info.name_stack)) if part)
        for var, value in zip(eqn.outvars, _evaluate_one(eqn, inputs, here), strict=True):
            values[var] = value
        for v in {v for v in eqn.invars if not isinstance(v, core.Literal)}:
            if last_use[v] == i and v not in kept:
                del values[v]
    return [read(v) for v in jaxpr.outvars]


def _evaluate_one(eqn: Any, inputs: list[_Value], scope: str) -> list[_Value]:
    if eqn.primitive.name == "cond":
        index = int(inputs[0].array)
        branch = eqn.params["branches"][min(max(index, 0), len(eqn.params["branches"]) - 1)]
        return _evaluate(branch.jaxpr, [_Value(array=c) for c in branch.consts], inputs[1:], scope=scope)
    if eqn.primitive.name not in ("while", "scan"):
        inner = next((eqn.params[key] for key in _CALLS if key in eqn.params), None)
        if isinstance(inner, core.ClosedJaxpr):
            return _evaluate(inner.jaxpr, [_Value(array=c) for c in inner.consts], inputs, scope=scope)
        if isinstance(inner, core.Jaxpr):
            return _evaluate(inner, [], inputs, scope=scope)
    out = eqn.primitive.bind(*(v.array for v in inputs), **eqn.params)
    arrays = out if eqn.primitive.multiple_results else [out]
    return [_judged(array, inputs, scope, eqn.primitive.name) for array in arrays]


def _judged(array: Any, inputs: list[_Value], scope: str, operation: str) -> _Value:
    """An operation's result with its origin: that of an input, or this operation where no input explains it."""
    found = _non_finite(array)
    if found is None:
        return _Value(array=array)
    bad = [v for v in inputs if _non_finite(v.array)]
    origins = [o for v in sorted(bad, key=lambda v: v.origin is None) if (o := _origin_of(v, scope, operation)) is not None]
    if origins:
        return _Value(array=array, origin=origins[0])
    if not bad or (found == "NaN" and not any(_non_finite(v.array) == "NaN" for v in bad)):
        cause = f"{found} from {'infinite constants' if bad else 'finite inputs'}"
        return _Value(array=array, origin=Origin(scope=scope, operation=operation, cause=cause))
    return _Value(array=array)  # the infinities of masks


def _origin_of(value: _Value, scope: str, operation: str) -> Origin | None:
    """Why a value that is not finite is not; None for a constant of the function."""
    if value.origin is None and value.name is not None:
        return Origin(scope=scope, operation=operation, cause=f"its input {value.name} holds {_non_finite(value.array)}")
    return value.origin


def _non_finite(array: Any) -> str | None:
    """'NaN' or 'infinity' where an array holds them; None where it is finite or of integers."""
    dtype = getattr(array, "dtype", None)
    if dtype is None or not jax.numpy.issubdtype(dtype, jax.numpy.inexact):
        return None
    x = np.asarray(array)
    if np.isfinite(x).all():
        return None
    return "NaN" if np.isnan(x).any() else "infinity"
