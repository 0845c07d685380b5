"""Devices that need not be at hand: what vendors and measurements say of them."""

from lightning_mist.hardware.catalog.catalog_device import CatalogDevice
from lightning_mist.hardware.catalog.catalog_profiles import STACKS, catalog_profile, with_stack
from lightning_mist.hardware.catalog.devices import canonical_name, capability_of, find_device, host_memory
from lightning_mist.hardware.catalog.interference_kinds import copies_are_staged, interference_of_kind, lanes_are_shared
from lightning_mist.hardware.catalog.memory_overheads import (
    NOTHING,
    Overhead,
    alone_overhead,
    communicator_overhead,
    context_overhead,
    workspace_bytes,
)
