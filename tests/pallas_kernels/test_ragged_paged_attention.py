"""One suite for every implementation of ragged paged attention, the reference included, against dense float64 numpy."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import utils

from pallas_kernels import ContractError, Target, Unsupported, ragged_paged_attention, ragged_paged_attention_choice, write_kv_pages
from pallas_kernels.dispatch import Implementation
from pallas_kernels.ragged_paged_attention import config
from pallas_kernels.ragged_paged_attention.api import IMPLS, attention_spec
from pallas_kernels.ragged_paged_attention.config import (
    AttentionSpec,
    mosaic_config,
    mosaic_prefill_config,
    mosaic_shared_bytes,
    triton_refusal,
    xla_config,
)
from tests.pallas_kernels.paged import A100, CPU, H200, INTERPRETED, REFUSED_HERE, TARGETS, Case, Inputs, check_error_budget, make_inputs

CASES = {
    "decode": Case(rows=((1, 100), (1, 1), (1, 48)), max_q_len=1),
    "decode_bf16_gqa7": Case(rows=((1, 513), (1, 64)), num_heads=7, num_kv_heads=1, head_dim=128, page_size=64, dtype="bfloat16",
                             max_q_len=1),
    "decode_f16_empty_rows": Case(rows=((1, 65), (0, 0), (1, 7), (0, 33), (0, 0)), num_heads=2, page_size=64, dtype="float16",
                                  num_padding=3, max_q_len=1),
    "decode_window_softcap": Case(rows=((1, 300), (1, 30), (1, 257)), page_size=32, dtype="bfloat16", max_q_len=1, sliding_window=100,
                                  softcap=5.0),
    "decode_f32_over_bf16_pages": Case(rows=((1, 90), (1, 33)), dtype="float32", kv_dtype="bfloat16", page_size=32, max_q_len=1),
    "decode_bf16_page128": Case(rows=((1, 129), (0, 0), (1, 700)), num_heads=2, num_kv_heads=1, page_size=128, dtype="bfloat16",
                                max_q_len=1),
    "decode_one_page_one_split": Case(rows=((1, 64), (0, 0), (1, 5)), page_size=64, spare_entries=0, dtype="bfloat16", num_padding=1,
                                      max_q_len=1),
    "decode_h64_many_splits": Case(rows=((1, 577), (1, 3)), num_heads=3, num_kv_heads=1, page_size=32, dtype="bfloat16", max_q_len=1,
                                   spare_entries=0),
    "decode_more_splits_than_one_tile": Case(rows=((1, 2500), (1, 300), (1, 2176), (0, 0)), num_heads=2, num_kv_heads=1, page_size=128,
                                             dtype="float16", max_q_len=1, spare_entries=0),
    "decode_more_splits_windowed": Case(rows=((1, 2600), (1, 2304)), num_heads=2, num_kv_heads=1, page_size=128, dtype="float16",
                                        max_q_len=1, spare_entries=0, sliding_window=2200),
    "decode_bf16_page48": Case(rows=((1, 129), (0, 0), (1, 301)), num_heads=6, num_kv_heads=2, page_size=48, dtype="bfloat16",
                               num_padding=2, max_q_len=1),
    "decode_bf16_page16": Case(rows=((1, 33), (0, 0), (1, 301), (1, 16)), num_heads=7, num_kv_heads=1, head_dim=128, page_size=16,
                               dtype="bfloat16", max_q_len=1),
    "prefill_bf16_page16": Case(rows=((67, 67), (3, 99)), num_heads=2, num_kv_heads=1, page_size=16, dtype="bfloat16"),
    "decode_f16_gqa17": Case(rows=((1, 129), (1, 40)), num_heads=34, num_kv_heads=2, dtype="float16", max_q_len=1),
    "prefill_bf16_odd": Case(rows=((67, 67), (1, 1), (0, 0), (3, 99)), num_heads=2, num_kv_heads=1, head_dim=128, page_size=64,
                             dtype="bfloat16", num_padding=9),
    "prefill_f16_window_softcap": Case(rows=((40, 301), (100, 100)), num_heads=1, num_kv_heads=1, page_size=32, dtype="float16",
                                       sliding_window=33, softcap=5.0),
    "prefill_bf16_window": Case(rows=((150, 420), (40, 40)), num_heads=2, num_kv_heads=1, page_size=64, dtype="bfloat16", sliding_window=50,
                                num_padding=2),
    "prefill_bf16_two_tiles": Case(rows=((130, 259),), num_heads=1, num_kv_heads=1, page_size=64, dtype="bfloat16"),
    "prefill_bf16_few_tokens": Case(rows=((2, 129), (5, 5)), num_heads=2, page_size=128, dtype="bfloat16", max_q_len=8),
    "prefill": Case(rows=((33, 33), (17, 17), (64, 64))),
    "mixed_511_513": Case(rows=((1, 40), (511, 511), (17, 200), (513, 513), (1, 1)), num_heads=2, num_kv_heads=1, num_padding=5),
    "mixed_bf16_gqa3": Case(rows=((1, 200), (60, 130), (17, 17), (0, 0)), num_heads=3, num_kv_heads=1, head_dim=128, page_size=64,
                            dtype="bfloat16", num_padding=18),
    "many_rows_mixed": Case(rows=((1, 70), (35, 35), (0, 0), (1, 1), (2, 40), (1, 129), (0, 3), (1, 64), (66, 90), (1, 65)), num_heads=3,
                            num_kv_heads=1, page_size=64, dtype="bfloat16", num_padding=1),
    "many_rows_all_single_windowed": Case(rows=((1, 70),) * 9 + ((1, 1),), num_heads=2, num_kv_heads=1, page_size=32, dtype="float16",
                                          num_padding=3, sliding_window=40),
    "head_dim_80_f16": Case(rows=((20, 48), (0, 9), (5, 5)), num_heads=2, head_dim=80, dtype="float16"),
    "head_dim_96_bf16": Case(rows=((1, 40), (20, 70), (0, 9), (5, 5)), head_dim=96, page_size=64, dtype="bfloat16", num_padding=2),
    "decode_head_dim_96_f16": Case(rows=((1, 100), (1, 1)), head_dim=96, page_size=64, dtype="float16", max_q_len=1),
    "head_dim_256": Case(rows=((1, 40), (20, 33)), num_heads=2, num_kv_heads=1, head_dim=256, num_padding=1),
    "decode_head_dim_256_bf16": Case(rows=((1, 100), (1, 1)), head_dim=256, page_size=64, dtype="bfloat16", max_q_len=1),
    "window": Case(rows=((40, 300), (150, 150), (1, 260)), sliding_window=33, page_size=32),
    "softcap": Case(rows=((30, 64), (3, 3)), softcap=3.0),
    "one_page_bounded_q": Case(rows=((3, 16), (2, 9), (4, 4)), spare_entries=0, max_q_len=4),
    "bf16_over_f32_pages": Case(rows=((9, 20), (1, 50)), dtype="bfloat16", kv_dtype="float32"),
}


# Cases that also run with the tiles kernel_xla takes on a GPU: many at once, 16-bit operands.
GPU_TILES = {"decode_bf16_gqa7", "decode_window_softcap", "mixed_bf16_gqa3", "window", "one_page_bounded_q", "head_dim_96_bf16",
             "decode_head_dim_256_bf16"}


def spec_of(case: Case, inputs: Inputs) -> AttentionSpec:
    return attention_spec(*inputs.arrays(), **case.statics())


def runner(impl: Implementation[AttentionSpec], target: Target, case: Case, inputs: Inputs) -> Callable[..., jax.Array]:
    run = functools.partial(impl.run, scale=case.scale, spec=spec_of(case, inputs), target=target)
    # The interpreter calls back into Python: two kernels of one executable would wait for each other's threads on a small CPU.
    return run if target.interpret else jax.jit(run)


def variants(cases: dict[str, Case]) -> list[object]:
    """Every (case, implementation, target) that the registry says is supported."""
    out = []
    for name, case in cases.items():
        spec = spec_of(case, make_inputs(case))
        for impl in IMPLS:
            for target_name, target in TARGETS.items():
                redundant = target_name == "interpreted" if impl.name in ("xla", "reference") else target_name != "interpreted"
                redundant |= target_name == "gpu" and (impl.name == "reference" or name not in GPU_TILES)
                if not redundant and impl.supports(spec, target) is None:
                    out.append(pytest.param(case, impl, target, id=f"{name}-{impl.name}-{target_name}"))
    return out


@pytest.mark.parametrize(("case", "impl", "target"), variants(CASES))
def test_within_error_budget_and_repeatable(case: Case, impl: Implementation[AttentionSpec], target: Target) -> None:
    inputs = make_inputs(case)
    run = runner(impl, target, case, inputs)
    first = run(*inputs.arrays())
    check_error_budget(case, inputs, first)
    if not target.interpret:  # the interpreter is slow, and its repeatability says nothing of the kernel's
        second = run(*inputs.arrays())
        assert np.asarray(first).tobytes() == np.asarray(second).tobytes()


def test_every_implementation_is_exercised() -> None:
    missing = {impl.name for impl in IMPLS} - {param.values[1].name for param in variants(CASES)}
    assert missing <= {"jax_triton"} | REFUSED_HERE
    if "jax_triton" in missing:  # it has no interpreter
        pytest.skip(f"jax_triton: {triton_refusal(spec_of(GOOD_DECODE, make_inputs(GOOD_DECODE)), INTERPRETED)}")


NEIGHBOURS = {
    "decode": (Case(rows=((1, 270), (1, 40), (1, 90)), page_size=64, num_heads=2, num_kv_heads=1, max_q_len=1, dtype="bfloat16"),
               ((1, 1), (1, 600))),
    "mixed": (Case(rows=((40, 70), (10, 20), (14, 14)), page_size=32), ((23, 600), (1, 1))),
    "mixed_bf16": (Case(rows=((40, 70), (10, 20), (14, 14)), page_size=32, num_heads=1, num_kv_heads=1, dtype="bfloat16"),
                   ((23, 200), (1, 1))),
}


def same_shapes(inputs: Inputs, *, num_tokens: int, num_pages: int) -> Inputs:
    """The inputs padded to a bucket, so that all run in one executable."""
    pools = [jnp.pad(pool, ((0, num_pages - pool.shape[0]), (0, 0), (0, 0), (0, 0))) for pool in (inputs.k_pages, inputs.v_pages)]
    q = jnp.pad(inputs.q, ((0, num_tokens - inputs.q.shape[0]), (0, 0), (0, 0)))
    return dataclasses.replace(inputs, q=q, k_pages=pools[0], v_pages=pools[1])


@pytest.mark.parametrize(("case", "impl", "target"), variants({name: case for name, (case, _) in NEIGHBOURS.items()}))
def test_neighbours_do_not_change_a_bit(case: Case, impl: Implementation[AttentionSpec], target: Target) -> None:
    other_rows = next(rows for known, rows in NEIGHBOURS.values() if known == case)
    other = dataclasses.replace(case, rows=(*other_rows, case.rows[0]), seed=1)
    num_tokens = 4 if case.max_q_len == 1 else 64
    num_entries = 12 if case.max_q_len == 1 else 20
    here, there = (same_shapes(make_inputs(c, num_entries=num_entries), num_tokens=num_tokens, num_pages=32) for c in (case, other))
    # The row moves to the end, among neighbours of other lengths, onto other pages; its contents stay.
    q_len, kv_len = case.rows[0]
    num_pages, start = -(-kv_len // case.page_size), int(there.cu_q_lens[2])
    from_pages, to_pages = (np.asarray(table)[:num_pages] for table in (here.page_table[0], there.page_table[2]))
    moved = dataclasses.replace(
        there, q=there.q.at[start:start + q_len].set(here.q[:q_len]), k_pages=there.k_pages.at[to_pages].set(here.k_pages[from_pages]),
        v_pages=there.v_pages.at[to_pages].set(here.v_pages[from_pages]))
    run = runner(impl, target, case, here)
    ours, theirs = run(*here.arrays())[:q_len], run(*moved.arrays())[start:start + q_len]
    assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


def test_any_lengths_at_fixed_shapes() -> None:
    """Random splits of one bucket, rows of no token among them, through one compiled function."""
    rng = np.random.default_rng(3)
    num_tokens, num_rows, compiled = 48, 5, None
    for seed in range(12):
        q_lens = np.diff(np.sort(np.r_[0, rng.integers(0, num_tokens + 1, num_rows)]))
        rows = tuple((int(n), int(n + rng.integers(0, 60)) if n or rng.random() < 0.5 else 0) for n in q_lens)
        case = Case(rows=rows, head_dim=16, num_padding=num_tokens - int(q_lens.sum()), seed=seed)
        inputs = same_shapes(make_inputs(case, num_entries=8), num_tokens=num_tokens, num_pages=60)
        compiled = compiled or jax.jit(functools.partial(ragged_paged_attention, **case.statics()))
        check_error_budget(case, inputs, compiled(*inputs.arrays()))
    assert compiled is not None and compiled._cache_size() == 1


def test_chunked_prefill_equals_whole() -> None:
    whole = Case(rows=((100, 100),), page_size=16, head_dim=32)
    inputs = make_inputs(whole)
    attend = jax.jit(functools.partial(ragged_paged_attention, **whole.statics()))
    expected = attend(*inputs.arrays())
    k, v = (jnp.pad(jnp.asarray(x[0], jnp.float32), ((0, 64), (0, 0), (0, 0))) for x in (inputs.dense_k, inputs.dense_v))
    q, write = jnp.pad(inputs.q, ((0, 64), (0, 0), (0, 0))), jax.jit(write_kv_pages)
    k_pages, v_pages = jnp.full_like(inputs.k_pages, jnp.nan), jnp.full_like(inputs.v_pages, jnp.nan)
    parts, start = [], 0
    for end in (30, 31, 70, 100):  # chunks of one bucket of 64 tokens: what follows the chunk is padding
        rows = (inputs.page_table, jnp.array([0, end - start], jnp.int32), jnp.array([end], jnp.int32))
        k_pages, v_pages = write(k[start:start + 64], v[start:start + 64], k_pages, v_pages, *rows)
        parts.append(attend(q[start:start + 64], k_pages, v_pages, *rows)[:end - start])
        start = end
    np.testing.assert_allclose(np.concatenate(parts), expected, rtol=0, atol=2e-6)


def test_nan_query_stays_visible() -> None:
    """A layer that went wrong must not be hidden by the guard for rows without keys."""
    case = CASES["decode"]
    inputs = make_inputs(case)
    attend = jax.jit(functools.partial(ragged_paged_attention, **case.statics()))
    out = attend(inputs.q.at[1].set(jnp.nan), *inputs.arrays()[1:])
    assert np.isnan(out[1]).all() and np.isfinite(out[0]).all() and np.isfinite(out[2]).all()


def broken(**changes: object) -> dict[str, object]:
    """A good call's arguments with some replaced."""
    array = jax.ShapeDtypeStruct
    good: dict[str, object] = {
        "q": array((8, 4, 64), jnp.float32), "k_pages": array((9, 2, 16, 64), jnp.float32), "v_pages": array((9, 2, 16, 64), jnp.float32),
        "page_table": array((3, 5), jnp.int32), "cu_q_lens": array((4,), jnp.int32), "kv_lens": array((3,), jnp.int32), "scale": 0.125}
    return good | changes


