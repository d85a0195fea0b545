"""Sources that must be refused: each by name, before any weight is written, leaving no output.

  python -m tests.convert.test_refusals    prints every refusal of this table with its whole message
"""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert.converter import convert
from convert.mapping import Entry, Part, make_plan
from jaxinfer.errors import CheckpointError, ConfigError, JaxInferError
from tests.convert.checkpoints import hf_config, hf_tensors, write_gguf, write_hf, write_safetensors

EMBED, NORM = "model.embed_tokens.weight", "model.norm.weight"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def refused(tmp_path: Path, source: Path, message: str) -> str:
    with pytest.raises(JaxInferError, match=message) as caught:
        convert(source, tmp_path / "out", progress=False)
    assert not list(tmp_path.glob("out*")), "a refusal left something behind"
    return str(caught.value)


def drop(name: str) -> Callable[[dict[str, Any], dict[str, np.ndarray]], Any]:
    return lambda config, tensors: tensors.pop(name)


TENSOR_CASES: dict[str, Callable[[dict[str, Any], dict[str, np.ndarray]], Any]] = {
    "missing tensor model.norm.weight": drop(NORM),
    "missing tensor lm_head.weight.*tie_word_embeddings": drop("lm_head.weight"),
    "unknown tensor model.extra.weight": lambda c, t: t.update({"model.extra.weight": np.zeros(3, np.float32)}),
    r"q_proj.weight has shape \[4, 64\], the config asks for \[128, 64\]": lambda c, t: t.update({Q_PROJ: np.zeros((4, 64), np.float32)}),
    "q_proj.weight has dtype I8": lambda c, t: t.update({Q_PROJ: np.zeros((128, 64), np.int8)}),
    "q_proj.weight holds NaN or infinity": lambda c, t: t.update({Q_PROJ: np.full((128, 64), np.nan, np.float32)}),
    "embeddings are tied, but lm_head.weight differs": lambda c, t: c.update(tie_word_embeddings=True),
    "has only 27 tensors": lambda c, t: c.update(num_hidden_layers=2**31),
    r"quantization_config \(awq\) has no 'bits'": lambda c, t: c.update(quantization_config={"quant_method": "awq"}),
    "GPTNeoXForCausalLM": lambda c, t: c.update(architectures=["GPTNeoXForCausalLM"]),
    "eos_token_id in config.json is 'x'": lambda c, t: c.update(eos_token_id="x"),
    "has no 'rms_norm_eps'": lambda c, t: c.pop("rms_norm_eps"),
    "attributes that are not implemented: logit_softcap = 30": lambda c, t: c.update(logit_softcap=30),
    "rope kind 'longrope'": lambda c, t: c.update(rope_scaling={"rope_type": "longrope", "factor": 4.0}),
    "needs a finite number > 0 as 'factor'": lambda c, t: c.update(rope_scaling={"type": "linear"}),
    "hidden_act = 'gelu'": lambda c, t: c.update(hidden_act="gelu"),
    "vocab_size = 1000000000000": lambda c, t: c.update(vocab_size=10**12),
    r"tensor lm_head.weight has shape \[100, 64\]": lambda c, t: t.update({"lm_head.weight": np.zeros((100, 64), np.float32)}),
}


@pytest.mark.parametrize("message", sorted(TENSOR_CASES))
def test_hf_tensors(tmp_path: Path, message: str) -> None:
    config = hf_config()
    tensors = hf_tensors(config, np.float32)
    TENSOR_CASES[message](config, tensors)
    refused(tmp_path, write_hf(tmp_path / "hf", config, tensors), message)


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    config = hf_config()
    tensors = hf_tensors(config)
    del tensors[NORM], tensors[Q_PROJ]
    tensors["odd"] = np.zeros(1, np.float32)
    text = refused(tmp_path, write_hf(tmp_path / "hf", config, tensors), "3 problems")
    assert all(name in text for name in (NORM, Q_PROJ, "odd"))


def shard(folder: Path, number: int) -> Path:
    return folder / f"model-{number:05d}-of-00002.safetensors"


def edit_index(folder: Path, **changes: str | None) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for name, value in changes.items():
        index["weight_map"].pop(name, None)
        if value is not None:
            index["weight_map"][name] = value
    path.write_text(json.dumps(index))


