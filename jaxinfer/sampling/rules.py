"""A request's rules and counts as arrays for its slot, and the checks that need the vocabulary. Host code: numpy, no device."""

from collections.abc import Callable, Collection, Sequence

import numpy as np

from jaxinfer.errors import RequestError
from jaxinfer.sampling.params import MAX_LOGIT_BIASES, SamplingParams
from jaxinfer.sampling.processors import NO_PROCESSORS, ProcessorTable
from jaxinfer.state import NUM_BIASES, NUM_RECENT, NUM_WORDS, PROMPT_BIT, TokenRules

assert NUM_BIASES == MAX_LOGIT_BIASES, "the limit that params.py states is the table's width"


def bad_word_ids(words: Sequence[str], encode: Callable[[str], Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Token sequences of barred words: each word by itself and, as vLLM does, with a space before it where that is another first
    token and as many tokens.

    Args:
      words: SamplingParams.bad_words.
      encode: text -> ids, without special tokens.

    Raises:
      RequestError: a word of more tokens than a slot remembers, or more words of several tokens than a slot holds.
    """
    found: dict[tuple[int, ...], str] = {}
    for word in words:
        bare, spaced = (tuple(encode(text)) for text in (word.lstrip(), " " + word.lstrip()))
        found[bare] = word
        if spaced and len(spaced) == len(bare) and spaced[0] != bare[0]:
            found[spaced] = word
    for ids, word in found.items():
        if not 1 <= len(ids) <= NUM_RECENT:
            raise RequestError(f"bad_words: {word!r} has {len(ids)} tokens, must be 1 to {NUM_RECENT}: give a shorter part of it.")
    several = sum(len(ids) > 1 for ids in found)
    if several > NUM_WORDS:
        raise RequestError(f"bad_words gives {several} sequences of several tokens (words with and without a space before them), at most "
                           f"{NUM_WORDS} fit: give fewer words. Words of one token are not counted.")
    return tuple(found)


def check_rules(params: SamplingParams, bad_words: Sequence[Sequence[int]], end_ids: Collection[int], *, vocab_size: int,
                num_valid_tokens: int) -> None:
    """Checks what a request says about single tokens against the vocabulary.

    Args:
      params: the request's.
      bad_words: from bad_word_ids.
      end_ids: ids that may not be sampled before min_tokens.
      vocab_size: V.
      num_valid_tokens: ids at or above this are padding.

    Raises:
      RequestError: an id outside the vocabulary, or rules that leave nothing to sample.
    """
    for name, limit in (("stop_token_ids", vocab_size), ("logit_bias", num_valid_tokens), ("allowed_token_ids", num_valid_tokens)):
        bad = [t for t in (getattr(params, name) or ()) if t >= limit]
        if bad:
            raise RequestError(f"{name} holds {bad[0]}, outside the vocabulary [0, {limit}).")
    left = set(range(num_valid_tokens) if params.allowed_token_ids is None else params.allowed_token_ids)
    left -= {ids[0] for ids in bad_words if len(ids) == 1}
    given = "allowed_token_ids and bad_words" if params.bad_words else "allowed_token_ids"
    if not left:
        raise RequestError(f"{given} leave no token to sample: allow more.")
    if params.min_tokens and not left - set(end_ids):
        raise RequestError(f"min_tokens = {params.min_tokens}, and {given} leave no token that does not end the completion: allow more, or "
                           "set min_tokens to 0.")


def token_masks(params: SamplingParams, bad_words: Sequence[Sequence[int]], end_ids: Collection[int], *, vocab_size: int) -> np.ndarray:
    """TokenRules.masks of a request: what its list of tokens and its barred words of one token leave. Arguments as in check_rules."""
    allowed = np.ones((2, -(-vocab_size // 32) * 32), bool)
    if params.allowed_token_ids is not None:
        allowed[:] = False
        allowed[:, list(params.allowed_token_ids)] = True
    allowed[:, [ids[0] for ids in bad_words if len(ids) == 1]] = False
    allowed[1, [t for t in end_ids if t < vocab_size]] = False
    return np.packbits(allowed, axis=1, bitorder="little").view(np.uint32)


def token_rules(params: SamplingParams, bad_words: Sequence[Sequence[int]], end_ids: Collection[int], *, vocab_size: int,
                processors: ProcessorTable = NO_PROCESSORS) -> TokenRules:
    """The rules of a request, for its slot. Arguments as in check_rules, which must have passed, and the engine's processors."""
    bias_ids, bias_values = np.full(NUM_BIASES, vocab_size, np.int32), np.zeros(NUM_BIASES, np.float32)
    bias_ids[:len(params.biases)] = list(params.biases)
    bias_values[:len(params.biases)] = list(params.biases.values())
    prefixes, ends = np.full((NUM_WORDS, NUM_RECENT - 1), -1, np.int32), np.full(NUM_WORDS, vocab_size, np.int32)
    for i, ids in enumerate(ids for ids in bad_words if len(ids) > 1):
        prefixes[i, NUM_RECENT - len(ids):] = ids[:-1]
        ends[i] = ids[-1]
    return TokenRules(masks=token_masks(params, bad_words, end_ids, vocab_size=vocab_size), bias_ids=bias_ids, bias_values=bias_values,
                      word_prefixes=prefixes, word_ends=ends, processor_words=processors.words(params.logits_processors))


def recent_tokens(prompt_len: int, output: Sequence[int]) -> np.ndarray:
    """[NUM_RECENT] int32: the last output tokens, each at its position modulo NUM_RECENT."""
    recent = np.zeros(NUM_RECENT, np.int32)
    for i in range(max(len(output) - NUM_RECENT, 0), len(output)):
        recent[(prompt_len + i) % NUM_RECENT] = output[i]
    return recent


def token_counts(prompt: Sequence[int], output: Sequence[int], *, vocab_size: int) -> np.ndarray:
    """[V] int32, as a row of SlotTables.counts."""
    counts = np.bincount(np.asarray(output, np.int64), minlength=vocab_size).astype(np.int32)
    counts[np.asarray(prompt, np.int64)] |= PROMPT_BIT
    return counts
