import pytest

from lightning_mist.estimate.allocator.allocator_data import (
    MIB,
    AllocatorSettings,
    MemoryEvent,
    free,
    malloc,
)


def test_events_say_what_is_asked_for() -> None:
    assert malloc(3, 512) == MemoryEvent(kind="malloc", identity=3, nbytes=512, stream="compute")
    assert malloc(3, 512, "gather").stream == "gather"
    assert free(3) == MemoryEvent(kind="free", identity=3)


def test_settings_that_the_allocator_takes() -> None:
    AllocatorSettings(capacity_bytes=1, garbage_collection_threshold=0.5, roundup_power2_divisions=1)
    AllocatorSettings(max_split_bytes=20 * MIB)
    AllocatorSettings(large_segment_bytes=10 * MIB, max_split_bytes=10 * MIB)


def test_settings_that_the_allocator_would_refuse() -> None:
    with pytest.raises(ValueError, match=r"capacity_bytes = 0: .* None for no limit"):
        AllocatorSettings(capacity_bytes=0)
    with pytest.raises(ValueError, match=r"max_split_bytes = 1048576: .* 20971520"):
        AllocatorSettings(max_split_bytes=MIB)
    with pytest.raises(ValueError, match=r"garbage_collection_threshold = 1\.5"):
        AllocatorSettings(garbage_collection_threshold=1.5, capacity_bytes=1)
    with pytest.raises(ValueError, match="without capacity_bytes"):
        AllocatorSettings(garbage_collection_threshold=0.5)
    with pytest.raises(ValueError, match="roundup_power2_divisions = 3"):
        AllocatorSettings(roundup_power2_divisions=3)
    with pytest.raises(ValueError, match="large_segment_bytes = 3145728"):
        AllocatorSettings(large_segment_bytes=3 * MIB)
