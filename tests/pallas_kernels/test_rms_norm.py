"""One suite for every implementation of rms_norm, against float64 numpy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ContractError, Target, Unsupported, rms_norm, rms_norm_choice
from pallas_kernels.dispatch import Implementation
from pallas_kernels.rms_norm.api import IMPLS, norm_spec
from tests.pallas_kernels.paged import A100, CPU, H200, TARGETS

EPS = 1e-6
CASES = {  # num_tokens, dim, dtype, weight dtype, residual
    "bf16": (5, 896, "bfloat16", "bfloat16", False),
    "bf16_residual": (3, 3584, "bfloat16", "bfloat16", True),
    "f16_residual_f32_weight": (2, 1024, "float16", "float32", True),
    "f32_odd_width": (4, 577, "float32", "float32", True),
}


def make_inputs(num_tokens: int, dim: int, dtype: str, weight_dtype: str, has_residual: bool) -> tuple[jax.Array, ...]:
    """x, weight and perhaps the residual; one row is zero."""
    rng = np.random.default_rng(dim)
    x, residual = rng.normal(size=(2, num_tokens, dim)) * 3
    x[-1] = residual[-1] = 0
    arrays = jnp.asarray(x, dtype), jnp.asarray(rng.normal(size=dim) + 1, weight_dtype), jnp.asarray(residual, dtype)
    return arrays[:2 + has_residual]


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
def test_within_a_rounding_of_each_step(arrays: tuple[jax.Array, ...], spec: object, impl: Implementation[object], target: Target) -> None:
    got = jax.jit(functools.partial(impl.run, eps=EPS, spec=spec, target=target))(*arrays)
    x, weight, *residual = (np.asarray(a).astype(np.float64) for a in arrays)
    if residual:
        got, total = got
        np.testing.assert_array_equal(np.asarray(total), np.asarray(arrays[0] + arrays[2]))
        x = np.asarray(total).astype(np.float64)
    truth = x / np.sqrt((x * x).mean(1, keepdims=True) + EPS) * weight
    assert got.dtype == arrays[0].dtype
    # The quotient, the weight and the product are each rounded once: three half units in the last place, and float32's own.
    np.testing.assert_allclose(np.asarray(got).astype(np.float64), truth, rtol=1.5 * float(jnp.finfo(got.dtype).eps) + 1e-6, atol=1e-30)


def test_every_implementation_is_exercised() -> None:
    assert {param.values[2].name for param in variants()} == {impl.name for impl in IMPLS}


ERRORS = {
    "weight": ({"weight": jax.ShapeDtypeStruct((65,), jnp.float32)}, r"weight \[65\], \[D\], and x \[8, 64\], \[T, D\], differ in D"),
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
