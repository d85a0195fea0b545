"""Generates text from prompts, from a file of prompts, or in a conversation.

  python -m jaxinfer.generate --model=DIR --prompt="The capital of France is" --temperature=0
  python -m jaxinfer.generate --model=DIR --prompt="What is the capital of France?" --chat
  python -m jaxinfer.generate --model=DIR --chat                                       a conversation
  python -m jaxinfer.generate --model=DIR --prompts_file=in.jsonl --output=out.jsonl   many prompts, batched

A line of --prompts_file holds {"prompt": text}, {"messages": [{"role": ..., "content": ...}]} or {"prompt_token_ids": [...]},
with sampling settings, "priority" and "deadline_s" for that line beside it. Text goes to standard output, all else to standard error.
Exit codes: 0 done, 1 something failed or a line was bad, 2 the command line is wrong, 130 interrupted.
"""

import collections
import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from absl import app, flags

from jaxinfer import cli
from jaxinfer.chat import Conversation, print_stream
from jaxinfer.config import CPU_MAX_NUM_SEQS, EngineConfig
from jaxinfer.errors import RequestError
from jaxinfer.jsonl import BadLine, Entry, ResultFile, failure, read_prompts, result
from jaxinfer.request import RequestOutput
from jaxinfer.sampling.params import SamplingParams

DEFAULT_MAX_TOKENS = 256

logger = logging.getLogger(__name__)


class Generator(Protocol):
    """What is needed of an LLM; jaxinfer/llm.py says what each does."""

    def generate(self, prompts: Any, params: Any = None, *, priority: Any = 0, deadline_s: Any = None, use_tqdm: bool = False,
                 on_error: str = "raise", on_output: Callable[[int, RequestOutput], None] | None = None) -> list[RequestOutput]: ...

    def stream(self, prompt: Any, params: SamplingParams | None = None, *, priority: int = 0,
               deadline_s: float | None = None) -> Iterator[RequestOutput]: ...

    def metrics(self) -> dict[str, Any]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The command line, checked."""

    engine: EngineConfig
    params: SamplingParams
    prompts: tuple[str, ...]
    prompts_file: Path | None
    chat: bool
    system: str | None
    stream: bool | None
    """None: where one prompt's text goes to a terminal."""
    output: Path | None

    @property
    def is_conversation(self) -> bool:
        return self.chat and not self.prompts and self.prompts_file is None


def main(argv: Sequence[str] | None = None, *, make_llm: Callable[..., Generator] | None = None) -> int:
    """Console entry.

    Args:
      argv: arguments without the program's name; None takes the process's.
      make_llm: takes EngineConfig's fields as keywords; default LLM.

    Returns:
      The exit code.
    """
    values = define_flags()
    return cli.run(lambda _: generate(settings(values), make_llm or _make_llm), values, argv, __doc__)


def define_flags() -> flags.FlagValues:
    """All flags of this command."""
    values = flags.FlagValues()

    def define(define_one: Callable[..., Any], name: str, help: str) -> None:
        define_one(name, None, help, flag_values=values, module_name="What to generate")

    define(flags.DEFINE_multi_string, "prompt", "A prompt.")
    define(flags.DEFINE_string, "prompts_file", "A JSON Lines file of prompts.")
    define(flags.DEFINE_boolean, "chat", "Render prompts through the model's chat template; with no prompt, hold a conversation.")
    define(flags.DEFINE_string, "system", "System message of a chat.")
    define(flags.DEFINE_boolean, "stream", "Show text as it is generated, one prompt after another; default: where the text of a single "
                                           "prompt goes to a terminal.")
    define(flags.DEFINE_string, "output", "A JSON Lines file for the results, one line a prompt in order; replaces what it held.")
    cli.define_sampling_flags(values, defaults={"max_tokens": DEFAULT_MAX_TOKENS})
    cli.define_engine_flags(values)
    return values


def settings(values: flags.FlagValues) -> Settings:
    """The settings that parsed flags say.

    Raises:
      absl.app.UsageError: values out of range, or flags that contradict each other.
    """
    s = Settings(
        engine=cli.engine_config(values), params=cli.sampling_params(values), prompts=tuple(values["prompt"].value or ()),
        prompts_file=_path(values, "prompts_file"), chat=bool(values["chat"].value), system=values["system"].value,
        stream=values["stream"].value, output=_path(values, "output"))
    one = len(s.prompts) == 1 and s.prompts_file is None
    problems = (
        (not s.engine.model, "--model is missing: give a converted checkpoint, a Hugging Face folder or a .gguf file."),
        (s.prompts and s.prompts_file is not None, "--prompt and --prompts_file contradict each other: give one of them."),
        (not (s.prompts or s.prompts_file or s.chat), "nothing to generate: give --prompt, --prompts_file or --chat."),
        (s.system is not None and not s.chat, "--system needs --chat: a plain prompt has no system message."),
        (s.is_conversation and s.output is not None, "--output needs prompts: a conversation is not recorded."),
        (s.is_conversation and s.stream is False, "--nostream contradicts a conversation: give --prompt or --prompts_file with it."),
        ((s.stream or s.is_conversation) and s.params.n > 1, f"--n={s.params.n} cannot be streamed: add --nostream, or leave n at 1."),
    )
    for wrong, message in problems:
        if wrong:
            raise app.UsageError(message)
    show_live = one and s.output is None and s.params.n == 1 and sys.stdout.isatty()
    return dataclasses.replace(s, stream=show_live if s.stream is None else s.stream)


