"""diagnose: its figures against their definitions, what it flags and advises, and the command on a tiny pair of checkpoints."""

import dataclasses
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import convert.quantise.run
from convert import quantize
from convert.quantise.methods import METHODS, QuantiseConfig
from jaxinfer import diagnose as command
from jaxinfer.drift import StageFigures, diagnose, flagged, logit_figures, moments, perplexity, stage_figures
from jaxinfer.engine.load import LoadedModel, random_model
from jaxinfer.errors import CheckpointError, ConfigError, NonFiniteError
from jaxinfer.models.shapes import SHAPES
from jaxinfer.textfile import differences, profile, read_text

TOKENS = np.arange(2 * 24, dtype=np.int32).reshape(2, 24) * 5 % 256


@pytest.fixture(scope="module")
def original() -> LoadedModel:
    return random_model(SHAPES["tiny"], dtype="float32", seed=0)


def changed(model: LoadedModel, **factors: float) -> LoadedModel:
    """The model with some weights multiplied; dots in names are written __."""
    params = {name: value * factors.get(name.replace(".", "__"), 1.0) for name, value in model.params.items()}
    return dataclasses.replace(model, params=params)


def test_moments_and_stage_figures_are_what_they_say() -> None:
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((400, 100)).astype(np.float32) * 3 + 1
    mean, std, kurtosis = moments(normal)
    assert mean == pytest.approx(1, abs=0.05) and std == pytest.approx(3, rel=0.02) and kurtosis == pytest.approx(3, rel=0.05)
    assert moments(np.full((3, 3), 2.0)) == (2.0, 0.0, 0.0)
    half = stage_figures("layer 0", normal, 0.5 * normal)
    assert half.cosine == pytest.approx(1) and half.relative_error == pytest.approx(0.5) and half.std[1] == pytest.approx(0.5 * half.std[0])
    zero = stage_figures("layer 0", np.zeros((2, 4)), np.zeros((2, 4)))
    assert zero.cosine == 1.0 and zero.relative_error == 0.0


def test_logit_figures_are_what_they_say() -> None:
    p, q = np.array([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]]), np.array([[0.25, 0.5, 0.25], [0.2, 0.2, 0.6]])
    found = logit_figures(np.log(p).astype(np.float32) + 3, np.log(q).astype(np.float32) - 2, np.array([0, 2]))
    assert found["kl"] == pytest.approx(float((p * np.log(p / q)).sum()), rel=1e-4) and found["agree"] == 1 and found["tokens"] == 2
    assert found["nll_original"] == pytest.approx(-np.log(0.5 * 0.6), rel=1e-4)
    assert found["nll_quantized"] == pytest.approx(-np.log(0.25 * 0.6), rel=1e-4)


def test_a_model_agrees_with_itself(original: LoadedModel) -> None:
    figures = diagnose(original, original, TOKENS)
    assert figures["kl_per_token"] == 0 and figures["top1_agreement"] == 1 and figures["num_tokens"] == 46
    assert [s.name for s in figures["stages"]] == ["embedding", "layer 0", "layer 1", "final norm"]
    assert all(s.relative_error == 0 and s.cosine == pytest.approx(1) and not s.flags for s in figures["stages"])
    logits = np.asarray(original.logits(jnp.asarray(TOKENS)), np.float64)[:, :-1]
    chosen = np.take_along_axis(logits, TOKENS[:, 1:, None].astype(np.int64), -1)[..., 0]
    assert figures["perplexity"]["original"] == pytest.approx(np.exp((np.log(np.exp(logits).sum(-1)) - chosen).mean()), rel=1e-4)


def test_the_layer_that_shrank_is_flagged(original: LoadedModel) -> None:
    quiet = {"layers__0__mlp__down__weight": 0.0, "layers__0__attention__output__weight": 0.0}
    loud = changed(original, layers__0__mlp__down__weight=50.0)
    figures = diagnose(loud, changed(original, **quiet), TOKENS)
    assert [s.name for s in figures["stages"] if any("deviation shrank by" in flag for flag in s.flags)][0] == "layer 0"
    assert figures["kl_per_token"] > 0
    said = command.advice(figures, {"method": "awq", "group_size": 128}, ["digits are 9 % of the calibration text, 1 % here"])
    assert said[0].startswith("The calibration text differs") and "--noclip" in said[1] and any("--keep_int8=auto:" in line for line in said)
    with pytest.raises(CheckpointError, match="are different models"):
        diagnose(original, dataclasses.replace(original, config=dataclasses.replace(original.config, dim=128)), TOKENS)


