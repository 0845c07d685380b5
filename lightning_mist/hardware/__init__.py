"""What the machine is: detected, described or from the catalog, and what was measured of it."""

from lightning_mist.hardware.cluster import Cluster, Device, Link
from lightning_mist.hardware.groups import RankGroup, measuring_groups
from lightning_mist.hardware.measure import measure_profile
from lightning_mist.hardware.profile import CollectiveCost, ComputeRate, HardwareProfile

__all__ = [
    "Cluster",
    "CollectiveCost",
    "ComputeRate",
    "Device",
    "HardwareProfile",
    "Link",
    "RankGroup",
    "measure_profile",
    "measuring_groups",
]
