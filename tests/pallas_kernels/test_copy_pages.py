"""One suite for every implementation of copy_pages, the promise that donated pools are written in place, and pages between pools."""

import functools
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ContractError, Target, copy_pages, copy_pages_choice, insert_pages, transfer_pages
from pallas_kernels.copy_pages.api import IMPLS, copy_spec
from pallas_kernels.dispatch import Implementation
from tests.pallas_kernels.paged import CPU, H200

CASES = {  # src, dst
    "apart": ([1, 2, 3], [7, 8, 9]),
    "one_to_many": ([4, 4, 4], [1, 2, 3]),
    "exchange": ([1, 2], [2, 1]),
    "chain": ([1, 2, 3, 4], [2, 3, 4, 5]),
    "chain_backwards": ([2, 3, 4], [1, 2, 3]),
    "padding": ([5, 0, 0, 0], [6, 0, 0, 0]),
    "same_twice": ([5, 5], [6, 6]),
    "nothing": ([0], [0]),
}
NUM_PAGES = 11


def make_pools() -> dict[str, Any]:
    """Pools of several shapes and dtypes in a nested pytree; page 8 is NaN where it can be, and NaN's bits are copied too."""
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, NUM_PAGES, 2, 16, 8))
    k[8] = v[8] = np.nan
    return {"layers": [(jnp.asarray(k, jnp.float32), jnp.asarray(v, jnp.bfloat16))],
            "codes": jnp.asarray(rng.integers(-128, 128, (NUM_PAGES, 1, 32, 4)), jnp.int8),
            "scales": jnp.asarray(rng.normal(size=(NUM_PAGES, 1, 32)), jnp.float32)}


def integers(numbers: list[int]) -> jax.Array:
    return jnp.asarray(numbers, jnp.int32)


