"""`--verify`: the finished checkpoint's logits, through jaxinfer, against those of convert/float32_model.py, from the source's tensors.

It catches what the checked bijection cannot: a tensor in the wrong slice, a permuted head, a config read wrongly. Weights are rounded to the
conversion's dtype on both sides, so what is left is the order of float32 sums.
"""

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np

from convert.float32_model import Float32Model
from convert.source import DTYPES, Source
from jaxinfer.errors import CapacityError, CheckpointError

logger = logging.getLogger(__name__)

NUM_ROWS, NUM_TOKENS = 2, 24
TOLERANCE = 2e-4
"""Largest difference of a logit, as a share of the largest logit (at least 1)."""
MEMORY_MARGIN_BYTES = 1 << 30


def check_possible(source: Source, *, num_params: int, dtype: str) -> None:
    """Says before any work whether `compare` can be done.

    Raises:
      UnsupportedModelError: the independent path does not know the architecture or its rope kind.
      CapacityError: the model in float32 does not fit the memory that is free.
    """
    Float32Model(source, DTYPES[dtype], num_tokens=NUM_TOKENS)
    free, needed = _available_bytes(), 4 * num_params + MEMORY_MARGIN_BYTES
    if free is not None and free < needed:
        raise CapacityError(f"--verify runs the model in float32, which takes {needed / 1e9:.1f} GB of memory; {free / 1e9:.1f} GB are free: "
                            "verify on a larger machine, or convert without it")


def compare(source: Source, folder: Path) -> dict[str, Any]:
    """Compares a finished checkpoint with its source.

    Args:
      source: what was converted.
      folder: the checkpoint, complete with its manifest.

    Returns:
      The manifest's `verification`: max_abs_diff of the logits, argmax_equal at every token, tokens compared, passed.

    Raises:
      CheckpointError: the logits differ by more than TOLERANCE.
    """
    import jax.numpy as jnp

    import jaxinfer

    loaded = jaxinfer.load(folder, dtype="float32")
    reference = Float32Model(source, DTYPES[loaded.manifest["dtype"]], num_tokens=NUM_TOKENS)
    tokens = token_rows(loaded.config.vocab_size)
    wanted = reference.logits(tokens)
    found = np.asarray(loaded.logits(jnp.asarray(tokens)))
    difference = float(np.abs(found - wanted).max())
    limit = TOLERANCE * max(1.0, float(np.abs(wanted).max()))
    result = {"max_abs_diff": difference, "argmax_equal": bool((found.argmax(-1) == wanted.argmax(-1)).all()), "tokens": tokens.size,
              "passed": math.isfinite(difference) and difference <= limit}
    if not result["passed"]:
        raise CheckpointError(f"{source.path}: verification failed: the converted model's logits differ from the source's by {difference:g}, "
                              f"more than {limit:g}; nothing was written. Convert without --verify to look into it, and report it")
    logger.info("verified: %d tokens, largest difference of a logit %.2g (limit %.2g), argmax %s", tokens.size, difference, limit,
                "equal" if result["argmax_equal"] else "differs in a tie")
    return result


def token_rows(vocab_size: int) -> np.ndarray:
    """The fixed rows [R, T] int32, spread over the vocabulary."""
    return (np.arange(NUM_ROWS * NUM_TOKENS, dtype=np.int64) * 2654435761 % vocab_size).astype(np.int32).reshape(NUM_ROWS, NUM_TOKENS)


def _available_bytes() -> int | None:
    """MemAvailable, None where /proc does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None
