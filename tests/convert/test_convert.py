"""Whole conversions: every parameter bitwise, what the folder holds, and that nothing is left when something goes wrong."""

import gc
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from convert import converter, verify, writer
from convert.converter import convert
from jaxinfer.checkpoint import read_manifest, restore_params
from jaxinfer.errors import CheckpointError, ConfigError
from tests.convert.checkpoints import QUANT_TYPES, expected, hf_config, hf_tensors, write_gguf, write_hf

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
ROOT = Path(__file__).parents[2]


def restore(folder: Path) -> dict[str, np.ndarray]:
    tensors = read_manifest(folder)["tensors"]
    abstract = {name: jax.ShapeDtypeStruct(tuple(spec["shape"]), spec["dtype"]) for name, spec in tensors.items()}
    return {name: np.asarray(value) for name, value in restore_params(folder, abstract).items()}


def assert_bitwise(folder: Path, wanted: dict[str, np.ndarray]) -> None:
    found = restore(folder)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and found[name].tobytes() == np.ascontiguousarray(value).tobytes(), name


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "LlamaForCausalLM"])
@pytest.mark.parametrize("tied", [True, False])
def test_hf_is_converted_bitwise(tmp_path: Path, architecture: str, tied: bool) -> None:
    config = hf_config(architecture, tied=tied)
    tensors = hf_tensors(config)
    folder = convert(write_hf(tmp_path / "hf", config, tensors, shards=1 if tied else 3), tmp_path / "out", progress=False)
    assert_bitwise(folder, expected(config, tensors, ml_dtypes.bfloat16))
    assert json.loads((folder / "config.json").read_text()) == config
    assert read_manifest(folder)["dtype"] == "bfloat16"


def test_llama_with_biases(tmp_path: Path) -> None:
    config = hf_config("LlamaForCausalLM", attention_bias=True)
    tensors = hf_tensors(config, np.float32)
    assert_bitwise(convert(write_hf(tmp_path / "hf", config, tensors), tmp_path / "out"), expected(config, tensors, np.float32))


@pytest.mark.parametrize("stored", [np.float16, np.float32])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype(tmp_path: Path, stored: Any, dtype: str) -> None:
    config = hf_config(tied=True)
    tensors = hf_tensors(config, stored)
    folder = convert(write_hf(tmp_path / "hf", config, tensors), tmp_path / "out", dtype=dtype, progress=False)
    assert_bitwise(folder, expected(config, tensors, DTYPES[dtype]))


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "LlamaForCausalLM"])
@pytest.mark.parametrize("tied", [True, False])
def test_gguf_is_converted_bitwise(tmp_path: Path, architecture: str, tied: bool) -> None:
    config = hf_config(architecture, tied=tied)
    exact = write_gguf(tmp_path / "m.gguf", config, hf_tensors(config, np.float32), types=QUANT_TYPES)
    folder = convert(tmp_path / "m.gguf", tmp_path / "out", dtype="float32", progress=False)
    assert_bitwise(folder, expected(config, exact, np.float32))
    assert read_manifest(folder)["source"]["kind"] == "gguf"


@pytest.mark.parametrize(("stored", "dtype"), [("Q8_0", "bfloat16"), ("F16", "float16"), ("F32", "float32"), ("BF16", "bfloat16")])
def test_auto_dtype_of_gguf(tmp_path: Path, stored: str, dtype: str) -> None:
    config = hf_config(tied=True)
    write_gguf(tmp_path / "m.gguf", config, hf_tensors(config, np.float32), types=(stored,))
    assert read_manifest(convert(tmp_path / "m.gguf", tmp_path / "out", progress=False))["dtype"] == dtype


def test_restore_casts_and_is_strict(tmp_path: Path) -> None:
    config = hf_config(tied=True)
    tensors = hf_tensors(config, np.float32)
    folder = convert(write_hf(tmp_path / "hf", config, tensors), tmp_path / "out", progress=False)
    specs = {name: tuple(spec["shape"]) for name, spec in read_manifest(folder)["tensors"].items()}
    abstract = {name: jax.ShapeDtypeStruct(shape, ml_dtypes.bfloat16) for name, shape in specs.items()}
    for name, value in expected(config, tensors, ml_dtypes.bfloat16).items():
        assert np.asarray(restore_params(folder, abstract)[name]).tobytes() == np.ascontiguousarray(value).tobytes()
        break
    for change, message in (({"extra": jax.ShapeDtypeStruct((1,), np.float32)}, "extra is missing"),
                            ({"final_norm.weight": jax.ShapeDtypeStruct((3,), np.float32)}, r"has shape \[64\], the model needs \[3\]")):
        with pytest.raises(CheckpointError, match=message):
            restore_params(folder, {**abstract, **change})
    del abstract["final_norm.weight"]
    with pytest.raises(CheckpointError, match="final_norm.weight is not a parameter"):
        restore_params(folder, abstract)


