"""The prefix cache's tree as plain data, and back with checks. Knows no pages' content and no live cache. Never imports jax."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxinfer.errors import ConfigError

VERSION = 1


class Record(NamedTuple):
    """One cached page."""

    number: int
    page: int
    parent: int | None
    """Number of the record of the page before; None for a prompt's first."""
    namespace: Hashable
    tokens: tuple[int, ...]


def dump(entries: Sequence[tuple[int, int | None, Hashable, tuple[int, ...]]], *, page_size: int) -> dict[str, Any]:
    """Plain data of (page, parent's page, namespace, tokens), parents first."""
    index_of = {page: index for index, (page, *_) in enumerate(entries)}
    return {"version": VERSION, "page_size": page_size, "entries": [
        {"page": page, "parent": None if parent is None else index_of[parent], "namespace": namespace, "tokens": list(tokens)}
        for page, parent, namespace, tokens in entries]}


def parse(state: Mapping[str, Any], *, page_size: int) -> list[Record]:
    """The records of a dump, checked.

    Raises:
      ConfigError: another version or page size, or entries that no dump has.
    """
    if state.get("version") != VERSION:
        raise ConfigError(f"prefix-cache state of version {state.get('version')!r}: this jaxinfer reads version {VERSION}; start without it.")
    if state.get("page_size") != page_size:
        raise ConfigError(f"prefix-cache state with pages of {state.get('page_size')!r} tokens: this engine's have {page_size}; start with "
                          "the same page_size or without the state.")
    records: list[Record] = []
    pages: set[int] = set()
    for index, entry in enumerate(state["entries"]):
        record = Record(index, entry["page"], entry["parent"], _frozen(entry["namespace"]), tuple(entry["tokens"]))
        is_first = record.parent is None
        above = None if record.parent is None else records[record.parent] if 0 <= record.parent < index else None
        if not (0 < len(record.tokens) <= page_size and (is_first or (above is not None and len(above.tokens) == page_size))
                and record.page not in pages):
            raise ConfigError(f"prefix-cache state: entry {index} (page {record.page}, parent {record.parent}, {len(record.tokens)} tokens) "
                              "cannot be: the state is damaged; start without it.")
        pages.add(record.page)
        records.append(record)
    return records


def _frozen(namespace: Any) -> Hashable:
    """A namespace as it was before JSON made lists of its tuples."""
    return tuple(map(_frozen, namespace)) if isinstance(namespace, list | tuple) else namespace
