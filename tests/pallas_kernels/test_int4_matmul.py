"""One suite for every implementation of int4_matmul, and its packed layout, against float64 numpy."""

import dataclasses
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import (
    ContractError,
    MatmulSpec,
    Target,
    Unsupported,
    dequantize,
    int4_matmul,
    int4_matmul_choice,
    pack,
    pack_zeros,
    packed_shape,
    unpack,
)
from pallas_kernels.dispatch import Implementation
from pallas_kernels.int4_matmul.api import IMPLS, activated, matmul_spec
from pallas_kernels.int4_matmul.config import (
    MOSAIC_MEASURED,
    mosaic_config,
    mosaic_shared_bytes,
    xla_strip_tiles,
)
from pallas_kernels.int4_matmul.stream_config import (
    STREAM_MEASURED,
    STREAM_MOST_STEPS,
    STREAM_MOST_SUMS,
    stream_config,
    stream_shared_bytes,
    stream_steps,
    stream_tiles,
)
from pallas_kernels.int4_matmul.wgmma_config import WGMMA_MEASURED, WGMMA_WARPGROUPS, WgmmaConfig, wgmma_config, wgmma_shared_bytes
from tests.pallas_kernels.paged import A100, CPU, H200, INTERPRETED, ON_SM_80, REFUSED_HERE, TARGETS

KERNELS = ("dequantize", "mosaic", "stream", "wgmma")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A call, and whether it is also run in the interpreter, which takes seconds."""

    m: int
    k: int
    n: int
    group_size: int
    bits: int = 4
    dtype: str = "bfloat16"
    scale_dtype: str = "float16"
    zero_dtype: str | None = "uint8"
    has_bias: bool = False
    out_dtype: str | None = None
    interpreted: bool = False


CASES = {
    "one_token": Case(m=1, k=256, n=64, group_size=128, has_bias=True, interpreted=True),
    "tail_of_n": Case(m=3, k=256, n=72, group_size=64, zero_dtype="bfloat16", out_dtype="float32", interpreted=True),
    "f16_symmetric_whole_column": Case(m=8, k=300, n=8, group_size=300, dtype="float16", zero_dtype=None, interpreted=True),
    "group32": Case(m=17, k=320, n=64, group_size=32, scale_dtype="bfloat16", has_bias=True, interpreted=True),
    "tail_of_m": Case(m=65, k=256, n=40, group_size=128, scale_dtype="float32", interpreted=True),
    "int8_symmetric": Case(m=5, k=256, n=64, group_size=256, bits=8, zero_dtype=None, interpreted=True),
    "int8_zeros": Case(m=20, k=256, n=56, group_size=128, bits=8, zero_dtype="int32", has_bias=True, interpreted=True),
    "int8_f16": Case(m=3, k=256, n=24, group_size=64, bits=8, dtype="float16", interpreted=True),
    "f32": Case(m=64, k=576, n=136, group_size=64, dtype="float32", zero_dtype="float32"),
    "odd_n": Case(m=3, k=96, n=37, group_size=48, dtype="float32", zero_dtype=None),
    "many_tokens": Case(m=600, k=128, n=72, group_size=128, has_bias=True),
}


@functools.cache
def make_inputs(case: Case) -> tuple[np.ndarray, tuple[jax.Array | None, ...]]:
    """The exact weights in float64, and x, packed, scales, zeros, bias. The last row of x is NaN; zero points reach 2^bits."""
    rng = np.random.default_rng(case.k + case.n)
    groups = (case.k // case.group_size, case.n)
    q = rng.integers(0, 2**case.bits, (case.k, case.n)).astype(np.uint8)
    scales = np.array(jnp.asarray(rng.uniform(0.5, 1.5, groups) / 2**case.bits, case.scale_dtype))
    scales[0, 0] = 0
    zeros = rng.integers(0, 2**case.bits + (case.zero_dtype != "uint8" or case.bits == 4), groups)
    zeros[-1, -1] = 2**case.bits - (case.bits == 8 and case.zero_dtype == "uint8")
    z = np.full(groups, 2 ** (case.bits - 1)) if case.zero_dtype is None else zeros
    weights = (q.astype(np.float64) - np.repeat(z, case.group_size, 0)) * np.repeat(scales.astype(np.float64), case.group_size, 0)
    x = rng.normal(size=(case.m, case.k))
    if case.m > 1:
        x[-1] = np.nan
    return weights, (jnp.asarray(x, case.dtype), jnp.asarray(pack(q, bits=case.bits)), jnp.asarray(scales),
                     None if case.zero_dtype is None else jnp.asarray(zeros, case.zero_dtype),
                     jnp.asarray(rng.normal(size=case.n), case.dtype) if case.has_bias else None)


def spec_of(case: Case) -> MatmulSpec:
    return matmul_spec(*make_inputs(case)[1], group_size=case.group_size, bits=case.bits, out_dtype=case.out_dtype)


def variants() -> list[object]:
    """Every (case, implementation, target) that the registry says is supported."""
    out = []
    for name, case in CASES.items():
        for impl in IMPLS:
            target = TARGETS["interpreted" if impl.name in KERNELS else "cpu"]
            if (impl.name not in KERNELS or case.interpreted) and impl.supports(spec_of(case), target) is None:
                out.append(pytest.param(case, impl, target, id=f"{name}-{impl.name}"))
    return out


@pytest.mark.parametrize(("case", "impl", "target"), variants())
def test_within_error_budget_and_repeatable(case: Case, impl: Implementation[MatmulSpec], target: Target) -> None:
    """At most twice the error of weights rounded to x's dtype, plus rounding of the result; NaN stays in its row."""
    weights, arrays = make_inputs(case)
    run = jax.jit(functools.partial(impl.run, spec=spec_of(case), target=target))
    out = run(*arrays)
    assert out.dtype == jnp.dtype(case.out_dtype or case.dtype) and out.shape == (case.m, case.n)
    x, bias = np.asarray(arrays[0]).astype(np.float64), 0 if arrays[4] is None else np.asarray(arrays[4]).astype(np.float64)
    got = np.asarray(out).astype(np.float64)
    if case.m > 1:
        assert np.all(np.isnan(got[-1])) and np.all(np.isfinite(got[:-1]))
        x, got = x[:-1], got[:-1]
    truth = x @ weights + bias
    naive = np.abs(x @ np.asarray(jnp.asarray(weights, case.dtype)).astype(np.float64) + bias - truth).max()
    floor = 4 * float(jnp.finfo(out.dtype).eps) * np.abs(truth).max()
    error = np.abs(got - truth).max()
    assert error <= 2 * naive + floor, f"error {error:.3g}, budget {2 * naive + floor:.3g}: naive {naive:.3g}, floor {floor:.3g}"
    if not target.interpret:  # the interpreter is slow, and its repeatability says nothing of the kernel's
        assert np.asarray(out).tobytes() == np.asarray(run(*arrays)).tobytes()


