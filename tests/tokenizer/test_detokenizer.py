"""Pushed one by one, tokens give the text that they give together, and never half a character."""

import functools
import json
import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.tokenizer import IncrementalDetokenizer, Tokenizer
from tests.tokenizer import tiny

FIXTURES = Path(__file__).parents[1] / "fixtures"
REAL = sorted({p.parent for p in FIXTURES.rglob("tokenizer.json")})


@functools.cache
def made(kind: str) -> Tokenizer:
    return Tokenizer(tiny.wrap(tiny.KINDS[kind]()))


def pieces(tokenizer: Tokenizer, ids: list[int], skip: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", tiny.KINDS)
@settings(max_examples=150)
@given(data=st.data())
def test_joined_pieces_are_the_decoded_whole(kind: str, skip: bool, data: st.DataObject) -> None:
    tokenizer = made(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.num_tokens + 1), max_size=40))  # two ids are in no vocabulary
    assert "".join(pieces(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "mixed"])
@given(text=st.text(max_size=30))
def test_valid_text_never_shows_a_broken_character(kind: str, text: str) -> None:
    tokenizer = made(kind)
    text = text.replace("\ufffd", "")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert not any("\ufffd" in p for p in pieces(tokenizer, ids, False))


@given(text=st.text(max_size=30))
def test_byte_level_round_trip(text: str) -> None:
    tokenizer = made("byte_level")
    assert "".join(pieces(tokenizer, tokenizer.encode(text), False)) == text


def test_character_is_held_until_whole() -> None:
    tokenizer = made("byte_level")
    ids = tokenizer.encode("🦁")  # in no training text: more than one token
    assert len(ids) > 1
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push(i) for i in ids] == [""] * (len(ids) - 1) + ["🦁"]
    assert detokenizer.flush() == ""


def test_flush_shows_an_incomplete_character() -> None:
    tokenizer = made("byte_level")
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert "".join(detokenizer.push(i) for i in tokenizer.encode("🦁")[:-1]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_are_skipped_or_shown() -> None:
    tokenizer = made("byte_level")
    ids = tokenizer.encode("a<|im_end|>b")
    assert "".join(pieces(tokenizer, ids, True)) == "ab"
    assert "".join(pieces(tokenizer, ids, False)) == "a<|im_end|>b"


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_cost_of_a_token_does_not_grow(kind: str) -> None:
    """Twenty thousand tokens, the worst kinds in long runs: bytes that are no UTF-8, and one token over and over."""
    tokenizer = made(kind)
    generator = random.Random(0)
    bad_byte = next(i for i in range(tokenizer.num_tokens) if tokenizer.token(i) in ("<0xFF>", "ÿ", "fox"))
    runs = [[bad_byte] * 5000, [tokenizer.num_tokens - 1] * 5000, [generator.randrange(tokenizer.num_tokens) for _ in range(10000)]]
    start = time.process_time()
    for ids in runs:
        assert sum(map(len, pieces(tokenizer, ids, True))) > 0
    assert time.process_time() - start < 10, "quadratic work would take minutes"


@pytest.mark.parametrize("folder", REAL, ids=lambda p: p.name)
def test_real_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.from_dir(folder)
    generator = random.Random(json.dumps(folder.name))
    for skip in (True, False):
        for _ in range(20):
            ids = [generator.randrange(tokenizer.num_tokens) for _ in range(60)]
            assert "".join(pieces(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)
