import pytest

from lightning_mist.estimate.allocator.allocator_data import AllocatorSettings, parse_allocator_settings

MIB = 2**20


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", AllocatorSettings()),
        ("expandable_segments:True", AllocatorSettings(expandable_segments=True)),
        (
            "max_split_size_mb:512, roundup_power2_divisions:8",
            AllocatorSettings(max_split_bytes=512 * MIB, roundup_power2_divisions=8),
        ),
        ("backend:native,pinned_use_background_threads:True,", AllocatorSettings()),
        ("large_segment_size_mb:64", AllocatorSettings(large_segment_bytes=64 * MIB)),
    ],
)
def test_settings_as_torch_reads_them(text: str, settings: AllocatorSettings) -> None:
    assert parse_allocator_settings(text) == settings


def test_a_threshold_needs_a_capacity() -> None:
    found = parse_allocator_settings("garbage_collection_threshold:0.8", 100 * MIB)
    assert (found.garbage_collection_threshold, found.capacity_bytes) == (0.8, 100 * MIB)
    with pytest.raises(ValueError, match="without capacity_bytes"):
        parse_allocator_settings("garbage_collection_threshold:0.8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("expandable_segment:True", "'expandable_segment' is not one of .*: the nearest is expandable_segments"),
        ("expandable_segments:yes", "'yes' is no value for expandable_segments: True or False is needed"),
        ("max_split_size_mb:many", "'many' is no value for max_split_size_mb"),
        ("max_split_size_mb:1", "max_split_bytes = 1048576: it must be at least"),
        ("backend:cudaMallocAsync", "only torch's native allocator is simulated"),
    ],
)
def test_what_torch_would_not_take(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_allocator_settings(text)