def corrupt_header(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data and len(old) == len(new)
    path.write_bytes(data.replace(old, new, 1))


FOLDER_CASES: dict[str, Callable[[Path], Any]] = {
    "lacks 1 of 2 shards.*model-00002": lambda f: shard(f, 2).unlink(),
    "model-00001.* is truncated": lambda f: os.truncate(shard(f, 1), shard(f, 1).stat().st_size - 10),
    "is truncated or no safetensors file": lambda f: os.truncate(shard(f, 1), 4),
    "bytes after its last tensor": lambda f: shard(f, 1).write_bytes(shard(f, 1).read_bytes() + b"xxxx"),
    "damaged safetensors header": lambda f: corrupt_header(shard(f, 1), b'{"__metadata__"', b'x"__metadata__"'),
    "its header entry spans": lambda f: corrupt_header(shard(f, 1), b'"BF16"', b'"F32" '),
    "has dtype XX16": lambda f: corrupt_header(shard(f, 1), b'"BF16"', b'"XX16"'),
    "ghost should be in .* but no shard holds it": lambda f: edit_index(f, ghost=shard(f, 1).name),
    "model.norm.weight is in .* but not in the index": lambda f: edit_index(f, **{NORM: None}),
    "which is no .safetensors file of this folder": lambda f: edit_index(f, ghost="../x.safetensors"),
    "is in both": lambda f: write_safetensors(shard(f, 2), hf_tensors(hf_config())),
    "has no weight_map": lambda f: (f / "model.safetensors.index.json").write_text("{}"),
    "but none of model.safetensors": lambda f: (f / "model.safetensors.index.json").unlink(),
    "config.json does not exist": lambda f: (f / "config.json").unlink(),
    "cannot be read as JSON": lambda f: (f / "config.json").write_text('{"a": 1, "a": 2}'),
    "holds a JSON list": lambda f: (f / "config.json").write_text("[]"),
    "generation_config.json cannot be read as JSON": lambda f: (f / "generation_config.json").write_text("{"),
    "tokenizer.json describes no tokenizer": lambda f: (f / "tokenizer.json").write_text("{}"),
    "tokenizer_config.json cannot be read as JSON": lambda f: (f / "tokenizer_config.json").write_bytes(b"\xff"),
    "eos_token_id in generation_config.json is -1": lambda f: (f / "generation_config.json").write_text('{"eos_token_id": -1}'),
}


@pytest.mark.parametrize("message", sorted(FOLDER_CASES))
def test_hf_folder(tmp_path: Path, message: str) -> None:
    folder = write_hf(tmp_path / "hf", hf_config(), hf_tensors(hf_config()), shards=2)
    FOLDER_CASES[message](folder)
    refused(tmp_path, folder, message)


def test_folders_without_safetensors(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    refused(tmp_path, folder, "has no weights")
    (folder / "pytorch_model.bin").write_bytes(b"")
    refused(tmp_path, folder, "pytorch_model.bin is no torch checkpoint")
    refused(tmp_path, tmp_path / "nothing", "does not exist")
    (tmp_path / "model.onnx").write_bytes(b"")
    refused(tmp_path, tmp_path / "model.onnx", "neither a folder nor a .gguf file")
    with pytest.raises(ConfigError, match="dtype is 'int8'"):
        convert(folder, tmp_path / "out", dtype="int8")


def test_float16_overflow_is_refused(tmp_path: Path) -> None:
    config = hf_config()
    tensors = hf_tensors(config, np.float32)
    tensors[NORM] = np.full(64, 1e6, np.float32)
    with pytest.raises(CheckpointError, match="model.norm.weight holds 1e.06, more than float16 can"):
        convert(write_hf(tmp_path / "hf", config, tensors), tmp_path / "out", dtype="float16", progress=False)
    assert not list(tmp_path.glob("out*"))


GGUF_CASES: dict[str, tuple[dict[str, Any], str]] = {
    "GGUF pre-tokenizer 'strange'": ({}, "strange"),
    r"GGUF key qwen2.attn_logit_softcapping = 30.0": ({"qwen2.attn_logit_softcapping": 30.0}, "qwen2"),
    "qwen2.expert_count = 8": ({"qwen2.expert_count": 8}, "qwen2"),
    "qwen2.rope.dimension_count = 16 differs": ({"qwen2.rope.dimension_count": 16}, "qwen2"),
    "rope kind 'strange'": ({"qwen2.rope.scaling.type": "strange", "qwen2.rope.scaling.factor": 4.0}, "qwen2"),
    "one of 3 parts": ({"split.count": 3}, "qwen2"),
    "eot_token_id is 9999": ({"tokenizer.ggml.eot_token_id": 9999}, "qwen2"),
}


@pytest.mark.parametrize("message", sorted(GGUF_CASES))
def test_gguf_metadata(tmp_path: Path, message: str) -> None:
    metadata, pre = GGUF_CASES[message]
    write_gguf(tmp_path / "m.gguf", hf_config(), hf_tensors(hf_config(), np.float32), pre=pre, metadata=metadata)
    refused(tmp_path, tmp_path / "m.gguf", message)


def test_gguf_containers(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, hf_config(), hf_tensors(hf_config(), np.float32), pre="qwen2")
    whole = path.read_bytes()
    for data, message in (
        (b"", "cannot be read"), (b"GGML" + whole[4:], "is no GGUF file"), (whole[:4] + b"\x01" + whole[5:], "has GGUF version 1"),
        (whole[:2000], "truncated or damaged"), (whole[:-64], "is truncated: tensor"),
        (whole.replace(b"blk.0.attn_q.weight", b"blk.0.attn_k.weight", 1), "appears twice"),
        (whole.replace(b"token_embd.weight", b"token_embx.weight", 1), "no tensor token_embd.weight"),
        (whole.replace(b"blk.1.attn_q.weight", b"blk.7.attn_q.weight", 1), "unknown tensor blk.7.attn_q.weight"),
        (whole.replace(b"general.architecture\x08\0\0\0\x05", b"general.architecturf\x08\0\0\0\x05", 1), "GGUF architecture None"),
    ):
        path.write_bytes(data)
        refused(tmp_path, path, message)


def test_damaged_headers_never_escape_as_other_errors(tmp_path: Path) -> None:
    """Truncations and bit flips in the headers of both formats: converted, or refused with a typed error; never another exception."""
    rng = np.random.default_rng(7)
    write_gguf(tmp_path / "m.gguf", hf_config(), hf_tensors(hf_config(), np.float32), pre="qwen2")
    folder = write_hf(tmp_path / "hf", hf_config(), hf_tensors(hf_config()))
    sources = {tmp_path / "m.gguf": tmp_path / "m.gguf", folder / "model.safetensors": folder, folder / "config.json": folder}
    for path, source in sources.items():
        whole = path.read_bytes()
        for case in range(25):
            data = bytearray(whole)
            if case % 3 == 0:
                del data[int(rng.integers(len(data))):]
            else:
                data[int(rng.integers(min(len(data), 9000)))] ^= 1 << int(rng.integers(8))
            path.write_bytes(data)
            try:
                convert(source, tmp_path / f"out-{path.name}-{case}", progress=False)
            except JaxInferError:
                assert not (tmp_path / f"out-{path.name}-{case}").exists()
        path.write_bytes(whole)
    assert not list(tmp_path.glob("*.partial-*"))


def test_tables_that_are_no_bijection() -> None:
    class Source:
        path = Path("source")
        tensors: dict[str, Any] = {}

    table = [Entry("a", (Part("x", "same"), Part("x", "same"))), Entry("a", (Part("y", "same"),)), Entry("b", (Part("z", "same"),))]
    with pytest.raises(CheckpointError) as caught:
        make_plan(Source(), table, {"a": (2,), "c": (3,)}, architecture="Test", tied=None)  # type: ignore[arg-type]
    for message in ("parameter a is set 2 times", "parameter c is never set", "b is not a parameter of the model",
                    "a has 2 elements, of which 4 are set", "tensor x is used by both a and a", "missing tensor y, needed for a"):
        assert message in str(caught.value)


def messages(root: Path) -> dict[str, str]:
    """What is wrong -> the whole message, for every row of the tables above."""
    found = {}

    def record(what: str, source: Path) -> None:
        try:
            convert(source, root / "out", progress=False)
        except JaxInferError as error:
            found[what] = f"{type(error).__name__}: {error}".replace(str(root), "...")

    for i, (what, change) in enumerate(TENSOR_CASES.items()):
        config = hf_config()
        tensors = hf_tensors(config, np.float32)
        change(config, tensors)
        record(what, write_hf(root / f"t{i}", config, tensors))
    for i, (what, spoil) in enumerate(FOLDER_CASES.items()):
        spoil(folder := write_hf(root / f"f{i}", hf_config(), hf_tensors(hf_config()), shards=2))
        record(what, folder)
    for i, (what, (metadata, pre)) in enumerate(GGUF_CASES.items()):
        write_gguf(root / f"g{i}.gguf", hf_config(), hf_tensors(hf_config(), np.float32), pre=pre, metadata=metadata)
        record(what, root / f"g{i}.gguf")
    return found


def test_the_table_is_whole(tmp_path: Path) -> None:
    found = messages(tmp_path)
    assert len(found) == len(TENSOR_CASES) + len(FOLDER_CASES) + len(GGUF_CASES) >= 40


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        for number, (what, message) in enumerate(messages(Path(scratch)).items(), 1):
            print(f"{number:3}. {what}\n     {message}".replace("\n  - ", "\n       - "))