def test_every_implementation_is_exercised() -> None:
    assert {param.values[1].name for param in variants()} == {impl.name for impl in IMPLS} - REFUSED_HERE


def test_many_strips_give_what_one_gives() -> None:
    case = CASES["f32"]
    _, arrays = make_inputs(case)
    from pallas_kernels.int4_matmul import kernel_xla

    whole, strips = (kernel_xla.int4_matmul(*arrays, bits=case.bits, out_dtype="float32", strip_tiles=tiles) for tiles in (100, 2))
    np.testing.assert_allclose(np.asarray(strips)[:-1], np.asarray(whole)[:-1], rtol=1e-5, atol=1e-5)
    assert xla_strip_tiles(dataclasses.replace(spec_of(case), k=10**7), CPU) == 1


@pytest.mark.parametrize(("warpgroups", "splits", "strips", "k"), [(2, 2, 2, 1792), (1, 2, 5, 768)])
def test_more_strips_a_block_give_what_one_gives(warpgroups: int, splits: int, strips: int, k: int) -> None:
    """Three strips, so that the last block's are partly beyond the end; warpgroups of a strip and splits share an odd number of tiles of k."""
    case = Case(m=3, k=k, n=136, group_size=128)
    weights, arrays = make_inputs(case)
    from pallas_kernels.int4_matmul import kernel_mosaic

    config = dataclasses.replace(mosaic_config(spec_of(case), H200), warpgroups=warpgroups, splits=splits, stages=2)
    one, more = (np.asarray(kernel_mosaic.int4_matmul(*arrays, bits=4, out_dtype="float32", interpret=INTERPRETED.interpret,
                                                      config=dataclasses.replace(config, strips=count)))[:-1] for count in (1, strips))
    np.testing.assert_allclose(more, one, rtol=1e-6, atol=1e-6)
    truth = np.asarray(arrays[0])[:-1].astype(np.float64) @ weights
    np.testing.assert_allclose(more, truth, atol=1e-5 * np.abs(truth).max())