def assert_same_bits(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype and np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


@pytest.mark.parametrize("impl", IMPLS, ids=[impl.name for impl in IMPLS])
def test_all_pages_are_read_before_any_is_written(impl: Implementation[Any]) -> None:
    for name, (src, dst) in CASES.items():
        pools = make_pools()
        expected = jax.tree.map(np.array, pools)
        for pool in jax.tree.leaves(expected):
            before = pool.copy()
            for s, d in zip(src, dst, strict=True):
                pool[d] = before[s]
        run = functools.partial(impl.run, spec=copy_spec(pools, integers(src), integers(dst)), target=CPU)
        got = jax.jit(run, donate_argnums=0)(pools, integers(src), integers(dst))
        try:
            assert_same_bits(got, expected)
        except AssertionError as error:
            raise AssertionError(name) from error


def test_donated_pools_are_written_in_place() -> None:
    pool, numbers = jax.ShapeDtypeStruct((512, 2, 16, 64), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.int32)
    pool_bytes, page = 4 * pool.size, jax.ShapeDtypeStruct((4, 2, 16, 64), jnp.float32)
    for function, arguments in ((copy_pages, (numbers, numbers)), (insert_pages, ([(page, page)] * 2, numbers))):
        compiled = jax.jit(function, donate_argnums=0).lower([(pool, pool)] * 2, *arguments).compile()
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == 4 * pool_bytes
        assert memory.temp_size_in_bytes < pool_bytes, f"temporaries of {memory.temp_size_in_bytes} bytes hold a pool of {pool_bytes}"
        assert not [line for line in compiled.as_text().splitlines() if " copy(" in line and "f32[512,2,16,64]" in line.split(" copy(")[0]]


def test_pages_go_from_one_pool_to_another() -> None:
    here, there = make_pools(), jax.tree.map(jnp.zeros_like, make_pools())
    device = jax.devices()[-1]
    pages = transfer_pages(here, integers([3, 8, 0]), device)
    assert all(x.devices() == {device} and x.shape[0] == 3 for x in jax.tree.leaves(pages))
    expected = jax.tree.map(np.array, there)
    for pool, source in zip(jax.tree.leaves(expected), jax.tree.leaves(here), strict=True):
        pool[[5, 1, 0]] = np.asarray(source)[[3, 8, 0]]
    there = jax.device_put(there, device)
    assert_same_bits(jax.jit(insert_pages, donate_argnums=0)(there, pages, jax.device_put(integers([5, 1, 0]), device)), expected)


def test_pages_go_to_the_host_and_back() -> None:
    pools, device = make_pools(), jax.devices()[0]
    host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    pages = transfer_pages(pools, integers([3, 8]), host)
    assert all(x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(pages))
    emptied = jax.tree.map(lambda pool: pool.at[integers([3, 8])].set(0), pools)
    assert_same_bits(insert_pages(emptied, jax.device_put(pages, jax.tree.leaves(pools)[0].sharding), integers([3, 8])), pools)


def test_pages_go_to_another_device() -> None:
    """In a process of its own: the number of CPU devices is fixed when jax starts."""
    code = """if True:
        import jax, jax.numpy as jnp, numpy as np
        from pallas_kernels import insert_pages, transfer_pages
        here, there = jax.devices()
        pool = jnp.arange(5 * 2 * 16 * 4, dtype=jnp.float32).reshape(5, 2, 16, 4)
        pages = transfer_pages((pool,), jnp.array([4, 2], jnp.int32), there)
        assert pages[0].devices() == {there}
        other = jax.device_put((jnp.zeros_like(pool),), there)
        out, = jax.jit(insert_pages, donate_argnums=0)(other, pages, jax.device_put(jnp.array([1, 3], jnp.int32), there))
        assert out.devices() == {there}
        np.testing.assert_array_equal(out[jnp.array([1, 3, 0])], jnp.stack([pool[4], pool[2], jnp.zeros_like(pool[0])]))
    """
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


POOL, NUMBERS = jax.ShapeDtypeStruct((9, 2, 16, 64), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.int32)
PAGES = jax.ShapeDtypeStruct((4, 2, 16, 64), jnp.float32)
COPY_ERRORS = {
    "empty": ((), NUMBERS, NUMBERS, r"copy_pages: pools holds no array: give the key and value pages"),
    "rank": ((jax.ShapeDtypeStruct((9,), jnp.float32),), NUMBERS, NUMBERS, r"pools\[0\] has shape \(9,\): must be \[P, K, Z, H\]"),
    "pages": ({"k": POOL, "v": jax.ShapeDtypeStruct((8, 2, 16, 64), jnp.float32)}, NUMBERS, NUMBERS,
              r"pools\['v'\] \[8, 2, 16, 64\] has 8 pages, the first pool 9"),
    "dtype": ((POOL,), jax.ShapeDtypeStruct((4,), jnp.int16), NUMBERS, "src has dtype int16: must be int32"),
    "lengths": ((POOL,), NUMBERS, jax.ShapeDtypeStruct((5,), jnp.int32), r"src \[4\] and dst \[5\] differ in length"),
}


@pytest.mark.parametrize(("pools", "src", "dst", "message"), COPY_ERRORS.values(), ids=COPY_ERRORS.keys())
def test_copy_errors_name_value_limit_and_remedy(pools: Any, src: Any, dst: Any, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        jax.eval_shape(copy_pages, pools, src, dst)


INSERT_ERRORS = {
    "tree": ([PAGES, PAGES], r"insert_pages: pages is a PyTreeDef\(\[\*, \*\]\) and pools a PyTreeDef\(\[\*\]\): give one array of pages"),
    "shape": ([jax.ShapeDtypeStruct((3, 2, 16, 64), jnp.float32)], r"pages\[0\] is float32\[3, 2, 16, 64\]: must be float32\[4, 2, 16, 64\]"),
    "dtype": ([jax.ShapeDtypeStruct((4, 2, 16, 64), jnp.bfloat16)], r"pages\[0\] is bfloat16\[4, 2, 16, 64\]: must be float32"),
}


@pytest.mark.parametrize(("pages", "message"), INSERT_ERRORS.values(), ids=INSERT_ERRORS.keys())
def test_insert_errors_name_value_limit_and_remedy(pages: Any, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        jax.eval_shape(insert_pages, [POOL], pages, NUMBERS)


def test_transfer_needs_a_device() -> None:
    with pytest.raises(ContractError, match=r"device = 'gpu': must be a jax.Device or a jax.sharding.Sharding; jax.devices\(\) lists"):
        transfer_pages(make_pools(), integers([1]), "gpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("target", (CPU, H200), ids=("cpu", "h200"))
def test_choice_is_known_without_running(target: Target) -> None:
    spec = copy_spec([POOL, POOL], NUMBERS, NUMBERS)
    assert (spec.num_pools, spec.num_pages, spec.num_copies, spec.page_bytes) == (2, 9, 4, 2 * 2 * 16 * 64 * 4)
    assert copy_pages_choice(spec, target).implementation == "xla"
    assert copy_pages_choice(spec, target, implementation="reference").reason == "asked for by name"
