"""Every sampling setting out of range is refused with its name, its value and the range."""

import pytest

from jaxinfer.errors import RequestError
from jaxinfer.sampling.params import SamplingParams


@pytest.mark.parametrize(("name", "value", "limit"), [
    ("n", 0, ">= 1"), ("n", 1.5, ">= 1"), ("temperature", -0.1, ">= 0"), ("temperature", float("nan"), ">= 0"),
    ("temperature", float("inf"), "finite"), ("top_k", -2, ">= 1"), ("top_k", 1.5, ">= 1"), ("top_p", 0, "(0, 1]"),
    ("top_p", 1.01, "(0, 1]"), ("min_p", -0.1, "[0, 1]"), ("min_p", 2, "[0, 1]"), ("seed", -1, "[0, "), ("seed", 2**32, "[0, "),
    ("max_tokens", 0, ">= 1"), ("max_tokens", True, ">= 1"), ("stop", "", "non-empty"), ("stop", ["a", ""], "non-empty"),
    ("stop_token_ids", [-1], ">= 0"), ("stop_token_ids", 5, "a list"), ("stop", 5, "a list"), ("stop_token_ids", "5", ">= 0"),
])
def test_refuses(name, value, limit):
    with pytest.raises(RequestError) as error:
        SamplingParams(**{name: value})
    assert f"SamplingParams.{name}" in str(error.value) and limit in str(error.value)


def test_normal_forms():
    params = SamplingParams(stop="x", top_k=-1, stop_token_ids=[3])
    assert params.stop == ("x",) and params.top_k == 0 and params.stop_token_ids == (3,)
    assert SamplingParams().stop == ()