WGMMA_TILES = {  # strips, warpgroups, splits, places, values of k of a place; at most two warpgroups: the interpreter needs a core for each
    "two_strips_whole_places": ((2, 1, 1, 4, 256), Case(m=3, k=1792, n=136, group_size=128)),
    "two_strips_half_places": ((2, 1, 2, 4, 128), Case(m=20, k=768, n=136, group_size=64)),
    "two_shares": ((1, 2, 2, 2, 256), Case(m=3, k=1792, n=136, group_size=128)),
    "scaled_weights_two_shares": ((1, 2, 1, 4, 64), Case(m=20, k=768, n=72, group_size=32)),
    "scaled_weights_two_strips": ((2, 1, 1, 4, 64), Case(m=140, k=512, n=136, group_size=128)),
}


@pytest.mark.skipif(ON_SM_80, reason="warpgroup products are of sm_90")
@pytest.mark.parametrize(("tiles", "case"), WGMMA_TILES.values(), ids=WGMMA_TILES.keys())
def test_any_tiles_of_wgmma_give_the_product(tiles: tuple[int, int, int, int, int], case: Case) -> None:
    """Strips that share tokens, shares of k that meet in shared memory, splits that XLA adds up; the last block's strips lie beyond the end."""
    weights, arrays = make_inputs(case)
    from pallas_kernels.int4_matmul import kernel_wgmma

    strips, warpgroups, splits, token_stages, place_k = tiles
    config: WgmmaConfig = dataclasses.replace(wgmma_config(spec_of(case), H200), strips=strips, warpgroups=warpgroups, splits=splits, stages=2,
                                              token_stages=token_stages, place_k=place_k)
    out = np.asarray(kernel_wgmma.int4_matmul(*arrays, bits=case.bits, out_dtype="float32", interpret=INTERPRETED.interpret, config=config))
    truth = np.asarray(arrays[0])[:-1].astype(np.float64) @ weights
    budget = 2e-6 if config.scales_product else 2.0 ** -8  # weights exact, or rounded once to bfloat16
    np.testing.assert_allclose(out[:-1], truth, atol=budget * np.abs(truth).max(), rtol=0)


SHAPES = st.tuples(st.integers(1, 600), st.integers(1, 140), st.sampled_from((4, 8)))


@given(SHAPES, st.integers(0, 2**31))
@settings(max_examples=25, deadline=None)
def test_packing_loses_nothing(shape: tuple[int, int, int], seed: int) -> None:
    k, n, bits = shape
    q = np.random.default_rng(seed).integers(0, 2**bits, (k, n)).astype(np.uint8)
    packed = pack(q, bits=bits)
    assert packed.shape == packed_shape(k, n, bits=bits) and packed.dtype == np.int16
    np.testing.assert_array_equal(unpack(packed, k=k, n=n, bits=bits), q)


@pytest.mark.parametrize("bits", [4, 8])
def test_jax_packs_as_numpy_does(bits: int) -> None:
    q = np.random.default_rng(0).integers(0, 2**bits, (300, 72)).astype(np.uint8)
    packed = jax.jit(functools.partial(pack, bits=bits))(q)
    np.testing.assert_array_equal(np.asarray(packed), pack(q, bits=bits))
    np.testing.assert_array_equal(np.asarray(jax.jit(functools.partial(unpack, k=300, n=72, bits=bits))(packed)), q)


def test_a_word_holds_what_the_diagram_says() -> None:
    q = np.zeros((512, 128), np.uint8)
    for plane in range(4):
        q[256 + 64 * plane + 5, 64 + 7] = plane + 9
    assert pack(q)[1, 1, 7, 5].view(np.uint16) == 0xCBA9


@pytest.mark.parametrize("name", ["tail_of_n", "f16_symmetric_whole_column", "int8_zeros", "tail_of_m"])
def test_dequantize_is_exact(name: str) -> None:
    case = CASES[name]
    _, (_, packed, scales, zeros, _) = make_inputs(case)
    q = unpack(np.asarray(packed), k=case.k, n=case.n, bits=case.bits).astype(np.float32)
    z = np.float32(2 ** (case.bits - 1)) if zeros is None else np.repeat(np.asarray(zeros).astype(np.float32), case.group_size, 0)
    want = (q - z) * np.repeat(np.asarray(scales).astype(np.float32), case.group_size, 0)
    statics = {"group_size": case.group_size, "bits": case.bits}
    on_host = dequantize(np.asarray(packed), np.asarray(scales), None if zeros is None else np.asarray(zeros), **statics)
    for got in (on_host, np.asarray(dequantize(packed, scales, zeros, **statics))):
        assert got.dtype == np.float32 and got.tobytes() == want.tobytes()


