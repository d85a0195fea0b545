"""One suite for every implementation of paged_gather, against the dense rows that the pages were cut from."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ContractError, Target, flash_attention, paged_gather, paged_gather_choice, ragged_paged_attention
from pallas_kernels.dispatch import Implementation
from pallas_kernels.paged_gather.api import IMPLS, gather_spec
from pallas_kernels.paged_gather.config import GatherSpec
from tests.pallas_kernels.paged import CPU, H200, Case, make_inputs

CASES = {  # rows, max_len
    "some": (Case(rows=((1, 100), (0, 0), (1, 48), (1, 1))), 100),
    "cut_bf16": (Case(rows=((1, 100), (1, 33)), dtype="bfloat16", page_size=32, num_kv_heads=1), 40),
    "longer_than_the_table_f16": (Case(rows=((1, 64), (1, 5)), dtype="float16", page_size=64, spare_entries=0, head_dim=80), 70),
    "one_token": (Case(rows=((1, 17), (0, 0))), 1),
}


def variants() -> list[object]:
    out = []
    for name, (case, max_len) in CASES.items():
        inputs = make_inputs(case)
        spec = gather_spec(inputs.k_pages, inputs.v_pages, inputs.page_table, inputs.kv_lens, max_len=max_len)
        out += [pytest.param(case, max_len, spec, impl, id=f"{name}-{impl.name}") for impl in IMPLS if impl.supports(spec, CPU) is None]
    return out


@pytest.mark.parametrize(("case", "max_len", "spec", "impl"), variants())
def test_rows_come_out_as_they_were_and_the_rest_is_zero(case: Case, max_len: int, spec: GatherSpec,
                                                         impl: Implementation[GatherSpec]) -> None:
    inputs = make_inputs(case)
    run = jax.jit(functools.partial(impl.run, spec=spec, target=CPU))
    arrays = inputs.k_pages, inputs.v_pages, inputs.page_table, inputs.kv_lens
    got = run(*arrays)
    for ours, dense in zip(got, (inputs.dense_k, inputs.dense_v), strict=True):
        expected = np.zeros((len(case.rows), max_len, case.num_kv_heads, case.head_dim))
        for b, row in enumerate(dense):
            expected[b, :len(row)] = row[:max_len]
        assert ours.dtype == inputs.k_pages.dtype
        np.testing.assert_array_equal(np.asarray(ours).astype(np.float64), expected)
    assert [x.tobytes() for x in map(np.asarray, run(*arrays))] == [x.tobytes() for x in map(np.asarray, got)]


def test_every_implementation_is_exercised() -> None:
    assert {param.values[3].name for param in variants()} == {impl.name for impl in IMPLS}


def test_flash_attention_over_gathered_pages_is_paged_attention() -> None:
    case = Case(rows=((1, 70), (5, 33), (4, 4)), max_q_len=5)
    inputs = make_inputs(case)
    q_lens = [q_len for q_len, _ in case.rows]
    q = np.full((3, 5, case.num_heads, case.head_dim), np.nan, np.float32)
    for b, q_len in enumerate(q_lens):
        q[b, :q_len] = inputs.q[inputs.cu_q_lens[b]:inputs.cu_q_lens[b + 1]]
    k, v = paged_gather(inputs.k_pages, inputs.v_pages, inputs.page_table, inputs.kv_lens, max_len=70)
    dense = flash_attention(jnp.asarray(q), k, v, causal=True, scale=case.scale, q_lengths=jnp.asarray(q_lens, jnp.int32),
                            kv_lengths=inputs.kv_lens)
    paged = ragged_paged_attention(*inputs.arrays(), scale=case.scale)
    np.testing.assert_allclose(np.concatenate([dense[b, :n] for b, n in enumerate(q_lens)]), paged, rtol=0, atol=2e-6)


def broken(**changes: object) -> dict[str, object]:
    """A good call's arguments with some replaced."""
    array = jax.ShapeDtypeStruct
    good: dict[str, object] = {
        "k_pages": array((9, 2, 16, 64), jnp.float32), "v_pages": array((9, 2, 16, 64), jnp.float32),
        "page_table": array((3, 5), jnp.int32), "kv_lens": array((3,), jnp.int32)}
    return good | changes


ERRORS = {
    "pools": ({"v_pages": jax.ShapeDtypeStruct((8, 2, 16, 64), jnp.float32)}, 50, r"k_pages is float32\[9, 2, 16, 64\] and v_pages"),
    "dtype": ({"page_table": jax.ShapeDtypeStruct((3, 5), jnp.uint32)}, 50, "page_table has dtype uint32: must be int32"),
    "batch": ({"kv_lens": jax.ShapeDtypeStruct((2,), jnp.int32)}, 50, r"page_table \[3, 5\].* and kv_lens \[2\], \[B\], differ in B"),
    "max_len": ({}, 0, "max_len = 0: must be a Python integer >= 1"),
}


@pytest.mark.parametrize(("changes", "max_len", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_contract_errors_name_value_limit_and_remedy(changes: dict[str, object], max_len: int, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        jax.eval_shape(functools.partial(paged_gather, max_len=max_len), *broken(**changes).values())


@pytest.mark.parametrize("target", (CPU, H200), ids=("cpu", "h200"))
def test_choice_is_known_without_running(target: Target) -> None:
    spec = gather_spec(*broken().values(), max_len=50)  # type: ignore[arg-type]
    assert paged_gather_choice(spec, target).implementation == "xla"
    assert paged_gather_choice(spec, target, implementation="reference").reason == "asked for by name"
