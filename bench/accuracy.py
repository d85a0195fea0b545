"""Any checkpoints against each other: perplexity, next-token agreement with the first, and two small sets of choices made here.

  python -m bench.accuracy --models=A,B,... --text=FILE [--text=FILE ...] [--dtype=bfloat16 --num_windows=16 --max_len=512]

The sets (bench/accuracy_sets.py): arithmetic, '12 + 7 =' among four sums; code, the start of a small Python function among four ends.
A set's answer is the choice of the largest log-likelihood. Models are loaded one after another, and the result file is written anew after
each.
"""

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from absl import flags

from bench import report
from bench.accuracy_sets import SETS, Question
from jaxinfer import cli
from jaxinfer.drift import perplexity
from jaxinfer.engine.compiled import jit_logits
from jaxinfer.engine.load import load
from jaxinfer.errors import ConfigError
from jaxinfer.source import converted_checkpoint
from jaxinfer.textfile import read_text
from jaxinfer.tokenizer import Tokenizer

_FLAGS = flags.FlagValues()  # its own: other commands have flags of these names
_MODELS = flags.DEFINE_list("models", None, "Checkpoints; the first is what the others are compared with.", required=True, flag_values=_FLAGS)
_TEXT = flags.DEFINE_multi_string("text", [], "Texts for perplexity and agreement.", flag_values=_FLAGS)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16", "float16"], "To run in.", flag_values=_FLAGS)
_NUM_WINDOWS = flags.DEFINE_integer("num_windows", 16, "Windows of each text.", 1, flag_values=_FLAGS)
_MAX_LEN = flags.DEFINE_integer("max_len", 512, "Tokens of a window.", 2, flag_values=_FLAGS)
_NUM_QUESTIONS = flags.DEFINE_integer("num_questions", 100, "Questions of each set.", 0, flag_values=_FLAGS)
_SEED = flags.DEFINE_integer("seed", 0, "Of the questions.", 0, flag_values=_FLAGS)
_NAME = flags.DEFINE_string("name", None, "The result's file name; default accuracy-<first model>.", flag_values=_FLAGS)

PAD_TO = 32

Logits = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""tokens [B, T] int32, lengths [B] int32 -> float32 [B, T, V]."""


def log_likelihoods(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Log-probability of each target: logits [T, V], targets [T] -> float64 [T]."""
    wide = np.asarray(logits, np.float64)
    top = wide.max(-1)
    return wide[np.arange(len(targets)), targets] - top - np.log(np.exp(wide - top[:, None]).sum(-1))


def judge_text(logits: Logits, windows: np.ndarray) -> tuple[float, np.ndarray]:
    """(perplexity, likeliest next tokens [S, T - 1]) over windows [S, T], one at a time."""
    total, likeliest = 0.0, []
    for ids in windows:
        out = np.asarray(logits(ids[None], np.array([len(ids)], np.int32)))[0, :-1]
        total -= float(log_likelihoods(out, ids[1:]).sum())
        likeliest.append(out.argmax(-1))
    return perplexity("the model", total, windows.shape[0] * (windows.shape[1] - 1)), np.stack(likeliest)


def judge_set(logits: Logits, tokenizer: Tokenizer, questions: Sequence[Question]) -> list[int]:
    """The choice of the largest log-likelihood for every question; ties go to the earlier choice.

    Every row is padded to the longest of the set, rounded up, so that a set is compiled for once.
    """
    encoded = [[(tokenizer.encode(q.prompt), tokenizer.encode(q.prompt + choice)) for choice in q.choices] for q in questions]
    width = -(-max(len(whole) for rows in encoded for _, whole in rows) // PAD_TO) * PAD_TO
    chosen = []
    for rows in encoded:
        tokens = np.zeros((len(rows), width), np.int32)
        for i, (_, whole) in enumerate(rows):
            tokens[i, :len(whole)] = whole
        out = np.asarray(logits(tokens, np.array([len(whole) for _, whole in rows], np.int32)))
        scores = []
        for i, (prompt, whole) in enumerate(rows):
            start = shared_length(prompt, whole)
            scores.append(float(log_likelihoods(out[i, start - 1:len(whole) - 1], np.array(whole[start:])).sum()))
        chosen.append(int(np.argmax(scores)))
    return chosen


def shared_length(prompt: Sequence[int], whole: Sequence[int]) -> int:
    """Leading tokens that prompt and prompt-with-choice share, at least 1: a choice may change how the prompt's end is split."""
    count = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), min(len(prompt), len(whole)))
    return max(1, min(count, len(whole) - 1))


