"""One suite for every implementation of write_kv_pages, and the promise that donated pools are written in place."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ContractError, Target, ragged_paged_attention, write_kv_pages, write_kv_pages_choice
from pallas_kernels.dispatch import Implementation
from pallas_kernels.write_kv_pages import config, kernel_mosaic
from pallas_kernels.write_kv_pages.api import IMPLS, write_spec
from pallas_kernels.write_kv_pages.config import WriteSpec
from tests.pallas_kernels.paged import A100, CPU, TARGETS, Case, Inputs, make_inputs

CASES = {
    "decode": Case(rows=((1, 100), (1, 1), (1, 48)), max_q_len=1),
    "prefill_bf16": Case(rows=((33, 33), (0, 0), (17, 80)), page_size=64, dtype="bfloat16", head_dim=128, num_padding=70),
    "decode_h128": Case(rows=((1, 65), (0, 0), (1, 1), (1, 64)), page_size=64, dtype="bfloat16", head_dim=128, num_padding=2, max_q_len=1),
    "f16_edges": Case(rows=((0, 5), (16, 16), (17, 33), (0, 0)), dtype="float16", num_padding=1, page_size=32),
    "head_dim_80": Case(rows=((3, 50), (2, 2)), head_dim=80),
    "head_dim_80_f16": Case(rows=((15, 31), (2, 2)), num_kv_heads=1, head_dim=80, dtype="float16", num_padding=3),
    "head_dim_8": Case(rows=((0, 0), (49, 70), (1, 33)), num_kv_heads=1, head_dim=8, dtype="bfloat16", page_size=48),
    "one_vector": Case(rows=((1, 17),), num_kv_heads=1, head_dim=8, dtype="bfloat16"),
    "one_row_kv_heads_32": Case(rows=((21, 40),), num_kv_heads=32, head_dim=128, dtype="bfloat16", page_size=32, num_padding=1),
    "rows_of_three_searches": Case(rows=((0, 0), *((1, 5),) * 30, (0, 9), (0, 0), (3, 18), *((0, 0),) * 36), dtype="float16", num_padding=2),
    "only_padding": Case(rows=((0, 0), (0, 16)), dtype="bfloat16", num_padding=35),
    "f32_into_bf16": Case(rows=((20, 20), (1, 31)), kv_dtype="bfloat16"),
}


def new_tokens(case: Case, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """The rows' last tokens, packed, with NaN as padding."""
    packed = []
    for dense in (inputs.dense_k, inputs.dense_v):
        parts = [row[kv_len - q_len:] for row, (q_len, kv_len) in zip(dense, case.rows, strict=True)]
        parts.append(np.full((case.num_padding, case.num_kv_heads, case.head_dim), np.nan))
        packed.append(jnp.asarray(np.concatenate(parts), case.dtype))
    return packed[0], packed[1]


def variants() -> list[object]:
    out = []
    for name, case in CASES.items():
        inputs = make_inputs(case)
        spec = write_spec(*new_tokens(case, inputs), *inputs.arrays()[1:])
        for impl in IMPLS:
            target = TARGETS["interpreted" if impl.name == "mosaic" else "cpu"]
            if impl.supports(spec, target) is None:
                out.append(pytest.param(case, spec, impl, target, id=f"{name}-{impl.name}"))
    return out