ERRORS = {
    "rank": ({"q": jax.ShapeDtypeStruct((8, 64), jnp.float32)}, r"q has shape \(8, 64\): must be \[T, N, H\]"),
    "zero": ({"q": jax.ShapeDtypeStruct((0, 4, 64), jnp.float32)}, r"at least 1; pad to a bucket"),
    "q_dtype": ({"q": jax.ShapeDtypeStruct((8, 4, 64), jnp.int8)}, r"q has dtype int8: must be one of bfloat16"),
    "pools": ({"v_pages": jax.ShapeDtypeStruct((8, 2, 16, 64), jnp.float32)},
              r"k_pages is float32\[9, 2, 16, 64\] and v_pages float32\[8, 2, 16, 64\]"),
    "page_size": ({name: jax.ShapeDtypeStruct((9, 2, 24, 64), jnp.float32) for name in ("k_pages", "v_pages")},
                  r"pages of 24 tokens .*multiple of 16 from 16 to 128"),
    "table_dtype": ({"page_table": jax.ShapeDtypeStruct((3, 5), jnp.int16)}, r"page_table has dtype int16: must be int32"),
    "batch": ({"kv_lens": jax.ShapeDtypeStruct((4,), jnp.int32)}, r"page_table \[3, 5\] has B = 3 rows.*must be \[B \+ 1\] = \[4\]"),
    "head_dim": ({"q": jax.ShapeDtypeStruct((8, 4, 32), jnp.float32)}, r"q \[8, 4, 32\].* k_pages \[9, 2, 16, 64\].*head dim"),
    "groups": ({"q": jax.ShapeDtypeStruct((8, 3, 64), jnp.float32)}, r"N = 3 query heads.*K = 2 KV heads.*multiple of K"),
    "scale": ({"scale": float("nan")}, r"scale = nan: must be a finite Python number > 0"),
    "max_q_len": ({"max_q_len": 0}, r"max_q_len = 0: must be a Python integer >= 1"),
    "sliding_window": ({"sliding_window": 1.5}, r"sliding_window = 1.5: must be a Python integer >= 1"),
    "softcap": ({"softcap": 0.0}, r"softcap = 0.0: must be a finite Python number > 0"),
    "implementation": ({"implementation": "triton"}, r"implementation = 'triton' is unknown: give one of .*xla, reference"),
}


