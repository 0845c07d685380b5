"""Requests to an allocator, for tests."""

from hypothesis import strategies as st

from lightning_mist.estimate.allocator.allocator_data import AllocatorSettings, MemoryEvent, free, malloc
from lightning_mist.estimate.allocator.device_allocator import simulate_allocator

KIB, MIB = 1 << 10, 1 << 20


def reserved(*events: MemoryEvent, **settings: object) -> int:
    """Most bytes that were ever reserved."""
    return simulate_allocator(events, AllocatorSettings(**settings)).peak_reserved  # type: ignore[arg-type]


SIZES = st.one_of(
    st.integers(1, 4 * KIB), st.sampled_from([MIB, MIB + 1, 9 * MIB, 10 * MIB]), st.integers(MIB, 70 * MIB)
)


@st.composite
def traces(draw: st.DrawFn) -> list[MemoryEvent]:
    """Requests on two streams, and frees of what lives, in any order."""
    events: list[MemoryEvent] = []
    living: list[int] = []
    for name in range(draw(st.integers(1, 40))):
        while living and draw(st.integers(0, 2)) == 0:
            events.append(free(living.pop(draw(st.integers(0, len(living) - 1)))))
        events.append(malloc(name, draw(SIZES), draw(st.sampled_from(["compute", "gather"]))))
        living.append(name)
    return events
