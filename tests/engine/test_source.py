"""From a name to a converted checkpoint, where the name, the cache or the tokenizer is missing."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import jaxinfer
from jaxinfer import source
from jaxinfer.engine.compiled import jit_logits
from jaxinfer.errors import CheckpointError, RequestError
from tests.engine.conftest import SMALL

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.mark.parametrize("model", ["a" * 5000, "/" + "a" * 5000 + "/b", "~nosuchuser/x", "", "a\0b"])
def test_names_that_no_path_can_have(model: str) -> None:
    with pytest.raises(CheckpointError) as error:
        source.converted_checkpoint(model, dtype="auto")
    assert len(str(error.value)) < 1000


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: Path) -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "expanduser", fails)
    with pytest.raises(CheckpointError, match="HOME"):
        source.converted_checkpoint("~/x", dtype="auto")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for cache in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match=f"{cache}.*cannot be (written|accessed)"):
            source.converted_checkpoint(str(FIXTURES / "qwen2_tied"), dtype="auto", cache=cache)
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(CheckpointError, match="closed.*no permission to write.*convert"):
        source.converted_checkpoint(str(FIXTURES / "qwen2_tied"), dtype="auto", cache=tmp_path / "closed")


def test_a_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", fails)
    with pytest.raises(CheckpointError, match=f"{tmp_path}.*Permission denied"):
        source.converted_checkpoint(str(tmp_path), dtype="auto")


def test_a_checkpoint_without_tokenizer_takes_token_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "CACHE", tmp_path / "cache")
    folder = tmp_path / "qwen2"
    shutil.copytree(FIXTURES / "qwen2_tied", folder)
    settings = {**SMALL, "max_model_len": 32, "enforce_eager": True}
    llm = jaxinfer.LLM(folder, **settings)
    assert llm.tokenizer is None and llm.engine.resolved.num_valid_tokens == llm.engine.model.config.vocab_size
    golden = np.random.default_rng(0).integers(0, llm.engine.model.config.vocab_size, 8).tolist()
    (out,) = llm.generate({"prompt_token_ids": golden}, jaxinfer.SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    logits = np.asarray(jit_logits(llm.engine.model)(np.array([[*golden, *out.outputs[0].token_ids]], np.int32)))[0, 7:-1]
    assert out.outputs[0].token_ids == tuple(logits.argmax(-1).tolist())
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.generate("text")
