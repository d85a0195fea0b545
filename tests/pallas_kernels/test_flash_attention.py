"""One suite for every implementation of flash attention, the reference included, against dense float64 numpy."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ContractError, FlashAttentionSpec, Target, Unsupported, flash_attention, flash_attention_choice
from pallas_kernels.dispatch import Implementation
from pallas_kernels.flash_attention.api import IMPLS, flash_attention_spec
from pallas_kernels.flash_attention.config import mosaic_shared_bytes, xla_config
from tests.pallas_kernels.dense import Case, Inputs, check_error_budget, dense_attention, make_inputs
from tests.pallas_kernels.paged import A100, CPU, H200, REFUSED_HERE, TARGETS

CASES = {
    "causal": Case(num_tokens=150, num_keys=150, num_rows=2, num_heads=4, num_kv_heads=2),
    "one_query_bf16_over_f32": Case(num_tokens=1, num_keys=133, num_rows=3, kv_lengths=(133, 1, 70), dtype="bfloat16", kv_dtype="float32"),
    "full_lengths": Case(num_tokens=131, num_keys=257, num_rows=4, causal=False, num_heads=3, q_lengths=(131, 3, 9, 64),
                         kv_lengths=(257, 1, 0, 130)),
    "lengths": Case(num_tokens=65, num_keys=140, num_rows=4, q_lengths=(65, 0, 7, 30), kv_lengths=(140, 33, 0, 11)),
    "segments": Case(num_tokens=100, num_keys=100, num_rows=2, segments=((30, 1, 60), (100,))),
    "full_segments_head_dim_80": Case(num_tokens=50, num_keys=50, causal=False, head_dim=80, segments=((20, 25),)),
    "lengths_head_dim_96_bf16": Case(num_tokens=20, num_keys=70, num_rows=2, head_dim=96, dtype="bfloat16", q_lengths=(20, 3),
                                     kv_lengths=(70, 9)),
    "full_head_dim_256": Case(num_tokens=9, num_keys=33, causal=False, head_dim=256),
    "bf16_head_dim_256": Case(num_tokens=20, num_keys=33, head_dim=256, dtype="bfloat16"),
    "window_softcap": Case(num_tokens=140, num_keys=300, sliding_window=33, softcap=3.0),
    "bf16_h128_gqa3": Case(num_tokens=35, num_keys=99, num_heads=3, head_dim=128, dtype="bfloat16"),
    "bf16_lengths": Case(num_tokens=66, num_keys=150, num_rows=3, num_heads=1, dtype="bfloat16", q_lengths=(66, 9, 5),
                         kv_lengths=(131, 3, 0)),
    "bf16_full": Case(num_tokens=5, num_keys=130, num_rows=2, causal=False, dtype="bfloat16", kv_lengths=(130, 1)),
    "f16_window": Case(num_tokens=66, num_keys=200, num_heads=1, dtype="float16", sliding_window=20),
    "bf16_segments": Case(num_tokens=130, num_keys=130, num_heads=1, num_rows=2, dtype="bfloat16", segments=((64, 3, 50), (130,)),
                          kv_lengths=(130, 90), q_lengths=(130, 90), softcap=4.0),
}
GPU_TILES = {"causal", "bf16_segments", "lengths_head_dim_96_bf16", "bf16_head_dim_256"}  # also with the tiles kernel_xla takes on a GPU


def spec_of(case: Case) -> FlashAttentionSpec:
    return flash_attention_spec(*make_inputs(case).arrays(), **case.statics())  # type: ignore[arg-type]


def implementation(name: str) -> Implementation[FlashAttentionSpec]:
    return next(impl for impl in IMPLS if impl.name == name)


def runner(impl: Implementation[FlashAttentionSpec], target: Target, case: Case) -> Callable[..., jax.Array]:
    return jax.jit(functools.partial(impl.run, scale=case.scale, spec=spec_of(case), target=target))


def variants(cases: dict[str, Case]) -> list[object]:
    """Every (case, implementation, target) that the registry says is supported."""
    out = []
    for name, case in cases.items():
        spec = spec_of(case)
        for impl in IMPLS:
            for target_name, target in TARGETS.items():
                redundant = target_name == "interpreted" if impl.name in ("xla", "reference") else target_name != "interpreted"
                redundant |= target_name == "gpu" and (impl.name == "reference" or name not in GPU_TILES)
                if not redundant and impl.supports(spec, target) is None:
                    out.append(pytest.param(case, impl, target, id=f"{name}-{impl.name}-{target_name}"))
    return out


@pytest.mark.parametrize(("case", "impl", "target"), variants(CASES))
def test_within_error_budget_and_repeatable(case: Case, impl: Implementation[FlashAttentionSpec], target: Target) -> None:
    inputs = make_inputs(case)
    run = runner(impl, target, case)
    first = run(*inputs.arrays())
    check_error_budget(case, inputs, first)
    if not target.interpret:  # the interpreter is slow, and its repeatability says nothing of the kernel's
        second = run(*inputs.arrays())
        assert np.asarray(first).tobytes() == np.asarray(second).tobytes()


def test_every_implementation_is_exercised() -> None:
    assert {param.values[1].name for param in variants(CASES)} == {impl.name for impl in IMPLS} - REFUSED_HERE


@pytest.mark.parametrize("name", ("mosaic", "xla"))
def test_nan_query_stays_visible(name: str) -> None:
    """A layer that went wrong must not be hidden by the guard for queries without keys."""
    case = Case(num_tokens=8, num_keys=8, num_heads=1, num_rows=2, dtype="bfloat16")
    inputs = make_inputs(case)
    out = runner(implementation(name), TARGETS["cpu" if name == "xla" else "interpreted"], case)(
        inputs.q.at[1, 3].set(jnp.nan), *inputs.arrays()[1:])
    assert np.isnan(out[1, 3]).all() and np.isfinite(out[0]).all() and np.isfinite(out[1, 4:]).all()


GRADIENT_CASES = {
    "lengths_softcap": dataclasses.replace(CASES["lengths"], softcap=2.0),
    "segments_window": dataclasses.replace(CASES["segments"], sliding_window=21),
    "several_full_tiles": Case(num_tokens=150, num_keys=290, num_heads=4, num_kv_heads=2, head_dim=16, causal=False),
}


def gradients(run: Callable[..., jax.Array], inputs: Inputs) -> tuple[jax.Array, ...]:
    """Of a loss that weighs every output differently, padding's among them."""
    weight = jnp.asarray(np.random.default_rng(7).normal(size=inputs.q.shape), jnp.float32)
    return jax.jit(jax.grad(lambda q, k, v: jnp.sum(run(q, k, v, *inputs.arrays()[3:]).astype(jnp.float32) * weight), argnums=(0, 1, 2)))(
        inputs.q, inputs.k, inputs.v)


