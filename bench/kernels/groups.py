"""What there is to time: name for --ops -> function of the settings that gives the group's rows, in the order in which they run.

A group of one's own is a file beside this one with such a function, and a row here. It yields rows.Row (a call to time), rows.LeftOut (a
row that cannot be had, by name and with the reason) and rows.Check (figures from the lines before it).
"""

from collections.abc import Callable, Iterator

from bench.kernels.attention import chunk_items, decode_items, prefill_items
from bench.kernels.dense import flash_items
from bench.kernels.int4 import int4_items
from bench.kernels.memory import norm_items, rotary_items, write_items
from bench.kernels.mixed import mixed_items
from bench.kernels.pages import copy_items, gather_items
from bench.kernels.rows import Item, Settings

GROUPS: dict[str, Callable[[Settings], Iterator[Item]]] = {
    "decode": decode_items,
    "prefill": prefill_items,
    "mixed": mixed_items,
    "chunk": chunk_items,
    "flash": flash_items,
    "write": write_items,
    "rotary": rotary_items,
    "norm": norm_items,
    "gather": gather_items,
    "copy": copy_items,
    "int4": int4_items,
}


def of_shapes(group: Callable[[Settings], Iterator[Item]], settings: Settings) -> Iterator[Item]:
    """A group's items of the shapes that are asked for."""
    return (item for item in group(settings) if not settings.shapes or item.shape.startswith(settings.shapes))
