"""Questions with four choices, one right, made from a seed: sums and differences, and ends of small Python functions. No files, no model."""

import dataclasses
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt and four different continuations."""

    prompt: str
    choices: tuple[str, ...]
    answer: int
    """Place of the right choice."""


def _shuffled(rng: np.random.Generator, prompt: str, right: str, wrong: list[str]) -> Question:
    assert right not in wrong and len(set(wrong)) == len(wrong), (right, wrong)
    order = rng.permutation(1 + len(wrong))
    choices = [(right, *wrong)[i] for i in order]
    return Question(prompt=prompt, choices=tuple(choices), answer=choices.index(right))


def arithmetic(count: int, seed: int) -> list[Question]:
    """Two solved examples, then a sum or difference of numbers below 100; wrong choices are near: off by 1, by 10, by both."""
    rng = np.random.default_rng([seed, 1])
    found = []
    for _ in range(count):
        lines = []
        for _ in range(3):
            a, b = sorted(rng.integers(1, 100, 2).tolist(), reverse=True)
            sign = "+-"[int(rng.integers(2))]
            lines.append((f"{a} {sign} {b} =", a + b if sign == "+" else a - b))
        prompt = "".join(f"{text} {result}\n" for text, result in lines[:2]) + lines[2][0]
        result = lines[2][1]
        near = [result + d for d in (1, -1, 10, -10, 11, 9) if result + d >= 0]
        wrong = rng.choice(near, 3, replace=False).tolist()
        found.append(_shuffled(rng, prompt, f" {result}", [f" {value}" for value in wrong]))
    return found


TEMPLATES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("def {f}(values):\n    total = 0\n    for {x} in values:\n        total +=", " {x}\n    return total\n",
     (" total\n    return total\n", " 1\n    return values\n", " values\n    return {x}\n")),
    ("def {f}({x}):\n    # the largest of a list\n    best = {x}[0]\n    for other in {x}:\n        if other >",
     " best:\n            best = other\n", (" other:\n            best = other\n", " best:\n            other = best\n",
      " {x}:\n            best = {x}\n")),
    ("def {f}({x}, {y}):\n    \"\"\"Returns {x} divided by {y}, or None for {y} == 0.\"\"\"\n    if {y} ==",
     " 0:\n        return None\n    return {x} / {y}\n", (" 0:\n        return {x}\n    return {y} / {x}\n",
      " 1:\n        return None\n    return {x} / {y}\n",
      " 0:\n        return None\n    return {y} / {x}\n")),
    ("def {f}(text):\n    counts = {{}}\n    for {x} in text:\n        counts[{x}] = counts.get(", "{x}, 0) + 1\n    return counts\n",
     ("text, 0) + 1\n    return counts\n", "{x}, 1) - 1\n    return text\n", "counts, 0) + 1\n    return {x}\n")),
    ("with open({x}) as file:\n    for line in", " file:\n        print(line)\n",
     (" line:\n        print(file)\n", " {x}.file:\n        line(print)\n", " open:\n        print({x})\n")),
    ("class {f}:\n    def __init__(self, {x}):\n        self.{x} =", " {x}\n", (" self\n", " self.{x}\n", " {f}\n")),
    ("def {f}({x}):\n    if {x} <= 1:\n        return 1\n    return {x} *", " {f}({x} - 1)\n",
     (" {f}({x})\n", " {x}({f} - 1)\n", " {f}({x} + 1)\n")),
    ("import json\n\ndef {f}(path):\n    with open(path) as {x}:\n        return json.", "load({x})\n",
     ("load(path)\n", "dump({x})\n", "open({x})\n")),
)
"""(start, right end, three wrong ends) with names to fill in."""
NAMES = {"f": ("compute", "helper", "process", "run", "solve", "apply"), "x": ("item", "value", "data", "entry", "name", "key"),
         "y": ("other", "count", "size", "limit")}


def code(count: int, seed: int) -> list[Question]:
    """The start of a small Python function, class or loop; wrong ends parse alike but use the wrong name, number or order."""
    rng = np.random.default_rng([seed, 2])
    found = []
    for _ in range(count):
        start, right, wrong = TEMPLATES[int(rng.integers(len(TEMPLATES)))]
        names = {key: str(rng.choice(choices)) for key, choices in NAMES.items()}
        found.append(_shuffled(rng, start.format(**names), right.format(**names), [text.format(**names) for text in wrong]))
    return found


SETS: dict[str, Callable[[int, int], list[Question]]] = {"arithmetic": arithmetic, "code": code}
"""Name -> (count, seed) -> questions."""
