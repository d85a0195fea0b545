"""One suite for every implementation of rotary_kv_write: against numpy, in place, and its errors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ContractError, RotaryWriteSpec, Target, rotary_kv_write, rotary_kv_write_choice
from pallas_kernels.dispatch import Implementation
from pallas_kernels.rotary_kv_write import config, kernel_mosaic
from pallas_kernels.rotary_kv_write.api import IMPLS, rotary_write_spec
from tests.pallas_kernels.paged import A100, CPU, TARGETS, Case, Inputs, make_inputs

CASES = {
    "decode": Case(rows=((1, 100), (1, 1), (1, 48)), max_q_len=1),
    "decode_bf16": Case(rows=((1, 65), (0, 0), (1, 1), (1, 64)), num_heads=14, page_size=64, dtype="bfloat16", head_dim=128, num_padding=2),
    "one_token": Case(rows=((1, 17),), num_heads=28, num_kv_heads=4, dtype="bfloat16", head_dim=128),
    "prefill_f16": Case(rows=((33, 33), (0, 0), (17, 80)), page_size=64, dtype="float16", num_padding=6),
    "one_head_each": Case(rows=((3, 50), (2, 2)), num_heads=2, dtype="bfloat16", head_dim=128),
    "one_kv_head": Case(rows=((0, 0), (21, 40), (1, 31)), num_heads=8, num_kv_heads=1, dtype="float16"),
    "only_padding": Case(rows=((0, 0), (0, 16)), num_heads=2, dtype="bfloat16", num_padding=3),
    "head_dim_80": Case(rows=((3, 50), (2, 2)), dtype="bfloat16", head_dim=80),
    "f32_into_bf16": Case(rows=((20, 20), (1, 31)), kv_dtype="bfloat16"),
}


def projections(case: Case, inputs: Inputs) -> list[jax.Array]:
    """qkv and the four arrays of turns; NaN in padding."""
    rng = np.random.default_rng(3)
    num_tokens, half = inputs.q.shape[0], case.head_dim // 2
    qkv = rng.normal(size=(num_tokens, case.num_kv_heads, case.num_heads // case.num_kv_heads + 2, case.head_dim))
    qkv[num_tokens - case.num_padding:] = np.nan
    angles = rng.uniform(0, 6, size=(2, num_tokens, half))
    turns = [f(a) * s for a, s in zip(angles, (1.5, 1.0), strict=True) for f in (np.cos, np.sin)]
    return [jnp.asarray(qkv, case.dtype), *(jnp.asarray(x, jnp.float32) for x in turns)]


def expected(case: Case, inputs: Inputs, arrays: list[jax.Array]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries of the valid tokens and both pools in float64, one head after another."""
    qkv, query_cos, query_sin, key_cos, key_sin = (np.asarray(x).astype(np.float64) for x in arrays)
    pools = [np.asarray(x).astype(np.float64) for x in (inputs.k_pages, inputs.v_pages)]
    half, groups = case.head_dim // 2, qkv.shape[2] - 2

    def turn(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
        return np.stack([x[i] * cos[i % half] + (-1 if i < half else 1) * x[(i + half) % (2 * half)] * sin[i % half]
                         for i in range(2 * half)])

    queries, table, t = [], np.asarray(inputs.page_table), 0
    for b, (q_len, kv_len) in enumerate(case.rows):
        for pos in range(kv_len - q_len, kv_len):
            page, slot = table[b, pos // case.page_size], pos % case.page_size
            for head in range(case.num_kv_heads):
                queries += [turn(qkv[t, head, g], query_cos[t], query_sin[t]) for g in range(groups)]
                pools[0][page, head, slot] = turn(qkv[t, head, groups], key_cos[t], key_sin[t])
                pools[1][page, head, slot] = qkv[t, head, groups + 1]
            t += 1
    return np.asarray(queries).reshape(t, case.num_heads, case.head_dim), *pools


def variants() -> list[object]:
    out = []
    for name, case in CASES.items():
        inputs = make_inputs(case)
        spec = rotary_write_spec(*projections(case, inputs), *inputs.arrays()[1:])
        for impl in IMPLS:
            target = TARGETS["interpreted" if impl.name == "mosaic" else "cpu"]
            if impl.supports(spec, target) is None:
                out.append(pytest.param(case, spec, impl, target, id=f"{name}-{impl.name}"))
    return out


@pytest.mark.parametrize(("case", "spec", "impl", "target"), variants())
def test_rotates_and_writes_new_tokens_and_nothing_else(
        case: Case, spec: RotaryWriteSpec, impl: Implementation[RotaryWriteSpec], target: Target) -> None:
    inputs = make_inputs(case)
    arrays = projections(case, inputs)
    run = jax.jit(functools.partial(impl.run, spec=spec, target=target))
    got = run(*arrays, *inputs.arrays()[1:])
    again = run(*arrays, *inputs.arrays()[1:])
    want = expected(case, inputs, arrays)
    assert got[0].shape == (spec.num_tokens, case.num_heads, case.head_dim) and got[0].dtype == inputs.q.dtype
    for one, other, truth, dtype in zip(got, again, want, (case.dtype, spec.kv_dtype, spec.kv_dtype), strict=True):
        # The null page takes the padding; queries of padding mean nothing.
        part, same, right = (one[:len(truth)], other[:len(truth)], truth) if one is got[0] else (one[1:], other[1:], truth[1:])
        np.testing.assert_array_equal(np.asarray(part).view(np.uint8), np.asarray(same).view(np.uint8))
        # One rounding of a float32 result, which may fall to the other side where the float32 sum did.
        tolerance = 1.01 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(np.asarray(part).astype(np.float64), right, rtol=tolerance, atol=4e-6)


def test_any_number_of_pairs_a_thread_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(rows=((19, 40), (0, 0), (1, 33)), num_heads=7, num_kv_heads=1, dtype="bfloat16", head_dim=128, num_padding=1)
    inputs = make_inputs(case)
    num_valid, results = int(inputs.cu_q_lens[-1]), []
    for few in (config.MOSAIC_FEW_BLOCKS, 0):
        monkeypatch.setattr(config, "MOSAIC_FEW_BLOCKS", few)
        run = jax.jit(functools.partial(kernel_mosaic.rotary_kv_write, interpret=TARGETS["interpreted"].interpret))
        q, k_pages, v_pages = run(*projections(case, inputs), *inputs.arrays()[1:])
        results.append([np.asarray(x).view(np.uint16) for x in (q[:num_valid], k_pages[1:], v_pages[1:])])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_every_implementation_is_exercised() -> None:
    assert {param.values[2].name for param in variants()} == {impl.name for impl in IMPLS}


def arguments(**changes: object) -> list[object]:
    array = jax.ShapeDtypeStruct
    turns = array((8, 32), jnp.float32)
    good: dict[str, object] = {
        "qkv": array((8, 2, 4, 64), jnp.bfloat16), "query_cos": turns, "query_sin": turns, "key_cos": turns, "key_sin": turns,
        "k_pages": array((9, 2, 16, 64), jnp.bfloat16), "v_pages": array((9, 2, 16, 64), jnp.bfloat16),
        "page_table": array((3, 5), jnp.int32), "cu_q_lens": array((4,), jnp.int32), "kv_lens": array((3,), jnp.int32)}
    return list((good | changes).values())


ERRORS = {
    "members": ({"qkv": jax.ShapeDtypeStruct((8, 2, 2, 64), jnp.bfloat16)}, r"qkv \[8, 2, 2, 64\], .* at least one query, a key and a value"),
    "turns": ({"key_sin": jax.ShapeDtypeStruct((8, 64), jnp.float32)}, r"key_sin is float32\[8, 64\]: must be .* float32\[8, 32\]"),
    "turns_dtype": ({"query_cos": jax.ShapeDtypeStruct((8, 32), jnp.bfloat16)}, r"query_cos is bfloat16\[8, 32\]"),
    "heads": ({"qkv": jax.ShapeDtypeStruct((8, 3, 4, 64), jnp.bfloat16)}, r"differ in K or H: allocate"),
}


@pytest.mark.parametrize(("changes", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_contract_errors_name_the_shapes(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        jax.eval_shape(rotary_kv_write, *arguments(**changes))


def test_choice_is_known_without_running() -> None:
    spec = rotary_write_spec(*arguments())  # type: ignore[arg-type]
    assert rotary_kv_write_choice(spec, CPU).implementation == "xla"
    assert rotary_kv_write_choice(spec, A100).implementation == "mosaic"
    assert rotary_kv_write_choice(dataclasses.replace(spec, num_tokens=65536, num_kv_heads=32), A100).implementation == "mosaic"
    for change, reason in (({"head_dim": 72}, "needs a head dim that is a multiple of 16, not 72"),
                           ({"kv_dtype": "float32"}, "copies without a cast, not bfloat16 into float32"),
                           ({"dtype": "float32"}, "is built for bfloat16 and float16, not float32")):
        assert rotary_kv_write_choice(dataclasses.replace(spec, **change), A100).rejected == (("mosaic", reason),)
