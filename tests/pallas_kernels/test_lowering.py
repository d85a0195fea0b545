"""What a kernel costs beside its run: it is lowered once for all programs, to bytes that do not depend on when."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

from pallas_kernels.dispatch import lowered_once, traced_once
from pallas_kernels.rms_norm import kernel_mosaic
from tests.pallas_kernels.paged import H200

lowered: list[Any] = []


def lower_counted(ctx: mlir.LoweringRuleContext, x: Any) -> list[Any]:
    lowered.append(ctx.avals_in[0].shape)
    return [x]


counted = Primitive("counted")
counted.def_abstract_eval(lambda x: x)
mlir.register_lowering(counted, lower_counted)


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    lowered.clear()
    yield
    traced_once.cache_clear()


def run(x: jax.Array, *, target: Any, factor: int) -> jax.Array:
    return counted.bind(x) * factor


def lower(function: Any, num_rows: int) -> str:
    x = jax.ShapeDtypeStruct((num_rows, 256), jnp.bfloat16)
    return jax.jit(function).trace(x).lower(lowering_platforms=("cuda",)).as_text()


def test_programs_share_what_is_lowered_once() -> None:
    twice = traced_once(lowered_once(run), target=H200, factor=3)
    texts = lower(lambda x: twice(twice(x)), 4), lower(lambda x: twice(x) + 1, 4)
    assert lowered == [(4, 256)]
    assert all("call_exported" in text for text in texts)
    lower(lambda x: twice(x), 8)
    assert lowered == [(4, 256), (8, 256)]


def test_interpreted_kernels_are_lowered_in_place() -> None:
    here = traced_once(lowered_once(run), target=dataclasses.replace(H200, interpret=True), factor=3)
    assert "call_exported" not in lower(here, 4)
    lower(lambda x: here(x) + 1, 4)
    assert len(lowered) == 2


def test_a_kernel_is_the_same_bytes_whatever_was_lowered_before() -> None:
    def hashes(*sizes: int) -> dict[int, str]:
        def norm(x: jax.Array) -> Any:
            return kernel_mosaic.rms_norm(x, jnp.ones((256,), jnp.bfloat16), None, eps=1e-6, vector=2, asks_for_weight_first=True,
                                          interpret=False)

        found = {}
        for size in sizes:
            kernel, = re.findall(r'kernel_hash = "((?:\\.|[^"\\])*)"', lower(norm, size))
            found[size] = kernel
        return found

    first = hashes(8, 16)
    assert first == hashes(16, 8) and first[8] != first[16]
