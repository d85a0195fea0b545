"""Pages between device and host: the pure functions that read and write them over all layers, a few pages a call. Owns no memory."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.state import DeviceState, KVCache

NUM_PAGES_MOVED = 8  # pages of one call
MAX_CALLS_AHEAD = 4  # calls under way at once, in each direction: each takes device memory for its pages, beside the pool


def read_pages(cache: KVCache, pages: jax.Array) -> jax.Array:
    """The contents of pages [C] int32: [C, 2, L, K, Z, H], keys and values."""
    return jnp.stack([jnp.stack([layer[pages] for layer in layers], axis=1) for layers in (cache.k, cache.v)], axis=1)


def write_pages(state: DeviceState, pages: jax.Array, rows: jax.Array) -> DeviceState:
    """Gives pages [C] int32 the contents [C, 2, L, K, Z, H]; the null page may stand there often, with zeros. DONATES state."""
    k, v = (tuple(layer.at[pages].set(rows[:, i, number]) for number, layer in enumerate(layers))
            for i, layers in enumerate((state.cache.k, state.cache.v)))
    return dataclasses.replace(state, cache=KVCache(k=k, v=v))


def padded(pages: Sequence[int]) -> np.ndarray:
    """[NUM_PAGES_MOVED] int32, the null page behind the others."""
    return np.asarray([*pages, *[0] * (NUM_PAGES_MOVED - len(pages))], np.int32)
