"""Small unsigned integers in 32-bit words, as checkpoint files pack them. Numpy only; knows no format.

Word w holds 32 / bits values, value i at bits [i * bits, (i + 1) * bits): value `order[i]` of the word's columns.
"""

from collections.abc import Sequence

import numpy as np


def unpack_columns(words: np.ndarray, bits: int, order: Sequence[int] | None = None) -> np.ndarray:
    """[rows, columns * bits / 32] of 32-bit words -> [rows, columns] uint8.

    Args:
      words: int32 or uint32.
      bits: 4 or 8.
      order: the column, within a word's columns, of each value from the lowest bits up; None is in order.
    """
    per_word = 32 // bits
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    values = words.view(np.uint32)[:, :, None] >> shifts & np.uint32(2**bits - 1)  # [rows, words, values]
    out = np.empty(values.shape, np.uint8)
    out[:, :, list(range(per_word) if order is None else order)] = values
    return out.reshape(words.shape[0], -1)


def pack_columns(values: np.ndarray, bits: int, order: Sequence[int] | None = None) -> np.ndarray:
    """The inverse of `unpack_columns`: [rows, columns] uint8 -> int32 words; columns must be a multiple of 32 / bits."""
    per_word = 32 // bits
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    ordered = values.reshape(values.shape[0], -1, per_word)[:, :, list(range(per_word) if order is None else order)]
    return np.bitwise_or.reduce(ordered.astype(np.uint32) << shifts, axis=2).view(np.int32)


def unpack_rows(words: np.ndarray, bits: int) -> np.ndarray:
    """[rows * bits / 32, columns] -> [rows, columns] uint8, lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)[:, None]
    values = words.view(np.uint32)[:, None, :] >> shifts & np.uint32(2**bits - 1)  # [words, values, columns]
    return values.astype(np.uint8).reshape(-1, words.shape[1])


def pack_rows(values: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `unpack_rows`; rows must be a multiple of 32 / bits."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)[:, None]
    words = values.reshape(-1, 32 // bits, values.shape[1]).astype(np.uint32) << shifts
    return np.bitwise_or.reduce(words, axis=1).view(np.int32)
