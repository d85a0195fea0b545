"""Turns logits into tokens on the device: ordered stages over per-row arrays, so that no setting compiles anew.

Order of stages, as in vLLM: valid vocabulary -> rules and penalties (adjust.py) -> logit processors (processors.py) -> temperature ->
min-p -> top-k -> top-p -> draw.
Stages that no row of the batch asks for are not run. No stage sorts: the top-k and top-p thresholds are found digit by digit over
the bit patterns of non-negative floats, which order as the floats do. On a GPU no loop is left in the program either: a command
buffer can hold all of it, so that dispatching it never waits.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.sampling.adjust import adjust
from jaxinfer.sampling.processors import NO_PROCESSORS, ProcessorTable
from jaxinfer.state import SamplingState, SlotTables

_WEIGHT_BITS = 30    # every weight exp(logit - max) lies in [0, 1], and 1.0f is 0x3F800000
_GPU_DIGIT_BITS = 3  # bits of a threshold found in one pass over the row: few passes where a launch costs more than compares
_CPU_DIGIT_BITS = 1
_TINY = 1.1754944e-38  # the least normal float32: what lies below may be taken for 0


def greedy(logits: jax.Array, *, num_valid_tokens: int) -> tuple[jax.Array, jax.Array]:
    """The largest logit of each row, the lowest id on a tie: all that a batch of plainly greedy rows needs.

    Args:
      logits: [B, V] float32.
      num_valid_tokens: ids at or above this are padding of the vocabulary and are never chosen.

    Returns:
      tokens [B] int32; finite [B] bool: False where a row's valid logits held NaN or infinity (its token means nothing).
    """
    with jax.named_scope("greedy"):
        return _argmax(_where_valid(logits, num_valid_tokens, -jnp.inf)), _is_finite(logits, num_valid_tokens)


def sample(logits: jax.Array, sampling: SamplingState, slots: SlotTables, *, num_valid_tokens: int,
           processors: ProcessorTable = NO_PROCESSORS) -> tuple[jax.Array, jax.Array]:
    """One token for each row, whatever the rows ask for.

    Args:
      logits: [B, V] float32.
      sampling: per-row settings; temperature 0 takes the largest logit, the lowest id on a tie.
      slots: counts and rules of the rows' slots.
      num_valid_tokens: ids at or above this are padding of the vocabulary and are never chosen.
      processors: those that rows may ask for; static.

    Returns:
      tokens [B] int32; finite [B] bool: False where a row's valid logits held NaN or infinity or nothing was left to sample (its
      token means nothing).
    """
    with jax.named_scope("sample"):
        finite = _is_finite(logits, num_valid_tokens)
        adjusts = sampling.penalises | (sampling.mask > 0) | (sampling.has_biases > 0) | (sampling.has_words > 0)
        logits = _where_valid(logits, num_valid_tokens, -jnp.inf)
        logits = lax.cond(jnp.any(adjusts), lambda x: adjust(x, sampling, slots), lambda x: x, logits)
        tokens, possible = _draw_rows(processors.apply(logits, sampling, slots), sampling)
        return tokens, finite & possible


def _is_finite(logits: jax.Array, num_valid_tokens: int) -> jax.Array:
    """[B] bool: no NaN and no infinity among a row's valid logits, in one reduction: a NaN is the maximum, and is not less."""
    return jnp.max(jnp.abs(_where_valid(logits, num_valid_tokens, 0.0)), axis=1) < jnp.inf


def _where_valid(logits: jax.Array, num_valid_tokens: int, padding: float) -> jax.Array:
    """The logits with `padding` in place of those of padded ids."""
    if num_valid_tokens >= logits.shape[1]:
        return logits
    return jnp.where(lax.broadcasted_iota(jnp.int32, logits.shape, 1) < num_valid_tokens, logits, padding)


def _draw_rows(logits: jax.Array, sampling: SamplingState) -> tuple[jax.Array, jax.Array]:
    """Tokens [B], and whether each row had any to choose from [B]."""
    best = jnp.max(logits, axis=1)
    possible = (best > -jnp.inf) & (best < jnp.inf)  # NaN is neither
    random = sampling.temperature > 0
    restricted = random & ((sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0))
    least = lax.cond(jnp.any(restricted), lambda: keep_threshold(jnp.exp(_scaled(logits, sampling)), sampling),
                     lambda: jnp.zeros((logits.shape[0], 1), jnp.int32))
    largest = _argmax(logits)
    tokens = lax.cond(jnp.any(random), lambda: jnp.where(random, _draw(logits, sampling, least), largest), lambda: largest)
    return tokens, possible


