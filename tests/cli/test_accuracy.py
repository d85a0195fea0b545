"""The accuracy bench and its texts: sets with one right answer, scores by definition, splits that share no file."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bench import accuracy, texts
from bench.accuracy_sets import SETS, Question
from jaxinfer.errors import ConfigError


class Letters:
    """A tokenizer of one token a character."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) % 64 for character in text]


def bigram(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Logits that depend on the last token only."""
    return np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)[tokens]


@pytest.mark.parametrize("name", SETS)
def test_sets_are_the_same_every_time_and_have_four_choices(name: str) -> None:
    first, again, other = SETS[name](60, 0), SETS[name](60, 0), SETS[name](60, 1)
    assert first == again and first != other
    assert all(len(set(q.choices)) == 4 and 0 <= q.answer < 4 for q in first)
    assert {q.answer for q in first} == {0, 1, 2, 3}


def test_arithmetic_is_right() -> None:
    for question in SETS["arithmetic"](60, 3):
        for i, line in enumerate((question.prompt + question.choices[question.answer]).split("\n")):
            left, right = line.split(" =")
            a, sign, b = left.split()
            assert int(right) == (int(a) + int(b) if sign == "+" else int(a) - int(b)), (i, line)


def test_right_code_parses() -> None:
    for question in SETS["code"](60, 3):
        compile(question.prompt + question.choices[question.answer], "<question>", "exec")


def test_perplexity_and_choices_are_what_they_say() -> None:
    windows = np.arange(3 * 20, dtype=np.int32).reshape(3, 20) * 7 % 64
    perplexity, likeliest = accuracy.judge_text(bigram, windows)
    table = np.asarray(bigram(np.arange(64), np.array([1])), np.float64)
    log_p = table - np.log(np.exp(table).sum(1, keepdims=True))
    assert perplexity == pytest.approx(np.exp(-log_p[windows[:, :-1], windows[:, 1:]].mean()), rel=1e-6)
    assert np.array_equal(likeliest, table.argmax(1)[windows[:, :-1]])

    question = Question(prompt="ab", choices=("cd", "ce", "xy", "q"), answer=0)
    def score(text: str) -> float:
        ids = Letters().encode(text)
        return float(sum(log_p[a, b] for a, b in zip(ids, ids[1:], strict=False)))

    best = int(np.argmax([score("b" + choice) for choice in question.choices]))
    assert accuracy.judge_set(bigram, Letters(), [question]) == [best]  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt, whole, shared", [([1, 2], [1, 2, 3], 2), ([1, 2], [1, 9, 3], 1), ([1, 2], [7, 2], 1), ([1, 2], [1, 2], 1)])
def test_a_choice_that_changes_the_prompts_tokens_is_scored_from_there(prompt: Sequence[int], whole: Sequence[int], shared: int) -> None:
    assert accuracy.shared_length(prompt, whole) == shared


def test_short_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("short")
    with pytest.raises(ConfigError, match="t.txt has 5 tokens, which is not one window of 8"):
        accuracy.text_windows(Letters(), tmp_path / "t.txt", num_windows=1, max_len=8)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_windows, at", [(1, [0]), (2, [0, 3]), (5, [0, 1, 2, 4, 5]), (7, range(7)), (9, range(7))])
def test_windows_come_from_all_over_a_text(tmp_path: Path, num_windows: int, at: Sequence[int]) -> None:
    text = "".join(chr(97 + i // 4) for i in range(30))  # seven windows of four like letters, and two letters left
    (tmp_path / "t.txt").write_text(text)
    found = accuracy.text_windows(Letters(), tmp_path / "t.txt", num_windows=num_windows, max_len=4)  # type: ignore[arg-type]
    assert found.tolist() == [Letters().encode(chr(97 + i) * 4) for i in at]


@pytest.mark.parametrize("kind", texts.KINDS)
def test_splits_share_no_file(kind: str) -> None:
    calibration, held_out = (texts.files(kind, split) for split in texts.SPLITS)
    assert held_out and len(calibration) > 2 * len(held_out) and not set(calibration) & set(held_out)
    assert all(texts.split_of(name) in texts.SPLITS for name in ("a.py", "b.py"))


def test_docstrings_are_english_without_examples() -> None:
    english = "Says what the function does, in a sentence that is long enough to count as English text here."
    assert list(texts.docstrings(f'def f():\n    """{english}\n\n    >>> f()\n    """\n')) == [english]
    assert list(texts.docstrings('"""Short."""')) == []


def test_the_command_writes_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(texts, "texts", lambda kind, split: iter(["one", "two"]))
    assert texts.main(["--kind=code", "--split=heldout", f"--output={tmp_path / 'o.jsonl'}"]) == 0
    assert (tmp_path / "o.jsonl").read_text() == '{"text": "one"}\n{"text": "two"}\n' and "6 characters" in capsys.readouterr().out
    assert texts.main(["--kind=code", "--split=heldout", f"--output={tmp_path / 'o.txt'}"]) == 0
    assert (tmp_path / "o.txt").read_text() == "one\n\ntwo"
    assert texts.main(["--kind=code"]) == 2 and "--split is needed" in capsys.readouterr().err