@pytest.mark.parametrize("case", GRADIENT_CASES.values(), ids=GRADIENT_CASES.keys())
def test_gradients_agree_with_the_reference_and_padding_has_none(case: Case) -> None:
    inputs = make_inputs(case)
    expected, got = (gradients(runner(implementation(name), CPU, case), inputs) for name in ("reference", "xla"))
    for name, ours, theirs in zip("qkv", got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * float(jnp.abs(theirs).max()), err_msg=f"d{name}")
        padding = np.isnan(np.asarray(getattr(inputs, name))).any((2, 3))
        assert np.all(np.asarray(ours)[padding] == 0), f"d{name} of padding"


def test_reference_gradients_agree_with_differences() -> None:
    case = dataclasses.replace(CASES["window_softcap"], num_tokens=5, num_keys=9, head_dim=4, sliding_window=4)
    inputs = make_inputs(case)
    run = runner(implementation("reference"), CPU, case)
    weight = np.random.default_rng(7).normal(size=inputs.q.shape).astype(np.float32)
    rng, step = np.random.default_rng(1), 1e-3
    for name, gradient in zip("qkv", gradients(run, inputs), strict=True):
        direction = rng.normal(size=gradient.shape)
        x = np.asarray(getattr(inputs, name)).astype(np.float64)
        up, down = (dense_attention(case, dataclasses.replace(inputs, **{name: x + sign * step * direction}), "float64") for sign in (1, -1))
        slope = np.sum((up - down) * weight) / (2 * step)
        np.testing.assert_allclose(np.sum(np.asarray(gradient) * direction), slope, rtol=2e-4, err_msg=f"d{name}")


