"""Quantised, exported to another library's layout and loaded again, by the commands that users call: the same bits and the same tokens."""

from pathlib import Path

import numpy as np
import pytest

import jaxinfer
from convert import export, quantize
from convert.converter import convert
from jaxinfer import source
from tests.convert.calibration import write_lines
from tests.convert.checkpoints import hf_config, hf_tensors, write_hf
from tests.tokenizer import tiny

PROMPTS = ["the quick brown fox", "def f(x):\n    return"]
GREEDY = jaxinfer.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def loaded(folder: Path) -> jaxinfer.LLM:
    return jaxinfer.LLM(folder, max_num_seqs=2, max_num_batched_tokens=32, token_buckets=(32,), batch_buckets=(2,), page_size=16,
                        max_model_len=64, compilation_cache_dir=None)


def tokens(llm: jaxinfer.LLM) -> list[tuple[int, ...]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted checkpoint of two layers with a tokenizer."""
    root = tmp_path_factory.mktemp("base")
    config = hf_config(vocab_size=352)
    folder = write_hf(root / "hf", config, hf_tensors(config))
    tiny.wrap(tiny.byte_level(), chat_template=tiny.CHATML, eos_token="<|im_end|>").save_pretrained(folder)
    return convert(folder, root / "converted", progress=False)


@pytest.mark.parametrize("method", ["rtn", "awq"])
def test_an_export_of_a_quantised_model_is_the_same_model(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr(source, "CACHE", tmp_path / "cache")
    text = write_lines(tmp_path / "text.jsonl")
    calibration = [f"--calibration={text}", "--num_samples=8", "--max_len=32"] if method == "awq" else []
    made = tmp_path / "quantised"
    assert quantize.main([f"--model={base}", f"--output={made}", f"--method={method}", "--group_size=32", *calibration]) == 0
    model = loaded(made)
    wanted, params = tokens(model), model.engine.model.params
    assert all(len(set(row)) > 6 for row in wanted), "the model repeats itself: its tokens say little"
    for target in ("awq", "gptq"):
        folder = tmp_path / target
        assert export.main([f"--model={made}", f"--output={folder}", f"--format={target}", "--noprogress"]) == 0
        again = loaded(folder)
        found = again.engine.model.params
        assert found.keys() == params.keys()
        for name, value in params.items():
            assert (found[name].dtype, np.asarray(found[name]).tobytes()) == (value.dtype, np.asarray(value).tobytes()), f"{target}: {name}"
        assert tokens(again) == wanted, target
