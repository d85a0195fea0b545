"""What a request may ask of the sampler, checked on the host. No arrays and no jax here."""

import dataclasses
from collections.abc import Sequence

from jaxinfer.errors import RequestError

MAX_SEED = 2**32 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request; names and meaning follow vLLM's.

    Raises:
      RequestError: a value lies outside the range that its field states.
    """

    n: int = 1
    """Number of completions for the prompt; >= 1."""
    temperature: float = 1.0
    """Logits are divided by this; 0 means greedy (the largest logit, the lowest id on a tie)."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability sums to at least this; in (0, 1]."""
    min_p: float = 0.0
    """Keep tokens whose probability is at least this share of the most likely one's; in [0, 1]."""
    seed: int | None = None
    """Seed of the request's own random stream; None draws one from the engine's seed and the request's number."""
    max_tokens: int | None = 16
    """Tokens to generate at most; None means up to the model's length limit."""
    stop: str | Sequence[str] | None = None
    """Strings that end the generation; the text returned stops before the match."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the generation, beside the model's own end tokens."""
    ignore_eos: bool = False
    """Go on past the model's end tokens; `stop` and `stop_token_ids` still hold."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            _check(value is None or isinstance(value, str | Sequence), name, value, "a list, or None")
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value or ()))
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        _check(_is_int(self.n) and self.n >= 1, "n", self.n, "an integer >= 1")
        _check(_is_real(self.temperature) and 0 <= self.temperature < float("inf"), "temperature", self.temperature,
               "a finite number >= 0 (0 is greedy)")
        _check(_is_int(self.top_k) and self.top_k >= 0, "top_k", self.top_k, "an integer >= 1, or 0 or -1 to keep every token")
        _check(_is_real(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]; 1 keeps every token")
        _check(_is_real(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]; 0 keeps every token")
        _check(self.seed is None or (_is_int(self.seed) and 0 <= self.seed <= MAX_SEED), "seed", self.seed,
               f"None or an integer in [0, {MAX_SEED}]")
        _check(self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1), "max_tokens", self.max_tokens,
               "None or an integer >= 1")
        _check(all(isinstance(s, str) and s for s in self.stop or ()), "stop", self.stop, "a non-empty string or a list of them")
        _check(all(_is_int(t) and t >= 0 for t in self.stop_token_ids or ()), "stop_token_ids", self.stop_token_ids,
               "a list of token ids >= 0")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check(ok: bool, name: str, value: object, limit: str) -> None:
    if not ok:
        raise RequestError(f"SamplingParams.{name} = {value!r}: must be {limit}.")