def test_manifest_and_files(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf", hf_config(tied=True, eos_token_id=[3, 5]), hf_tensors(hf_config(tied=True)), shards=2)
    (source / "generation_config.json").write_text('{"eos_token_id": 7, "temperature": 0.7}')
    (source / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}, "chat_template": "x"}')
    (source / "added_tokens.json").write_text('{"<end>": 9}')
    (source / "modeling_custom.py").write_text("raise SystemExit")
    folder = convert(source, tmp_path / "out", progress=False)
    manifest = read_manifest(folder)
    assert manifest["end_token_ids"] == [3, 5, 7, 9]
    assert manifest["num_params"] == sum(int(np.prod(spec["shape"])) for spec in manifest["tensors"].values())
    assert (manifest["quantization"], manifest["verification"], manifest["architecture"]) == (None, None, "Qwen2ForCausalLM")
    hashes = {entry["name"]: (entry["bytes"], entry["sha256"]) for entry in manifest["source"]["files"]}
    assert len(hashes) == 4  # config, index, two shards
    for name, facts in hashes.items():
        data = (source / name).read_bytes()
        assert facts == (len(data), hashlib.sha256(data).hexdigest())
    assert sorted(path.name for path in folder.iterdir()) == [
        "added_tokens.json", "config.json", "generation_config.json", "manifest.json", "params", "tokenizer_config.json"]


def test_tied_copy_is_dropped_and_buffers_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = hf_config(tied=True)
    tensors = hf_tensors(config)
    extra = {"lm_head.weight": tensors["model.embed_tokens.weight"], "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    with caplog.at_level("INFO", logger="convert"):
        folder = convert(write_hf(tmp_path / "hf", config, {**tensors, **extra}), tmp_path / "out", progress=False)
    assert_bitwise(folder, expected(config, tensors, ml_dtypes.bfloat16))
    assert "dropped lm_head.weight" in caplog.text and "ignored model.layers.0.self_attn.rotary_emb.inv_freq" in caplog.text
    assert "peak anonymous memory" in caplog.text


def test_output_rules(tmp_path: Path) -> None:
    config = hf_config(tied=True)
    source = write_hf(tmp_path / "hf", config, hf_tensors(config))
    (tmp_path / "out").mkdir()  # an empty folder is taken
    folder = convert(source, tmp_path / "out", progress=False)
    before = (folder / "manifest.json").read_bytes()
    with pytest.raises(CheckpointError, match="give --overwrite"):
        convert(source, folder, progress=False)
    other = write_hf(tmp_path / "hf2", config, hf_tensors(config, seed=1))
    convert(other, folder, overwrite=True, progress=False)
    assert (folder / "manifest.json").read_bytes() != before
    assert_bitwise(folder, expected(config, hf_tensors(config, seed=1), ml_dtypes.bfloat16))
    with pytest.raises(CheckpointError, match="never replaced"):
        convert(source, other, overwrite=True, progress=False)
    with pytest.raises(ConfigError, match="is or holds the source"):
        convert(source, tmp_path, overwrite=True, progress=False)
    (tmp_path / "file").write_text("x")
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="exists and is a link or no folder|cannot be written"):
            convert(source, output, progress=False)
    with pytest.raises(CheckpointError, match="already a converted checkpoint"):
        convert(folder, tmp_path / "again", progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "hf", "hf2", "out"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("stop"), OSError(28, "No space left on device")])
