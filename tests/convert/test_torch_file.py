""".bin checkpoints: read bitwise without torch, and nothing that a pickle may contain is ever run."""

import io
import json
import pickle
import pickletools
import re
import shutil
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from convert.converter import convert
from convert.torch_file import TorchFile
from jaxinfer.errors import CheckpointError, JaxInferError, UnsupportedModelError
from tests.convert.checkpoints import D, hf_config, hf_tensors, write_hf
from tests.convert.test_convert import assert_bitwise, expected

BIN_TINY = Path(__file__).resolve().parents[1] / "fixtures" / "bin-tiny"
STORAGES = {"float32": "FloatStorage", "bfloat16": "BFloat16Storage", "float16": "HalfStorage", "int64": "LongStorage"}


def fixture_values() -> dict[str, np.ndarray]:
    """What tests/goldens/make_bin_fixture.py saved, from its formula."""
    layer = "model.layers.0."
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", layer + "input_layernorm.weight",
             layer + "post_attention_layernorm.weight", *(f"{layer}self_attn.{p}_proj.{k}" for p in "qkv" for k in ("weight", "bias")),
             layer + "self_attn.o_proj.weight", *(f"{layer}mlp.{p}_proj.weight" for p in ("gate", "up", "down"))]
    shapes = {**dict.fromkeys(names, (8,)), "model.embed_tokens.weight": (16, 8), "lm_head.weight": (16, 8),
              layer + "self_attn.q_proj.weight": (8, 8), layer + "self_attn.o_proj.weight": (8, 8),
              **{f"{layer}self_attn.{p}_proj.weight": (4, 8) for p in "kv"}, **{f"{layer}self_attn.{p}_proj.bias": (4,) for p in "kv"},
              **{f"{layer}mlp.{p}_proj.weight": (12, 8) for p in ("gate", "up")}, layer + "mlp.down_proj.weight": (8, 12)}
    return {name: ((7 * i + 3 * np.arange(np.prod(shapes[name]))) % 61 - 30).reshape(shapes[name]) / 64 for i, name in enumerate(names)}


def test_what_torch_saved_is_read_bitwise() -> None:
    """Views of one storage, transposed strides, parameters, three dtypes and two shards."""
    shards = [TorchFile(path) for path in sorted(BIN_TINY.glob("*.bin"))]
    found = {name: shard for shard in shards for name in shard.tensors if not name.endswith("inv_freq")}
    wanted = fixture_values()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        info = found[name].tensors[name]
        assert info.shape == value.shape
        rows = found[name].read_rows(name, 0, len(value))
        assert rows.dtype == {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "F16": np.float16}[info.dtype]
        assert np.array_equal(rows.astype(np.float64), value), name
        assert np.array_equal(found[name].read_rows(name, 1, 3).astype(np.float64), value[1:3]), name
        assert not rows.flags.writeable