@pytest.mark.parametrize(("changes", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_contract_errors_name_value_limit_and_remedy(changes: dict[str, object], message: str) -> None:
    arguments = broken(**changes)
    arrays = [arguments.pop(name) for name in ("q", "k_pages", "v_pages", "page_table", "cu_q_lens", "kv_lens")]
    with pytest.raises(ContractError, match=message):
        jax.eval_shape(functools.partial(ragged_paged_attention, **arguments), *arrays)


def test_choice_is_known_without_running() -> None:
    spec = spec_of(CASES["prefill"], make_inputs(CASES["prefill"]))
    choice = ragged_paged_attention_choice(spec, CPU)
    assert choice.implementation == "xla" and "ragged_paged_attention: xla (" in str(choice)
    forced = ragged_paged_attention_choice(spec, H200, implementation="reference")
    assert (forced.implementation, forced.reason, forced.rejected) == ("reference", "asked for by name", ())


GOOD_DECODE = Case(rows=((1, 100), (1, 5)), page_size=64, head_dim=128, dtype="bfloat16", max_q_len=1)
MOSAIC_REFUSALS = {
    "cpu": (CPU, {}, "needs an NVIDIA GPU, not cpu"),
    "turing": (dataclasses.replace(A100, compute_capability=(7, 5)), {}, r"is built for sm_80 and sm_90, not \(7, 5\)"),
    "f32": (H200, {"dtype": "float32"}, "needs 16-bit pages, not float32"),
    "mixed_dtypes": (H200, {"kv_dtype": "float16"}, "not bfloat16 over float16"),
    **{f"head_dim_{h}": (H200, {"head_dim": h}, rf"has no tiles for head dim {h}, only \(64, 128\)") for h in (80, 96, 256)},
    "groups": (H200, {"num_heads": 34}, "packs at most 16 query heads a KV head, not 17"),
}


@pytest.mark.parametrize(("target", "changes", "message"), MOSAIC_REFUSALS.values(), ids=MOSAIC_REFUSALS.keys())
def test_mosaic_refuses_with_a_reason_and_xla_takes_over(target: Target, changes: dict[str, object], message: str,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "find_spec", lambda name: None)  # without jax-triton
    case = dataclasses.replace(GOOD_DECODE, **changes)  # type: ignore[arg-type]
    spec = spec_of(case, make_inputs(case))
    choice = ragged_paged_attention_choice(spec, target)
    assert choice.implementation == "xla" and [name for name, _ in choice.rejected] == ["wgmma", "mosaic", "jax_triton"]
    with pytest.raises(Unsupported, match=message):
        ragged_paged_attention_choice(spec, target, implementation="mosaic")


@pytest.mark.parametrize("target", (A100, H200), ids=("a100", "h200"))
@pytest.mark.parametrize("page_size", (16, 32, 48, 64, 96, 128))
@pytest.mark.parametrize("max_q_len", (1, None), ids=("decode", "prefill"))
def test_mosaic_is_chosen_and_fits(target: Target, page_size: int, max_q_len: int | None) -> None:
    case = dataclasses.replace(GOOD_DECODE, page_size=page_size, max_q_len=max_q_len)
    spec = spec_of(case, make_inputs(case))
    by_wgmma = target is H200 and max_q_len is None and page_size not in (48, 96)
    assert ragged_paged_attention_choice(spec, target).implementation == ("wgmma" if by_wgmma else "mosaic")
    assert mosaic_shared_bytes(spec) <= 163 * 1024


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("page_size", range(16, 129, 16))
def test_tiles_of_a_page_are_as_wide_as_four_warps_can_share_them(page_size: int, head_dim: int) -> None:
    case = dataclasses.replace(GOOD_DECODE, page_size=page_size, head_dim=head_dim)
    spec = spec_of(case, make_inputs(case))
    for num_keys, swizzle_bytes in ((page_size, mosaic_config(spec).swizzle_bytes),
                                    (mosaic_prefill_config(spec).block_kv, mosaic_prefill_config(spec).swizzle_bytes)):
        assert swizzle_bytes == (64 if head_dim == 64 and num_keys % 32 else 128)
        rows, columns = num_keys // 8, 2 * head_dim // swizzle_bytes
        assert rows % 4 == 0 or (rows % 2, columns % 2) == (0, 0)


@pytest.mark.parametrize("page_size", (16, 48, 112))
@pytest.mark.parametrize("max_q_len", (1, None), ids=("decode", "prefill"))
def test_pages_of_odd_multiples_of_16_can_be_lowered_for_sm_80(page_size: int, max_q_len: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowering deals the tiles to the warps and needs no GPU; the interpreter copies without tiles."""
    monkeypatch.setattr(utils, "_infer_arch", lambda: (8, 0))
    case = dataclasses.replace(GOOD_DECODE, page_size=page_size, head_dim=64, max_q_len=max_q_len)
    inputs = make_inputs(case)
    (mosaic,) = (impl for impl in IMPLS if impl.name == "mosaic")
    jax.eval_shape(runner(mosaic, A100, case, inputs), *inputs.arrays())


WGMMA_REFUSALS = {
    "a100": (A100, {}, r"is built for sm_90, not \(8, 0\)"),
    "decode": (H200, {"max_q_len": 1}, r"is for prefill, not decode \(max_q_len 1\)"),
    "page": (H200, {"page_size": 96}, "needs pages of 16, 32, 64 or 128 tokens, not 96"),
}


@pytest.mark.parametrize(("target", "changes", "message"), WGMMA_REFUSALS.values(), ids=WGMMA_REFUSALS.keys())
def test_wgmma_refuses_with_a_reason_and_mosaic_takes_over(target: Target, changes: dict[str, object], message: str) -> None:
    case = dataclasses.replace(GOOD_DECODE, **{"max_q_len": None} | changes)  # type: ignore[arg-type]
    spec = spec_of(case, make_inputs(case))
    assert ragged_paged_attention_choice(spec, target).implementation == "mosaic"
    with pytest.raises(Unsupported, match=message):
        ragged_paged_attention_choice(spec, target, implementation="wgmma")


TRITON_REFUSALS = {
    "cpu": (CPU, {}, "needs an NVIDIA GPU, not cpu"),
    "interpreted": (dataclasses.replace(H200, interpret=True), {}, "has no interpreter"),
    "turing": (dataclasses.replace(A100, compute_capability=(7, 5)), {}, r"needs sm_80 or newer, not \(7, 5\)"),
    "prefill": (H200, {"max_q_len": None}, r"decodes only \(max_q_len 1\)"),
    "f32": (A100, {"dtype": "float32"}, "needs 16-bit pages, not float32"),
    "mixed_dtypes": (H200, {"kv_dtype": "float16"}, "not bfloat16 over float16"),
    "head_dim": (H200, {"head_dim": 80}, r"has no tiles for head dim 80, only \(64, 128\)"),
    "groups": (H200, {"num_heads": 130}, "packs at most 64 query heads a KV head, not 65"),
}


@pytest.mark.parametrize(("target", "changes", "message"), TRITON_REFUSALS.values(), ids=TRITON_REFUSALS.keys())
def test_jax_triton_refuses_with_a_reason(target: Target, changes: dict[str, object], message: str,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "find_spec", lambda name: name)  # as if it were installed
    case = dataclasses.replace(GOOD_DECODE, **changes)  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match=message):
        ragged_paged_attention_choice(spec_of(case, make_inputs(case)), target, implementation="jax_triton")


@pytest.mark.parametrize("target", (A100, H200), ids=("a100", "h200"))
def test_jax_triton_stands_behind_mosaic_and_needs_its_package(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    good, wide = (spec_of(case, make_inputs(case)) for case in (GOOD_DECODE, dataclasses.replace(GOOD_DECODE, num_heads=34)))
    monkeypatch.setattr(config, "find_spec", lambda name: name)
    assert ragged_paged_attention_choice(good, target).implementation == "mosaic"
    assert ragged_paged_attention_choice(wide, target).implementation == "jax_triton"
    monkeypatch.setattr(config, "find_spec", lambda name: None)
    assert ragged_paged_attention_choice(wide, target).implementation == "xla"
    with pytest.raises(Unsupported, match=r"needs the package jax_triton and triton: pip install 'jaxinfer\[triton\]'"):
        ragged_paged_attention_choice(good, target, implementation="jax_triton")


@pytest.mark.parametrize("target", (CPU, A100, H200), ids=("cpu", "a100", "h200"))
def test_xla_tiles_follow_the_target(target: Target) -> None:
    case = dataclasses.replace(CASES["mixed_bf16_gqa3"], page_size=16)
    spec = spec_of(case, make_inputs(case))
    tiles = xla_config(spec, target)
    assert tiles.widen == (target.platform == "cpu") and (tiles.tile_batch == 1) == (target.platform == "cpu")
    assert xla_config(dataclasses.replace(spec, max_q_len=1), target).block_q == 1
    assert xla_config(dataclasses.replace(spec, q_dtype="float32"), target).widen
