"""Brings the prefix cache to disk and back: the scheduler's tree, the device's pages, and the digest of the weights that made them.

Called between requests only. engine/cache_file.py knows the file; this knows the engine.
"""

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.engine import cache_file
from jaxinfer.engine.compiled import CompiledSteps
from jaxinfer.engine.load import LoadedModel
from jaxinfer.engine.page_moves import NUM_PAGES_MOVED
from jaxinfer.errors import ConfigError, PrefixCacheError
from jaxinfer.scheduler.pages import PageAllocator
from jaxinfer.scheduler.prefix_cache import HashedPrefixCache, PrefixCache


class SavedPrefixes:
    """Saves and loads one engine's prefix cache.

    Args:
      cache: the engine's.
      pages: its pool.
      steps: its executables, which own the device's state.
    """

    def __init__(self, cache: PrefixCache, pages: PageAllocator, steps: CompiledSteps) -> None:
        self._cache = cache
        self._pages = pages
        self._steps = steps

    def save(self, path: str | Path, model: LoadedModel) -> int:
        """Writes what is cached into one file; see LLM.save_prefix_cache. Returns the pages written."""
        file = cache_file.read_path(path)
        state = self._hashed("save_prefix_cache").dump_state(is_kept=lambda namespace: namespace[-1] is None)
        blocks = self._read([entry["page"] for entry in state["entries"]])
        cache_file.write(file, self._identity(model), state, blocks)
        return len(state["entries"])

    def load(self, path: str | Path, model: LoadedModel) -> int:
        """Takes in as much of a file as the pool holds; see LLM.load_prefix_cache. Returns the pages taken."""
        cache = self._hashed("load_prefix_cache")
        with cache_file.CacheFile(cache_file.read_path(path), self._identity(model)) as file:
            file.check(min(file.num_rows, self._pages.capacity))
            self._pages.evict_all()
            try:
                moved = cache.load_state(file.state)
                row_of = {entry["page"]: row for row, entry in enumerate(file.state["entries"])}
                self._write(list(moved.values()), file.rows(row_of[page] for page in moved))
            except (ConfigError, PrefixCacheError) as error:
                self._pages.evict_all()  # pages without their contents
                raise PrefixCacheError(f"{path}: {error}") from error
        return len(moved)

    def _hashed(self, purpose: str) -> HashedPrefixCache:
        if not isinstance(self._cache, HashedPrefixCache):
            raise ConfigError(f"{purpose}: enable_prefix_caching = False, so there is no prefix cache: set it to True.")
        return self._cache

    def _read(self, pages: Sequence[int]) -> Iterator[np.ndarray]:
        """The contents of pages, in blocks [n, 2, L, K, Z, H]."""
        for chunk in itertools.batched(pages, NUM_PAGES_MOVED):
            with self._steps.aside():
                rows = self._steps.read_pages(chunk)
            yield np.asarray(rows)[:len(chunk)]

    def _write(self, pages: Sequence[int], rows: Iterator[np.ndarray]) -> None:
        """Gives pages their contents, [2, L, K, Z, H] each."""
        for chunk in itertools.batched(pages, NUM_PAGES_MOVED):
            with self._steps.aside():
                self._steps.write_pages(chunk, np.stack([next(rows) for _ in chunk]))

    def _identity(self, model: LoadedModel) -> cache_file.CacheIdentity:
        resolved, config = self._steps.resolved, model.config
        digest = hashlib.sha256(json.dumps(dataclasses.asdict(config), sort_keys=True, default=str).encode())
        for name, x in sorted(model.params.items()):
            digest.update(f"{name} {x.shape} {x.dtype} {int(self._steps.run_aside(checksum, x)):08x}\n".encode())
        return cache_file.CacheIdentity(
            model=digest.hexdigest(), architecture=config.architecture, kv_dtype=resolved.kv_dtype, page_size=resolved.page_size,
            row_shape=(2, config.num_layers, config.num_kv_heads, resolved.page_size, config.head_dim))


def checksum(x: jax.Array) -> jax.Array:
    """uint32: the elements' bits, each times an odd number that its place decides, summed modulo 2**32: the same on any device.

    Tells weights apart, at the speed of reading them where they are, each device its part; it resists no forger.
    """
    bits = jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]).astype(jnp.uint32)
    place = jnp.zeros(x.shape, jnp.uint32)  # in row-major order
    for axis in range(x.ndim):
        place += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * np.uint32(math.prod(x.shape[axis + 1:]) % 2**32)
    return jnp.sum((bits + np.uint32(1)) * (place * np.uint32(2_654_435_762) + np.uint32(1)), dtype=jnp.uint32)