def test_kernels_have_the_gradients_of_xla() -> None:
    """Their backward pass recomputes through kernel_xla: equal but for XLA's fusions, whatever the forward pass rounded."""
    case = Case(num_tokens=20, num_keys=40, num_rows=2, num_heads=1, dtype="bfloat16", q_lengths=(20, 5), kv_lengths=(40, 3))
    inputs = make_inputs(case)
    ours, theirs = (gradients(runner(implementation(name), TARGETS["interpreted"], case), inputs) for name in ("mosaic", "xla"))
    for letter, x, y in zip("qkv", ours, theirs, strict=True):
        x, y = (np.asarray(gradient).astype(np.float32) for gradient in (x, y))
        np.testing.assert_allclose(x, y, rtol=0, atol=2 * float(jnp.finfo(case.dtype).eps) * np.abs(y).max(), err_msg=f"d{letter}")


def test_memory_does_not_grow_with_the_square_of_the_length() -> None:
    length = 8192
    shape = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
    loss = jax.grad(lambda q, k, v: jnp.sum(flash_attention(q, k, v, causal=True, scale=1.0)), argnums=(0, 1, 2))
    temp_bytes = jax.jit(loss).lower(shape, shape, shape).compile().memory_analysis().temp_size_in_bytes
    assert temp_bytes < 24 * shape.size * 4 < 2 * length * length * 4 / 20, temp_bytes


def broken(**changes: object) -> dict[str, object]:
    """A good call's arguments with some replaced."""
    array = jax.ShapeDtypeStruct
    good: dict[str, object] = {"q": array((3, 8, 4, 64), jnp.float32), "k": array((3, 9, 2, 64), jnp.float32),
                               "v": array((3, 9, 2, 64), jnp.float32), "causal": True, "scale": 0.125}
    return good | changes


ERRORS = {
    "rank": ({"q": jax.ShapeDtypeStruct((8, 4, 64), jnp.float32)}, r"q has shape \(8, 4, 64\): must be \[B, T, N, H\]"),
    "dtype": ({"k": jax.ShapeDtypeStruct((3, 9, 2, 64), jnp.int8)}, r"k has dtype int8: must be one of bfloat16"),
    "values": ({"v": jax.ShapeDtypeStruct((3, 8, 2, 64), jnp.float32)}, r"k is float32\[3, 9, 2, 64\] and v float32\[3, 8, 2, 64\]"),
    "batch": ({"q": jax.ShapeDtypeStruct((2, 8, 4, 64), jnp.float32)}, r"q \[2, 8, 4, 64\].* k \[3, 9, 2, 64\].*differ in B or H"),
    "groups": ({"q": jax.ShapeDtypeStruct((3, 8, 3, 64), jnp.float32)}, r"N = 3 query heads.*K = 2 KV heads: N must be a multiple of K"),
    "lengths": ({"kv_lengths": jax.ShapeDtypeStruct((2,), jnp.int32)}, r"kv_lengths is int32\[2\]: must be int32\[3\], \[B\]"),
    "segment_dtype": ({"q_segment_ids": jax.ShapeDtypeStruct((3, 8), jnp.int8)}, r"q_segment_ids is int8\[3, 8\]: must be int32\[3, 8\]"),
    "one_segment": ({"kv_segment_ids": jax.ShapeDtypeStruct((3, 9), jnp.int32)}, "kv_segment_ids without q_segment_ids: give both"),
    "causal": ({"causal": None}, "causal = None: must be True or False"),
    "scale": ({"scale": -1.0}, r"scale = -1.0: must be a finite Python number > 0"),
    "window": ({"sliding_window": 0}, r"sliding_window = 0: must be a Python integer >= 1"),
    "huge_window": ({"sliding_window": 2**31}, r"sliding_window = 2147483648: must be a Python integer >= 1, and at most 2147483647"),
    "huge_scale": ({"scale": 10**400}, r"scale = 10*: must be a finite Python number > 0, and at most 3.4"),
    "full_window": ({"sliding_window": 5, "causal": False}, r"sliding_window = 5 with causal = False: .*give causal=True"),
    "softcap": ({"softcap": 0.0}, r"softcap = 0.0: must be a finite Python number > 0"),
    "implementation": ({"implementation": "cudnn"}, r"implementation = 'cudnn' is unknown: give one of .*xla, reference"),
}


