"""torch's caching allocator, simulated."""

from lightning_mist.estimate.allocator.allocator_data import (
    MIB,
    AllocatorSettings,
    MemoryEvent,
    free,
    malloc,
    parse_allocator_settings,
)
from lightning_mist.estimate.allocator.device_allocator import least_capacity, simulate_allocator

__all__ = [
    "MIB",
    "AllocatorSettings",
    "MemoryEvent",
    "free",
    "least_capacity",
    "malloc",
    "parse_allocator_settings",
    "simulate_allocator",
]