def test_zero_points_keep_their_values() -> None:
    zeros = np.arange(257)
    np.testing.assert_array_equal(np.asarray(pack_zeros(zeros)).astype(int), zeros)


ARRAY = jax.ShapeDtypeStruct
GOOD = {"x": ARRAY((4, 256), jnp.bfloat16), "packed": ARRAY((2, 1, 64, 64), jnp.int16), "scales": ARRAY((2, 128), jnp.float16),
        "zeros": ARRAY((2, 128), jnp.uint8), "bias": ARRAY((128,), jnp.bfloat16)}
ERRORS = {
    "group": ({"group_size": 96}, r"group_size = 96: the group size must divide k = 256"),
    "scales": ({"scales": ARRAY((4, 128), jnp.float16)}, r"scales \[4, 128\] and group_size = 128"),
    "packed_shape": ({"packed": ARRAY((1, 1, 64, 64), jnp.int16)}, r"a \[256, 128\] matrix of 4 bits is int16\[2, 1, 64, 64\]"),
    "packed_dtype": ({"packed": ARRAY((2, 1, 64, 64), jnp.uint16)}, r"packed is uint16\[2, 1, 64, 64\]"),
    "bits": ({"bits": 3}, r"bits = 3: must be 4 or 8"),
    "zeros": ({"zeros": ARRAY((2, 64), jnp.uint8)}, r"zeros is uint8\[2, 64\]: must have the scales' shape \[2, 128\]"),
    "zero_dtype": ({"zeros": ARRAY((2, 128), jnp.uint32)}, r"be one of bfloat16, float16, float32, int8.*None stands for 8"),
    "bias": ({"bias": ARRAY((64,), jnp.bfloat16)}, r"bias \[64\], \[n\], and scales \[2, 128\]"),
    "out_dtype": ({"out_dtype": "int8"}, r"out_dtype = int8: must be one of"),
    "no_dtype": ({"out_dtype": "float17"}, r"out_dtype = 'float17': must be one of"),
}