def _path(values: flags.FlagValues, name: str) -> Path | None:
    text = values[name].value
    return None if text is None else cli.expanded(name, text)


def _make_llm(**engine: Any) -> Generator:
    from jaxinfer.llm import LLM

    return LLM(**engine)


def generate(s: Settings, make_llm: Callable[..., Generator]) -> int:
    """Does what the settings say; returns the exit code."""
    items = _items(s)
    bad = [item for item in items if isinstance(item, BadLine)]
    for line in bad:
        _report(s, f"line {line.line}", line.message)
    if len(items) == len(bad) and not s.is_conversation:
        print(f"error: {s.prompts_file} holds no prompt that can be used.", file=sys.stderr)
        return 1
    with ExitStack() as stack:
        file = stack.enter_context(_result_file(s)) if s.output is not None else None
        logger.info("loading %s", s.engine.model)
        engine = dataclasses.replace(s.engine, max_num_seqs=_max_num_seqs(s, items))
        llm = make_llm(**{f.name: getattr(engine, f.name) for f in dataclasses.fields(engine)})
        failed = 0
        if s.is_conversation:
            Conversation(llm, s.params, s.system).run()
        else:
            failed = _stream(llm, items, file, s) if s.stream else _batch(llm, items, file, s)
        if file is not None:
            num_errors = failed + len(bad)
            errors = f" and {num_errors} error{'s' * (num_errors != 1)}" if num_errors else ""
            print(f"{len(items) - num_errors} result{'s' * (len(items) - num_errors != 1)}{errors} in {s.output}", file=sys.stderr)
        print(figures(llm.metrics()), file=sys.stderr)
    return 1 if failed or bad else 0


def _max_num_seqs(s: Settings, items: Sequence[Entry | BadLine]) -> int | None:
    """The setting; where there is none, on a CPU, no more than can run together here: each size less is executables less to compile."""
    if s.engine.max_num_seqs is not None or s.engine.batch_buckets is not None or not _is_on_cpu():
        return s.engine.max_num_seqs
    together = 1 if s.is_conversation or s.stream else sum(item.params.n for item in items if isinstance(item, Entry))
    return min(1 << (together - 1).bit_length(), CPU_MAX_NUM_SEQS)


def _is_on_cpu() -> bool:
    """Whether jax will run on the CPU, as far as can be told before it is loaded."""
    return os.environ.get("JAX_PLATFORMS") == "cpu" or not Path("/dev/nvidiactl").exists()


def _items(s: Settings) -> list[Entry | BadLine]:
    """Prompts of the command line or the file, rendered as chats if asked."""
    items: list[Entry | BadLine]
    if s.prompts_file is None:
        items = [Entry(name=f"prompt {i}", prompt={"prompt": p}, params=s.params, tags={}) for i, p in enumerate(s.prompts, 1)]
    else:
        try:
            items = read_prompts(s.prompts_file, s.params)
        except OSError as e:
            raise app.UsageError(f"--prompts_file={s.prompts_file} cannot be read: {e.strerror}.") from e
    if s.stream and any(isinstance(item, Entry) and item.params.n > 1 for item in items):
        raise app.UsageError(f"{s.prompts_file} asks for n > 1, which cannot be streamed: leave out --stream.")
    return [_as_chat(item, s.system) if s.chat and isinstance(item, Entry) else item for item in items]


def _as_chat(entry: Entry, system: str | None) -> Entry:
    """A plain prompt becomes a user's turn; the system message opens conversations that have none. Token ids stay as they are."""
    if "prompt_token_ids" in entry.prompt:
        return entry
    messages = entry.prompt.get("messages", [{"role": "user", "content": entry.prompt.get("prompt")}])
    if system is not None and messages[0].get("role") != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return dataclasses.replace(entry, prompt={"messages": messages})