def test_a_sharded_folder_is_converted(tmp_path: Path) -> None:
    folder = convert(BIN_TINY, tmp_path / "out", progress=False, verify_logits=True)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["dtype"] == "bfloat16" and manifest["verification"]["passed"]
    assert [file["name"] for file in manifest["source"]["files"]] == [
        "config.json", "pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]


class Raw:
    """A pickle written by hand: opcodes for the tensors of a state dict."""

    @staticmethod
    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value.encode())) + value.encode()

    @staticmethod
    def number(value: int) -> bytes:
        if 0 <= value < 2**31:
            return b"J" + struct.pack("<i", value)
        raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return b"\x8a" + bytes([len(raw)]) + raw

    @classmethod
    def sizes(cls, values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(map(cls.number, values)) + b"t"

    @classmethod
    def tensor(cls, key: str, storage: str, num_elements: int, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
        persistent = b"(" + cls.text("storage") + f"ctorch\n{storage}\n".encode() + cls.text(key) + cls.text("cpu")
        persistent += cls.number(num_elements) + b"tQ"
        hooks = b"ccollections\nOrderedDict\n)R"
        where = cls.number(offset) + cls.sizes(shape) + cls.sizes(strides)
        return b"ctorch._utils\n_rebuild_tensor_v2\n(" + persistent + where + b"\x89" + hooks + b"tR"

    @classmethod
    def state(cls, items: dict[str, bytes]) -> bytes:
        return b"\x80\x02ccollections\nOrderedDict\n)R(" + b"".join(cls.text(name) + value for name, value in items.items()) + b"u."


def archive(path: Path, pickled: bytes, records: dict[str, bytes], *, order: bytes | None = b"little", **settings: Any) -> Path:
    with zipfile.ZipFile(path, "w", **settings) as file:
        file.writestr("archive/data.pkl", pickled)
        if order is not None:
            file.writestr("archive/byteorder", order)
        for key, data in records.items():
            file.writestr(f"archive/data/{key}", data)
    return path


def write_bin(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """As torch.save lays it out, without torch."""
    items, records = {}, {}
    for i, (name, array) in enumerate(tensors.items()):
        strides = tuple(stride // array.itemsize for stride in array.strides)
        items[name] = Raw.tensor(str(i), STORAGES[array.dtype.name], array.size, 0, array.shape, strides)
        records[str(i)] = array.tobytes()
    archive(path, Raw.state(items), records)


def test_one_file_with_biases_and_without_a_byte_order(tmp_path: Path) -> None:
    config = hf_config()
    tensors = hf_tensors(config)
    folder = write_hf(tmp_path / "hf", config, {})
    (folder / "model.safetensors").unlink()
    write_bin(folder / "pytorch_model.bin", tensors)
    assert_bitwise(convert(folder, tmp_path / "out", progress=False), expected(config, tensors, ml_dtypes.bfloat16))


ONE = {"w": Raw.tensor("0", "FloatStorage", 4, 0, (2, 2), (2, 1))}
FOUR_FLOATS = {"0": np.arange(4, dtype=np.float32).tobytes()}


@pytest.mark.parametrize(("offset", "shape", "strides", "wanted"), [
    (1, (3,), (1,), [1, 2, 3]), (0, (2, 2), (1, 2), [[0, 2], [1, 3]]), (1, (2, 2), (1, 1), [[1, 2], [2, 3]]), (3, (2, 1), (0, 1), [[3], [3]]),
    (0, (), (), 0), (2, (0, 5), (5, 1), np.zeros((0, 5)))])
def test_strides_and_offsets(tmp_path: Path, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], wanted: Any) -> None:
    state = Raw.state({"w": Raw.tensor("0", "FloatStorage", 4, offset, shape, strides)})
    file = TorchFile(archive(tmp_path / "x.bin", state, FOUR_FLOATS, order=None))
    assert file.tensors["w"].shape == shape
    if shape:
        assert np.array_equal(file.read_rows("w", 0, shape[0]), np.array(wanted, np.float32))


class Malice:
    """Pickles as a call of whatever it was made with."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def sentinel(path: str) -> None:
    Path(path).write_text("a pickle was run")


def test_nothing_in_a_pickle_is_run(tmp_path: Path) -> None:
    import os
    import subprocess

    witness = tmp_path / "witness"
    calls = [Malice(os.system, f"touch {witness}"), Malice(eval, f"open({str(witness)!r}, 'w')"), Malice(exec, f"open({str(witness)!r}, 'w')"),
             Malice(subprocess.Popen, ["touch", str(witness)]), Malice(sentinel, str(witness)), Malice(open, str(witness), "w"),
             Malice(getattr, Malice(__import__, "os"), "system"), Malice(pickle.loads, pickle.dumps(Malice(sentinel, str(witness))))]
    for call in calls:
        for protocol in range(2, 6):
            for value in (call, {"w": call}, OrderedDict(w=call), [call], {"w": (call, {"x": call})}):
                path = archive(tmp_path / "x.bin", pickle.dumps(value, protocol), {})
                with pytest.raises(CheckpointError, match="refers to|refused|damaged"):
                    TorchFile(path)
                assert not witness.exists()
    path = archive(tmp_path / "x.bin", pickle.dumps(Malice(os.system, "true"), 2), {})
    with pytest.raises(CheckpointError, match=r"refers to posix.system, which weights do not need.*nothing was run"):
        TorchFile(path)


def refused(path: Path, message: str, error: type[JaxInferError] = CheckpointError) -> None:
    with pytest.raises(error, match=re.escape(message)):
        TorchFile(path)


PICKLES: dict[str, bytes] = {
    "pickle instruction INST": b"\x80\x02(ios\nsystem\n.",
    "pickle instruction OBJ": b"\x80\x02(ccollections\nOrderedDict\no.",
    "pickle instruction NEWOBJ": b"\x80\x02ccollections\nOrderedDict\n)\x81.",
    "pickle instruction EXT1": b"\x80\x02\x82\x01.",
    "pickle instruction BINBYTES": b"\x80\x03B\x00\x00\x00\x00.",
    "refers to torch.storage.UntypedStorage": b"\x80\x02ctorch.storage\nUntypedStorage\n.",
    "refers to torch.load": b"\x80\x02ctorch\nload\n.",
    "refers to builtins.eval": b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.",
    "something is called that is no constructor": b"\x80\x02})R.",
    "its stack is empty": b"\x80\x02.",
    "a mark is missing": b"\x80\x02t.",
    "pickle exhausted before seeing STOP": b"",
    "damaged pickle": b"\x80\x02h\x05.",
    "holds a list, expected a dict of tensors": b"\x80\x02].",
    "its entry 'a' is a dict, expected a tensor": b"\x80\x02}X\x01\x00\x00\x00a}s.",
    "a dict's keys are not all texts": b"\x80\x02}]]s.",
    "an OrderedDict is built from arguments": b"\x80\x02ccollections\nOrderedDict\nN\x85R.",
    "a tensor is built from no storage": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(NNNNtR.",
    "a parameter is built from no tensor": b"\x80\x02ctorch._utils\n_rebuild_parameter\n)R.",
    "a persistent id names no storage": b"\x80\x02NQ.",
    "reaches element 4 of a storage of 4": Raw.state({"w": Raw.tensor("0", "FloatStorage", 4, 1, (2, 2), (2, 1))}),
    "are no sizes": Raw.state({"w": Raw.tensor("0", "FloatStorage", 4, 0, (2, -2), (2, 1))}),
    "has no record archive/data/7": Raw.state({"w": Raw.tensor("7", "FloatStorage", 4, 0, (2, 2), (2, 1))}),
    "has 16 bytes, its 8 elements of F32 take 32": Raw.state({"w": Raw.tensor("0", "FloatStorage", 8, 0, (2, 2), (2, 1))}),
    "elements": Raw.state({"w": Raw.tensor("0", "FloatStorage", 4, 0, (2**40, 2**40), (0, 0))}),
}


@pytest.mark.parametrize("message", sorted(PICKLES))
def test_pickles_that_are_refused(tmp_path: Path, message: str) -> None:
    refused(archive(tmp_path / "x.bin", PICKLES[message], FOUR_FLOATS), message)


def test_a_pickle_cannot_take_memory(tmp_path: Path) -> None:
    """Indices and lengths far beyond the data: the standard unpickler would allocate for them."""
    huge = struct.pack("<Q", 2**60)
    for body in (b"\x80\x02}r\xff\xff\xff\x7f.", b"\x80\x04\x8d" + huge + b"x.", b"\x80\x04\x95" + huge + b"}."):
        path = archive(tmp_path / "x.bin", body, {})
        try:
            assert TorchFile(path).tensors == {}
        except CheckpointError:
            pass
    nested = b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b"."
    refused(archive(tmp_path / "x.bin", nested, {}), "holds a tuple, expected a dict")


def test_containers_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    good = archive(path, Raw.state(ONE), FOUR_FLOATS).read_bytes()
    assert TorchFile(path).read_rows("w", 0, 2).tolist() == [[0, 1], [2, 3]]
    archive(path, Raw.state(ONE), FOUR_FLOATS, order=b"big")
    refused(path, "byte order b'big'; only little-endian", UnsupportedModelError)
    archive(path, Raw.state(ONE), FOUR_FLOATS, compression=zipfile.ZIP_DEFLATED)
    refused(path, "is compressed or encrypted", UnsupportedModelError)
    path.write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")
    refused(path, "torch's old format", UnsupportedModelError)
    path.write_bytes(b"hello")
    refused(path, "is no torch checkpoint")
    path.write_bytes(good[:-30])
    refused(path, "truncated or no whole zip archive")
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/other", b"")
    refused(path, "holds 0 records data.pkl")
    refused(tmp_path / "absent.bin", "does not exist")
    data = np.arange(4, dtype=np.float32).tobytes()
    path.write_bytes(good.replace(data, data[:5] + b"\x40" + data[6:]))
    with pytest.raises(CheckpointError, match="record data/0 has the checksum"):
        TorchFile(path).read_rows("w", 0, 1)
    path.write_bytes(good.replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v3", 1))
    refused(path, "record data.pkl has the checksum")


def test_integers_are_no_weights_and_shards_are_checked(tmp_path: Path) -> None:
    config = hf_config()
    folder = write_hf(tmp_path / "hf", config, {})
    (folder / "model.safetensors").unlink()
    tensors = {**hf_tensors(config), "model.norm.weight": np.zeros(D, np.int64)}
    write_bin(folder / "pytorch_model.bin", tensors)
    with pytest.raises(CheckpointError, match="model.norm.weight has dtype I64; weights must be floating point"):
        convert(folder, tmp_path / "out", progress=False)
    shutil.copytree(BIN_TINY, tmp_path / "bin")
    (tmp_path / "bin" / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(CheckpointError, match="lacks 1 of 2 shards that pytorch_model.bin.index.json names: pytorch_model-00002"):
        convert(tmp_path / "bin", tmp_path / "out", progress=False)
    assert not list(tmp_path.glob("out*"))


def test_every_instruction_that_torch_writes_is_known() -> None:
    from convert.torch_pickle import INSTRUCTIONS, LITERALS

    for path in BIN_TINY.glob("*.bin"):
        with zipfile.ZipFile(path) as file:
            name = next(name for name in file.namelist() if name.endswith("data.pkl"))
            used = {opcode.name for opcode, _, _ in pickletools.genops(io.BytesIO(file.read(name)))}
        assert used <= INSTRUCTIONS.keys() | LITERALS | {"STOP"}