def _scaled(logits: jax.Array, sampling: SamplingState) -> jax.Array:
    """Logits less the row's largest, over temperature: exp of it is each token's probability over the likeliest one's.

    In this order the likeliest stands at exactly 0, whatever the temperature, and its weight is exactly 1.
    """
    temperature = jnp.where(sampling.temperature > 0, jnp.maximum(sampling.temperature, _TINY), 1.0)[:, None]
    return (logits - jnp.max(logits, axis=1, keepdims=True)) / temperature


def _draw(logits: jax.Array, sampling: SamplingState, least: jax.Array) -> jax.Array:
    """Tokens [B] by the Gumbel-max rule, among those whose weight has at least the bit pattern `least` [B, 1]; the likeliest is always one."""
    scaled = _scaled(logits, sampling)
    keep = (lax.bitcast_convert_type(jnp.exp(scaled), jnp.int32) >= least) | (scaled == 0)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(_row_keys(sampling))
    return _argmax(jnp.where(keep, scaled + noise, -jnp.inf))


def keep_threshold(weights: jax.Array, sampling: SamplingState) -> jax.Array:
    """What min-p, top-k and top-p leave, in that order; top-p is over what the first two leave.

    Args:
      weights: [B, V] float32 in [0, 1], probabilities divided by the row's largest.
      sampling: per-row settings.

    Returns:
      [B, 1] int32, the bit pattern of the least weight that is kept. Tokens that tie with the last one kept are kept too, and the
      likeliest always is.
    """
    bits = lax.bitcast_convert_type(weights, jnp.int32)[:, None]
    kept = weights >= sampling.min_p[:, None]
    k = jnp.where(sampling.top_k > 0, sampling.top_k, weights.shape[1])[:, None]
    least = _largest_threshold(lambda t: jnp.sum(kept[:, None] & (bits >= t[:, :, None]), axis=2) >= k, weights.shape[0])
    least = jnp.maximum(least, lax.bitcast_convert_type(sampling.min_p, jnp.int32)[:, None])
    mass = jnp.where(bits[:, 0] >= least, weights, 0.0)
    goal = jnp.maximum(sampling.top_p[:, None] * jnp.sum(mass, axis=1, keepdims=True), _TINY)  # 0 would be reached by no token at all
    enough = _largest_threshold(lambda t: jnp.sum(jnp.where(bits >= t[:, :, None], mass[:, None], 0.0), axis=2) >= goal, weights.shape[0])
    least = jnp.where(sampling.top_p[:, None] < 1, jnp.maximum(least, enough), least)
    return jnp.minimum(least, jnp.max(bits, axis=2))


def _largest_threshold(enough: Callable[[jax.Array], jax.Array], num_rows: int) -> jax.Array:
    """The largest bit pattern for which `enough` still holds in its row, 0 where it never does: [B, 1] int32.

    Args:
      enough: thresholds [B, R] -> [B, R] bool, each row true up to some threshold and false beyond.
    """
    def search(digit_bits: int, *, unroll: bool) -> jax.Array:
        digits = jnp.arange(1, 1 << digit_bits, dtype=jnp.int32)

        def find_digit(index: jax.Array | int, found: jax.Array) -> jax.Array:
            shift = jnp.asarray(_WEIGHT_BITS - digit_bits * (index + 1), jnp.int32)
            return found + (jnp.sum(enough(found + (digits << shift)), axis=1, keepdims=True, dtype=jnp.int32) << shift)

        return lax.fori_loop(0, _WEIGHT_BITS // digit_bits, find_digit, jnp.zeros((num_rows, 1), jnp.int32), unroll=unroll)

    return lax.platform_dependent(cpu=lambda: search(_CPU_DIGIT_BITS, unroll=False),
                                  default=lambda: search(_GPU_DIGIT_BITS, unroll=True))


def _argmax(x: jax.Array) -> jax.Array:
    """The first index of each row's maximum, [B] int32: two plain reductions, which XLA vectorises on a CPU as it does not jnp.argmax."""
    index = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    first = jnp.min(jnp.where(x == jnp.max(x, axis=1, keepdims=True), index, x.shape[1]), axis=1)
    return jnp.minimum(first, x.shape[1] - 1)  # a row of NaN equals nothing


def _row_keys(sampling: SamplingState) -> jax.Array:
    """One key a row, fixed by (seed, sample index, position) alone: never by the batch around it."""
    def key(seed: jax.Array, sample_index: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), sample_index), position)

    return jax.vmap(key)(sampling.seed, sampling.sample_index, sampling.position)
