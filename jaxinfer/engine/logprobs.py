"""Log-probabilities as callers get them: read from the device, by token id, with each token's text. No jax."""

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxinfer.request import Logprob, PositionLogprobs


class HostLogprobs:
    """A TokenLogprobs on the host; reading it waits for the step."""

    def __init__(self, logprobs: Any) -> None:
        self._chosen, self._ranks, self._top_ids, self._top = (
            np.asarray(x) for x in (logprobs.chosen, logprobs.ranks, logprobs.top_ids, logprobs.top))

    def at(self, i: int, token_id: int, num: int, decode: Callable[[int], str | None]) -> PositionLogprobs:
        """Entry i: the token that stands there and the `num` likeliest; the likeliest are ranked 1, 2, ... also where equal."""
        found = {token_id: Logprob(float(self._chosen[i]), int(self._ranks[i]), decode(token_id))}
        for rank, (other, logprob) in enumerate(zip(self._top_ids[i, :num].tolist(), self._top[i, :num].tolist(), strict=True), 1):
            if logprob > -np.inf:  # fewer tokens than asked for
                found[other] = Logprob(logprob, rank, decode(other))
        return found
