"""The oracle of copy_pages: every page of the result looked up among the copies. It shares no helper with the implementations."""

from typing import Any

import jax
import jax.numpy as jnp


def copy_pages(
    pools: Any,         # a pytree of [P, ...]
    src: jax.Array,     # [U]
    dst: jax.Array,     # [U]
) -> Any:
    """See api.copy_pages."""
    num_pages = jax.tree.leaves(pools)[0].shape[0]
    named = jnp.arange(num_pages)[:, None] == dst                                       # [P, U]
    source = jnp.where(jnp.any(named, axis=1), src[jnp.argmax(named, axis=1)], jnp.arange(num_pages))
    return jax.tree.map(lambda pool: pool[source], pools)