@pytest.mark.parametrize(("changes", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_contract_errors_name_value_and_limit(changes: dict[str, object], message: str) -> None:
    facts = {"group_size": 128, "bits": 4, "out_dtype": None} | GOOD | changes
    with pytest.raises(ContractError, match=message):
        matmul_spec(**facts)


@pytest.mark.parametrize(("q", "bits", "message"), [
    (np.zeros((4, 8), np.int32), 4, "q has dtype int32: must be uint8 codes 0..15"),
    (np.full((4, 8), 16, np.uint8), 4, "q has a code 16: 4 bits hold 0..15"),
    (np.zeros((4, 8), np.uint8), 5, "bits = 5: must be 4 or 8"),
])
def test_what_cannot_be_packed_is_refused(q: np.ndarray, bits: int, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        pack(q, bits=bits)


@pytest.mark.parametrize("kernel", ["mosaic", "wgmma"])
def test_parts_that_are_left_add_up_to_the_product(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more than one comes out whole, as from what splits nothing."""
    if kernel in REFUSED_HERE:
        pytest.skip("warpgroup products are of sm_90")
    case = Case(m=20 if kernel == "wgmma" else 3, k=768, n=72, group_size=128)
    _, (x, packed, scales, zeros, _) = make_inputs(case)
    call = functools.partial(int4_matmul, x, packed, scales, zeros, group_size=128)
    spec = matmul_spec(x, packed, scales, zeros, None, group_size=128, bits=4, out_dtype=None, leave_parts=True)
    impl = next(impl for impl in IMPLS if impl.name == kernel)
    tiles: Any = wgmma_config(spec, H200) if kernel == "wgmma" else mosaic_config(spec, INTERPRETED)
    split = dataclasses.replace(tiles, strips=1, warpgroups=1, splits=3)
    monkeypatch.setattr(importlib.import_module("pallas_kernels.int4_matmul.api"), f"{kernel}_config", lambda spec, target: split)
    parts = impl.run(x, packed, scales, zeros, None, spec=spec, target=INTERPRETED)
    whole = impl.run(x, packed, scales, zeros, None, spec=dataclasses.replace(spec, leaves_parts=False), target=INTERPRETED)
    assert parts.shape == (3, case.m, case.n) and parts.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(jnp.sum(parts, axis=0).astype(whole.dtype)).view(np.uint16), np.asarray(whole).view(np.uint16))
    plain = call(leave_parts=True, implementation="xla")
    assert plain.shape == whole.shape and plain.dtype == x.dtype
    with pytest.raises(ContractError, match="leave_parts = True beside a bias, which needs the whole sum"):
        call(leave_parts=True, bias=scales[0])
    with pytest.raises(ContractError, match="leave_parts = True beside activation = 'swiglu'"):
        call(leave_parts=True, activation="swiglu")


def choice(m: int, target: Target, implementation: str | None = None, **changes: object) -> str:
    facts = {"m": m, "k": 3584, "n": 4608, "group_size": 128, "bits": 4, "x_dtype": "bfloat16", "scale_dtype": "float16",
             "zero_dtype": "bfloat16", "has_bias": False, "out_dtype": "bfloat16"}
    return int4_matmul_choice(MatmulSpec(**(facts | changes)), target, implementation=implementation).implementation


def test_choice_is_known_without_running() -> None:
    assert [choice(m, H200) for m in (1, 2, 8, 16, 64, 256, 4096)] == [
        "stream", "stream", "mosaic", "mosaic", "wgmma", "wgmma", "dequantize"]
    assert [choice(m, A100) for m in (1, 8, 64, 4096)] == ["stream", "mosaic", "mosaic", "dequantize"]
    assert choice(1, H200, group_size=32) == "mosaic"  # whose parameters a lane has no registers for
    assert choice(1, CPU) == choice(1, H200, x_dtype="float32") == choice(1, H200, group_size=112) == "xla"
    with pytest.raises(Unsupported, match="needs groups of 32, 64, 128, a multiple of 256 or the whole column, not 112"):
        choice(1, A100, "mosaic", group_size=112)
    for m, k in ((4096, 300), (4096, 3580), (600, 4100)):  # rows of 8 values do not lie whole: XLA's own way, not one for few tokens
        assert choice(m, H200, k=k, group_size=k) == choice(m, A100, k=k, group_size=k) == "xla"
    with pytest.raises(Unsupported, match="is built for sm_90, not"):
        choice(64, A100, "wgmma")


def test_forced_implementation_runs_or_refuses() -> None:
    case = CASES["f32"]
    _, (x, packed, scales, zeros, _) = make_inputs(case)
    out = int4_matmul(x, packed, scales, zeros, group_size=case.group_size, implementation="reference")
    np.testing.assert_allclose(out[:-1], int4_matmul(x, packed, scales, zeros, group_size=case.group_size)[:-1], rtol=1e-5, atol=1e-5)
    with pytest.raises(Unsupported, match="cannot do this case: needs x in 16 bits, not float32|needs an NVIDIA GPU"):
        int4_matmul(x, packed, scales, zeros, group_size=case.group_size, implementation="mosaic")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(3584, 4608), (3584, 37888), (18944, 3584), (896, 896), (576, 1536)])
def test_tiles_fit_the_device(shape: tuple[int, int], bits: int) -> None:
    for m in (1, 8, 9, 16, 17, 64, 65, 200, 512):
        spec = MatmulSpec(m=m, k=shape[0], n=shape[1], group_size=64, bits=bits, x_dtype="bfloat16", scale_dtype="float16",
                          zero_dtype=None, has_bias=False, out_dtype="bfloat16")
        for target in (A100, H200):
            config = mosaic_config(spec, target)
            assert mosaic_shared_bytes(spec, config) <= target.shared_memory_bytes
            assert config.splits * config.warpgroups <= spec.num_tiles and config.stages >= 2 and config.warpgroups * config.strips <= 5
            if m <= 8:
                stream = stream_config(spec, target)
                steps = stream_steps(spec.num_tiles, stream.columns, stream.warpgroups, stream.splits)
                assert stream_shared_bytes(spec, stream) <= target.shared_memory_bytes and stream.splits <= spec.num_tiles
                assert stream.places == 1 or stream.depth % steps == 0 and steps <= STREAM_MOST_STEPS and 4 * steps <= STREAM_MOST_SUMS
        wide = wgmma_config(spec, H200)
        assert wgmma_shared_bytes(spec, wide) <= H200.shared_memory_bytes and wide.stages >= 2
        assert wide.warpgroups * wide.splits <= spec.num_tiles and wide.warpgroups * wide.strips <= WGMMA_WARPGROUPS[wide.block_m]


@pytest.mark.parametrize("entry", STREAM_MEASURED)
def test_measured_tiles_of_few_tokens_are_taken_and_activate_what_comes_in_pairs(entry: tuple[int, int, int]) -> None:
    k, n, m = entry
    for activation in (None, "swiglu"):
        spec = MatmulSpec(m=m, k=k, n=n, group_size=128, bits=4, x_dtype="bfloat16", scale_dtype="float16", zero_dtype="bfloat16",
                          has_bias=False, out_dtype="bfloat16", activation=activation)
        taken = stream_config(spec, H200)
        assert (taken.columns, taken.places, taken.warpgroups, taken.splits, taken.depth) == STREAM_MEASURED[entry]
        assert taken.gated == (activation is not None and taken.places % 2 == 0) and stream_shared_bytes(spec, taken) <= 227 * 1024


# (columns, places, warpgroups, splits, depth): warps side by side in n or in k, waiting for k or going through n, with parts left over
STREAMS = [(64, 1, 1, 1, 2), (32, 1, 2, 1, 3), (16, 1, 1, 2, 2), (32, 2, 4, 1, 2), (16, 3, 2, 1, 2), (16, 4, 1, 1, 3)]


@pytest.mark.parametrize("tiles", STREAMS, ids=str)
@pytest.mark.parametrize("name", ["bf16", "odd_n", "f16", "int8"])
def test_streams_of_any_tiles_agree(name: str, tiles: tuple[int, int, int, int, int]) -> None:
    """Tiles change only the order of sums; where places come in pairs, silu of the one is multiplied by the other."""
    case = {"bf16": Case(m=2, k=2560, n=136, group_size=128, has_bias=True),
            "odd_n": Case(m=1, k=700, n=37, group_size=700, scale_dtype="float32", has_bias=True),
            "f16": Case(m=3, k=640, n=64, group_size=64, dtype="float16", zero_dtype=None, out_dtype="float32"),
            "int8": Case(m=8, k=1536, n=128, group_size=256, bits=8, has_bias=True)}[name]
    from pallas_kernels.int4_matmul import kernel_stream

    weights, arrays = make_inputs(case)
    spec = spec_of(case)
    x, bias = np.asarray(arrays[0]).astype(np.float64), 0 if arrays[4] is None else np.asarray(arrays[4]).astype(np.float64)
    rows = slice(0, max(1, case.m - 1))  # the last of several is NaN
    product = (x @ weights + bias)[rows]
    for activation in (None, "swiglu"):
        config = stream_tiles(dataclasses.replace(spec, activation=activation), *tiles)
        steps = stream_steps(spec.num_tiles, config.columns, config.warpgroups, config.splits)
        if config.places > 1 and config.depth % steps or activation and not config.gated:
            continue
        gate, up = product[:, :case.n // 2], product[:, case.n // 2:]
        truth = gate / (1 + np.exp(-gate)) * up if activation else product
        out = kernel_stream.int4_matmul(*arrays, bits=case.bits, out_dtype=spec.out_dtype, config=config, interpret=INTERPRETED.interpret)
        assert out.shape == (case.m, truth.shape[1]) and (case.m == 1 or np.isnan(out[-1]).all())
        tolerance = 4 * float(jnp.finfo(out.dtype).eps) * np.abs(truth).max()
        np.testing.assert_allclose(np.asarray(out[rows]).astype(np.float64), truth, rtol=0, atol=tolerance)


@pytest.mark.parametrize("implementation", ["stream", "mosaic", "xla", "reference"])
def test_an_activation_is_the_same_wherever_it_is_computed(implementation: str) -> None:
    case = Case(m=2, k=512, n=128, group_size=128)
    weights, (x, packed, scales, zeros, _) = make_inputs(case)
    spec = dataclasses.replace(spec_of(case), activation="swiglu")
    impl = next(each for each in IMPLS if each.name == implementation)
    target = TARGETS["interpreted" if implementation in KERNELS else "cpu"]
    out = activated(impl.run(x, packed, scales, zeros, None, spec=spec, target=target), spec)
    product = (np.asarray(x[:1]).astype(np.float64) @ weights)
    truth = product[:, :64] / (1 + np.exp(-product[:, :64])) * product[:, 64:]
    assert out.shape == (2, 64) and out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out[:1]).astype(np.float64), truth, rtol=0, atol=6 * 2.0 ** -8 * np.abs(truth).max())


def test_an_activation_that_is_not_one_is_refused() -> None:
    _, (x, packed, scales, zeros, _) = make_inputs(CASES["odd_n"])
    with pytest.raises(ContractError, match="activation = 'gelu': must be 'swiglu', or None"):
        int4_matmul(x, packed, scales, zeros, group_size=48, activation="gelu")
    with pytest.raises(ContractError, match="takes the halves of n = 37 columns: n must be even"):
        int4_matmul(x, packed, scales, zeros, group_size=48, activation="swiglu")


@pytest.mark.parametrize(("table", "entry"), [*(("mosaic", key) for key in MOSAIC_MEASURED), *(("wgmma", key) for key in WGMMA_MEASURED)])
def test_measured_tiles_are_taken_where_they_were_measured(table: str, entry: tuple[int, int, int]) -> None:
    k, n, m = entry
    spec = MatmulSpec(m=m, k=k, n=n, group_size=128, bits=4, x_dtype="bfloat16", scale_dtype="float16", zero_dtype="bfloat16",
                      has_bias=False, out_dtype="bfloat16")
    if table == "mosaic":
        narrow = mosaic_config(spec, H200)
        assert (narrow.warpgroups, narrow.splits, narrow.stages, narrow.strips) == MOSAIC_MEASURED[entry]
        assert mosaic_shared_bytes(spec, narrow) <= H200.shared_memory_bytes and narrow.warpgroups * narrow.splits <= spec.num_tiles
    else:
        wide = wgmma_config(spec, H200)
        assert (wide.strips, wide.warpgroups, wide.splits, wide.stages, wide.token_stages, wide.place_k) == WGMMA_MEASURED[entry]
        assert wide.strips == 1 or wide.token_stages > 2 or wide.place_k == 256, "strips wait for a place that is fetched after the wait"
        assert wgmma_shared_bytes(spec, wide) <= H200.shared_memory_bytes and wide.warpgroups * wide.splits <= spec.num_tiles


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 64), (8, 64), (8, 128), (8, 3584)])
@pytest.mark.parametrize("m", [64, 128])
def test_blocks_whose_rows_or_codes_fill_registers_have_fewer_warpgroups(m: int, bits: int, group_size: int) -> None:
    """Three of a wide vocabulary head spill: 104 bytes a thread with 64 tokens and 8 bits, and ptxas then runs products one by one."""
    spec = MatmulSpec(m=m, k=3584, n=152064, group_size=group_size, bits=bits, x_dtype="bfloat16", scale_dtype="float32",
                      zero_dtype="bfloat16", has_bias=False, out_dtype="float32")
    config = wgmma_config(spec, H200)
    assert config.strips * config.warpgroups < WGMMA_WARPGROUPS[config.block_m]


@pytest.mark.parametrize("entry", WGMMA_MEASURED | dict.fromkeys((k, n, m) for k, n, m in MOSAIC_MEASURED))
def test_scales_of_32_bits_find_tiles_where_others_were_measured(entry: tuple[int, int, int]) -> None:
    """Which take twice the memory: 32 tokens of 3584 x 3584 had no room for the measured tiles, 16 of 18944 x 3584 fell back to XLA."""
    k, n, m = entry
    assert choice(m, H200, k=k, n=n, scale_dtype="float32") in ("mosaic", "wgmma", "dequantize")
    if m > 16:
        assert choice(m, H200, "wgmma", k=k, n=n, scale_dtype="float32") == "wgmma"


def test_a_measured_entry_moves_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = MatmulSpec(m=8, k=3584, n=4608, group_size=128, bits=4, x_dtype="bfloat16", scale_dtype="float16", zero_dtype="bfloat16",
                      has_bias=False, out_dtype="bfloat16")
    monkeypatch.setitem(MOSAIC_MEASURED, (3584, 4608, 8), (3, 2, 2, 1))
    taken, elsewhere = mosaic_config(spec, H200), mosaic_config(spec, A100)
    assert (taken.warpgroups, taken.splits, taken.stages, taken.strips) == (3, 2, 2, 1) and elsewhere.warpgroups != 3
