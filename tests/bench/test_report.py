"""What benchmarks say of an engine's own counters."""

from bench.report import phases
from jaxinfer.engine.metrics import EngineMetrics


def test_phases_part_a_run_by_what_its_steps_did() -> None:
    metrics = EngineMetrics(decode_read_bytes=1, kv_token_bytes=1, read_bytes_per_s=None, num_steps=12, num_decode_steps=8, decode_seconds=2.0,
                            num_prefill_tokens=600)
    assert phases(metrics, 5.0) == {
        "prompt_tokens_per_s_of_mixed_steps": 200.0, "mixed_step_ms": 750.0, "num_mixed_steps": 4, "decode_step_ms": 250.0}
    idle = EngineMetrics(decode_read_bytes=1, kv_token_bytes=1, read_bytes_per_s=None)
    assert set(phases(idle, 0.0).values()) == {None, 0}
