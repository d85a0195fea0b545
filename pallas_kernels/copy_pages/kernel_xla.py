"""Pages gathered from pools and scattered into them by XLA, for CPU and any GPU. It validates nothing: api.py has."""

from typing import Any

import jax


def copy_pages(
    pools: Any,         # a pytree of [P, ...]
    src: jax.Array,     # [U]
    dst: jax.Array,     # [U]
) -> Any:
    """See api.copy_pages. In place where the pools are donated: what is held besides is the U pages of each pool."""
    return insert_pages(pools, take_pages(pools, src), dst)


def take_pages(
    pools: Any,         # a pytree of [P, ...]
    src: jax.Array,     # [U]
) -> Any:               # the pytree with [U, ...]
    """The pages `src` of every pool."""
    return jax.tree.map(lambda pool: pool.at[src].get(mode="clip", wrap_negative_indices=False), pools)


def insert_pages(
    pools: Any,         # a pytree of [P, ...]
    pages: Any,         # the pytree with [U, ...]
    dst: jax.Array,     # [U]
) -> Any:
    """See api.insert_pages. In place where the pools are donated."""
    return jax.tree.map(lambda pool, new: pool.at[dst].set(new, mode="drop", wrap_negative_indices=False), pools, pages)
