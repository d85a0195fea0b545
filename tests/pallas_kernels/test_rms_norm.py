"""One suite for every implementation of rms_norm, against float64 numpy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ContractError, Target, Unsupported, rms_norm, rms_norm_choice
from pallas_kernels.dispatch import Implementation
from pallas_kernels.rms_norm.api import IMPLS, NormSpec, norm_spec
from tests.pallas_kernels.paged import A100, CPU, H200, TARGETS

EPS = 1e-6
CASES = {  # num_tokens, dim, dtype, weight dtype, residual, parts of x (0: x itself)
    "bf16": (5, 896, "bfloat16", "bfloat16", False, 0),
    "bf16_residual": (3, 3584, "bfloat16", "bfloat16", True, 0),
    "f16_residual_f32_weight": (3, 1024, "float16", "float32", True, 0),
    "f32_odd_width": (33, 577, "float32", "float32", True, 0),
    "bf16_parts": (3, 3584, "bfloat16", "bfloat16", True, 3),
    "f16_one_part": (5, 896, "float16", "float16", True, 1),
    "f32_parts": (4, 577, "float32", "float32", True, 9),
}


def make_inputs(num_tokens: int, dim: int, dtype: str, weight_dtype: str, has_residual: bool, num_parts: int) -> tuple[jax.Array, ...]:
    """x or its parts, weight and perhaps the residual; the first row holds one NaN, the last is zero."""
    rng = np.random.default_rng(dim)
    x, residual = rng.normal(size=(2, num_tokens, dim)) * 3
    x[0, 1], x[-1], residual[-1] = np.nan, 0, 0
    arrays = jnp.asarray(x, dtype), jnp.asarray(rng.normal(size=dim) + 1, weight_dtype), jnp.asarray(residual, dtype)
    if num_parts:
        shares = rng.normal(size=(num_parts, num_tokens, dim)) * (x != 0)
        shares[0] += x - shares.sum(0)
        return jnp.asarray(shares, jnp.float32), *arrays[1:]
    return arrays[:2 + has_residual]


def naive_norm(h: np.ndarray, weight: np.ndarray, dtype: str) -> np.ndarray:
    """The formula with every operation rounded to `dtype`: float64 is the truth, another the naive peer, which adds up in float32."""
    compute = np.dtype(jnp.dtype(dtype))
    h, weight = h.astype(compute), weight.astype(compute)
    squares = (h * h).astype(np.float64 if dtype == "float64" else np.float32)
    mean_square = squares.sum(1, keepdims=True).astype(compute) / compute.type(h.shape[1])
    return (h / np.sqrt(mean_square + compute.type(EPS)) * weight).astype(np.float64)


def sum_error(spec: NormSpec) -> float:
    """Of x + residual, relative to the parts and to the sum: none, or where parts may be added up in another order, a rounding of each."""
    return 0 if spec.num_parts < 3 else float(jnp.finfo(spec.dtype).eps) + spec.num_parts * float(jnp.finfo(jnp.float32).eps)


def variants() -> list[object]:
    out = []
    for name, case in CASES.items():
        arrays = make_inputs(*case)
        spec = norm_spec(arrays[0], arrays[1], arrays[2] if len(arrays) == 3 else None, eps=EPS)
        for impl in IMPLS:
            target = TARGETS["interpreted" if impl.name == "mosaic" else "cpu"]
            if impl.supports(spec, target) is None:
                out.append(pytest.param(arrays, spec, impl, target, id=f"{name}-{impl.name}"))
    return out


@pytest.mark.parametrize(("arrays", "spec", "impl", "target"), variants())
def test_within_error_budget_and_repeatable(arrays: tuple[jax.Array, ...], spec: NormSpec, impl: Implementation[NormSpec],
                                            target: Target) -> None:
    """At most twice the naive error in x's dtype, and no more than a rounding of each step; NaN stays in its row, zeros stay zero."""
    run = jax.jit(functools.partial(impl.run, eps=EPS, spec=spec, target=target))
    out, again = run(*arrays), run(*arrays)
    for one, other in zip(jax.tree.leaves(out), jax.tree.leaves(again), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    h, weight = np.asarray(arrays[0]), np.asarray(arrays[1])
    if len(arrays) == 3:
        out, total = out
        h = np.asarray(total)
        x = arrays[0] if arrays[0].ndim == 2 else jnp.sum(arrays[0], axis=0).astype(arrays[2].dtype)
        differs = np.abs(h.astype(np.float64) - np.asarray(x + arrays[2]).astype(np.float64))
        allowed = sum_error(spec) * np.abs(np.asarray(arrays[0], np.float64)).reshape(-1, *x.shape).sum(0)
        assert (differs[1:] <= (allowed + sum_error(spec) * np.abs(h))[1:]).all()
    assert out.dtype == arrays[-1 if len(arrays) == 3 else 0].dtype and out.shape == arrays[0].shape[-2:]
    got = np.asarray(out).astype(np.float64)
    assert np.isnan(got[0]).all() and np.isfinite(got[1:]).all() and not got[-1].any()
    truth = naive_norm(h[1:-1], weight, "float64")
    not_zero = truth != 0  # a sum of 16-bit values may cancel

    def relative_error(values: np.ndarray) -> float:
        assert not values[~not_zero].any()
        return float((np.abs(values - truth)[not_zero] / np.abs(truth[not_zero])).max())

    error, naive = relative_error(got[1:-1]), relative_error(naive_norm(h[1:-1], weight, out.dtype.name))
    # The quotient, the weight and the product are each rounded once: three half units in the last place, and the statistics' float32.
    steps = 1.5 * float(jnp.finfo(out.dtype).eps) + 2 * relative_error(naive_norm(h[1:-1], weight, "float32"))
    assert error <= min(2 * naive, steps), f"relative error {error:.3g}, naive {naive:.3g}, a rounding of each step {steps:.3g}"


def test_every_implementation_is_exercised() -> None:
    assert {param.values[2].name for param in variants()} == {impl.name for impl in IMPLS}


ERRORS = {
    "weight": ({"weight": jax.ShapeDtypeStruct((65,), jnp.float32)}, r"weight \[65\], \[D\], and x \[8, 64\], \[T, D\], differ in D"),
    "parts without a residual": ({"x": jax.ShapeDtypeStruct((2, 8, 64), jnp.float32)}, r"x is float32\[2, 8, 64\]: parts .* with a residual"),
    "parts of 16 bits": ({"x": jax.ShapeDtypeStruct((2, 8, 64), jnp.bfloat16), "residual": jax.ShapeDtypeStruct((8, 64), jnp.bfloat16)},
                         r"x is bfloat16\[2, 8, 64\]: parts \[P, T, D\] must be float32"),
    "residual beside parts": ({"x": jax.ShapeDtypeStruct((2, 8, 64), jnp.float32), "residual": jax.ShapeDtypeStruct((2, 64), jnp.bfloat16)},
                              r"residual is bfloat16\[2, 64\] and x float32\[2, 8, 64\]"),
    "residual": ({"residual": jax.ShapeDtypeStruct((8, 64), jnp.bfloat16)}, r"residual is bfloat16\[8, 64\] and x float32\[8, 64\]"),
}


@pytest.mark.parametrize(("changes", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_contract_errors_name_both_shapes(changes: dict[str, jax.ShapeDtypeStruct], message: str) -> None:
    good = {"x": jax.ShapeDtypeStruct((8, 64), jnp.float32), "weight": jax.ShapeDtypeStruct((64,), jnp.float32)}
    with pytest.raises(ContractError, match=message):
        jax.eval_shape(functools.partial(rms_norm, eps=EPS), *(good | changes).values())


def test_choice_is_known_without_running() -> None:
    spec = norm_spec(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 100), (100,))), None, eps=EPS)
    assert rms_norm_choice(spec, H200).implementation == rms_norm_choice(spec, CPU).implementation == "xla"
    for num_tokens, has_residual, implementation in ((8, True, "mosaic"), (4096, True, "mosaic"), (8, False, "xla")):
        facts = dataclasses.replace(spec, num_tokens=num_tokens, dim=3584, has_residual=has_residual)
        assert rms_norm_choice(facts, H200).implementation == rms_norm_choice(facts, A100).implementation == implementation
        assert rms_norm_choice(facts, H200, implementation="mosaic").implementation == "mosaic"  # a choice is not asked whether it pays
    with pytest.raises(Unsupported, match="needs a width that is a multiple of 128, not 100"):
        rms_norm_choice(spec, A100, implementation="mosaic")
