import pytest

from benchmarks.planner import tracing

SMALL = {"hidden": 64, "ffn": 128, "heads": 4, "key_value_heads": 2, "vocabulary": 96}


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(tracing.MODELS))
def test_a_model_is_traced_apart(name: str) -> None:
    sample = tracing.measure(name, 2, SMALL)
    assert (sample["model"], sample["layers"]) == (name, 2)
    matrices = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) + 2 * 96 * 64
    assert sample["parameters"] == matrices + 5 * 64
    assert sample["processor_seconds"] > 0
    assert sample["trace_seconds"] > 0
