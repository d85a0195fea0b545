"""The first cases of tests/convert/fuzz.py; `python -m tests.convert.fuzz` runs thousands."""

from pathlib import Path

from tests.convert.fuzz import run

NUM_CASES = 100


def test_damaged_checkpoints_end_with_typed_errors(tmp_path: Path) -> None:
    outcomes, failures = run(NUM_CASES, 0, tmp_path)
    assert not failures, "\n\n".join(failures[:3])
    assert sum(sum(counts.values()) for counts in outcomes.values()) == NUM_CASES
    assert all(set(counts) - {"whole"} for counts in outcomes.values()), f"a kind of file was never refused: {outcomes}"
