"""Quantised folders all the way: converted, run, exported, read again, and refused by name where they are not what they say."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from convert import converter
from convert.converter import convert
from convert.export import export
from convert.inspect import inspect
from convert.quantized_checkpoint import write_quantized
from jaxinfer.checkpoint import read_manifest, read_param
from jaxinfer.engine.load import LoadedModel, load, teacher_forced_logits
from jaxinfer.errors import CheckpointError, ConfigError, JaxInferError, UnsupportedModelError
from tests.convert.checkpoints import hf_config, hf_tensors, write_hf
from tests.convert.dequantize import dequantized
from tests.convert.quantized_checkpoints import CONFIGS, quantized

LOGITS = jax.jit(teacher_forced_logits, static_argnums=0)
IDS = np.arange(1, 41, dtype=np.int32).reshape(2, 20) * 5
LAYER = "model.layers.0."
Q, K_PROJ, DOWN = (f"{LAYER}{name}" for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"))


def folder_of(path: Path, name: str, *, tensors: dict[str, np.ndarray] | None = None, num_layers: int = 1,
              **changes: Any) -> tuple[Path, dict[str, np.ndarray]]:
    """A folder quantised as CONFIGS[name] says, float16 beside, and its tensors with float32 weights in their place."""
    config = hf_config(quantization_config={**CONFIGS[name], **changes}, num_hidden_layers=num_layers)
    stored, plain = quantized(name, hf_tensors(config, np.float16))
    return write_hf(path, config, stored if tensors is None else tensors), plain


def logits(model: LoadedModel) -> np.ndarray:
    return np.asarray(LOGITS(model.graphdef, model.params, IDS))


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_converted_folder_holds_and_computes_what_its_source_says(tmp_path: Path, name: str) -> None:
    source, plain = folder_of(tmp_path / "hf", name)
    folder = convert(source, tmp_path / "out", progress=False)
    for weight, found in dequantized(folder).items():
        np.testing.assert_array_equal(found, plain[weight])
    manifest, model = read_manifest(folder), load(folder, dtype="float32")
    assert manifest["quantization"]["quant_method"] == "jaxinfer" and manifest["dtype"] == "float16"
    assert manifest["num_params"] == sum(value.size for value in plain.values())
    if name in ("awq", "gptq_desc_act", "gptq_8bit_sym"):  # zero points; permuted inputs; 8 bits, symmetric, whole columns
        reference = load(convert(write_hf(tmp_path / "plain", hf_config(num_hidden_layers=1), plain), tmp_path / "reference",
                                 dtype="float32", progress=False))
        want = logits(reference)
        assert np.abs(want).max() > 1.0
        np.testing.assert_allclose(logits(model), want, atol=1e-4, rtol=0)
    quantization = model.config.quantization
    assert quantization is not None and quantization.weights.permuted == ("act" in name) and quantization.exceptions == ()
    assert str(quantization.weights) in inspect(folder)


@pytest.mark.parametrize(("name", "target"), [("awq", "gptq_v2"), ("gptq_desc_act", "gptq"), ("gptq_8bit_sym", "gptq"), ("packed", "awq"),
                                              ("int8", "gptq")])  # test_export.py has awq and gptq to themselves
def test_export_and_read_again(tmp_path: Path, name: str, target: str) -> None:
    first = convert(folder_of(tmp_path / "hf", name)[0], tmp_path / "first", progress=False)
    again = convert(export(first, tmp_path / "back", target=target, progress=False), tmp_path / "again", progress=False)
    one, two = read_manifest(first), read_manifest(again)
    if name == "gptq_desc_act":
        stored, written = load_file(tmp_path / "hf" / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
        assert stored.keys() == written.keys()
        assert all(stored[key].tobytes() == written[key].tobytes() for key in stored)
    weights, same = dequantized(first), dequantized(again)
    assert weights.keys() == same.keys() and all(np.array_equal(weights[key], same[key]) for key in weights)
    shared = [key for key in one["tensors"] if key in two["tensors"] and not key.endswith(".zeros")]
    assert all(np.array_equal(read_param(first, one, key), read_param(again, two, key)) for key in shared)
    assert two["quantization"]["method"] == target.removesuffix("_v2")


@pytest.mark.parametrize(("name", "file"), [("gptq", "quantize_config.json"), ("awq", "quant_config.json")])
def test_older_quantisers_have_a_file_of_their_own(tmp_path: Path, name: str, file: str) -> None:
    config = hf_config(num_hidden_layers=1)
    stored, plain = quantized(name, hf_tensors(config, np.float16))
    source = write_hf(tmp_path / "hf", config, stored)
    own = {key: value for key, value in CONFIGS[name].items() if key != "quant_method"}
    if name == "awq":
        own = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM", "modules_to_not_convert": None}
    (source / file).write_text(json.dumps(own))
    folder = convert(source, tmp_path / "out", progress=False)
    assert all(np.array_equal(found, plain[weight]) for weight, found in dequantized(folder).items())
    assert file in [entry["name"] for entry in read_manifest(folder)["source"]["files"]]


def test_verification_uses_the_exact_weights(tmp_path: Path) -> None:
    folder = convert(folder_of(tmp_path / "hf", "gptq_desc_act")[0], tmp_path / "out", progress=False, verify_logits=True)
    verification = read_manifest(folder)["verification"]
    assert verification["passed"] and verification["max_abs_diff"] < 1e-4 and verification["argmax_equal"]


def test_modules_that_stay_as_they_are(tmp_path: Path) -> None:
    config = hf_config(quantization_config={**CONFIGS["awq"], "modules_to_not_convert": ["layers.1.mlp.down_proj", "layers.0.self_attn"]})
    stored, plain = quantized("awq", hf_tensors(config, np.float16))
    apart = [f"model.layers.{i}.{name}" for i, name in ((1, "mlp.down_proj"), *((0, f"self_attn.{p}_proj") for p in "qkvo"))]
    for module in apart:
        plain[f"{module}.weight"] = plain[f"{module}.weight"].astype(np.float16)
        stored = {key: value for key, value in stored.items() if not key.startswith(module) or key.endswith(".bias")}
        stored[f"{module}.weight"] = plain[f"{module}.weight"]
    first = convert(write_hf(tmp_path / "hf", config, stored), tmp_path / "first", progress=False)
    model = load(first, dtype="float32")
    assert [name for name, value in model.config.quantization.exceptions if value is None] == [
        "layers.0.attention.output", "layers.0.attention.qkv", "layers.1.mlp.down"]
    want = logits(load(convert(write_hf(tmp_path / "plain", hf_config(), plain), tmp_path / "reference", dtype="float32", progress=False)))
    np.testing.assert_allclose(logits(model), want, atol=1e-4, rtol=0)
    back = export(first, tmp_path / "back", target="awq", progress=False)
    assert sorted(json.loads((back / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]) == sorted(apart)
    written = load_file(back / "model.safetensors")
    assert written.keys() == stored.keys() and all(written[key].tobytes() == stored[key].tobytes() for key in stored)
    with pytest.raises(UnsupportedModelError, match="no list of unquantised modules"):
        export(first, tmp_path / "no", target="gptq", progress=False)
    assert "3 modules otherwise" in inspect(first)


def test_zero_biases_of_quantisers_are_dropped_and_others_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, _ = folder_of(tmp_path / "hf", "gptq")
    tensors = load_file(source / "model.safetensors")
    tensors[f"{DOWN}.bias"] = np.zeros(64, np.float16)
    with caplog.at_level(logging.INFO):
        convert(folder_of(tmp_path / "zero", "gptq", tensors=tensors)[0], tmp_path / "out", progress=False)
    assert f"dropped {DOWN}.bias: it is zero" in caplog.text
    tensors[f"{DOWN}.bias"][5] = 1
    with pytest.raises(CheckpointError, match="down_proj.bias holds a bias that this architecture has not"):
        convert(folder_of(tmp_path / "one", "gptq", tensors=tensors)[0], tmp_path / "no", progress=False)


Change = Callable[[dict[str, np.ndarray]], Any]
BAD_TENSORS: dict[str, tuple[str, Change]] = {
    r"missing tensor model.layers.0.mlp.down_proj.qzeros, needed for layers.0.mlp.down.weight": ("awq", lambda t: t.pop(f"{DOWN}.qzeros")),
    r"down_proj.qzeros has shape \[2, 8\], config and quantization_config ask for \[3, 8\]": (
        "awq", lambda t: t.update({f"{DOWN}.qzeros": t[f"{DOWN}.qzeros"][:2]})),
    "down_proj.qweight has dtype F16; the quantised format needs I32": (
        "gptq", lambda t: t.update({f"{DOWN}.qweight": np.zeros(t[f"{DOWN}.qweight"].shape, np.float16)})),
    "unknown tensor model.layers.0.mlp.down_proj.weight": ("awq", lambda t: t.update({f"{DOWN}.weight": np.zeros((64, 96), np.float16)})),
    "missing tensor .*q_proj.g_idx": ("gptq_desc_act", lambda t: t.pop(f"{Q}.g_idx")),
    "q_proj, .*k_proj, .*v_proj are grouped differently .*desc_act = false": (
        "gptq_desc_act", lambda t: t.update({f"{K_PROJ}.g_idx": t[f"{K_PROJ}.g_idx"][::-1].copy()})),
    "down_proj: g_idx puts 31 to 33 inputs in a group": ("gptq_desc_act", lambda t: move_input(t[f"{DOWN}.g_idx"])),
    "down_proj: .*1 scales are NaN, infinite or negative .the first is inf": (
        "gptq", lambda t: t[f"{DOWN}.scales"].__setitem__((0, 0), np.inf)),
    "weight_shape says .96, 64., weight_packed holds .64, 96.": (
        "packed", lambda t: t.update({f"{DOWN}.weight_shape": np.array([96, 64])})),
    "its zero points are not all 128, but the config says that they are symmetric": (
        "gptq_8bit_sym", lambda t: t[f"{DOWN}.qzeros"].__setitem__((0, 0), 5)),
}


def move_input(index: np.ndarray) -> None:
    index[int(np.argmax(index == 0))] = 1


@pytest.mark.parametrize("message", sorted(BAD_TENSORS))
def test_damaged_tensors_are_refused_by_name(tmp_path: Path, message: str) -> None:
    name, change = BAD_TENSORS[message]
    source, _ = folder_of(tmp_path / "hf", name)
    tensors = {key: value.copy() for key, value in load_file(source / "model.safetensors").items()}
    change(tensors)
    with pytest.raises(JaxInferError, match=message):
        convert(folder_of(tmp_path / "bad", name, tensors=tensors)[0], tmp_path / "out", progress=False)
    assert not list(tmp_path.glob("out*"))


def test_configs_that_cannot_be(tmp_path: Path) -> None:
    source, _ = folder_of(tmp_path / "hf", "awq", modules_to_not_convert=["layers.0.self_attn.q_proj"])
    with pytest.raises(UnsupportedModelError, match="parts of layers.0.attention.qkv.weight some are quantised and some are not"):
        convert(source, tmp_path / "out", progress=False)
    config = hf_config(quantization_config={**CONFIGS["awq"], "modules_to_not_convert": ["layers"]})
    with pytest.raises(ConfigError, match="none of 9 modules is quantised"):
        convert(write_hf(tmp_path / "none", config, hf_tensors(config)), tmp_path / "out", progress=False)
    config = hf_config(quantization_config={**CONFIGS["awq"], "group_size": 128})
    tensors, _ = quantized("awq", hf_tensors(config, np.float16))
    cut = {key: value[:1].copy() if key.endswith(("qzeros", "scales")) else value for key, value in tensors.items()}
    with pytest.raises(ConfigError, match="layers.0.attention.qkv: 64 inputs do not split into groups of 128: quantise with a group size of "):
        convert(write_hf(tmp_path / "groups", config, cut), tmp_path / "out", progress=False)


def test_an_interrupted_conversion_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = folder_of(tmp_path / "hf", "awq", num_layers=2)
    whole = convert(source, tmp_path / "whole", progress=False)
    fuse, calls = converter.fuse, []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return fuse(*args)

    monkeypatch.setattr("convert.writer.BATCH_BYTES", 1)
    monkeypatch.setattr(converter, "fuse", failing)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", progress=False, resume=True)
    folder = convert(source, tmp_path / "out", progress=False, resume=True)
    assert 8 < len(calls) < 12, "nothing was taken over"
    one, two = read_manifest(whole), read_manifest(folder)
    assert one["tensors"] == two["tensors"]
    assert all(np.array_equal(read_param(whole, one, name), read_param(folder, two, name)) for name in one["tensors"])


def test_writing_a_quantised_checkpoint(tmp_path: Path) -> None:
    """`write_quantized` makes what a conversion makes, and takes mixtures: int8 beside int4, changed norms, a module left alone."""
    source, plain = folder_of(tmp_path / "hf", "awq", num_layers=2)
    converted = convert(source, tmp_path / "converted", progress=False)
    base = convert(write_hf(tmp_path / "plain", hf_config(), plain), tmp_path / "base", dtype="float16", progress=False)
    made = items_of(converted)
    int8 = made["layers.0.mlp.down"]
    made["layers.0.mlp.down"] = type(int8)(q=int8.q + np.uint8(120), scales=int8.scales, zeros=int8.zeros + np.uint8(120), bits=8,
                                           group_size=int8.group_size, perm=None)
    apart = made.pop("layers.1.mlp.gate_up")
    assert apart is not None
    norm = np.full(64, 0.5, np.float32)
    written = write_quantized(base, tmp_path / "out", [*made.items(), ("layers.1.mlp_norm.weight", norm)], method="rtn",
                              facts={"seed": 3, "calibration": {"sha256": "ab"}})
    model, manifest = load(written, dtype="float32"), read_manifest(written)
    assert manifest["quantization"]["seed"] == 3 and manifest["quantization"]["layouts"].keys() == {"int4", "int8"}
    formats = {name: None if value is None else value.bits for name, value in model.config.quantization.exceptions}
    assert formats == {"layers.0.mlp.down": 8, "layers.1.mlp.gate_up": None}
    np.testing.assert_array_equal(model.params["layers.1.mlp_norm.weight"], norm)
    plain = {**plain, "model.layers.1.post_attention_layernorm.weight": norm}
    want = logits(load(convert(write_hf(tmp_path / "changed", hf_config(), plain), tmp_path / "want", dtype="float32", progress=False)))
    np.testing.assert_allclose(logits(model), want, atol=2e-3, rtol=0)  # gate_up is float16 in the base
    with pytest.raises(UnsupportedModelError, match="quantised in several ways .4 bits by 32, 8 bits by 32., which --format=gptq cannot"):
        export(written, tmp_path / "no", target="gptq", progress=False)


def items_of(folder: Path) -> dict[str, Any]:
    """Every quantised module of a checkpoint as (path, QuantizedMatrix)."""
    from convert.quantized import matrix_of
    from jaxinfer.models.registry import read_model_config

    manifest, model = read_manifest(folder), read_model_config(json.loads((folder / "config.json").read_text()))
    shapes = {"qkv": (64, 2, 4, 32), "output": (128, 64), "gate_up": (64, 2, 96), "down": (96, 64)}
    return {module: matrix_of(module, {f"{module}.{name}": read_param(folder, manifest, f"{module}.{name}")
                                       for name in ("packed", "scales", "zeros")}, model.quantization.weights, shapes[module.split(".")[-1]])
            for module in model.projections() if model.quantization.format_of(module) is not None}


def test_what_write_quantized_refuses(tmp_path: Path) -> None:
    source, plain = folder_of(tmp_path / "hf", "awq", num_layers=2)
    converted = convert(source, tmp_path / "converted", progress=False)
    base = convert(write_hf(tmp_path / "plain", hf_config(), plain), tmp_path / "base", dtype="float16", progress=False)
    made = items_of(converted)
    down = made["layers.0.mlp.down"]

    def refused(message: str, items: Any, *, error: type[JaxInferError] = CheckpointError, base: Path = base, output: str = "out") -> None:
        with pytest.raises(error, match=message):
            write_quantized(base, tmp_path / output, items, method="rtn", facts={})
        assert not list(tmp_path.glob("out*"))

    refused("is quantised already", [], base=converted)
    refused("is the checkpoint that is to be quantised", [], error=ConfigError, output="base")
    refused("none of 10 modules is quantised", [], error=ConfigError)
    refused("layers.0.mlp.down is given twice", [("layers.0.mlp.down", down), ("layers.0.mlp.down", down)])
    refused("layers.9.mlp.down is given twice, or is nothing of", [("layers.9.mlp.down", down)])
    refused(r"gate_up: a matrix \[96, 64\] for a weight \[64, 2, 96\]", [("layers.0.mlp.gate_up", down)])
    refused("final_norm.weight: an array of shape .64. whose values stay finite", [("final_norm.weight", np.full(64, np.nan))])
    scales = down.scales.copy()
    scales[0, 0] = np.nan
    refused("layers.0.mlp.down: 1 scales are NaN", [("layers.0.mlp.down", type(down)(**{**vars(down), "scales": scales}))])


def test_exports_that_cannot_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, plain = folder_of(tmp_path / "hf", "gptq_desc_act", num_layers=2)
    ordered = convert(source, tmp_path / "ordered", progress=False)
    with pytest.raises(UnsupportedModelError, match="holds quantised weights, which --format=hf cannot express: use --format=awq or gptq"):
        export(ordered, tmp_path / "no", progress=False)
    with pytest.raises(UnsupportedModelError, match="model.layers.0.self_attn.q_proj has a zero point of 0"):
        export(convert(folder_of(tmp_path / "zeros", "gptq_v2")[0], tmp_path / "v2", progress=False), tmp_path / "no", target="gptq",
               progress=False)
    with pytest.raises(UnsupportedModelError, match="no act-order"):
        export(ordered, tmp_path / "no", target="awq", progress=False)
    base = convert(write_hf(tmp_path / "plain", hf_config(), plain), tmp_path / "base", dtype="float16", progress=False)
    with pytest.raises(UnsupportedModelError, match="holds no quantised weights, which --format=awq writes"):
        export(base, tmp_path / "no", target="awq", progress=False)
    made = items_of(convert(folder_of(tmp_path / "awq", "awq", num_layers=2)[0], tmp_path / "converted", progress=False))

    def scaled(factor: float, dtype: Any) -> list[Any]:
        return [(name, type(m)(**{**vars(m), "scales": (m.scales.astype(np.float32) * factor).astype(dtype)})) for name, m in made.items()]

    wide = write_quantized(base, tmp_path / "wide", scaled(1e-7, np.float32), method="rtn", facts={})
    with pytest.raises(CheckpointError, match="q_proj: its scales lie between .* which float16 cannot hold: quantise it again"):
        export(wide, tmp_path / "no", target="awq", progress=False)
    odd = write_quantized(base, tmp_path / "odd", scaled(1 / 3, np.float32), method="rtn", facts={})
    with caplog.at_level(logging.WARNING):
        export(odd, tmp_path / "back", target="awq", progress=False)
    assert "q_proj: its float32 scales are rounded to float16, by" in caplog.text
    short = write_quantized(base, tmp_path / "short", scaled(1.0, ml_dtypes.bfloat16), method="rtn", facts={})
    assert load(short).params["layers.0.mlp.down.scales"].dtype == ml_dtypes.bfloat16
    export(short, tmp_path / "exact", target="gptq_v2", progress=False)
