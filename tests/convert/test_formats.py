"""Formats of quantised weights, matrix by matrix: goldens packed by the libraries themselves, round trips, and every refusal."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from convert.formats import EXPORTS, FORMATS, READERS, QuantizedMatrix, Scheme, read_scheme
from convert.formats.bits import pack_columns, pack_rows, unpack_columns, unpack_rows
from convert.formats.gptq import input_order
from jaxinfer.errors import CheckpointError, ConfigError, UnsupportedModelError
from jaxinfer.quant import QuantFormat
from tests.convert import exported_matrices
from tests.convert.quantized_checkpoints import CONFIGS, matrix
from tests.goldens.digests import digest

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
PACKED = dict(np.load(FIXTURES / "packed_matrices.npz"))
CASES = sorted({key.partition("/")[0] for key in PACKED})
UNPACKED = json.loads((FIXTURES / "unpacked_exports.json").read_text())["cases"]
CODES = {"int32": "I32", "int64": "I64", "int8": "I8", "float16": "F16"}


def scheme_of(config: dict[str, Any]) -> Scheme:
    scheme = read_scheme({"quantization_config": config})
    assert scheme is not None
    return scheme


def assert_specs(scheme: Scheme, found: dict[str, np.ndarray], k: int, n: int) -> None:
    """The tensors are those that the format announces."""
    specs = FORMATS[scheme.name].tensors(scheme, k, n)
    assert specs.keys() == found.keys()
    for name, spec in specs.items():
        assert spec.shape == found[name].shape and CODES[found[name].dtype.name] in spec.dtypes, name


@pytest.mark.parametrize("case", CASES)
def test_what_the_libraries_packed_dequantises_bit_for_bit(case: str) -> None:
    found = {key.partition("/")[2]: value for key, value in PACKED.items() if key.startswith(f"{case}/")}
    scheme, weight = scheme_of(json.loads(str(found.pop("config")))), found.pop("weight_f32")
    assert_specs(scheme, found, weight.shape[1], weight.shape[0])
    got = FORMATS[scheme.name].unpack(scheme, found)
    got.check(case)
    assert (got.perm is not None) == scheme.act_order == ("act" in case)
    np.testing.assert_array_equal(got.dequantized().T, weight)
    assert not got.dequantized().T[3].any()  # a column whose scales are zero
    if scheme.name == "gptq":  # and what is written of it is what the library wrote
        again = EXPORTS["gptq"].pack(got)
        assert again.keys() == found.keys()
        for name, value in found.items():
            np.testing.assert_array_equal(again[name], value, err_msg=name, strict=True)


@pytest.mark.parametrize("case", sorted(exported_matrices.CASES))
def test_the_libraries_unpack_what_was_packed(case: str) -> None:
    """The tensors are those that AutoAWQ or AutoGPTQ was given, and what it made of them is the matrix, bit for bit."""
    assert {name: digest(value) for name, value in exported_matrices.packed(case).items()} == UNPACKED[case]["tensors"]
    assert digest(exported_matrices.CASES[case][1].dequantized().T) == UNPACKED[case]["weight"]


def test_the_record_covers_every_layout_that_the_libraries_read() -> None:
    assert UNPACKED.keys() == exported_matrices.CASES.keys()
    assert {target for target, _ in exported_matrices.CASES.values()} == EXPORTS.keys() - {"gptq_v2"}  # AutoGPTQ 0.7.1 reads v1 alone


@pytest.mark.parametrize("name", ["awq", "gptq"])
@pytest.mark.parametrize(("module", "golden"), [("mlp.down_proj", "layer0_down_dequant"), ("self_attn.q_proj", "layer0_q_dequant")])
def test_tiny_checkpoints_dequantise_bit_for_bit(name: str, module: str, golden: str) -> None:
    folder = FIXTURES / f"{name}_tiny"
    scheme = scheme_of(json.loads((folder / "config.json").read_text())["quantization_config"])
    prefix = f"model.layers.0.{module}."
    tensors = {key.removeprefix(prefix): value for key, value in load_file(folder / "model.safetensors").items() if key.startswith(prefix)}
    tensors.pop("bias", None)
    got = FORMATS[name].unpack(scheme, tensors)
    np.testing.assert_array_equal(got.dequantized().T, np.load(folder / "golden.npz")[golden])


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_format_reads_what_its_definition_packs(name: str) -> None:
    scheme, rng = scheme_of(CONFIGS[name]), np.random.default_rng(0)
    found, weight = matrix(CONFIGS[name], rng, 96, 64, rng.permutation(96))
    assert_specs(scheme, found, 96, 64)
    got = FORMATS[scheme.name].unpack(scheme, found)
    np.testing.assert_array_equal(got.dequantized().T, weight)


def test_the_tests_cover_every_format() -> None:
    assert {scheme_of(config).name for config in CONFIGS.values()} == set(FORMATS)


@st.composite
def matrices(draw: st.DrawFn, bits: tuple[int, ...], permuted: bool, least_zero: int) -> QuantizedMatrix:
    width, size = draw(st.sampled_from(bits)), draw(st.sampled_from([32, 64, None]))
    groups = 1 if size is None else draw(st.integers(1, 3))
    k, n = (size or 8 * draw(st.integers(1, 12))) * groups, 8 * draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scales = rng.random((groups, n)).astype(np.float16) * (rng.random((groups, n)) > 0.2)
    zeros = rng.integers(least_zero, 2**width, (groups, n), dtype=np.uint8) if draw(st.booleans()) else None
    order = np.sort(rng.permutation(k).reshape(groups, -1), axis=1).reshape(-1).astype(np.int32)
    return QuantizedMatrix(q=rng.integers(0, 2**width, (k, n), dtype=np.uint8), scales=scales.astype(np.float16), zeros=zeros, bits=width,
                           group_size=size, perm=order if permuted and draw(st.booleans()) and (np.diff(order) < 0).any() else None)


@pytest.mark.parametrize("name", sorted(EXPORTS))
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pack_then_unpack_gives_the_matrix_back(name: str, data: st.DataObject) -> None:
    made = data.draw(matrices(bits=(4,) if name == "awq" else (4, 8), permuted=name != "awq", least_zero=int(name == "gptq")))
    made.check("matrix")
    scheme = EXPORTS[name].read_config(EXPORTS[name].write_config(made.format, skipped=[], lm_head=False))
    packed = EXPORTS[name].pack(made)
    assert_specs(scheme, packed, *made.q.shape)
    got = FORMATS[scheme.name].unpack(scheme, packed)
    zeros = np.full(made.scales.shape, 2**(made.bits - 1), np.uint8) if made.zeros is None else made.zeros
    for found, wanted in ((got.q, made.q), (got.scales, made.scales), (got.zeros, zeros)):
        np.testing.assert_array_equal(found, wanted)
    assert got.group_size == made.group_size and got.bits == made.bits
    np.testing.assert_array_equal(np.arange(made.q.shape[0]) if got.perm is None else got.perm,
                                  np.arange(made.q.shape[0]) if made.perm is None else made.perm)


@settings(max_examples=30, deadline=None)
@given(bits=st.sampled_from([4, 8]), rows=st.integers(1, 5), words=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_words_hold_every_value(bits: int, rows: int, words: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 2**bits, (rows, words * 32 // bits), dtype=np.uint8)
    order = rng.permutation(32 // bits).tolist()
    np.testing.assert_array_equal(unpack_columns(pack_columns(values, bits, order), bits, order), values)
    np.testing.assert_array_equal(unpack_rows(pack_rows(values.T, bits), bits), values.T)


def test_nibbles_stand_where_the_definitions_say() -> None:
    values = np.arange(8, dtype=np.uint8)[None]
    assert f"{pack_columns(values, 4).view(np.uint32)[0, 0]:08x}" == "76543210"
    assert f"{pack_columns(values, 4, (0, 2, 4, 6, 1, 3, 5, 7)).view(np.uint32)[0, 0]:08x}" == "75316420"
    assert f"{pack_rows(values[:, 4:].T, 8).view(np.uint32)[0, 0]:08x}" == "07060504"


def changed(name: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**CONFIGS[name], **changes}.items() if value is not ...}


def group_changed(**changes: Any) -> dict[str, Any]:
    return changed("packed", config_groups={"group_0": {**CONFIGS["packed"]["config_groups"]["group_0"], **changes}})


def weights_changed(**changes: Any) -> dict[str, Any]:
    return group_changed(weights={**CONFIGS["packed"]["config_groups"]["group_0"]["weights"], **changes})


REFUSED: dict[str, Any] = {
    "quant_method = 'bitsandbytes': awq, gptq, compressed-tensors are read": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "quant_method = 'fp8'": {"quant_method": "fp8"},
    "quant_method = 'awq4'": "awq4",
    r"quant_method = \['awq'\]": {"quant_method": ["awq"]},
    "this is the config of a converted checkpoint": {"quant_method": "jaxinfer"},
    r"\(awq\) says bits = 3: AWQ's layout holds 4": changed("awq", bits=3),
    "version = 'gemv': only 'gemm' is read; save the model again": changed("awq", version="gemv"),
    "version = 'marlin'": changed("awq", version="marlin"),
    "format = 'exllama'": changed("awq", version=..., format="exllama"),
    "has no 'zero_point', which decides": changed("awq", zero_point=...),
    "bits = '4': a value of type int is needed": changed("awq", bits="4"),
    "bits = True: a value of type int": changed("awq", bits=True),
    "another spelling of it says otherwise": changed("awq", q_group_size=64),
    "group_size = 0: a positive number, or -1": changed("awq", group_size=0),
    r"modules_to_not_convert holds 7: names of modules": changed("awq", modules_to_not_convert=[7]),
    r"attributes that are not implemented: clip = 1, twist = \[2\]": changed("awq", clip=1, twist=[2]),
    "bits = 3: 4 and 8 are read": changed("gptq", bits=3),
    "checkpoint_format = 'marlin': only 'gptq' and 'gptq_v2' are read": changed("gptq", checkpoint_format="marlin"),
    "is_marlin_format = True": changed("gptq", is_marlin_format=True),
    "lm_head = 1: a value of type bool is needed": changed("gptq", lm_head=1),
    r"\(awq\) has attributes that are not implemented: lm_head = True": changed("awq", lm_head=True),
    "dynamic = {'-:x': {}}": changed("gptq", dynamic={"-:x": {}}),
    "modules_in_block_to_quantize = .*only null is implemented": changed("gptq", modules_in_block_to_quantize=[["a"]]),
    "has no 'sym'": changed("gptq", sym=...),
    "format = 'float-quantized': only 'pack-quantized'": changed("packed", format="float-quantized"),
    "kv_cache_scheme = ": changed("packed", kv_cache_scheme={"num_bits": 8}),
    "has 2 config_groups: one for all linear": changed("packed", config_groups={"a": {}, "b": {}}),
    r"targets = \['re:.*q_proj'\]": group_changed(targets=["re:.*q_proj"]),
    "input_activations = ": group_changed(input_activations={"num_bits": 8}),
    "type = 'float'": weights_changed(type="float"),
    "num_bits = 3: pack-quantized is read with 4 or 8": weights_changed(num_bits=3),
    "strategy = 'block': only 'group' and 'channel'": weights_changed(strategy="block"),
    "strategy 'group' needs a positive number": weights_changed(group_size=None),
    r"ignore holds '\(', which is no regular expression": changed("packed", ignore=["re:("]),
}


@pytest.mark.parametrize("message", sorted(REFUSED))
def test_other_variants_are_refused_by_name(message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_scheme({"quantization_config": REFUSED[message]})


def test_an_unquantised_config_has_no_scheme_and_every_method_is_tested() -> None:
    assert read_scheme({}) is None and read_scheme({"quantization_config": None}) is None
    assert {config["quant_method"] for config in CONFIGS.values()} == set(READERS)


def test_names_of_modules_that_stay() -> None:
    awq = scheme_of(changed("awq", modules_to_not_convert=["layers.1.mlp", "visual"]))
    assert awq.is_quantized("model.layers.0.mlp.up_proj") and not awq.is_quantized("model.layers.1.mlp.up_proj")
    assert awq.is_quantized("model.layers.11.mlp.up_proj")
    packed = scheme_of(changed("packed", ignore=["model.layers.1.mlp.up_proj", "re:.*layers\\.2\\..*"]))
    stay = [name for name in (f"model.layers.{i}.mlp.up_proj" for i in range(4)) if not packed.is_quantized(name)]
    assert stay == ["model.layers.1.mlp.up_proj", "model.layers.2.mlp.up_proj"]


GOOD: dict[str, Any] = {"q": np.ones((64, 8), np.uint8), "scales": np.ones((2, 8), np.float16), "zeros": np.ones((2, 8), np.uint8), "bits": 4,
                        "group_size": 32, "perm": None}
BAD: dict[str, dict[str, Any]] = {
    r"needs scales and zeros \[2, 8\], found \[3, 8\]": {"scales": np.ones((3, 8), np.float16)},
    r"found \[2, 8\] and \[2, 4\]": {"zeros": np.ones((2, 4), np.uint8)},
    "values or zero points of 16 or more": {"q": np.full((64, 8), 16, np.uint8)},
    "1 scales are NaN, infinite or negative .the first is nan.: nothing is saved": {
        "scales": np.array([[np.nan] + 7 * [1], 8 * [1]], np.float16)},
    "8 scales are NaN.*the first is -1": {"scales": np.array([8 * [1], 8 * [-1]], np.float16)},
    "perm is no permutation of its 64 inputs": {"perm": np.zeros(64, np.int32)},
}


@pytest.mark.parametrize("message", sorted(BAD))
def test_what_is_never_saved(message: str) -> None:
    QuantizedMatrix(**GOOD).check("layers.0.mlp.down")
    with pytest.raises(CheckpointError, match=f"layers.0.mlp.down: .*{message}"):
        QuantizedMatrix(**{**GOOD, **BAD[message]}).check("layers.0.mlp.down")


def test_groups_that_do_not_divide_are_refused_before_anything_else() -> None:
    with pytest.raises(ConfigError, match="m: 96 inputs do not split into groups of 64: quantise with a group size of 32, or quantise by"):
        QuantizedMatrix(**{**GOOD, "q": np.ones((96, 8), np.uint8), "group_size": 64}).check("m")


def test_zero_groups_stay_exactly_zero() -> None:
    scales = np.array([8 * [0.0], 8 * [0.5]], np.float16)
    weight = QuantizedMatrix(**{**GOOD, "scales": scales, "q": np.full((64, 8), 9, np.uint8)}).dequantized()
    assert not weight[:32].any() and (weight[32:] == 4.0).all()


def test_groups_of_inputs() -> None:
    assert input_order(np.arange(8) // 4, 2) is None
    np.testing.assert_array_equal(input_order(np.array([1, 0, 1, 0]), 2), [1, 3, 0, 2])
    with pytest.raises(CheckpointError, match="names group 2 .least 0. of 2"):
        input_order(np.array([0, 2, 1, 1]), 2)
    with pytest.raises(CheckpointError, match="puts 1 to 3 inputs in a group, 4 inputs in 2 groups"):
        input_order(np.array([0, 0, 0, 1]), 2)


def test_gptq_v1_cannot_hold_a_zero_point_of_0_and_reads_what_stands_there_as_0() -> None:
    made = QuantizedMatrix(**{**GOOD, "zeros": np.zeros((2, 8), np.uint8)})
    with pytest.raises(UnsupportedModelError, match="a zero point of 0.* use --format=gptq_v2 or --format=awq"):
        EXPORTS["gptq"].pack(made)
    packed = EXPORTS["gptq_v2"].pack(made)
    assert not packed["qzeros"].any()
    got = FORMATS["gptq"].unpack(scheme_of(CONFIGS["gptq"]), {**packed, "qzeros": np.full((2, 1), -1, np.int32)})
    np.testing.assert_array_equal(got.zeros, made.zeros)


def test_what_the_layouts_cannot_express() -> None:
    weights = QuantFormat(bits=4, group_size=32, zero_point=True, permuted=True, scales_dtype="float16")
    with pytest.raises(UnsupportedModelError, match="holds 4 bits and no act-order, these weights are int4, groups of 32.*use --format=gptq"):
        EXPORTS["awq"].write_config(weights, skipped=[], lm_head=False)
    with pytest.raises(UnsupportedModelError, match="AutoAWQ knows no quantised lm_head, and this model has one: use --format=gptq, or"):
        EXPORTS["awq"].write_config(weights, skipped=[], lm_head=True)
    with pytest.raises(UnsupportedModelError, match="no list of unquantised modules, and m.x is one of 1"):
        EXPORTS["gptq"].write_config(weights, skipped=["m.x"], lm_head=False)


def test_which_formats_have_a_quantised_head() -> None:
    """Only GPTQ's, and only where its config says so."""
    assert {name for name, config in CONFIGS.items() if scheme_of(config).is_quantized("lm_head")} == set()
    assert scheme_of(changed("gptq", lm_head=True)).is_quantized("lm_head")
    assert not scheme_of(changed("gptq", lm_head=False)).is_quantized("lm_head")
    assert scheme_of(CONFIGS["gptq"]).is_quantized("model.layers.0.mlp.up_proj")
    weights = QuantFormat(bits=4, group_size=32, zero_point=True, permuted=False, scales_dtype="float16")
    for lm_head in (True, False):
        written = EXPORTS["gptq"].write_config(weights, skipped=[], lm_head=lm_head)
        assert EXPORTS["gptq"].read_config(written).is_quantized("lm_head") == lm_head
