"""convert.quantize --lm_head and --embedding: what is written, against numpy and the dequantised tables; resumed, refused, exported, run."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxinfer
from convert import quantize as command
from convert.converter import convert, plain_source, prepare
from convert.export import export
from convert.hf_reader import HFSource
from convert.inspect import inspect
from convert.quantise import memory, run, vocabulary
from convert.quantise.calibration import read_windows
from convert.quantise.grid import GridSpec
from convert.quantise.methods import METHODS, QuantiseConfig
from convert.quantise.run import quantise
from convert.quantized_checkpoint import write_quantized
from jaxinfer.checkpoint import read_manifest, read_param
from jaxinfer.drift import diagnose
from jaxinfer.engine.load import load, teacher_forced_logits
from jaxinfer.errors import CheckpointError, ConfigError, NonFiniteError, UnsupportedModelError
from jaxinfer.tokenizer import Tokenizer
from tests.convert.calibration import texts, write_lines
from tests.convert.checkpoints import D, hf_config, hf_tensors, write_hf
from tests.tokenizer import tiny

LOGITS = jax.jit(teacher_forced_logits, static_argnums=0)
GRID = GridSpec(bits=4, group_size=32, symmetric=False)


def made(root: Path, *, tied: bool) -> Path:
    """A converted checkpoint of two layers with a tokenizer."""
    config = hf_config(vocab_size=352, num_hidden_layers=2, tied=tied)
    source = write_hf(root / "hf", config, {name: value * 0.2 for name, value in hf_tensors(config, np.float32).items()})
    tiny.wrap(tiny.byte_level(), chat_template=tiny.CHATML, eos_token="<|im_end|>").save_pretrained(source)
    return convert(source, root / "converted", dtype="bfloat16", progress=False)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="module", params=["untied", "tied"])
def base(request: pytest.FixtureRequest, tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tied if request.param == "tied" else made(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("text") / "text.jsonl")


def stored_head(folder: Path) -> np.ndarray:
    """The plain head of a checkpoint, float32 [V, D]."""
    manifest = read_manifest(folder)
    name = "lm_head.weight" if "lm_head.weight" in manifest["tensors"] else "embedding.weight"
    return read_param(folder, manifest, name).astype(np.float32)


def packed_head(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    return packed_table(folder, "lm_head")


def packed_table(folder: Path, table: str) -> tuple[np.ndarray, np.ndarray]:
    """(codes [D, V], float32 weights [V, D]) of a quantised head or embedding."""
    from pallas_kernels.int4_matmul.layout import unpack

    manifest = read_manifest(folder)
    packed, scales, zeros = (read_param(folder, manifest, f"{table}.{name}") for name in ("packed", "scales", "zeros"))
    bits = 4 if packed.shape[-1] == 64 else 8
    q = np.asarray(unpack(np.asarray(packed), k=D, n=scales.shape[1], bits=bits))
    rows = D // scales.shape[0]
    wide = [np.repeat(np.asarray(x).astype(np.float32), rows, 0) for x in (zeros, scales)]
    return q, ((q.astype(np.float32) - wide[0]) * wide[1]).T


@pytest.mark.parametrize(("method", "bits"), [("rtn", 4), ("gptq", 8), ("awq", 4)])
def test_quantising_the_head(tmp_path: Path, base: Path, text: Path, method: str, bits: int) -> None:
    settings = QuantiseConfig(method=method, grid=GRID, lm_head_bits=bits, num_int8=1)
    found = quantise(base, tmp_path / "out", settings=settings, texts=texts(text, evaluation=text, num_eval_samples=4))
    assert found["settings"]["lm_head_bits"] == bits and 0 < found["errors"]["lm_head"] < (0.05 if bits == 4 else 3e-4)
    assert len(found["kept_int8"]) == 1 and "lm_head" not in found["kept_int8"]
    assert found["peak_bytes"] <= found["planned_peak_bytes"]
    original, model = (jaxinfer.load(folder, dtype="float32") for folder in (base, tmp_path / "out"))
    assert model.config.tie_embeddings is False and model.config.quantization is not None
    assert np.array_equal(original.params["embedding.weight"], model.params["embedding.weight"])
    assert read_manifest(tmp_path / "out")["num_params"] == read_manifest(base)["num_params"] + original.config.tie_embeddings * 352 * D
    kind = model.config.quantization.format_of("lm_head")
    assert kind is not None and (kind.bits, kind.group_size, kind.permuted) == (bits, 32, False)

    plain, (q, weight) = stored_head(base), packed_head(tmp_path / "out")
    steps = np.repeat(np.asarray(model.params["lm_head.scales"], np.float32), 32, 0).T
    assert q.max() == 2**bits - 1
    if method == "rtn":  # every weight to its nearest code; a scale rounded to float16 moves the outermost of the steps
        assert (np.abs(weight - plain) <= (0.501 + (2**bits - 1) / 2**11) * steps).all()
    else:
        assert np.abs(weight - plain).max() > 0.6 * steps.max(), "errors were not fed back"
    tokens = read_windows(text, Tokenizer.from_dir(base), num_samples=4, max_len=32, seed=0).tokens
    logits = np.asarray(LOGITS(model.graphdef, model.params, tokens), np.float64)
    dequantised = {**{k: v for k, v in model.params.items() if not k.startswith("lm_head.")}, "lm_head.weight": weight}
    exceptions = tuple((name, value) for name, value in model.config.quantization.exceptions if name != "lm_head")
    same = jaxinfer.engine.load.from_params(
        dataclasses.replace(model.config, quantization=dataclasses.replace(model.config.quantization, exceptions=exceptions)),
        {name: jax.numpy.asarray(value) for name, value in dequantised.items()})
    np.testing.assert_allclose(logits, LOGITS(same.graphdef, same.params, tokens), atol=1e-4, rtol=0)
    chosen = np.take_along_axis(logits[:, :-1], tokens[:, 1:, None].astype(np.int64), -1)[..., 0]
    nll = np.log(np.exp(logits[:, :-1] - logits[:, :-1].max(-1, keepdims=True)).sum(-1)) + logits[:, :-1].max(-1) - chosen
    assert np.exp(nll.mean()) == pytest.approx(found["perplexity"]["after"], rel=2e-3)
    figures = diagnose(original, model, tokens)
    assert figures["perplexity"]["quantized"] == pytest.approx(found["perplexity"]["after"], rel=2e-3)
    assert figures["kl_per_token"] > 0


def test_feedback_leaves_less_error_than_rounding_to_nearest(tmp_path: Path, tied: Path, text: Path) -> None:
    """On what the head reads, over the calibration text; and clipping to nearest lies between."""
    errors = {}
    for name, changes in {"rtn": {"method": "rtn"}, "gptq": {"method": "gptq"}, "awq": {"method": "awq"},
                          "nearest": {"method": "awq", "awq_rounding": "nearest"}}.items():
        settings = QuantiseConfig(grid=GRID, lm_head_bits=4, **changes)
        errors[name] = quantise(tied, tmp_path / name, settings=settings, texts=texts(text))["errors"]["lm_head"]
    assert errors["gptq"] < 0.9 * errors["rtn"] and errors["awq"] < 0.9 * errors["rtn"] and errors["nearest"] < errors["rtn"]


def test_the_error_is_that_of_the_logits(tmp_path: Path, tied: Path, text: Path) -> None:
    """|X dW|^2 / |X W|^2 of the final norm's outputs, from the definition."""
    settings = QuantiseConfig(method="gptq", grid=GRID, lm_head_bits=4)
    found = quantise(tied, tmp_path / "out", settings=settings, texts=texts(text))
    tokens = read_windows(text, Tokenizer.from_dir(tied), num_samples=8, max_len=32, seed=0).tokens
    original = jaxinfer.load(tied, dtype="float32")
    logits = np.asarray(LOGITS(original.graphdef, original.params, tokens), np.float64).reshape(-1, 352)
    plain = stored_head(tied).astype(np.float64)
    hidden = logits @ np.linalg.pinv(plain).T
    lost = hidden @ (packed_head(tmp_path / "out")[1] - plain).T
    assert found["errors"]["lm_head"] == pytest.approx((lost**2).sum() / (logits**2).sum(), rel=1e-2)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "awq"])
