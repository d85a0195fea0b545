"""Quantising whole tiny checkpoints: what is written, resumed, refused and reported; calibration files and the command."""

import errno
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxinfer
from convert import quantize as command
from convert.converter import convert
from convert.quantise import memory, report, run
from convert.quantise.calibration import read_windows
from convert.quantise.grid import GridSpec
from convert.quantise.layer import LINEARS
from convert.quantise.methods import QuantiseConfig
from convert.quantise.run import Texts, quantise
from convert.quantise.store import LayerStore
from jaxinfer.checkpoint import read_manifest, read_param
from jaxinfer.engine.compiled import jit_logits
from jaxinfer.errors import CapacityError, CheckpointError, ConfigError, JaxInferError, NonFiniteError
from jaxinfer.textfile import read_text
from jaxinfer.tokenizer import Tokenizer
from tests.convert.calibration import texts, write_lines
from tests.convert.checkpoints import hf_config, hf_tensors, write_hf
from tests.tokenizer import tiny

GRID = GridSpec(bits=4, group_size=32, symmetric=False)
RTN = QuantiseConfig(method="rtn", grid=GRID)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted checkpoint of three layers with a tokenizer and a chat template."""
    root = tmp_path_factory.mktemp("base")
    config = hf_config(vocab_size=352, num_hidden_layers=3)
    source = write_hf(root / "hf", config, {name: value * 0.2 for name, value in hf_tensors(config, np.float32).items()})
    tiny.wrap(tiny.byte_level(), chat_template=tiny.CHATML, eos_token="<|im_end|>").save_pretrained(source)
    return convert(source, root / "converted", dtype="bfloat16", progress=False)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("text") / "text.jsonl")


def parameters(folder: Path) -> dict[str, bytes]:
    manifest = read_manifest(folder)
    return {name: read_param(folder, manifest, name).tobytes() for name in manifest["tensors"]}


def test_a_quantised_checkpoint_is_whole_and_says_where_it_comes_from(tmp_path: Path, base: Path, text: Path,
                                                                      caplog: pytest.LogCaptureFixture) -> None:
    settings = QuantiseConfig(method="awq", grid=GRID, num_int8=2)
    with caplog.at_level(logging.INFO):
        found = quantise(base, tmp_path / "out", settings=settings, texts=texts(text, evaluation=text, num_eval_samples=4))
    # layers are numbered as the checkpoint names them
    assert re.findall(r"layer (\d+) \(last: 2\): relative output error qkv (\S+), ", caplog.text) == [
        (str(i), f"{found['errors'][f'layers.{i}.attention.qkv']:.2e}") for i in range(3)]
    quantization = read_manifest(tmp_path / "out")["quantization"]
    assert quantization["calibration"] == found["calibration"] and found["calibration"]["file"] == "text.jsonl"
    assert found["calibration"]["num_samples"] == 8 and len(found["calibration"]["sha256"]) == 64
    worst = sorted(found["errors"], key=found["errors"].__getitem__)[-2:]
    assert set(found["kept_int8"]) == set(quantization["kept_int8"]) == set(worst) and len(found["errors"]) == 3 * len(LINEARS)
    assert json.loads((tmp_path / "out" / report.JSON).read_text()) == json.loads(json.dumps(found))
    assert found["peak_bytes"] <= found["planned_peak_bytes"]

    original, model = (jaxinfer.load(folder, dtype="float32") for folder in (base, tmp_path / "out"))
    assert {f"{name}.packed" for name in found["errors"]} <= set(model.params)
    tokens = read_windows(text, Tokenizer.from_dir(base), num_samples=4, max_len=32, seed=0).tokens
    for loaded, key in ((original, "before"), (model, "after")):
        logits = np.asarray(jit_logits(loaded)(tokens), np.float64)[:, :-1]
        chosen = np.take_along_axis(logits, tokens[:, 1:, None].astype(np.int64), -1)[..., 0]
        nll = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1) - chosen
        assert np.exp(nll.mean()) == pytest.approx(found["perplexity"][key], rel=2e-3), key
    assert not [path.name for path in tmp_path.iterdir() if path.name != "out"]
    nearest = quantise(base, tmp_path / "rtn", settings=RTN, texts=texts(text))["errors"]
    assert all(found["errors"][name] <= 1.001 * nearest[name] for name in nearest)
    assert sum(found["errors"].values()) < 0.9 * sum(nearest.values())


def test_awq_by_the_paper_rounds_to_nearest(tmp_path: Path, base: Path, text: Path) -> None:
    """Feedback has less output error than rounding to nearest on the same scales; clipping to nearest says how many groups it took."""
    nearest, feedback = (quantise(base, tmp_path / rounding, settings=QuantiseConfig(method="awq", grid=GRID, awq_rounding=rounding),
                                  texts=texts(text)) for rounding in ("nearest", "feedback"))
    assert sum(feedback["errors"].values()) < 0.9 * sum(nearest["errors"].values())
    for found, key in ((nearest, "clipped_groups"), (feedback, "damping")):
        assert all(key in choice for layer in found["choices"].values() for choice in layer.values())


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path: Path, base: Path, text: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    settings = QuantiseConfig(method=method, grid=GRID)
    quantise(base, tmp_path / "whole", settings=settings, texts=texts(text))
    real, calls = run.quantise_layer, []

    def interrupted(layer: str, *args: Any) -> Any:
        calls.append(layer)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(layer, *args)

    monkeypatch.setattr(run, "quantise_layer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantise(base, tmp_path / "out", settings=settings, texts=texts(text), resume=True)
    assert not (tmp_path / "out").exists() and (tmp_path / "out.quantise-resume").is_dir()
    monkeypatch.setattr(run, "quantise_layer", lambda layer, *args: (calls.append(layer), real(layer, *args))[1])
    quantise(base, tmp_path / "out", settings=settings, texts=texts(text), resume=True)
    assert calls == ["layers.0", "layers.1", "layers.2", "layers.2"]
    assert parameters(tmp_path / "out") == parameters(tmp_path / "whole")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "whole"}


def test_what_cannot_be_continued_is_begun_anew(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch,
                                                caplog: pytest.LogCaptureFixture) -> None:
    def stop(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "write_quantized", stop)
        with pytest.raises(KeyboardInterrupt):
            quantise(base, tmp_path / "out", settings=RTN, texts=texts(None), resume=True)
    damaged = tmp_path / "out.quantise-resume" / "layer-1.npz"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    with caplog.at_level(logging.WARNING):
        quantise(base, tmp_path / "out", settings=RTN, texts=texts(None), resume=True)
    assert "begun anew" in caplog.text and read_manifest(tmp_path / "out")["quantization"]["calibration"] is None


def test_rounding_without_text_is_continued(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = run.quantise_layer, []

    def interrupted(layer: str, *args: Any) -> Any:
        calls.append(layer)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(layer, *args)

    monkeypatch.setattr(run, "quantise_layer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantise(base, tmp_path / "out", settings=RTN, texts=texts(None), resume=True)
    quantise(base, tmp_path / "out", settings=RTN, texts=texts(None), resume=True)
    assert calls == ["layers.0", "layers.1", "layers.2", "layers.2"]
    quantise(base, tmp_path / "whole", settings=RTN, texts=texts(None))
    assert parameters(tmp_path / "out") == parameters(tmp_path / "whole")


@pytest.mark.parametrize("state", [{}, {"what": "[]", "files": {}}, {"files": {}, "next": 1}, {"files": {}, "next": "1"}, []])
def test_a_state_that_names_no_layers_is_begun_anew(tmp_path: Path, state: Any) -> None:
    folder = tmp_path / "out.quantise-resume"
    (folder / "strange").mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"what": "[]", **state} if isinstance(state, dict) else state))
    with LayerStore(tmp_path / "out", what="[]", resume=True) as store:
        assert store.next_layer == 0 and store.inputs() is None and not list(folder.iterdir())


def test_an_output_that_cannot_be_made_is_a_checkpoint_error(tmp_path: Path, base: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "out.quantise-resume").write_text("")
    for output, resume in ((tmp_path / "file" / "out", False), (tmp_path / "out", True)):
        with pytest.raises(CheckpointError, match="out.quantise-.* cannot be written .*choose another --output"):
            quantise(base, output, settings=RTN, texts=texts(None), resume=resume)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "out.quantise-resume"}


def test_a_disk_that_fills_keeps_finished_layers(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, full = LayerStore.add, [False, True]

    def add(self: LayerStore, *args: Any) -> None:
        if full.pop(0):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, *args)

    monkeypatch.setattr(LayerStore, "add", add)
    with pytest.raises(CheckpointError, match="the disk is full.: free the disk and continue .*out.quantise-resume"):
        quantise(base, tmp_path / "out", settings=RTN, texts=texts(None), resume=True)
    full[:] = [True]
    with pytest.raises(CheckpointError, match="the disk is full.: nothing was left there"):
        quantise(base, tmp_path / "other", settings=RTN, texts=texts(None))


def test_refusals_leave_nothing(tmp_path: Path, base: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(error: type[JaxInferError], message: str, settings: QuantiseConfig = RTN, given: Texts | None = None,
                model: Path = base) -> None:
        with pytest.raises(error, match=message):
            quantise(model, tmp_path / "out", settings=settings, texts=given or texts(None))
        assert not [path.name for path in tmp_path.iterdir() if path.name not in ("q", "broken")]

    quantise(base, tmp_path / "q", settings=RTN, texts=texts(None))
    refused(CheckpointError, "q is quantised already", model=tmp_path / "q")
    refused(ConfigError, "awq needs calibration text", QuantiseConfig(method="awq", grid=GRID))
    refused(ConfigError, "attention.qkv: 64 inputs", QuantiseConfig(method="rtn", grid=GridSpec(bits=4, group_size=128, symmetric=False)))
    refused(ConfigError, "keep_int8 = auto:13: the model has 12 linears", QuantiseConfig(method="rtn", grid=GRID, num_int8=13))
    refused(ConfigError, "max_len = 129: the model was made for 128 positions.*lower --max_len", given=texts(text, max_len=129))
    with monkeypatch.context() as patch:
        patch.setattr(run, "quantise_layer", None)  # refused before any layer
        with pytest.raises(ConfigError, match="the output .* is the checkpoint that is to be quantised"):
            quantise(base, base, settings=RTN, texts=texts(None), overwrite=True)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "available_bytes", lambda: 1 << 20)
        refused(CapacityError, r"calibration takes .* GB of memory .*lower --num_samples")
    real = run.FloatModel.embed
    with monkeypatch.context() as patch:
        patch.setattr(run.FloatModel, "embed", lambda self, tokens: np.where(np.arange(64) == 5, np.nan, real(self, tokens)))
        refused(NonFiniteError, "the original: a token of the evaluation text takes nan nats .*nothing is saved",
                given=texts(None, evaluation=text))
    monkeypatch.setattr(run.FloatModel, "embed", lambda self, tokens: np.where(np.arange(64) == 5, np.nan, real(self, tokens)))
    refused(NonFiniteError, "layers.0.attention.qkv: its calibration activations are NaN", given=texts(text))


def test_calibration_files(tmp_path: Path, base: Path) -> None:
    tokenizer = Tokenizer.from_dir(base)

    def windows(name: str, content: bytes | str, **changes: Any) -> Any:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_windows(path, tokenizer, **{"num_samples": 4, "max_len": 16, "seed": 0, **changes})

    chat = json.dumps({"messages": [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "a fox " * 9}]})
    plain = "\n".join(json.dumps({"text": f"record {i} " * 5}) for i in range(20)) + "\n\n"
    both = json.dumps({"text": None, **json.loads(chat)})
    assert np.array_equal(windows("a.jsonl", both, num_samples=1).tokens, windows("a.jsonl", chat, num_samples=1).tokens)
    assert np.array_equal(windows("a.jsonl", "\ufeff" + plain).tokens, windows("a.jsonl", plain).tokens)
    found = windows("a.jsonl", plain)
    assert found.tokens.shape == (4, 16) and found.tokens.dtype == np.int32
    assert np.array_equal(found.tokens, windows("a.jsonl", plain).tokens)
    assert not np.array_equal(found.tokens, windows("a.jsonl", plain, seed=1).tokens)
    rendered = tokenizer.apply_chat_template(json.loads(chat)["messages"], add_generation_prompt=False)
    assert windows("b.jsonl", chat, num_samples=1).tokens[0].tolist() == rendered[:16]
    whole = tokenizer.encode("word " * 200)
    rows = windows("c.txt", "word " * 200, num_samples=3).tokens
    assert all(row.tolist() in [whole[i:i + 16] for i in range(0, len(whole), 16)] for row in rows)
    assert read_text(tmp_path / "b.jsonl").startswith("the fox\na fox") and read_text(tmp_path / "c.txt") == "word " * 200

    def refused(message: str, name: str, content: bytes | str, **changes: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            windows(name, content, **changes)

    refused("d.jsonl line 2 is not JSON", "d.jsonl", plain.split("\n")[0] + "\n{text: 1}")
    refused(r"d.jsonl line 3 has \['prompt'\]: expected", "d.jsonl", '{"text": "a"}\n\n{"prompt": "b"}')
    refused("d.jsonl line 1 has list", "d.jsonl", "[1]")
    refused("d.jsonl line 1: messages", "d.jsonl", '{"messages": [{"content": "no role"}]}')
    refused("d.jsonl holds no record", "d.jsonl", "\n")
    refused("d.txt line 2 is not UTF-8", "d.txt", b"good\nbad \xff")
    refused("d.txt has 2 tokens, which is not one window of 16", "d.txt", "the fox"[:4])
    refused("num_samples = 0 and max_len = 16", "d.txt", "the", num_samples=0)
    with pytest.raises(ConfigError, match="absent.txt cannot be read"):
        read_windows(tmp_path / "absent.txt", tokenizer, num_samples=1, max_len=16, seed=0)


def test_the_command(tmp_path: Path, base: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [f"--model={base}", f"--output={tmp_path / 'out'}"]
    for wrong, words in ((["--keep_int8=5"], "must be auto:N"), (["--method=rtn", "--damping=0.1"], "choose awq or gptq"),
                         (["--method=gptq", "--noclip"], "--clip changes nothing under --method=gptq"),
                         (["--method=rtn", "--num_samples=5"], "--num_samples changes nothing without --calibration"),
                         (["--method=rtn", "--seed=5"], "--seed changes nothing without --calibration or --eval_text"),
                         (["--num_eval_samples=5"], "--num_eval_samples changes nothing without --eval_text"),
                         (["--awq_rounding=nearest", "--damping=0.1"], "changes nothing under --awq_rounding=nearest")):
        assert command.main([*flags, *wrong]) == 2 and words in capsys.readouterr().err
    assert command.main(flags[:1]) == 2 and "--output is needed" in capsys.readouterr().err
    assert command.main([*flags, "--method=rtn", "--group_size=column", "--symmetric", f"--eval_text={text}", "--max_len=32"]) == 0
    quantization = read_manifest(tmp_path / "out")["quantization"]
    assert quantization["settings"]["grid"] == {"bits": 4, "group_size": None, "symmetric": True}
    assert quantization["perplexity"]["after"] > 0
    assert command.main([*flags, "--method=rtn"]) == 1 and "--overwrite" in capsys.readouterr().err
