"""What a device's channels do beside each other, and how fast bytes go between it and the host.

* On a CPU there are no separate channels: computing, communicating and copying use the same cores and take turns. What
  would go to a host is copied to files, whose rates were measured, or else within memory, which reads and writes every
  byte.
* On a device they run beside each other and slow each other down as the profile says. What is not known of a device
  counts as free of interference.
* Copies of a device cannot be faster than its part of what its node copies altogether, all of its devices copying.
"""

from dataclasses import dataclass

from lightning_mist.errors import ProfileError
from lightning_mist.hardware import Cluster, HardwareProfile, Interference
from lightning_mist.hardware.profile import COEFFICIENTS

FREE = Interference(**dict.fromkeys(COEFFICIENTS, 0.0), source="not known, so none")
"""Channels that do not slow each other down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRates:
    """Bytes per second that one device copies from and to the host, all devices of its node copying."""

    to_device: float
    to_host: float


def interference_of(profile: HardwareProfile, cluster: Cluster) -> Interference | None:
    """How the channels of a machine's devices slow each other down; ``None`` where they take turns."""
    if cluster.device.kind != "cuda":
        return None
    return profile.interference or FREE


def copy_rates(profile: HardwareProfile, cluster: Cluster) -> CopyRates:
    """How fast one device copies.

    Raises:
        ProfileError: If nothing is known of a device's copies.
    """
    rates = profile.host_to_device_bytes_per_second, profile.device_to_host_bytes_per_second
    if cluster.device.kind != "cuda":
        # Every byte is read once and written once.
        within = profile.memory_bytes_per_second / 2
        return CopyRates(to_device=rates[0] or within, to_host=rates[1] or within)
    if min(rates) <= 0:
        raise ProfileError(
            f"the profile of {profile.device} copies {rates[0]:g} bytes/s from the host and {rates[1]:g} to it: "
            "offload needs both rates; measure the machine, or describe its host link"
        )
    share = profile.host_bytes_per_second_per_node / cluster.devices_per_node or float("inf")
    return CopyRates(to_device=min(rates[0], share), to_host=min(rates[1], share))
