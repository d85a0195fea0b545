"""A text to calibrate tiny checkpoints on, and how the tests of quantising read it."""

import json
from pathlib import Path
from typing import Any

from convert.quantise.run import Texts


def write_lines(path: Path) -> Path:
    path.write_text("".join(json.dumps({"text": f"line {i}: the quick brown fox, {i * i} times, def f(x): return x + {i}"}) + "\n"
                            for i in range(60)))
    return path


def texts(path: Path | None, **changes: Any) -> Texts:
    return Texts(**{"calibration": path, "num_samples": 8, "max_len": 32, **changes})