def _result_file(s: Settings) -> ResultFile:
    """The output, opened before any model is loaded."""
    assert s.output is not None
    if s.prompts_file is not None and s.output.exists() and os.path.samefile(s.output, s.prompts_file):
        raise app.UsageError(f"--output={s.output} is the prompts file itself: name another.")
    try:
        return ResultFile(s.output)
    except OSError as e:
        raise app.UsageError(f"--output={s.output} cannot be written: {e.strerror}. Its folder must exist and be writable.") from e


def _batch(llm: Generator, items: Sequence[Entry | BadLine], file: ResultFile | None, s: Settings) -> int:
    """Generates all prompts together; returns how many failed. A result goes out once it and those before it are done."""
    entries = [item for item in items if isinstance(item, Entry)]
    logger.info("generating for %d prompts", len(entries))
    done: dict[int, RequestOutput] = {}
    remaining = collections.deque(items)
    num_out = 0

    def take(index: int, output: RequestOutput) -> None:
        nonlocal num_out
        done[index] = output
        while remaining and (isinstance(remaining[0], BadLine) or num_out in done):
            item = remaining.popleft()
            if isinstance(item, BadLine):
                _write(file, failure(item, item.message))
                continue
            _deliver(item, done.pop(num_out), file, s, heading=len(entries) > 1)
            num_out += 1

    outputs = llm.generate([e.prompt for e in entries], [e.params for e in entries], priority=[e.priority for e in entries],
                           deadline_s=[e.deadline_s for e in entries], use_tqdm=len(entries) > 1 and sys.stderr.isatty(),
                           on_error="return", on_output=take)
    return sum(output.error is not None for output in outputs)


def _deliver(entry: Entry, output: RequestOutput, file: ResultFile | None, s: Settings, *, heading: bool) -> None:
    if output.error is not None:
        _report(s, entry.name, output.error)
    elif file is None:
        _show(entry, output, heading=heading)
    _write(file, result(entry, output))


def _stream(llm: Generator, items: Sequence[Entry | BadLine], file: ResultFile | None, s: Settings) -> int:
    """Generates one prompt after another, showing the text as it comes; returns how many failed."""
    failed = 0
    for item in items:
        if isinstance(item, BadLine):
            _write(file, failure(item, item.message))
            continue
        if len(items) > 1:
            print(_heading(item), flush=True)
        try:
            output, stopped = print_stream(llm, item.prompt, item.params, priority=item.priority, deadline_s=item.deadline_s)
            error = "stopped before its first token." if output is None else output.error
        except RequestError as e:
            output, stopped, error = None, False, str(e)
        if error is not None:
            _report(s, item.name, error)
            failed += 1
        _write(file, failure(item, str(error)) if output is None else result(item, output))
        if stopped:
            raise KeyboardInterrupt
    return failed


def _write(file: ResultFile | None, record: Mapping[str, Any]) -> None:
    if file is not None:
        file.write(record)


def _report(s: Settings, name: str, error: str) -> None:
    """One line for a prompt that gave no text: where it stands, and why."""
    print(f"error: {name if s.prompts_file is None else f'{s.prompts_file}, {name}'}: {error}", file=sys.stderr)


def _heading(entry: Entry) -> str:
    asked = entry.prompt.get("prompt") or (entry.prompt["messages"][-1].get("content") if "messages" in entry.prompt else "token ids")
    text = " ".join(str(asked).split())
    return f"--- {entry.name}: {text if len(text) <= 80 else text[:77] + '...'}"


def _show(entry: Entry, output: RequestOutput, *, heading: bool) -> None:
    for completion in output.outputs:
        if heading or len(output.outputs) > 1:
            print(_heading(entry) + (f" [{completion.index + 1}]" if len(output.outputs) > 1 else ""))
        print(completion.text)


def figures(metrics: Mapping[str, Any]) -> str:
    """The closing line: latencies, rate, tokens, memory and the share of the memory bandwidth, where each is known."""
    num_in, num_out = metrics.get("num_prompt_tokens") or 0, metrics.get("num_output_tokens") or 0
    parts = [f"{num_in} prompt + {num_out} output = {num_in + num_out} tokens"]
    forms = (("ttft_ms", "TTFT {:.0f} ms", 1), ("decode_tokens_per_s", "decode {:.1f} tokens/s", 1),
             ("memory_bytes", "memory {:.2f} GB", 1e-9), ("roofline_share", "{:.0f} % of the bandwidth roofline", 100),
             ("startup_s", "start {:.1f} s", 1))
    parts += [form.format(metrics[key] * factor) for key, form, factor in forms if metrics.get(key) is not None]
    if metrics.get("num_compiles_after_warmup"):
        parts.append(f"{metrics['num_compiles_after_warmup']} compiles after warm-up")
    return " | ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
