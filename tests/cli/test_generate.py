"""The command line: what reaches the engine, what comes out, and what is refused before any model is loaded."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxinfer import generate
from jaxinfer.config import EngineConfig
from jaxinfer.errors import CheckpointError
from jaxinfer.sampling.params import SamplingParams
from tests.cli.fake import FakeLLM

CLOSING = "5 prompt + 7 output = 12 tokens | TTFT 12 ms | decode 45.7 tokens/s | memory 2.50 GB | start 1.5 s\n"


class Ran:
    """One run of the command: exit code, both outputs, and the LLM if one was made."""

    def __init__(self, capsys: pytest.CaptureFixture[str], args: Sequence[str],
                 prepare: Callable[[FakeLLM], None] = lambda llm: None) -> None:
        self.llm: FakeLLM | None = None

        def make(**settings: Any) -> FakeLLM:
            self.llm = FakeLLM(**settings)
            prepare(self.llm)
            return self.llm

        self.code = generate.main(["--log_level=error", *args], make_llm=make)
        self.out, self.err = capsys.readouterr()

    @property
    def calls(self) -> list[tuple[Any, SamplingParams]]:
        assert self.llm is not None
        return self.llm.calls


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    return lambda *args, **kwargs: Ran(capsys, ["--model=m", *args], **kwargs)


def jsonl(path: Path, *lines: Any) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_prompt(run: Any) -> None:
    ran = run("--prompt=hello")
    assert (ran.code, ran.out, ran.err) == (0, "HELLO\n", CLOSING)
    assert ran.calls == [({"prompt": "hello"}, SamplingParams(max_tokens=256))]


def test_prompts_are_batched_and_named(run: Any) -> None:
    ran = run("--prompt=one", "--prompt=two\nlines", "--n=2")
    assert ran.llm.num_generate_calls == 1
    assert ran.out == ("--- prompt 1: one [1]\nONE\n--- prompt 1: one [2]\nONE\n"
                       "--- prompt 2: two lines [1]\nTWO\nLINES\n--- prompt 2: two lines [2]\nTWO\nLINES\n")


def test_every_field_has_its_flag(run: Any) -> None:
    ran = run("--prompt=x", "--dtype=float32", "--block_size=32", "--num_pages=100", "--noenable_prefix_caching", "--token_buckets=16,64",
              "--engine_seed=3", "--max_num_seqs=4", "--gpu_memory_utilization=0.5",
              "--n=2", "--temperature=0.5", "--top_k=-1", "--top_p=0.9", "--min_p=0.1",
              "--seed=4", "--max_tokens=none", "--stop=a,b", "--stop=c", "--stop_token_ids=5,6", "--ignore_eos", "--noskip_special_tokens")
    assert ran.code == 0, ran.err
    engine = EngineConfig(model="m", dtype="float32", page_size=32, num_pages=100, enable_prefix_caching=False, token_buckets=(16, 64),
                          seed=3, max_num_seqs=4, gpu_memory_utilization=0.5)
    assert EngineConfig(**ran.llm.settings) == engine
    assert ran.calls[0][1] == SamplingParams(n=2, temperature=0.5, top_k=0, top_p=0.9, min_p=0.1, seed=4, max_tokens=None,
                                             stop=["a,b", "c"], stop_token_ids=[5, 6], ignore_eos=True, skip_special_tokens=False)


def test_chat_renders_prompts(run: Any) -> None:
    ran = run("--prompt=hi", "--chat", "--system=Be brief.")
    assert ran.calls[0][0] == {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]}


def test_stream_shows_prompts_in_turn(run: Any) -> None:
    ran = run("--prompt=one", "--prompt=too long", "--prompt=two", "--stream")
    assert ran.out == "--- prompt 1: one\nONE\n--- prompt 2: too long\n--- prompt 3: two\nTWO\n"
    assert ran.err == "error: prompt 2: prompt is too long\n" + CLOSING
    assert (ran.code, ran.llm.num_generate_calls, ran.llm.num_withdrawn) == (1, 0, 0)


def test_one_prompt_streams_to_a_terminal(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert run("--prompt=x").llm.num_generate_calls == 0
    assert run("--prompt=x", "--nostream").llm.num_generate_calls == 1
    assert run("--prompt=x", "--n=2").llm.num_generate_calls == 1


def test_prompts_file(run: Any, tmp_path: Path) -> None:
    """Bad lines are named and stop no other; settings of a line hold for it alone; results stand in order."""
    source = jsonl(
        tmp_path / "in.jsonl", {"prompt": "a", "max_tokens": 3, "id": "first"}, "{not json", "",
        {"messages": [{"role": "user", "content": "b"}]}, {"prompt": "too long"},
        {"prompt_token_ids": [1, 2], "temperature": 0, "stop": ["x"]}, {"prompt": "d", "top_p": 7})
    target = tmp_path / "out.jsonl"
    target.write_text("old\n")
    ran = run(f"--prompts_file={source}", f"--output={target}", "--seed=1")
    assert (ran.code, ran.out) == (1, "")
    assert [c[0] for c in ran.calls] == [{"prompt": "a"}, {"messages": [{"role": "user", "content": "b"}]}, {"prompt": "too long"},
                                         {"prompt_token_ids": [1, 2]}]
    assert ran.calls[0][1] == SamplingParams(max_tokens=3, seed=1)
    assert ran.calls[3][1] == SamplingParams(max_tokens=256, seed=1, temperature=0, stop=["x"])
    records = read(target)
    assert [r["line"] for r in records] == [1, 2, 4, 5, 6, 7]
    assert records[0] == {
        "line": 1, "id": "first", "prompt": "a", "num_prompt_tokens": 3, "num_cached_tokens": 0, "ttft_ms": 12.5, "latency_ms": 500.0,
        "outputs": [{"index": 0, "text": "A", "token_ids": [1, 2], "finish_reason": "stop", "stop_reason": None}]}
    assert "not JSON" in records[1]["error"] and "top_p = 7" in records[5]["error"]
    assert records[3] == {"line": 5, "prompt": "too long", "error": "prompt is too long"}
    for line in (f"error: {source}, line 2: not JSON", f"error: {source}, line 7: SamplingParams.top_p = 7",
                 f"error: {source}, line 5: prompt is too long", f"3 results and 3 errors in {target}"):
        assert line in ran.err


def test_prompts_file_streamed_into_a_file(run: Any, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", "bad", {"prompt": "a"}, {"prompt": "too long"})
    ran = run(f"--prompts_file={source}", f"--output={tmp_path / 'out.jsonl'}", "--stream", "--chat")
    assert ran.code == 1
    assert [(r["line"], "error" in r) for r in read(tmp_path / "out.jsonl")] == [(1, True), (2, False), (3, True)]


def test_byte_order_mark_and_unfinished_last_line(run: Any, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps({"prompt": "日本"}).encode())
    ran = run(f"--prompts_file={tmp_path / 'in.jsonl'}")
    assert (ran.code, ran.out) == (0, "日本\n")


@pytest.mark.parametrize("line, message", [
    ("[1]", "holds a list: must be an object"), ({}, "has no prompt"), ({"prompt": "a", "messages": []}, "has prompt and messages"),
    ({"prompt": 5}, "prompt = 5: must be a text"), ({"messages": []}, "must be a list of at least one"),
    ({"prompt_token_ids": [1, "a"]}, "must be a list of integers"), ({"prompt_token_ids": [True]}, "must be a list of integers"),
    ({"prompt": "a", "temprature": 1}, "unknown field 'temprature'"), ({"prompt": "a", "stop": 5}, "stop = 5: has the wrong type"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens = true: has the wrong type"), ({"prompt": "a", "n": 0}, "SamplingParams.n = 0"),
    ({"prompt": "a", "stop_token_ids": ["x"]}, "wrong type"),
])
def test_bad_lines(run: Any, tmp_path: Path, line: Any, message: str) -> None:
    ran = run(f"--prompts_file={jsonl(tmp_path / 'in.jsonl', line)}")
    assert (ran.code, ran.llm) == (1, None)
    assert "in.jsonl, line 1: " in ran.err and message in ran.err and "holds no prompt that can be used" in ran.err


def test_line_that_is_not_utf8(run: Any, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"prompt": "a\xff"}\n{"prompt": "b"}\n')
    ran = run(f"--prompts_file={tmp_path / 'in.jsonl'}")
    assert (ran.code, ran.out) == (1, "B\n")
    assert "line 1: not UTF-8: byte 0xff at column 14" in ran.err


USAGE = [
    (["--prompt=a", "--prompts_file=f"], "contradict each other"),
    ([], "nothing to generate"),
    (["--prompt=a", "--system=s"], "--system needs --chat"),
    (["--chat", "--output=o"], "a conversation is not recorded"),
    (["--chat", "--nostream"], "--nostream contradicts"),
    (["--prompt=a", "--stream", "--n=2"], "--n=2 cannot be streamed"),
    (["--prompt=a", "--temprature=1"], "Unknown command line flag 'temprature'"),
    (["--prompt=a", "b"], "unexpected argument 'b'"),
    (["--prompt=a", "--max_tokens=many"], "must be an integer or none"),
    (["--prompt=a", "--top_p=2"], "SamplingParams.top_p = 2.0: must be in (0, 1]"),
    (["--prompt=a", "--page_size=17"], "page_size = 17: must be one of"),
    (["--prompt=a", "--num_pages=5", "--kv_cache_memory_bytes=9"], "give one of them"),
    (["--prompt=a", "--log_level=loud"], "should be one of"),
    (["--prompts_file=absent.jsonl"], "--prompts_file=absent.jsonl cannot be read: No such file"),
    (["--prompt"], "Missing value for flag --prompt"),
    (["--prompt=a", "--output=absent/out.jsonl"], "Its folder must exist"),
    (["--prompt=a", "--model="], "--model is missing"),
    (["--prompt=a", "--model=~nosuchuser/x"], "--model=~nosuchuser/x: the home folder that ~nosuchuser stands for is not known"),
    (["--prompt=a", "--output=~nosuchuser/x"], "--output=~nosuchuser/x: the home folder"),
    (["--prompts_file=~nosuchuser/x"], "--prompts_file=~nosuchuser/x: the home folder"),
    (["--prompt=a", "--compilation_cache_dir=~nosuchuser"], "--compilation_cache_dir=~nosuchuser: the home folder"),
]


@pytest.mark.parametrize("args, message", USAGE, ids=lambda v: v if isinstance(v, str) else "")
def test_wrong_command_lines(run: Any, args: list[str], message: str) -> None:
    ran = run(*args)
    assert (ran.code, ran.out, ran.llm) == (2, "", None)
    assert message in ran.err and "Use --help" in ran.err and "Traceback" not in ran.err


def test_output_that_is_a_folder_or_the_input(run: Any, tmp_path: Path) -> None:
    assert "Is a directory" in run("--prompt=a", f"--output={tmp_path}").err
    source = jsonl(tmp_path / "in.jsonl", {"prompt": "a"})
    assert "is the prompts file itself" in run(f"--prompts_file={source}", f"--output={source}").err
    assert read(tmp_path / "in.jsonl") == [{"prompt": "a"}]


def test_full_disk_is_named(run: Any) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    ran = run("--prompt=a", "--output=/dev/full")
    assert (ran.code, "No space left on device. The 0 lines before are whole." in ran.err) == (1, True)


def test_full_standard_output_is_named() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    code = ("import sys\nfrom jaxinfer import generate\nfrom tests.cli.fake import FakeLLM\n"
            "sys.exit(generate.main(sys.argv[1:], make_llm=FakeLLM))")
    for args in (["--model=m", "--prompt=x"], ["--model=m", "--prompt=x", "--stream"], ["--help"]):
        with open("/dev/full", "w") as full:
            ran = subprocess.run([sys.executable, "-c", code, *args], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
                                 cwd=Path(__file__).parents[2])
        assert (ran.returncode, "Traceback" in ran.stderr, "Exception" in ran.stderr) == (1, False, False), ran.stderr
        assert "error: standard output cannot be written: No space left on device." in ran.stderr


@pytest.mark.parametrize("args, num_seqs", [
    (["--prompt=a"], 1), (["--prompt=a", "--n=3"], 4), (["--prompt=a", "--prompt=b", "--prompt=c"], 4), (["--prompt=a"] * 30, 8),
    (["--prompt=a", "--prompt=b", "--stream"], 1), (["--chat"], 1), (["--prompt=a", "--max_num_seqs=5"], 5),
    (["--prompt=a", "--batch_buckets=2"], None),
])
def test_on_a_cpu_the_engine_is_no_wider_than_the_prompts(run: Any, monkeypatch: pytest.MonkeyPatch, args: list[str],
                                                          num_seqs: int | None) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert run(*args).llm.settings["max_num_seqs"] == num_seqs


def test_stream_refuses_a_line_with_several_completions(run: Any, tmp_path: Path) -> None:
    ran = run(f"--prompts_file={jsonl(tmp_path / 'in.jsonl', {'prompt': 'a', 'n': 2})}", "--stream")
    assert (ran.code, "cannot be streamed" in ran.err) == (2, True)


def test_output_is_left_alone_when_the_model_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def fail(**_: Any) -> Any:
        raise CheckpointError("model = 'm': no such file or folder.")

    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("kept\n")
    for output in (old, new):
        assert generate.main(["--log_level=error", "--model=m", "--prompt=a", f"--output={output}"], make_llm=fail) == 1
        assert capsys.readouterr().err == "error: model = 'm': no such file or folder.\n"
    assert (old.read_text(), new.exists()) == ("kept\n", False)


def test_help_names_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in ("--prompts_file", "--[no]chat", "--temperature", "--stop_token_ids", "--page_size", "--engine_seed", "--log_level"):
        assert f"  {name}\n" in out
    assert "Tokens in one KV-cache page: 16, 32, 64 or 128." in out and "Logits are divided by this; 0 means greedy" in out
    assert "(default on)" in out and "(default off)" in out and "default 64,128,256" in out
    assert "block_size" not in out and max(map(len, out.splitlines())) <= 140


def converse(run: Any, monkeypatch: pytest.MonkeyPatch, *lines: str, **kwargs: Any) -> Ran:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
    return run("--chat", "--system=s", **kwargs)


def test_conversation_keeps_its_history(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = converse(run, monkeypatch, "one", "", "/what", "/help", "too long", "two", "/reset", "three", "/exit", "never read")
    assert (ran.code, ran.out) == (0, "ONE\nTWO\nTHREE\n")
    system, asked = {"role": "system", "content": "s"}, {"role": "user", "content": "one"}
    answered = {"role": "assistant", "content": "ONE"}
    assert [c[0] for c in ran.calls if c[0][-1]["content"] != "too long"] == [
        [system, asked], [system, asked, answered, {"role": "user", "content": "two"}], [system, {"role": "user", "content": "three"}]]
    for message in ("unknown command '/what'", "\nCommands: /reset", "prompt is too long\n(this turn was dropped", "(conversation forgotten)"):
        assert message in ran.err
    assert ran.err.endswith(CLOSING)


def test_control_c_stops_an_answer_and_not_the_conversation(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(llm: FakeLLM) -> None:
        llm.after_token = lambda: os.kill(os.getpid(), signal.SIGINT) if len(llm.calls) == 1 else None

    before = signal.getsignal(signal.SIGINT)
    ran = converse(run, monkeypatch, "abc", "next", prepare=prepare)
    assert (ran.code, ran.out, ran.llm.num_withdrawn) == (0, "AB\nNEXT\n", 1)
    assert ran.calls[1][0][-2] == {"role": "assistant", "content": "AB"}
    assert "(stopped)" in ran.err and signal.getsignal(signal.SIGINT) is before


def test_a_second_control_c_ends_the_command(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    ran = converse(run, monkeypatch, "abc", "next", prepare=lambda llm: setattr(llm, "after_token", twice))
    assert (ran.code, ran.llm.num_withdrawn, "interrupted" in ran.err) == (130, 1, True)


def test_wrong_flag_costs_no_jax_and_closed_output_no_traceback() -> None:
    code = "import sys\nfrom jaxinfer import generate\nrc = generate.main(['--nope'])\nassert 'jax' not in sys.modules\nsys.exit(rc)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, "Unknown command line flag 'nope'" in ran.stderr) == (2, True), ran.stderr
    shell = f"set -o pipefail; {sys.executable} -m jaxinfer.generate --help | true"
    assert "Traceback" not in subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60).stderr


def test_figures_leave_out_what_is_unknown() -> None:
    assert generate.figures({"ttft_ms": None, "num_output_tokens": 2}) == "0 prompt + 2 output = 2 tokens"
    shown = generate.figures({"roofline_share": 0.634, "num_compiles_after_warmup": 2})
    assert "63 % of the bandwidth roofline" in shown and "2 compiles after warm-up" in shown


def test_lines_bring_priority_and_deadline(run: Any, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "in.jsonl", {"prompt": "a", "priority": 3}, {"prompt": "b", "deadline_s": 2.5}, {"prompt": "c", "priority": "x"})
    for flags in ((), ("--stream",)):
        ran = run(f"--prompts_file={file}", *flags)
        assert ran.code == 1 and "line 3: priority = 'x'" in ran.err
        assert ran.llm.urgency == [(3, None), (0, 2.5)]
