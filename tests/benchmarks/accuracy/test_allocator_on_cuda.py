"""The traces themselves; torch's allocator is not at hand here."""

import pytest
import torch

from benchmarks.accuracy.allocator_on_cuda import MIB, STREAMS, main, random_events
from benchmarks.accuracy.allocator_streams import simulated
from lightning_mist.estimate.allocator.allocator_data import AllocatorSettings


def test_traces_are_the_same_for_a_seed_and_touch_every_rule() -> None:
    events = random_events(3, 400)
    assert events == random_events(3, 400)
    assert events != random_events(4, 400)
    assert {event.kind for event in events} == {"malloc", "free", "use", "finish"}
    assert {event.stream for event in events if event.kind == "malloc"} == set(STREAMS)
    found = simulated(events, AllocatorSettings())
    assert found["requested"] < found["allocated"] <= found["active"] < found["reserved"]
    assert found["events"] == len(events)


def test_some_traces_reach_the_capacity_and_some_exceed_it() -> None:
    limited = AllocatorSettings(capacity_bytes=1200 * MIB)
    found = [simulated(random_events(seed, 600), limited) for seed in range(1, 40, 2)]
    assert any(item["flushes"] for item in found)
    assert max(item["reserved"] for item in found) <= 1200 * MIB


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_nothing_is_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["allocator_on_cuda"])
    with pytest.raises(SystemExit):
        main()
    assert "there is no CUDA device" in capsys.readouterr().err
