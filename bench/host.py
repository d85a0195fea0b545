"""Host time of a decode step by phase, at 64 and 128 running sequences of a tiny model, and what a profiler says of it.

  python -m bench.host [--running=64,128] [--num_scheduler_steps=8] [--name=host] [--output_dir=DIR]
The device's work is not part of it, but for what its client does within a call: the tiny model takes next to none. Every figure is
the median of --steps steps in which all sequences decode, each token turned into text. JSON goes to --output_dir.
"""

import collections
import cProfile
import functools
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

from absl import flags

from bench import report
from jaxinfer import cli

if TYPE_CHECKING:
    from jaxinfer import LLM

_FLAGS = flags.FlagValues()  # its own: other commands have flags of these names
_RUNNING = flags.DEFINE_list("running", ["64", "128"], "Sequences that decode together, one engine each.", flag_values=_FLAGS)
_STEPS = flags.DEFINE_integer("steps", 150, "Steps of which the median is taken, after some that warm up.", lower_bound=10, flag_values=_FLAGS)
_BURST = flags.DEFINE_integer("num_scheduler_steps", None, "Engine setting; figures are still those of one step.", lower_bound=1,
                              upper_bound=32, flag_values=_FLAGS)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "Of every sequence.", lower_bound=0.0, flag_values=_FLAGS)
_NAME = flags.DEFINE_string("name", "host", "Name of the JSON file.", flag_values=_FLAGS)
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Folder of the JSON file; default: bench/results in a checkout, else the current one.",
                                  flag_values=_FLAGS)

PROMPT_LEN, MAX_MODEL_LEN, NUM_WARM_UP, NUM_TOP = 64, 512, 10, 15