def test_an_error_that_stands_out_is_flagged() -> None:
    def stage(name: str, error: float) -> StageFigures:
        return StageFigures(name=name, mean=(0.0, 0.0), std=(1.0, 1.0), kurtosis=(3.0, 3.0), cosine=1.0, relative_error=error)

    stages = [stage("embedding", 0.0), stage("layer 0", 0.01), stage("layer 1", 0.02), stage("layer 2", 0.12), stage("layer 3", 0.13)]
    assert [s.name for s in flagged(stages) if s.flags] == ["layer 2"]
    assert "squared error grew 10.0 times" in flagged(stages)[3].flags[0]


def test_advice_follows_from_the_figures() -> None:
    figures: dict[str, Any] = {"stages": [], "perplexity": {"original": 10.0, "quantized": 11.0}, "top1_agreement": 0.9}
    assert [line.split(":")[0] for line in command.advice(figures, {"method": "rtn", "group_size": 128}, [])] == [
        "Perplexity rose by 10.0 %", "The weights were rounded to nearest"]
    figures["perplexity"]["quantized"] = 10.05
    assert command.advice(figures, {"method": "awq", "group_size": 128}, []) == [
        "Nothing stands out: perplexity +0.50 %, the likeliest token agrees at 90.0 % of the positions."]


def test_head_and_embedding_are_blamed_where_they_have_four_bits() -> None:
    """--keep_int8 keeps linears of layers alone: a flagged embedding is no reason for it."""
    flagged_table = dataclasses.replace(SHRUNK, name="embedding", flags=("relative error 0.5",))
    figures = BAD | {"stages": [flagged_table], "perplexity": {"original": 10.0, "quantized": 13.0}}
    said = command.advice(figures, {"method": "gptq", "group_size": 32, "settings": {"lm_head_bits": 4, "embedding_bits": 4}}, [])
    assert said == ["Vocabulary head or embedding is at 4 bits: try --lm_head=int8 and --embedding=int8, or none."]
    in_eight = command.advice(figures, {"method": "gptq", "group_size": 32, "settings": {"lm_head_bits": 8, "embedding_bits": None}}, [])
    assert len(in_eight) == 1 and in_eight[0].startswith("Nothing stands out")


SHRUNK = StageFigures(name="layer 0", mean=(0.0, 0.0), std=(1.0, 0.1), kurtosis=(3.0, 3.0), cosine=1.0, relative_error=0.9,
                      flags=("deviation shrank by 90 %",))
BAD: dict[str, Any] = {"stages": [SHRUNK], "perplexity": {"original": 10.0, "quantized": 20.0}, "top1_agreement": 0.1}


