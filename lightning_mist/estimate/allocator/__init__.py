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
