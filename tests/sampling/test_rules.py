"""Rules as arrays, and the checks that need a vocabulary."""

import numpy as np
import pytest

from jaxinfer.errors import RequestError
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.sampling.rules import bad_word_ids, check_rules, recent_tokens, token_counts, token_rules
from jaxinfer.state import NUM_RECENT, NUM_WORDS, PROMPT_BIT, SlotTables, slot_table_bytes


def encode(text):
    """A letter a token; a space and the letter after it are one token, in capitals."""
    return [ord(c) for c in "".join(part.capitalize() if i else part for i, part in enumerate(text.split(" ")))]


def test_bad_words_come_with_and_without_a_space_before_them():
    assert bad_word_ids(["ab"], encode) == ((97, 98), (65, 98))
    assert bad_word_ids([" ab", "ab"], encode) == ((97, 98), (65, 98))
    assert bad_word_ids(["1"], encode) == ((49,),)  # the same first token
    assert bad_word_ids(["a"], lambda text: [32, 97] if text[0] == " " else [97]) == ((97,),)  # more tokens


@pytest.mark.parametrize(("words", "message"), [
    (["a" * (NUM_RECENT + 1)], f"has {NUM_RECENT + 1} tokens, must be 1 to {NUM_RECENT}"),
    ([f"{i:04}" for i in range(NUM_WORDS + 1)], f"at most {NUM_WORDS} fit"),
])
def test_bad_words_that_do_not_fit_are_refused(words, message):
    with pytest.raises(RequestError) as error:
        bad_word_ids(words, encode)
    assert message in str(error.value)


@pytest.mark.parametrize(("params", "words", "message"), [
    ({"stop_token_ids": [50]}, (), "stop_token_ids holds 50, outside the vocabulary [0, 50)"),
    ({"logit_bias": {48: 1.0}}, (), "logit_bias holds 48, outside the vocabulary [0, 48)"),
    ({"allowed_token_ids": [3, 49]}, (), "allowed_token_ids holds 49"),
    ({"allowed_token_ids": [3, 4], "bad_words": ["x"]}, ((3,), (4,)), "allowed_token_ids and bad_words leave no token"),
    ({"allowed_token_ids": [1, 2], "min_tokens": 3}, (), "no token that does not end the completion"),
])
def test_what_the_vocabulary_cannot_do_is_refused(params, words, message):
    with pytest.raises(RequestError) as error:
        check_rules(SamplingParams(**params), words, {1, 2}, vocab_size=50, num_valid_tokens=48)
    assert message in str(error.value)
    check_rules(SamplingParams(allowed_token_ids=[1, 2], logit_bias={47: 1}), ((1,), (2, 2)), {1, 2}, vocab_size=50, num_valid_tokens=48)


def test_arrays_of_rules():
    params = SamplingParams(allowed_token_ids=[0, 31, 32, 40], min_tokens=2, logit_bias={5: -1.5})
    rules = token_rules(params, ((40,), (7, 8, 9)), (31,), vocab_size=41)
    bits = np.unpackbits(rules.masks.view(np.uint8), axis=1, bitorder="little")
    assert [np.flatnonzero(row).tolist() for row in bits] == [[0, 31, 32], [0, 32]]
    assert rules.bias_ids[:2].tolist() == [5, 41] and rules.bias_values[:2].tolist() == [-1.5, 0]
    assert rules.word_prefixes[0].tolist() == [-1] * (NUM_RECENT - 3) + [7, 8] and rules.word_ends[:2].tolist() == [9, 41]
    assert recent_tokens(6, [50, 51, 52]).tolist() == [52, 0, 0, 0, 0, 0, 50, 51]
    assert recent_tokens(1, list(range(20))).tolist() == [15, 16, 17, 18, 19, 12, 13, 14]
    assert token_counts([4, 4, 2], [2, 3, 3], vocab_size=6).tolist() == [0, 0, PROMPT_BIT + 1, 2, PROMPT_BIT, 0]


def test_bytes_of_the_tables():
    rules = token_rules(SamplingParams(), (), (), vocab_size=41)
    tables = SlotTables(recent_tokens=np.zeros(NUM_RECENT, np.int32), counts=np.zeros(41, np.int32), rules=rules)
    each = tables.recent_tokens.nbytes + tables.counts.nbytes + sum(x.nbytes for x in vars(rules).values())
    assert slot_table_bytes(max_num_seqs=4, vocab_size=41) == 5 * each
