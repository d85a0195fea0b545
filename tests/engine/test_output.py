"""Stop strings, stop ids and length: what ends a request, what its text is, and what is never shown while it runs."""

import pytest

from jaxinfer.engine.output import OutputProcessor
from jaxinfer.request import FinishReason, Request, RequestStatus
from jaxinfer.sampling.params import SamplingParams

END = 0


class Letters:
    """Token i is the i-th letter pair of a made-up vocabulary; 200 and 201 are the two halves of a character."""

    special_token_ids = frozenset({END})
    decoder_types = frozenset({"ByteLevel"})
    byte_table = {END: b"<end>", 1: b"ab", 2: b"c", 3: b"STO", 4: b"P!", 5: b"S", 6: b"T", 200: b"\xc3", 201: b"\xa9"}


def run(tokens, *, max_tokens=50, **params):
    """(shown after each token, final text, reason, stop reason)."""
    request = Request(request_id="r", prompt_token_ids=(1,), params=SamplingParams(max_tokens=max_tokens, **params),
                      max_total_len=1 + max_tokens, stop_token_ids=frozenset({END}), seed=0)
    outputs = OutputProcessor(Letters())
    outputs.start(request)
    shown = []
    for token in tokens:
        reason = outputs.push(request, token, finite=True)
        request.output_token_ids.append(token)
        if reason is not None:
            request.status, request.finish_reason = RequestStatus.FINISHED, reason
        shown.append(outputs.text(request)[0])
        if reason is not None:
            break
    return shown, *outputs.text(request), request.finish_reason


def test_stop_string_split_over_tokens_is_never_half_shown():
    shown, text, stop, reason = run([1, 3, 4, 1], stop="STOP")
    assert (shown, text, stop, reason) == (["ab", "ab", "ab"], "ab", "STOP", FinishReason.STOP)


def test_held_back_text_is_shown_once_it_is_no_stop_string():
    shown, text, _, reason = run([1, 5, 2, 6], stop=["STOP"])
    assert shown == ["ab", "ab", "abSc", "abScT"] and text == "abScT" and reason is None


def test_the_earliest_stop_string_wins():
    assert run([1, 3, 4], stop=["P", "TO"])[1:3] == ("abS", "TO")


def test_a_stop_string_that_begins_in_text_already_shown_is_found():
    assert run([5, 6, 2], stop=["TOP", "STc"])[1:3] == ("", "STc")


def test_end_token_leaves_no_text_and_is_the_stop_reason():
    assert run([1, END, 1])[1:] == ("ab", END, FinishReason.STOP)


def test_length_flushes_half_a_character_and_whole_ones_pass():
    assert run([1, 200], max_tokens=2)[1:] == ("ab\ufffd", None, FinishReason.LENGTH)
    shown, text, _, _ = run([1, 200, 201, 2])
    assert shown == ["ab", "ab", "abé", "abéc"] and text == "abéc"


def test_held_back_text_is_returned_at_the_length_limit():
    assert run([1, 5], max_tokens=2, stop="STOP")[1:] == ("abS", None, FinishReason.LENGTH)


@pytest.mark.parametrize("tokens", [[1, 2], [END]])
def test_non_finite_ends_with_an_error(tokens):
    outputs = OutputProcessor(None)
    request = Request(request_id="r", prompt_token_ids=(1,), params=SamplingParams(), max_total_len=9, stop_token_ids=frozenset({END}), seed=0)
    outputs.start(request)
    assert outputs.push(request, tokens[0], finite=False) is FinishReason.ERROR


def test_stop_strings_and_end_tokens_stay_in_the_text_where_wanted():
    shown, text, stop, reason = run([1, 3, 4, 1], stop="TOP", include_stop_str_in_output=True)
    assert (shown, text, stop, reason) == (["ab", "abSTO", "abSTOP"], "abSTOP", "TOP", FinishReason.STOP)
    assert run([1, END], include_stop_str_in_output=True)[1:3] == ("ab", END)  # special
    assert run([1, END], include_stop_str_in_output=True, skip_special_tokens=False)[1:3] == ("ab<end>", END)
    assert run([1, END], skip_special_tokens=False)[1:3] == ("ab", END)


def test_stop_strings_do_not_stop_before_min_tokens():
    assert run([1, 3, 4, 2, 5], stop="STOP", min_tokens=2)[1:] == ("ab", "STOP", FinishReason.STOP)
    assert run([1, 3, 4, 2, 1], stop=["STOP", "ca"], min_tokens=3)[1:] == ("abSTOP!", "ca", FinishReason.STOP)
