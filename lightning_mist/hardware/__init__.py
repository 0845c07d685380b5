"""What the machine is: detected, described or from the catalog, and what was measured of it."""

from lightning_mist.hardware.cluster import Cluster, Device
from lightning_mist.hardware.profile import CollectiveCost, ComputeRate, HardwareProfile

__all__ = ["Cluster", "CollectiveCost", "ComputeRate", "Device", "HardwareProfile"]
