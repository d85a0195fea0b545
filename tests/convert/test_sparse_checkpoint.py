"""The sparse checkpoint of bench/: the same names, shapes and shards as the model that it stands for, and no disk."""

import json
import shutil
from pathlib import Path

import pytest

from bench.sparse_checkpoint import main
from convert.hf_reader import HFSource
from tests.convert.test_export import FIXTURES


def test_it_has_the_names_shapes_and_shards(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = Path(shutil.copytree(FIXTURES / "qwen1_tiny", tmp_path / "model"))
    index = json.loads((model / "model.safetensors.index.json").read_text())
    real = HFSource(model)
    index["metadata"]["total_size"] = sum(info.num_bytes for info in real.tensors.values())
    (model / "index.json").write_text(json.dumps(index))
    arguments = [f"--config={model / 'config.json'}", f"--index={model / 'index.json'}", f"--output={tmp_path / 'out'}"]
    assert main(arguments) == 0
    made = HFSource(tmp_path / "out")
    assert {name: info.shape for name, info in made.tensors.items()} == {name: info.shape for name, info in real.tensors.items()}
    assert [path.name for path in made.files] == [path.name for path in real.files]
    assert not made.read_rows("lm_head.weight", 0, 4).any()
    assert main(arguments) == 2 and main(arguments[:2]) == 2
    index["metadata"]["total_size"] += 2
    (model / "index.json").write_text(json.dumps(index))
    assert main([*arguments[:2], f"--output={tmp_path / 'other'}"]) == 1
    assert "the shapes of" in capfd.readouterr().err
