"""Rotary position embedding: how each rope kind turns positions into angles, and the rotation. Holds no parameters.

Angles are computed in float32 from the positions, once a step, and passed down to every layer.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Turns = tuple[jax.Array, jax.Array]
"""Cosines and sines, each [T, H // 2] float32."""


class RotaryAngles(NamedTuple):
    """How a step's tokens are rotated."""

    query: Turns
    """Those of `key`, times what scales the token's queries."""
    key: Turns


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """One rotary embedding, as a model's config states it."""

    kind: str
    """A key of ROPE_KINDS."""
    theta: float
    """Base of the geometric series of wavelengths."""
    parameters: tuple[tuple[str, float], ...] = ()
    """The kind's own settings, sorted by name; flags are 0 or 1."""

    def __getitem__(self, name: str) -> float:
        """One of the kind's own settings."""
        return dict(self.parameters)[name]

    def get(self, name: str) -> float | None:
        """One of the kind's own settings, None where neither the config nor the kind gives it."""
        return dict(self.parameters).get(name)


def _default(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """theta ** (-2i / H). Rounded where transformers rounds, which at position 8192 is worth 1e-3 radians."""
    wavelengths = (rope.theta ** (np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)
    return np.float32(1.0) / wavelengths


def _linear(rope: RopeConfig, head_dim: int) -> np.ndarray:
    return (_default(rope, head_dim) / np.float32(rope["factor"])).astype(np.float32)


def _llama3(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Wavelengths beyond the trained context are stretched by `factor`, short ones kept, those between blended linearly."""
    base = _default(rope, head_dim)
    trained_len = rope["original_max_position_embeddings"]
    turns = trained_len * base / np.float32(2 * math.pi)  # rotations within the trained context
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (base * (keep + (1.0 - keep) / rope["factor"])).astype(np.float32)


def _yarn(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Dimensions that turn less than beta_slow times in the trained context are stretched, those above beta_fast kept.

    Source: arXiv 2309.00071 section 3.2; with `truncate` the ramp's ends are whole dimensions.
    """
    def dimension(num_turns: float) -> float:
        return head_dim * math.log(rope["original_max_position_embeddings"] / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope["beta_fast"]), dimension(rope["beta_slow"])
    if rope["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    stretch = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / ((high - low) or 0.001), 0.0, 1.0)
    base = _default(rope, head_dim)
    return (base / rope["factor"] * stretch + base * (1.0 - stretch)).astype(np.float32)


def _yarn_magnitude(rope: RopeConfig) -> float:
    """What cosines and sines are multiplied by: attention_factor, or what `factor` and the mscale pair give."""
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    given, numerator, denominator = (rope.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return given
    if numerator is not None and denominator is not None:
        return mscale(numerator) / mscale(denominator)
    return mscale(1.0)


def _dynamic(rope: RopeConfig, head_dim: int, positions: jax.Array, prompt_lens: jax.Array) -> jax.Array:
    """theta grows with the length, which for a token is its request's prompt or, when decoding past it, the tokens so far.

    So keys keep the angles that they were given, as transformers' do when it decodes with its cache.
    """
    trained_len = rope["original_max_position_embeddings"]
    excess = jnp.maximum(jnp.maximum(prompt_lens, positions + 1) - int(trained_len), 0).astype(jnp.float32)
    ratio = 1.0 + rope["factor"] * excess / trained_len  # theta is multiplied by ratio ** (H / (H - 2))
    exponents = (np.arange(0, head_dim, 2) / max(head_dim - 2, 1)).astype(np.float32)
    return jnp.exp(-jnp.log(ratio)[:, None] * exponents) * jnp.asarray(_default(rope, head_dim))


def _qwen_ntk(rope: RopeConfig, head_dim: int, positions: jax.Array, prompt_lens: jax.Array) -> jax.Array:
    """Qwen v1's: theta * alpha ** (H / (H - 2)), alpha = 2 ** (d + 1) - 1 for a prompt of up to 2 ** d trained lengths.

    alpha is fixed by the prompt, whatever is decoded after it. Source: `QWenModel.get_ntk_alpha`, 2 ** ceil(log2(L / seq_length) + 1) - 1.
    """
    del positions
    limits = [int(rope["seq_length"]) << d for d in range(32 - int(rope["seq_length"]).bit_length())]
    table = [_default(dataclasses.replace(rope, theta=rope.theta * (2.0 ** (d + 1) - 1) ** (head_dim / (head_dim - 2))), head_dim)
             for d in range(len(limits) + 1)]
    num_doublings = jnp.sum(prompt_lens[:, None] > np.array(limits, np.int32), axis=-1)
    return jnp.take(jnp.asarray(np.stack(table)), num_doublings, axis=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeKind:
    """What a rope kind asks of a config and how it makes frequencies, radians a position."""

    required: tuple[str, ...] = ()
    """Numbers > 0 that the config's rope dictionary must have."""
    optional: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    """Others that it may have, with what holds where it has none. Any other name there is refused."""
    inverse_frequencies: Callable[[RopeConfig, int], np.ndarray] = _default
    """(config, H) -> float32 [H // 2]; of kinds with `token_frequencies`, those of an unstretched token."""
    token_frequencies: Callable[[RopeConfig, int, jax.Array, jax.Array], jax.Array] | None = None
    """(config, H, positions [T], prompt_lens [T]) -> float32 [T, H // 2], where they differ between requests."""
    prompt_class: Callable[[RopeConfig, int], int] = lambda rope, prompt_len: 0
    """(config, prompt length) -> a number; two requests share keys of equal tokens only where it is equal."""
    magnitude: Callable[[RopeConfig], float] = lambda rope: 1.0
    """Factor on cosines and sines."""
    reads_max_len: bool = False
    """original_max_position_embeddings is the config's max_position_embeddings where the rope dictionary does not give it."""
    max_len: Callable[[RopeConfig, int], int] = lambda rope, max_position_embeddings: max_position_embeddings
    """(config, max_position_embeddings) -> tokens that the stretched model was made for."""
    in_configs: bool = True
    """Whether a config's rope dictionary may name it; otherwise only its family asks for it."""


_TRAINED_LEN = "original_max_position_embeddings"

ROPE_KINDS: dict[str, RopeKind] = {
    "default": RopeKind(),
    "linear": RopeKind(required=("factor",), inverse_frequencies=_linear, max_len=lambda rope, stated: int(stated * rope["factor"])),
    "dynamic": RopeKind(
        required=("factor",), reads_max_len=True, token_frequencies=_dynamic,
        prompt_class=lambda rope, prompt_len: max(prompt_len, int(rope[_TRAINED_LEN])),
        max_len=lambda rope, stated: int(stated * rope["factor"])),
    "llama3": RopeKind(
        required=("factor", "low_freq_factor", "high_freq_factor"), optional={_TRAINED_LEN: None}, reads_max_len=True,
        inverse_frequencies=_llama3),
    "yarn": RopeKind(
        required=("factor",), reads_max_len=True, inverse_frequencies=_yarn, magnitude=_yarn_magnitude,
        optional={_TRAINED_LEN: None, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": 1.0, "attention_factor": None, "mscale": None,
                  "mscale_all_dim": None},
        max_len=lambda rope, stated: max(stated, int(rope[_TRAINED_LEN] * rope["factor"]))),
    "qwen_ntk": RopeKind(
        required=("seq_length",), token_frequencies=_qwen_ntk, in_configs=False,
        prompt_class=lambda rope, prompt_len: max((prompt_len - 1) // int(rope["seq_length"]), 0).bit_length()),
}


def prompt_class(rope: RopeConfig, prompt_len: int) -> int:
    """What of a prompt's length the rotary embedding depends on: a prefix cache must tell requests apart by it."""
    return ROPE_KINDS[rope.kind].prompt_class(rope, prompt_len)


@jax.named_scope("rotary_angles")
def rotary_angles(rope: RopeConfig, positions: jax.Array, prompt_lens: jax.Array, *, head_dim: int,
                  logn_len: int | None) -> RotaryAngles:
    """Cosines and sines of the angles position * inverse_frequency.

    With `logn_len` queries at a position p, counted from 1, are scaled by max(1, log(p) / log(logn_len)).

    Args:
      rope: the kind and its settings.
      positions: [T] int32, from 0.
      prompt_lens: [T] int32, the length of the prompt of each token's request.
      head_dim: H, even.
      logn_len: tokens > 1 from which on queries grow, or None for never.

    Source: RoFormer (arXiv 2104.09864) eq. 15; `transformers/modeling_rope_utils.py` for the scaled kinds; for logn
    `QWenAttention` in Qwen-7B's modeling_qwen.py, whose table ends at 32767 where this does not.
    """
    kind = ROPE_KINDS[rope.kind]
    frequencies = (kind.inverse_frequencies(rope, head_dim) if kind.token_frequencies is None
                   else kind.token_frequencies(rope, head_dim, positions, prompt_lens))
    angles = positions.astype(jnp.float32)[:, None] * frequencies  # [T, H // 2]
    magnitude = np.float32(kind.magnitude(rope))
    cos, sin = jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude
    if logn_len is None:
        return RotaryAngles((cos, sin), (cos, sin))
    scale = jnp.maximum(jnp.log((positions + 1).astype(jnp.float32)) / np.float32(math.log(logn_len)), 1.0)[:, None]
    return RotaryAngles((cos * scale, sin * scale), (cos, sin))


@jax.named_scope("rotary")
def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (x[i], x[i + H // 2]) of every head by the token's angles.

    Args:
      x: [T, N, H].
      cos: [T, H // 2] float32.
      sin: [T, H // 2] float32.

    Returns:
      [T, N, H] in x.dtype; computed in float32.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