@pytest.mark.parametrize("group_size", [None, 128, 32])
@pytest.mark.parametrize("method", METHODS)
def test_every_flag_that_is_advised_is_taken(method: str, group_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command that quantises, under the checkpoint's own method."""
    said = command.advice(BAD, {"method": method, "group_size": group_size}, [])
    named = re.findall(r"--\w+(?:=[\w:]*\w)?", " ".join(said))
    own = [flag + "=32" if flag == "--group_size" else flag for flag in named if not flag.startswith("--method=")]
    assert ("--noclip" in own) == (method == "awq") and ("--group_size=32" in own) == (group_size != 32) and "--keep_int8=auto:2" in own
    taken: list[QuantiseConfig] = []
    monkeypatch.setattr(convert.quantise.run, "quantise", lambda *paths, settings, **others: taken.append(settings))
    monkeypatch.setattr(quantize.signal, "signal", lambda number, handler: None)
    for flag in own:
        assert quantize.main(["--model=a", "--output=b", f"--method={method}", flag]) == 0
    assert [settings.method for settings in taken] == [method] * len(own)
    for other in (flag.removeprefix("--method=") for flag in named if flag.startswith("--method=")):
        assert other in METHODS and other != method


def test_clipping_is_blamed_only_where_there_was_some() -> None:
    def said(**quantization: Any) -> str:
        return " ".join(command.advice(BAD, quantization, []))

    assert "layer 0: try --noclip (clipping goes too far there), or a smaller --group_size." in said(method="awq", group_size=64)
    assert "layer 0: try --noclip (clipping goes too far there)." in said(method="awq", group_size=32)
    assert "layer 0: try a smaller --group_size." in said(method="awq", group_size=64, settings={"clip": False})
    for method in ("compressed-tensors", "random", None):
        assert "noclip" not in said(method=method, group_size=64) and "shrank" not in said(method=method, group_size=32)


def test_texts_are_told_apart() -> None:
    prose, code = "the quick brown fox jumps over it " * 9, "x = [12, 34]; y += f(x)[0] ** 2\n" * 9
    said = differences(profile(prose), profile(code + "語" * 40))
    assert any(line.startswith("digits are 0.0 %") for line in said) and any(line.startswith("Chinese letters") for line in said)
    assert differences(profile(prose), profile(prose + "a ")) == [] and profile("") == {}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, original: LoadedModel) -> None:
    class Bytes:
        def encode(self, text: str) -> list[int]:
            return list(text.encode())

    models = {"a": original, "b": changed(original, layers__1__mlp__down__weight=1.2)}
    monkeypatch.setattr(command, "converted_checkpoint", lambda name, dtype: Path(name))
    monkeypatch.setattr(command, "load", lambda path, dtype: models[path.name])
    monkeypatch.setattr(command, "read_manifest", lambda path: {"quantization": {"method": "awq", "group_size": 32}})
    monkeypatch.setattr(command.Tokenizer, "from_dir", lambda path: Bytes())
    (tmp_path / "t.txt").write_text("some text, 1 2 3 4 5 6 7 8 9 and more text " * 3)
    (tmp_path / "c.jsonl").write_text('{"text": "plain prose without numbers in it"}\n')
    flags = ["--model=a", "--quantized=b", f"--text={tmp_path / 't.txt'}", "--max_len=24", "--num_windows=2"]
    assert command.main([*flags, f"--calibration={tmp_path / 'c.jsonl'}", f"--output={tmp_path / 'o.json'}"]) == 0
    shown = capsys.readouterr().out
    assert "layer 1" in shown and "KL " in shown and "digits are 0.0 % of the calibration text" in shown and "What to try next:" in shown
    written = json.loads((tmp_path / "o.json").read_text())
    assert len(written["stages"]) == 4 and written["kl_per_token"] > 0 and written["text_differences"]
    assert command.main(flags[:2]) == 2 and "--text is needed" in capsys.readouterr().err
    assert command.main([*flags, f"--output={tmp_path / 'no' / 'o.json'}"]) == 1 and "choose another --output" in capsys.readouterr().err
    (tmp_path / "t.txt").write_text("x")
    assert command.main(flags) == 1 and "the text has 1 tokens" in capsys.readouterr().err


def test_a_picture_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--plot needs matplotlib"):
        command.plot({"stages": []}, tmp_path / "p.png")


def test_text_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"messages": [{"role": "user", "content": "two"}]}\n')
    assert read_text(tmp_path / "a.jsonl") == "one\ntwo"
    nulls = '{"text": null, "messages": [{"role": "user", "content": "two"}]}\n{"text": "one", "messages": null}\n'
    (tmp_path / "b.jsonl").write_text("\ufeff" + nulls, encoding="utf-8")
    assert read_text(tmp_path / "b.jsonl") == "two\none"
    (tmp_path / "c.txt").write_text("\ufeffmarked", encoding="utf-8")
    assert read_text(tmp_path / "c.txt") == "marked"
    (tmp_path / "d.jsonl").write_text('{"text": 5, "messages": [{"role": "user", "content": "two"}]}')
    with pytest.raises(ConfigError, match=r"d.jsonl line 1 has \['messages', 'text'\]: expected"):
        read_text(tmp_path / "d.jsonl")
    (tmp_path / "e.txt").write_bytes(b"\xef\xbb\xbfgood\nbad \xff")
    with pytest.raises(ConfigError, match="e.txt line 2 is not UTF-8 .byte 0xff"):
        read_text(tmp_path / "e.txt")


def test_what_is_not_finite_is_named(original: LoadedModel) -> None:
    broken = changed(original, layers__1__mlp__down__weight=float("nan"))
    with pytest.raises(NonFiniteError, match="the quantised model meets NaN or infinity first in layer 1: .*quantise it again"):
        diagnose(original, broken, TOKENS)
    with pytest.raises(NonFiniteError, match="the original model meets NaN or infinity first in layer 1: .*convert it again"):
        diagnose(broken, original, TOKENS)
    for total in (float("nan"), float("inf"), 1e5):
        with pytest.raises(NonFiniteError, match="the model: a token takes .* nats in the mean, which is no perplexity"):
            perplexity("the model", total, 10)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
@pytest.mark.parametrize("name", ["no/p.png", "p.docx"])
def test_a_picture_that_cannot_be_written(tmp_path: Path, original: LoadedModel, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be written .*choose another --plot"):
        command.plot(diagnose(original, original, TOKENS), tmp_path / name)