def byte_tokenizer() -> Any:
    """A byte-level tokenizer of 256 ids, made on the spot."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    from jaxinfer.detokenizer import byte_alphabet
    from jaxinfer.tokenizer import Tokenizer

    fast = tokenizers.Tokenizer(tokenizers.models.BPE({char: byte for char, byte in byte_alphabet().items()}, []))
    fast.pre_tokenizer, fast.decoder = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast), name="bytes")


def make_llm(num_running: int) -> "LLM":
    """A tiny model with room for the sequences, and one bucket for their decode steps."""
    import jaxinfer
    from jaxinfer.engine.load import random_model
    from jaxinfer.models.shapes import SHAPES

    return jaxinfer.LLM.from_model(
        random_model(SHAPES["tiny"], dtype="float32", seed=0), tokenizer=byte_tokenizer(), max_num_seqs=num_running,
        max_num_batched_tokens=512, token_buckets=(512,), batch_buckets=(num_running,), page_size=16, max_model_len=MAX_MODEL_LEN,
        num_scheduler_steps=_BURST.value)


class Phases:
    """Seconds that calls took since the last take(), by the phase that they belong to."""

    def __init__(self, llm: "LLM") -> None:
        from jaxinfer.engine import engine as module

        engine = llm.engine
        self._seconds: collections.defaultdict[str, float] = collections.defaultdict(float)
        self._patches = [mock.patch.object(owner, name, self._timed(phase, getattr(owner, name))) for phase, owner, name in (
            ("schedule", engine.scheduler, "next"), ("pack", module, "pack"), ("pack", module, "pack_again"), ("pack", module, "pick_layout"),
            ("dispatch", engine.steps, "run"), ("dispatch", engine.steps, "run_burst"), ("texts", engine.outputs, "push"),
            ("apply", engine.scheduler, "apply"))]
        self._patches.append(mock.patch.object(engine.scheduler, "again", self._timed_items("schedule", engine.scheduler.again)))

    def _timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self._seconds[phase] += time.perf_counter() - start
            return result

        return timed

    def _timed_items(self, phase: str, function: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def timed(*args: Any) -> Iterator[Any]:
            items = function(*args)
            while (item := self._timed(phase, next)(items, None)) is not None:
                yield item

        return timed

    def __enter__(self) -> "Phases":
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()

    def take(self) -> dict[str, float]:
        taken, self._seconds = dict(self._seconds), collections.defaultdict(float)
        return taken


def running(llm: "LLM", num_running: int) -> list[Any]:
    """Groups of the sequences, all of them past their prompts and far from their ends."""
    import jaxinfer

    params = jaxinfer.SamplingParams(temperature=_TEMPERATURE.value, max_tokens=MAX_MODEL_LEN - PROMPT_LEN, ignore_eos=True)
    groups = [llm.groups.make({"prompt_token_ids": [(7 * i + 3 * j) % 256 for j in range(PROMPT_LEN)]}, params) for i in range(num_running)]
    for group in groups:
        llm.groups.add(group)
    while any(len(r.output_token_ids) < NUM_WARM_UP for group in groups for r in group.requests):
        llm.engine.step()
    return groups


def withdraw(llm: "LLM", groups: list[Any]) -> None:
    """Ends the sequences and takes in what is in flight."""
    for group in groups:
        llm.groups.finish(group)
    while llm.engine.has_work:
        llm.engine.step()


def host_row(llm: "LLM", num_running: int) -> dict[str, Any]:
    """Median milliseconds of one step, by phase; `total` is the engine's own count, which waits for no token."""
    metrics, steps = llm.engine.metrics, []
    groups = running(llm, num_running)
    for _ in range(_STEPS.value // llm.engine.resolved.num_scheduler_steps):
        start, before = metrics.host_seconds, metrics.num_steps
        llm.engine.step()
        steps.append({"total": 1e3 * (metrics.host_seconds - start) / (metrics.num_steps - before)})
    with Phases(llm) as phases:
        for step in steps:
            before = metrics.num_steps
            llm.engine.step()
            step |= {phase: 1e3 * seconds / (metrics.num_steps - before) for phase, seconds in phases.take().items()}
    withdraw(llm, groups)
    medians = {phase: statistics.median(step[phase] for step in steps) for phase in ("schedule", "pack", "dispatch", "texts", "apply", "total")}
    return {"running": num_running, **{f"{phase}_ms": value for phase, value in medians.items()},
            "without_dispatch_ms": medians["total"] - medians["dispatch"], "least_total_ms": min(step["total"] for step in steps)}


def hottest(llm: "LLM", num_running: int) -> list[dict[str, Any]]:
    """The functions that took most of the host's time over the steps, themselves alone."""
    groups = running(llm, num_running)
    profile, burst = cProfile.Profile(), llm.engine.resolved.num_scheduler_steps
    num_steps = _STEPS.value // burst
    profile.enable()
    for _ in range(num_steps):
        llm.engine.step()
    profile.disable()
    withdraw(llm, groups)
    stats = sorted(pstats.Stats(profile).stats.items(), key=lambda item: -item[1][2])[:NUM_TOP]  # type: ignore[attr-defined]
    return [{"function": f"{file.rsplit('/', 1)[-1]}:{line}:{name}", "calls_per_step": calls / num_steps / burst,
             "self_us_per_step": 1e6 * own / num_steps / burst} for (file, line, name), (_, calls, own, _, _) in stats]


def main(argv: list[str]) -> None:
    folder = None if _OUTPUT_DIR.value is None else cli.expanded("output_dir", _OUTPUT_DIR.value)
    figures: dict[str, Any] = {"temperature": _TEMPERATURE.value, "rows": [], "profiles": {}}
    for num_running in map(int, _RUNNING.value):
        llm = make_llm(num_running)
        figures["num_scheduler_steps"] = llm.engine.resolved.num_scheduler_steps
        figures["rows"].append(host_row(llm, num_running))
        figures["profiles"][num_running] = hottest(llm, num_running)
        print(report.table(figures["rows"][-1:]), flush=True)
        print(report.table(figures["profiles"][num_running]), flush=True)
    print(f"written to {report.write(_NAME.value, figures, folder)}")


def entry() -> None:
    """Console entry."""
    sys.exit(cli.run(main, _FLAGS))


if __name__ == "__main__":
    entry()
