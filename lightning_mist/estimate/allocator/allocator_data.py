"""What goes into a simulation of torch's caching allocator and what comes out: events, settings, results."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

MIB = 1 << 20

EventKind = Literal["malloc", "free", "use", "finish"]


class MemoryEvent(NamedTuple):
    """One thing that a program asks of the allocator, or that the allocator learns of a stream.

    A tuple, because a step has tens of thousands of them. Made by :func:`malloc`, :func:`free`, :func:`use` and
    :func:`finish`.

    Attributes:
        kind: ``"malloc"``, ``"free"``, ``"use"`` (another stream works on the memory, as by ``record_stream``) or
            ``"finish"`` (all work issued so far on a stream is known to have ended).
        identity: Which allocation; unique among the living. -1 for ``"finish"``.
        nbytes: Bytes asked for; 0 but for ``"malloc"``.
        stream: The stream that allocates, uses or has finished; empty for ``"free"``.
    """

    kind: EventKind
    identity: int
    nbytes: int = 0
    stream: str = ""


def malloc(identity: int, nbytes: int, stream: str = "compute") -> MemoryEvent:
    """``stream`` allocates ``nbytes`` bytes."""
    return MemoryEvent("malloc", identity, nbytes, stream)


def free(identity: int) -> MemoryEvent:
    """The last reference to an allocation is gone."""
    return MemoryEvent("free", identity)


def use(identity: int, stream: str) -> MemoryEvent:
    """``stream`` works on an allocation of another one, which says so by ``record_stream``.

    After :func:`free` the memory serves others only once a later :func:`finish` says that ``stream`` has ended what it
    had been given by then.
    """
    return MemoryEvent("use", identity, 0, stream)


def finish(stream: str) -> MemoryEvent:
    """Everything issued on ``stream`` so far has ended on the device."""
    return MemoryEvent("finish", -1, 0, stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """How the allocator is set up; the defaults are torch's.

    Attributes:
        capacity_bytes: Device memory that the allocator may reserve; None for no limit. What lies outside of it
            (context, communicators, other processes) must have been taken off.
        expandable_segments: ``expandable_segments:True`` of ``PYTORCH_CUDA_ALLOC_CONF`` (torch 2.1 and later): one
            growing range of addresses per stream and pool, mapped page by page.
        max_split_bytes: ``max_split_size_mb`` in bytes: larger blocks are neither split nor given to smaller requests.
            None for no limit.
        garbage_collection_threshold: Fraction of the capacity above which blocks that have long been free are given
            back, as under ``torch.cuda.set_per_process_memory_fraction``; None never.
        roundup_power2_divisions: Sizes are rounded up to this many steps between powers of two (a power of two);
            None for multiples of 512 bytes.
        large_segment_bytes: Segment for requests above 1 MiB and below 10 MiB, and the page of expandable segments
            (``large_segment_size_mb`` of later torch versions; 20 MiB otherwise).

    Raises:
        ValueError: If the allocator would refuse the settings.
    """

    capacity_bytes: int | None = None
    expandable_segments: bool = False
    max_split_bytes: int | None = None
    garbage_collection_threshold: float | None = None
    roundup_power2_divisions: int | None = None
    large_segment_bytes: int = 20 * MIB

    def __post_init__(self) -> None:
        """Check the settings as torch does when it reads them."""
        if self.capacity_bytes is not None and self.capacity_bytes < 1:
            raise ValueError(f"capacity_bytes = {self.capacity_bytes}: a device has at least 1 byte; None for no limit")
        if self.large_segment_bytes < 10 * MIB or self.large_segment_bytes % (2 * MIB):
            raise ValueError(
                f"large_segment_bytes = {self.large_segment_bytes}: it must be a multiple of 2 MiB, at least 10 MiB"
            )
        if self.max_split_bytes is not None and self.max_split_bytes < self.large_segment_bytes:
            raise ValueError(
                f"max_split_bytes = {self.max_split_bytes}: it must be at least the segment for large blocks, "
                f"{self.large_segment_bytes}"
            )
        threshold = self.garbage_collection_threshold
        if threshold is not None and not 0.0 < threshold < 1.0:
            raise ValueError(f"garbage_collection_threshold = {threshold}: it is a fraction between 0 and 1")
        if threshold is not None and self.capacity_bytes is None:
            raise ValueError(
                f"garbage_collection_threshold = {threshold} without capacity_bytes: it is a fraction of the capacity"
            )
        divisions = self.roundup_power2_divisions
        if divisions is not None and (divisions < 1 or divisions & (divisions - 1)):
            raise ValueError(f"roundup_power2_divisions = {divisions}: it must be a power of two")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorBytes:
    """Bytes by torch's words.

    Attributes:
        requested: What living tensors asked for.
        allocated: The same in whole blocks (``torch.cuda.memory_allocated``).
        active: ``allocated`` and what was freed while another stream still uses it.
        reserved: What was taken from the device (``torch.cuda.memory_reserved``).
    """

    requested: int
    allocated: int
    active: int
    reserved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorResult:
    """What the allocator did with a list of events.

    Attributes:
        peak: Largest value of each figure; each may be reached at another event.
        flushes: How often everything that was free was given back to the device because a request did not fit
            (``num_alloc_retries``). Each one waits for the device.
        out_of_memory: Index of the request that could not be served, where the simulation ended after all that can be
            given back was given back; None if it ran through.
    """

    peak: AllocatorBytes
    final: AllocatorBytes
    flushes: int
    out_of_memory: int | None


def _boolean(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError("True or False is needed")
    return text == "True"


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