@pytest.mark.parametrize(("changes", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_contract_errors_name_value_limit_and_remedy(changes: dict[str, object], message: str) -> None:
    arguments = broken(**changes)
    arrays = {name: value for name, value in arguments.items() if isinstance(value, jax.ShapeDtypeStruct)}
    statics = {name: value for name, value in arguments.items() if name not in arrays}
    with pytest.raises(ContractError, match=message):
        jax.eval_shape(lambda arrays: flash_attention(**arrays, **statics), arrays)


GOOD = Case(num_tokens=99, num_keys=101, head_dim=128, dtype="bfloat16")
REFUSALS = {  # target, changes, why wgmma refuses, why mosaic does (None: it takes over)
    "cpu": (CPU, {}, "needs an NVIDIA GPU, not cpu", "needs an NVIDIA GPU, not cpu"),
    "a100": (A100, {}, r"is built for sm_90, not \(8, 0\)", None),
    "turing": (dataclasses.replace(A100, compute_capability=(7, 5)), {}, r"is built for sm_90, not \(7, 5\)",
               r"is built for sm_80 and sm_90, not \(7, 5\)"),
    "full": (H200, {"causal": False}, "is causal", None),
    "segments": (H200, {"segments": ((101,),)}, "is causal and knows no segments", None),
    "one_query": (H200, {"num_tokens": 1}, "is for prefill, not decode", None),
    "f32": (H200, {"dtype": "float32"}, "needs 16-bit pages, not float32", "needs 16-bit keys and values, not float32"),
    "mixed_dtypes": (H200, {"kv_dtype": "float16"}, "not bfloat16 over float16", "needs queries in the keys' dtype, not bfloat16 over float16"),
    **{f"head_dim_{h}": (H200, {"head_dim": h}, f"has no tiles for head dim {h}", rf"has no tiles for head dim {h}, only \(64, 128\)")
       for h in (80, 96, 256)},
}


@pytest.mark.parametrize(("target", "changes", "wgmma", "mosaic"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refusals_have_a_reason_and_the_next_row_takes_over(target: Target, changes: dict[str, object], wgmma: str, mosaic: str | None) -> None:
    spec = spec_of(dataclasses.replace(GOOD, **changes))  # type: ignore[arg-type]
    assert flash_attention_choice(spec, target).implementation == ("mosaic" if mosaic is None else "xla")
    for name, message in ({"wgmma": wgmma} | ({} if mosaic is None else {"mosaic": mosaic})).items():
        with pytest.raises(Unsupported, match=message):
            flash_attention_choice(spec, target, implementation=name)


def test_choice_is_known_without_running() -> None:
    spec = spec_of(GOOD)
    assert flash_attention_choice(spec, H200).implementation == "wgmma"
    assert "flash_attention: xla (blocked online softmax" in str(flash_attention_choice(spec, CPU))
    assert flash_attention_choice(spec, CPU, implementation="reference").reason == "asked for by name"


@pytest.mark.parametrize("head_dim", (64, 128))
def test_mosaic_fits_in_an_a100(head_dim: int) -> None:
    assert mosaic_shared_bytes(spec_of(dataclasses.replace(GOOD, head_dim=head_dim))) <= 163 * 1024


def test_xla_tiles_follow_target_and_lengths() -> None:
    spec = spec_of(GOOD)
    assert xla_config(spec, CPU).widen and not xla_config(spec, H200).widen
    huge = dataclasses.replace(spec, num_rows=64, num_tokens=8192, num_keys=8192, num_heads=64)
    config = xla_config(huge, H200)
    assert 4 * huge.num_rows * huge.num_heads * config.block_q * config.block_kv <= 256 * 2**20
    assert xla_config(dataclasses.replace(spec, num_tokens=1), H200).block_q == 1