@pytest.mark.parametrize(("case", "spec", "impl", "target"), variants())
def test_writes_new_tokens_and_nothing_else(case: Case, spec: WriteSpec, impl: Implementation[WriteSpec], target: Target) -> None:
    inputs = make_inputs(case)
    # The pools before the write: the new tokens' slots hold another number, and all else must survive bit for bit.
    before = []
    for pool in (inputs.k_pages, inputs.v_pages):
        host = np.array(pool)
        for b, (q_len, kv_len) in enumerate(case.rows):
            for s in range(kv_len - q_len, kv_len):
                host[np.asarray(inputs.page_table)[b, s // case.page_size], :, s % case.page_size] = 7
        before.append(jnp.asarray(host))
    run = jax.jit(functools.partial(impl.run, spec=spec, target=target))
    after, again = (run(*new_tokens(case, inputs), *before, *inputs.arrays()[3:]) for _ in range(2))
    for got, second, expected in zip(after, again, (inputs.k_pages, inputs.v_pages), strict=True):
        assert got.dtype == expected.dtype
        assert np.asarray(got[1:]).tobytes() == np.asarray(second[1:]).tobytes()  # the null page takes the padding, in any order
        np.testing.assert_array_equal(np.asarray(got[1:]).view(np.uint8), np.asarray(expected[1:]).view(np.uint8))


def test_any_number_of_vectors_a_thread_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(rows=((19, 40), (0, 0), (1, 33)), num_kv_heads=7, dtype="bfloat16", head_dim=128, num_padding=1)
    inputs, results = make_inputs(case), []
    for few in (config.MOSAIC_FEW_BLOCKS, 0):
        monkeypatch.setattr(config, "MOSAIC_FEW_BLOCKS", few)
        run = jax.jit(functools.partial(kernel_mosaic.write_kv_pages, interpret=TARGETS["interpreted"].interpret))
        results.append([np.asarray(x[1:]).view(np.uint16) for x in run(*new_tokens(case, inputs), *inputs.arrays()[1:])])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_every_implementation_is_exercised() -> None:
    assert {param.values[2].name for param in variants()} == {impl.name for impl in IMPLS}


def test_donated_pools_are_written_in_place() -> None:
    """Two layers of write and attention must not hold a second copy of any pool."""
    rows, num_tokens, pool = 4, 64, jax.ShapeDtypeStruct((2048, 2, 16, 64), jnp.float32)

    def step(pools: list[jax.Array], q: jax.Array, k: jax.Array, table: jax.Array, cu: jax.Array, lens: jax.Array) -> object:
        for layer in range(2):
            pools[2 * layer:2 * layer + 2] = write_kv_pages(k, k, *pools[2 * layer:2 * layer + 2], table, cu, lens)
            q = ragged_paged_attention(q, *pools[2 * layer:2 * layer + 2], table, cu, lens, scale=0.125)
        return q, pools

    compiled = jax.jit(step, donate_argnums=0).lower(
        [pool] * 4, jax.ShapeDtypeStruct((num_tokens, 4, 64), jnp.float32), jax.ShapeDtypeStruct((num_tokens, 2, 64), jnp.float32),
        jax.ShapeDtypeStruct((rows, 128), jnp.int32), jax.ShapeDtypeStruct((rows + 1,), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.int32)).compile()
    pool_bytes = 4 * int(np.prod(pool.shape))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 4 * pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes, f"temporaries of {memory.temp_size_in_bytes} bytes hold a pool of {pool_bytes}"
    assert not [line for line in compiled.as_text().splitlines() if " copy(" in line and "f32[2048,2,16,64]" in line.split(" copy(")[0]]


def arguments(**changes: object) -> list[object]:
    array = jax.ShapeDtypeStruct
    good: dict[str, object] = {
        "k": array((8, 2, 64), jnp.float32), "v": array((8, 2, 64), jnp.float32),
        "k_pages": array((9, 2, 16, 64), jnp.float32), "v_pages": array((9, 2, 16, 64), jnp.float32),
        "page_table": array((3, 5), jnp.int32), "cu_q_lens": array((4,), jnp.int32), "kv_lens": array((3,), jnp.int32)}
    return list((good | changes).values())


ERRORS = {
    "values": ({"v": jax.ShapeDtypeStruct((8, 2, 64), jnp.bfloat16)}, r"k is float32\[8, 2, 64\] and v bfloat16\[8, 2, 64\]"),
    "heads": ({name: jax.ShapeDtypeStruct((8, 3, 64), jnp.float32) for name in "kv"},
              r"k \[8, 3, 64\], .* and k_pages \[9, 2, 16, 64\], .* differ in K or H: allocate"),
}


@pytest.mark.parametrize(("changes", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_contract_errors_name_both_shapes(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        jax.eval_shape(write_kv_pages, *arguments(**changes))


def test_choice_is_known_without_running() -> None:
    spec = write_spec(*arguments())  # type: ignore[arg-type]
    assert write_kv_pages_choice(spec, CPU).implementation == "xla"
    assert write_kv_pages_choice(spec, A100).implementation == "mosaic"
    assert write_kv_pages_choice(dataclasses.replace(spec, num_tokens=65536, num_kv_heads=32), A100).implementation == "mosaic"
    for change, reason in (({"head_dim": 6}, "needs a head dim that is a multiple of 4, not 6"),
                           ({"head_dim": 12, "dtype": "float16", "kv_dtype": "float16"}, "needs a head dim that is a multiple of 8, not 12"),
                           ({"kv_dtype": "bfloat16"}, "copies without a cast, not float32 into bfloat16")):
        assert write_kv_pages_choice(dataclasses.replace(spec, **change), A100).rejected == (("mosaic", reason),)
