"""What `dtype` means: float16 checkpoints run in bfloat16 unless asked otherwise, all others as they are stored."""

import pytest

from jaxinfer.engine.resolve import running_dtype


@pytest.mark.parametrize(("setting", "stored", "runs"), [
    ("auto", "float16", "bfloat16"), ("auto", "bfloat16", "bfloat16"), ("auto", "float32", "float32"), ("float16", "float16", "float16"),
    ("float32", "float16", "float32"),
])
def test_running_dtype(setting, stored, runs):
    assert running_dtype(setting, stored) == runs