def test_strips_change_nothing(tmp_path: Path, tied: Path, text: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    settings = QuantiseConfig(method=method, grid=GRID, lm_head_bits=4)
    quantise(tied, tmp_path / "whole", settings=settings, texts=texts(text))
    monkeypatch.setattr(vocabulary, "STRIP", 100)
    quantise(tied, tmp_path / "strips", settings=settings, texts=texts(text))
    np.testing.assert_array_equal(packed_head(tmp_path / "whole")[0], packed_head(tmp_path / "strips")[0])


def test_resumed_equals_uninterrupted(tmp_path: Path, tied: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's inputs come from the disk where every layer is finished already."""
    settings = QuantiseConfig(method="gptq", grid=GRID, lm_head_bits=4)
    quantise(tied, tmp_path / "whole", settings=settings, texts=texts(text))

    def stop(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "write_quantized", stop)
        with pytest.raises(KeyboardInterrupt):
            quantise(tied, tmp_path / "out", settings=settings, texts=texts(text), resume=True)
    monkeypatch.setattr(run, "quantise_layer", None)  # none is left
    others = dataclasses.replace(settings, lm_head_bits=8, embedding_bits=8, num_int8=1)  # of which no layer depends
    with monkeypatch.context() as patch:
        patch.setattr(run, "write_quantized", stop)
        with pytest.raises(KeyboardInterrupt):
            quantise(tied, tmp_path / "out", settings=others, texts=texts(text), resume=True)
    quantise(tied, tmp_path / "out", settings=settings, texts=texts(text), resume=True)
    one, two = (read_manifest(tmp_path / name) for name in ("whole", "out"))
    assert one["tensors"] == two["tensors"]
    assert all(np.array_equal(read_param(tmp_path / "whole", one, name), read_param(tmp_path / "out", two, name)) for name in one["tensors"])


def test_a_quantised_head_is_exported(tmp_path: Path, tied: Path, text: Path) -> None:
    settings = QuantiseConfig(method="gptq", grid=GRID, lm_head_bits=4)
    quantise(tied, tmp_path / "out", settings=settings, texts=texts(text))
    back = export(tmp_path / "out", tmp_path / "back", target="gptq_v2", progress=False)
    model, again = load(tmp_path / "out"), load(convert(back, tmp_path / "again", progress=False))
    assert again.params.keys() == model.params.keys() and all(np.array_equal(again.params[key], model.params[key]) for key in model.params)
    source = plain_source(prepare(HFSource(back), "back", "bfloat16"))
    np.testing.assert_array_equal(source.read_rows("lm_head.weight", 0, 352), packed_head(tmp_path / "out")[1])
    mixed = dataclasses.replace(settings, lm_head_bits=8)
    quantise(tied, tmp_path / "mixed", settings=mixed, texts=texts(text))
    with pytest.raises(UnsupportedModelError, match="4 bits by 32, 8 bits by 32.*--lm_head=none or the same bits"):
        export(tmp_path / "mixed", tmp_path / "no", target="gptq", progress=False)


def test_what_is_refused(tmp_path: Path, base: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="lm_head_bits = 5: must be 4, 8 or None"):
        QuantiseConfig(method="rtn", grid=GRID, lm_head_bits=5)
    settings = QuantiseConfig(method="rtn", grid=GRID, lm_head_bits=4)
    real = run.FloatModel.read
    for name, words in (("final_norm.weight", "lm_head: its calibration activations are NaN or infinite"),
                        ("lm_head.weight", "lm_head: its weights are not finite")):
        if name in read_manifest(base)["tensors"]:
            with monkeypatch.context() as patch:
                patch.setattr(run.FloatModel, "read", lambda self, asked, name=name: real(self, asked) * (np.nan if asked == name else 1))
                with pytest.raises(NonFiniteError, match=f"{words}.*nothing is saved"):
                    quantise(base, tmp_path / "out", settings=settings, texts=texts(text))
    assert not list(tmp_path.glob("out*"))
    found = quantise(base, tmp_path / "q", settings=settings, texts=texts(None))
    assert 0 < found["errors"]["lm_head"] < 0.05  # of the weights alone
    matrix_of_wrong_shape = vocabulary.quantise_head(run.open_float(base, settings), settings, None).matrix
    narrow = dataclasses.replace(matrix_of_wrong_shape, q=matrix_of_wrong_shape.q[:, :64], scales=matrix_of_wrong_shape.scales[:, :64],
                                 zeros=None)
    with pytest.raises(CheckpointError, match=r"lm_head: a matrix \[64, 64\] for a weight \[64, 352\]"):
        write_quantized(base, tmp_path / "no", [("lm_head", narrow)], method="rtn", facts={})
    with pytest.raises(CheckpointError, match=r"embedding: a matrix \[64, 64\] for a weight \[64, 352\]"):
        write_quantized(base, tmp_path / "no", [("embedding", narrow)], method="rtn", facts={})


def test_a_plan_counts_the_tables(tied: Path) -> None:
    config = jaxinfer.load(tied).config
    none, one, two = (memory.plan_memory(config, method="awq", num_tables=number, num_samples=8, max_len=32) for number in (0, 1, 2))
    assert none.vocabulary == 0 and one.vocabulary >= 6 * 352 * D + 24 * 352 * D and two.vocabulary - one.vocabulary == 352 * D
    assert two.evaluation - none.evaluation == 2 * 352 * D


@pytest.mark.parametrize(("bits", "lm_head_bits"), [(4, None), (8, 8)])
def test_quantising_the_embedding(tmp_path: Path, base: Path, text: Path, bits: int, lm_head_bits: int | None) -> None:
    """Every token to its nearest codes; a tied head goes with it, one of its own does not; logits are those of the dequantised tables."""
    settings = QuantiseConfig(method="gptq", grid=GRID, lm_head_bits=lm_head_bits, embedding_bits=bits)
    found = quantise(base, tmp_path / "out", settings=settings, texts=texts(text, evaluation=text, num_eval_samples=4))
    original, model = (jaxinfer.load(folder, dtype="float32") for folder in (base, tmp_path / "out"))
    stays_tied = original.config.tie_embeddings and lm_head_bits is None
    assert model.config.tie_embeddings == stays_tied and model.config.quantization is not None
    assert ("lm_head.packed" in model.params) == (lm_head_bits is not None) and "embedding.weight" not in model.params
    plain, weight = np.asarray(original.params["embedding.weight"]), packed_table(tmp_path / "out", "embedding")[1]
    steps = np.repeat(np.asarray(model.params["embedding.scales"], np.float32), 32, 0).T
    assert (np.abs(weight - plain) <= (0.501 + (2**bits - 1) / 2**11) * steps).all()
    assert found["errors"]["embedding"] == pytest.approx(((weight - plain)**2).sum() / (plain**2).sum(), rel=1e-3)

    tables = {"embedding.weight": weight}
    if lm_head_bits is not None:
        tables["lm_head.weight"] = packed_table(tmp_path / "out", "lm_head")[1]
    rest = {name: value for name, value in model.params.items() if not name.startswith(("lm_head.p", "lm_head.s", "lm_head.z", "embedding."))}
    exceptions = tuple((name, value) for name, value in model.config.quantization.exceptions if name not in ("lm_head", "embedding"))
    same = jaxinfer.engine.load.from_params(
        dataclasses.replace(model.config, quantization=dataclasses.replace(model.config.quantization, exceptions=exceptions)),
        {name: jax.numpy.asarray(value) for name, value in (rest | tables).items()})
    tokens = read_windows(text, Tokenizer.from_dir(base), num_samples=4, max_len=32, seed=0).tokens
    np.testing.assert_allclose(LOGITS(model.graphdef, model.params, tokens), LOGITS(same.graphdef, same.params, tokens), atol=1e-4, rtol=0)
    figures = diagnose(original, model, tokens)
    assert figures["perplexity"]["quantized"] == pytest.approx(found["perplexity"]["after"], rel=2e-5)
    assert 0 < figures["stages"][0].relative_error < (0.15 if bits == 4 else 0.01) and figures["stages"][0].name == "embedding"
    with pytest.raises(UnsupportedModelError, match="the embedding is quantised, which --format=gptq cannot express: .*--embedding=none"):
        export(tmp_path / "out", tmp_path / "no", target="gptq", progress=False)


def test_the_engine_runs_a_quantised_embedding(tmp_path: Path, tied: Path) -> None:
    """One packed array looks tokens up and is the head."""
    settings = QuantiseConfig(method="rtn", grid=GRID, embedding_bits=8)
    quantise(tied, tmp_path / "out", settings=settings, texts=texts(None))
    llm = jaxinfer.LLM.from_model(load(tmp_path / "out", dtype="float32"), max_num_seqs=2, max_num_batched_tokens=16, page_size=16,
                                  deterministic=True, max_model_len=64, compilation_cache_dir=None)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    params = jaxinfer.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    ids = [*prompt, *llm.generate([{"prompt_token_ids": prompt}], params)[0].outputs[0].token_ids]
    model = llm.engine.model
    logits = np.asarray(LOGITS(model.graphdef, model.params, np.array([ids], np.int32))[0])[:, :llm.engine.resolved.num_valid_tokens]
    assert logits[len(prompt) - 1:-1].argmax(-1).tolist() == ids[len(prompt):]
    assert llm.engine.resolved.memory.weight_bytes == sum(x.nbytes for x in model.params.values())
    assert "the embedding has 352 rows" in inspect(tmp_path / "out")


def test_the_command(tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [f"--model={base}", f"--output={tmp_path / 'out'}", "--method=rtn", "--group_size=32"]
    for table in ("lm_head", "embedding"):
        assert command.main([*flags, f"--{table}=3"]) == 2 and table in capsys.readouterr().err
    assert command.main(flags) == 0
    assert not {"lm_head.packed", "embedding.packed"} & read_manifest(tmp_path / "out")["tensors"].keys(), "the default changed"
    assert command.main([*flags, "--lm_head=int8", "--embedding=int4", "--overwrite"]) == 0
    exceptions = read_manifest(tmp_path / "out")["quantization"]["exceptions"]
    assert {name: value["bits"] for name, value in exceptions.items()} == {"lm_head": 8, "embedding": 4}
