"""Settings of the caching allocator as users write them, in ``PYTORCH_CUDA_ALLOC_CONF``."""

import difflib
from collections.abc import Callable
from typing import Any

from lightning_mist.estimate.allocator.allocator_data import MIB, AllocatorSettings

_BOOLEANS = {"True": True, "False": False}


def _boolean(text: str) -> bool:
    if text not in _BOOLEANS:
        raise ValueError("True or False is needed")
    return _BOOLEANS[text]


def _mebibytes(text: str) -> int:
    return int(text) * MIB


_KNOWN: dict[str, tuple[str, Callable[[str], Any]]] = {
    "expandable_segments": ("expandable_segments", _boolean),
    "max_split_size_mb": ("max_split_bytes", _mebibytes),
    "garbage_collection_threshold": ("garbage_collection_threshold", float),
    "roundup_power2_divisions": ("roundup_power2_divisions", int),
    "large_segment_size_mb": ("large_segment_bytes", _mebibytes),
}
"""What changes how much is reserved: field and reader by torch's name."""

_WITHOUT_EFFECT = frozenset(
    ("backend", "pinned_use_background_threads", "pinned_use_cuda_host_register", "release_lock_on_cudamalloc")
)
"""What does not change it. (Of ``backend`` only the native one is simulated.)"""


def parse_allocator_settings(text: str, capacity_bytes: int | None = None) -> AllocatorSettings:
    """Settings from text such as ``"expandable_segments:True,max_split_size_mb:512"``.

    Args:
        text: As in ``PYTORCH_CUDA_ALLOC_CONF``; nothing for torch's defaults.
        capacity_bytes: Device memory that the allocator may reserve, if limited.

    Raises:
        ValueError: If a name is not known or a value not one for it; the message names the nearest name.
    """
    found: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (part.strip() for part in item.partition(":"))
        if name == "backend" and value != "native":
            raise ValueError(f"allocator setting {item!r}: only torch's native allocator is simulated; leave it out")
        if name in _WITHOUT_EFFECT:
            continue
        if name not in _KNOWN:
            near = difflib.get_close_matches(name, _KNOWN, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"allocator setting {name!r} is not one of {', '.join(_KNOWN)}, which are simulated: the nearest is "
                f"{near}"
            )
        field, read = _KNOWN[name]
        try:
            found[field] = read(value)
        except ValueError as error:
            raise ValueError(f"allocator setting {item!r}: {value!r} is no value for {name}: {error}") from None
    return AllocatorSettings(capacity_bytes=capacity_bytes, **found)
