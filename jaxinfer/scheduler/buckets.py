"""Sorts requests by the tokens they have left to compute, so that short ones need not queue behind long ones. Never imports jax.

    edges      64        256       1024
    bucket  0  |    1    |    2    |   3 (all longer ones)

A bucket may have as many requests in prefill as its cap says. By default that is what fills one step, so that no bucket
starts more than it can compute, and none holds back another.
"""

from bisect import bisect_left
from collections.abc import Sequence

from jaxinfer.errors import ConfigError


class LengthBuckets:
    """Bucket edges and caps.

    Args:
      edges: longest length of each bucket, increasing; one more bucket takes what is longer. () is one bucket for all.
      caps: requests of each bucket in prefill at once, one an edge; what is longer shares the last cap. None: enough to fill a step.
      max_num_batched_tokens: tokens of a step.
      max_rows: prefill chunks of a step.

    Raises:
      ConfigError: edges that do not increase, or caps that do not go with them.
    """

    def __init__(self, edges: Sequence[int], caps: Sequence[int] | None, *, max_num_batched_tokens: int, max_rows: int) -> None:
        if any(edge < 1 for edge in edges) or list(edges) != sorted(set(edges)):
            raise ConfigError(f"length_buckets = {tuple(edges)}: must be strictly increasing lengths >= 1.")
        if caps is not None and (len(caps) != len(edges) or any(cap < 1 for cap in caps)):
            raise ConfigError(f"length_bucket_caps = {tuple(caps)}: must be one number >= 1 for each of the {len(edges)} length_buckets.")
        self._edges = tuple(edges)
        fills_step = [-(-max_num_batched_tokens // (edge + 1)) for edge in (0, *edges)]
        self.caps: tuple[int, ...] = tuple(min(cap, max_rows) for cap in ((*caps, caps[-1]) if caps else fills_step))
        """Requests of each bucket that may be in prefill at once."""

    def __len__(self) -> int:
        return len(self.caps)

    def of(self, num_tokens: int) -> int:
        """The bucket of a request with so many tokens to compute."""
        return bisect_left(self._edges, num_tokens)