def text_windows(tokenizer: Tokenizer, path: Path, *, num_windows: int, max_len: int) -> np.ndarray:
    """Windows from all over a text, whose beginning need not be like the rest: int32 [S, T]. Raises ConfigError where it holds none."""
    ids = tokenizer.encode(read_text(path))
    held = len(ids) // max_len
    if held == 0:
        raise ConfigError(f"{path} has {len(ids)} tokens, which is not one window of {max_len}: give more text or a smaller --max_len.")
    count = min(num_windows, held)
    return np.array(ids[:held * max_len], np.int32).reshape(held, max_len)[np.arange(count) * held // count]


def judge(name: str, texts: Sequence[Path], questions: Mapping[str, Sequence[Question]], reference: dict[str, Any]) -> dict[str, Any]:
    """One model's row. `reference` holds the first model's likeliest tokens and choices, and is filled by it."""
    path = converted_checkpoint(name, dtype="auto")
    tokenizer = Tokenizer.from_dir(path)
    model = load(path, dtype=_DTYPE.value)
    compiled = jit_logits(model)

    def logits(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return np.asarray(compiled(jnp.asarray(tokens), jnp.asarray(lengths)))

    row: dict[str, Any] = {"model": path.name, "weights_mb": sum(x.nbytes for x in model.params.values()) / 1e6}
    for text in texts:
        windows = text_windows(tokenizer, text, num_windows=_NUM_WINDOWS.value, max_len=_MAX_LEN.value)
        found, likeliest = judge_text(logits, windows)
        key = f"text {text.name}"
        first = reference.setdefault(key, {"perplexity": found, "likeliest": likeliest, "windows": windows})
        if not np.array_equal(first["windows"], windows):
            raise ConfigError(f"{path} splits {text} into other tokens than the first model: compare models of one tokenizer.")
        row |= {f"ppl {text.stem}": found, f"rise {text.stem} %": 100 * (found / first["perplexity"] - 1),
                f"agree {text.stem} %": 100 * float((likeliest == first["likeliest"]).mean())}
    for set_name, asked in questions.items():
        chosen = judge_set(logits, tokenizer, asked)
        first = reference.setdefault(f"set {set_name}", chosen)
        row |= {f"{set_name} %": 100 * sum(c == q.answer for c, q in zip(chosen, asked, strict=True)) / len(asked),
                f"{set_name} agree %": 100 * sum(a == b for a, b in zip(chosen, first, strict=True)) / len(asked)}
    return row


def main(argv: list[str]) -> None:
    questions = {name: make(_NUM_QUESTIONS.value, _SEED.value) for name, make in SETS.items()} if _NUM_QUESTIONS.value else {}
    texts = [cli.expanded("text", text) for text in _TEXT.value]
    rows: list[dict[str, Any]] = []
    reference: dict[str, Any] = {}
    for name in _MODELS.value:
        rows.append(judge(name, texts, questions, reference))
        gc.collect()  # one model's weights at a time
        print(report.table(rows), flush=True)
        report.write(_NAME.value or f"accuracy-{rows[0]['model']}", {
            "dtype": _DTYPE.value, "texts": [text.name for text in texts], "num_windows": _NUM_WINDOWS.value, "max_len": _MAX_LEN.value,
            "num_questions": _NUM_QUESTIONS.value, "seed": _SEED.value, "rows": rows})


if __name__ == "__main__":
    sys.exit(cli.run(main, _FLAGS))
