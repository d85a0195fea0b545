"""Where NaN and infinity are said to come from: functions whose every operation is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.engine.oracle import run_traced

X = jnp.asarray([[1.0, 2.0, 3.0]])


def masked(a):
    """Infinities of a constant that the softmax takes out again."""
    return jax.nn.softmax(jnp.where(jnp.arange(3) < 2, a["x"], -jnp.inf))


def overflows(a):
    with jax.named_scope("layer_1"):
        wide = jax.jit(lambda x: x * jnp.float16(6e4))(a["x"].astype(jnp.float16))
        with jax.named_scope("next"):
            return wide - wide


def branches(a):
    with jax.named_scope("outer"):
        return jax.lax.cond(a["x"][0, 0] > 0, lambda x: jnp.log(-x), lambda x: x, a["x"])


def loops(a):
    return jax.lax.fori_loop(0, 3, lambda i, x: x * x, a["x"] * 1e30)


def weighs(a):
    with jax.named_scope("layer_0"), jax.named_scope("down"):
        return (a["x"] + 1) @ a["weights"]["down"]


@pytest.mark.parametrize(("function", "weight", "said"), [
    (masked, 1.0, None), (weighs, 1.0, None),
    (overflows, 1.0, "layer_1: mul, infinity from finite inputs"), (branches, 1.0, "outer: log, NaN from finite inputs"),
    (loops, 1.0, "the top level: "), (weighs, np.nan, "layer_0/down: dot_general, its input weights down holds NaN"),
    (weighs, np.inf, "layer_0/down: dot_general, its input weights down holds infinity"),
    (lambda a: jnp.full((3,), jnp.inf) * 0 + a["x"], 1.0, "NaN from infinite constants"),
    (lambda a: (a["x"], weighs(a) * 0 + 1)[0], np.nan, None),  # what does not reach the result is nobody's concern
])
def test_the_first_operation_on_the_way_to_the_result(function, weight, said):
    args = {"x": X, "weights": {"down": jnp.full((3, 3), weight)}}
    out, (origin,) = run_traced(function, args)
    np.testing.assert_allclose(np.asarray(out), np.asarray(function(args)), rtol=1e-6)
    assert (origin is None) == (said is None) and (said is None or said in str(origin)), origin