@pytest.mark.parametrize("exists", [False, True])
def test_interruption_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, exists: bool) -> None:
    config = hf_config(tied=True)
    source = write_hf(tmp_path / "hf", config, hf_tensors(config))
    if exists:
        convert(source, tmp_path / "out", progress=False)
    monkeypatch.setattr(writer, "BATCH_BYTES", 1 << 14)
    calls = 0

    def fill(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 12:
            assert list(tmp_path.glob("out.partial-*/params*")), "nothing was being written yet"
            raise error
        args[0][...] = 1

    monkeypatch.setattr(converter, "fill", fill)
    with pytest.raises(CheckpointError if isinstance(error, OSError) else type(error)):
        convert(source, tmp_path / "out", overwrite=True, progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == (["hf", "out"] if exists else ["hf"])
    if exists:
        assert_bitwise(tmp_path / "out", expected(config, hf_tensors(config), ml_dtypes.bfloat16))


@pytest.mark.parametrize("name", ["hash", "orbax"])
def test_interruption_while_a_thread_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Ctrl-C inside Thread.start once left a worker that waited for ever, and the process with it."""
    config = hf_config(tied=True)
    source = write_hf(tmp_path / "hf", config, hf_tensors(config))
    start, started = threading.Thread.start, []

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.startswith(name):
            started.append(thread)
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        convert(source, tmp_path / "out", progress=False)
    started[0].join(timeout=20)
    assert not started[0].is_alive()
    del caught  # until here its traceback keeps every object of the run alive, as the end of a process does
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_not_enough_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = hf_config(tied=True)
    source = write_hf(tmp_path / "hf", config, hf_tensors(config))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="its disk has 0 MB free"):
        convert(source, tmp_path / "out", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_damaged_checkpoint_is_detected(tmp_path: Path) -> None:
    config = hf_config(tied=True)
    whole = convert(write_hf(tmp_path / "hf", config, hf_tensors(config)), tmp_path / "whole", progress=False)
    largest = max((whole / name for name in read_manifest(whole)["params_files"]), key=lambda path: path.stat().st_size).relative_to(whole)

    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    def edit(path: Path, **changes: Any) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    damages = {
        "is damaged: its checksum": lambda c: flip(c / largest),
        "bytes, the manifest says": lambda c: os.truncate(c / largest, 100),
        "is missing": lambda c: (c / largest).unlink(),
        "unfinished one": lambda c: (c / "manifest.json").unlink(),
        "cannot be read": lambda c: (c / "manifest.json").write_text("{"),
        "has format 'x'": lambda c: edit(c / "manifest.json", format="x"),
        "layout_version 2": lambda c: edit(c / "manifest.json", layout_version=2),
        "has tensors = 3": lambda c: edit(c / "manifest.json", tensors=3),
        "damaged entries a": lambda c: edit(c / "manifest.json", tensors={"a": {"shape": [-1], "dtype": "float32"}}),
        "damaged entries ../x": lambda c: edit(c / "manifest.json", params_files={"../x": {"bytes": 1, "crc32": 1}}),
    }
    for i, (message, damage) in enumerate(damages.items()):
        copy = Path(shutil.copytree(whole, tmp_path / f"copy{i}"))
        damage(copy)
        with pytest.raises(CheckpointError, match=message):
            restore(copy)
    with pytest.raises(CheckpointError, match="is no folder"):
        read_manifest(tmp_path / "absent")


def run_cli(*args: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "convert", *args], cwd=ROOT, capture_output=True, text=True, timeout=120, **kwargs)


def test_command_line(tmp_path: Path) -> None:
    config = hf_config(tied=True)
    source = write_hf(tmp_path / "hf", config, hf_tensors(config))
    done = run_cli(f"--model={source}", f"--output={tmp_path / 'out'}", "--dtype=float32")
    assert done.returncode == 0 and "peak anonymous memory" in done.stderr, done.stderr
    assert read_manifest(tmp_path / "out")["dtype"] == "float32"
    for args, code, message in (
        (["--help"], 0, "python -m convert --model=FOLDER"),
        (["--modle=x"], 2, "Unknown command line flag 'modle'"),
        ([f"--model={source}"], 2, "--output is needed"),
        ([f"--model={source}", "--output=~nosuchuser/x"], 2, "--output=~nosuchuser/x: the home folder"),
        (["--model=~nosuchuser/x", f"--output={tmp_path / 'o'}"], 2, "--model=~nosuchuser/x: the home folder"),
        ([f"--model={source}", f"--output={tmp_path / 'o'}", "stray"], 2, "unexpected argument 'stray'"),
        ([f"--model={source}", f"--output={tmp_path / 'o'}", "--dtype=int4"], 2, "should be one of"),
    ):
        done = run_cli(*args)
        assert message in done.stdout + done.stderr and done.returncode == code, (args, done)
        assert "Traceback" not in done.stderr
    done = run_cli(f"--model={tmp_path / 'absent'}", f"--output={tmp_path / 'o'}")
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "does not exist" in done.stderr


LATE_THREAD = """
import time, convert.writer, tensorstore
real = tensorstore.Transaction
def late(**arguments):
    if not arguments:  # the transaction of the file of shardings, which has a thread of its own
        time.sleep(1); print("late", flush=True)
    return real(**arguments)
tensorstore.Transaction = late
"""


@pytest.mark.parametrize("before", ["", LATE_THREAD], ids=["", "late_thread"])
def test_a_disk_that_refuses_leaves_nothing(tmp_path: Path, before: str) -> None:
    """A real failure inside Orbax: the process may write files of 20 kB at most. No thread of Orbax writes, or speaks, afterwards."""
    config = hf_config(tied=True)
    source = write_hf(tmp_path / "hf", config, hf_tensors(config))
    limited = (f"import resource, sys, convert.__main__ as m\n{before}\nresource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
               "sys.exit(m.main())")
    done = subprocess.run([sys.executable, "-c", limited, f"--model={source}", f"--output={tmp_path / 'out'}"], cwd=ROOT,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "cannot be written" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert done.stdout == ("late\n" if before else "")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_complaints_about_a_loop_that_orbax_closed_are_dropped_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from callbacks, whose exceptions Python hands to the unraisable hook, as it does those of `__del__`."""
    class Callback:
        def __init__(self, message: str) -> None:
            self.message = message

        def __del__(self) -> None:
            raise RuntimeError(self.message)

    seen: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: seen.append(str(dropped.exc_value)))
    before = sys.unraisablehook
    with writer.CheckpointWriter(tmp_path / "out", overwrite=False):
        for message in ("Event loop is closed", "another"):
            Callback(message)
        assert seen == ["another"]
    assert sys.unraisablehook is before and not list(tmp_path.iterdir())


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_signals_leave_nothing(tmp_path: Path, signal_number: int) -> None:
    config = hf_config(tied=True)
    source = write_hf(tmp_path / "hf", config, hf_tensors(config))
    slow = ("import signal, sys, time, convert.__main__ as m, convert.converter as c\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits SIGINT ignored\n"
            "real = c.fill\n"
            "def fill(*a):\n    time.sleep(0.2); real(*a)\n"
            "c.fill = fill\nsys.exit(m.main())")
    process = subprocess.Popen([sys.executable, "-c", slow, f"--model={source}", f"--output={tmp_path / 'out'}"], cwd=ROOT,
                               stderr=subprocess.PIPE, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("out.partial-*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal_number)
    _, stderr = process.communicate(timeout=60)
    code, line = (130, "interrupted") if signal_number == signal.SIGINT else (143, "terminated")
    assert (process.returncode, stderr.splitlines()[-1:]) == (code, [line]) and "Traceback" not in stderr, stderr
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("at", ["fill", "verify"])
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_signals_inside_a_callback_are_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                                signal_number: int, at: str) -> None:
    """Whatever a handler raises in a callback of the garbage collector is dropped by Python; jax has such a callback."""
    config = hf_config(tied=True)
    source = write_hf(tmp_path / "hf", config, hf_tensors(config))
    sent = []

    def callback(phase: str, info: dict[str, int]) -> None:
        if not sent:
            sent.append(phase)
            signal.raise_signal(signal_number)

    def collect(*args: Any) -> Any:
        gc.callbacks.append(callback)
        try:
            gc.collect()
        finally:
            gc.callbacks.remove(callback)
        return real(*args)

    def terminate(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    where, name = (converter, "fill") if at == "fill" else (verify, "compare")
    real = getattr(where, name)
    monkeypatch.setattr(where, name, collect)
    before = {signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler), signal.SIGTERM: signal.signal(signal.SIGTERM, terminate)}
    hook = sys.unraisablehook
    try:
        with pytest.raises(KeyboardInterrupt if signal_number == signal.SIGINT else SystemExit):
            convert(source, tmp_path / "out", progress=False, verify_logits=True)
        assert signal.getsignal(signal.SIGTERM) is terminate and sys.unraisablehook is hook
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert sent and "ignored" not in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is read from /proc")
def test_anonymous_memory_is_bounded(tmp_path: Path) -> None:
    """Two tensors of 101 MB: above the memory that the libraries take, the peak stays near one of them, not two."""
    vocab, dim = 24576, 1024
    config = hf_config(tied=False, vocab_size=vocab, hidden_size=dim, num_hidden_layers=1)
    source = write_hf(tmp_path / "hf", config, hf_tensors(config, np.float32))
    code = ("import sys\nfrom convert.converter import convert\nfrom convert.progress import MemoryMeter, anonymous_bytes\n"
            "start = anonymous_bytes()\n"
            "with MemoryMeter() as meter:\n    convert(sys.argv[1], sys.argv[2], progress=False)\n"
            "print(meter.peak_bytes - start)")
    done = subprocess.run([sys.executable, "-c", code, str(source), str(tmp_path / "out")], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "JAX_PLATFORMS": "cpu"}, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 150e6, f"{int(done.stdout) / 1e6:.0f} MB"
