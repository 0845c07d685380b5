"""How much channels that run at the same time slow each other down.

A device works on four things at once: it computes, exchanges bytes with other devices, and copies from and to the host.
Each pair of these channels has one coefficient between 0 (they run beside each other freely) and 1 (they take turns):
while the set ``A`` of channels is active, channel ``j`` advances at the speed

    v_j = 1 / (1 + sum over k in A, k != j, of a_jk),        a_jk = a_kj

of what it does alone. Two channels with ``a = 1`` run at half their speed each, as if they took turns. As no
coefficient is above 1, all speeds together are never below 1: running together is never slower than taking turns.

What a network and a copy do to each other depends on the link: inside a node they share PCIe lanes, if there is no
NVLink; between nodes the network's bytes go over the same lanes or through host memory. These two coefficients
exist for both kinds of groups, which makes eight numbers.
"""

from dataclasses import dataclass
from typing import Literal

Channel = Literal["compute", "network", "to_device", "to_host"]
"""What a device does at the same time: computing, communicating with other devices, copying from and to the host."""

CHANNELS: tuple[Channel, ...] = ("compute", "network", "to_device", "to_host")
"""All channels, in the order of their bits in a mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """Coefficients of a machine, each from 0 (free of each other) to 1 (taking turns).

    Attributes:
        compute_network: Computation and communication.
        compute_to_device: Computation and copies from the host.
        compute_to_host: Computation and copies to the host.
        to_device_to_host: Copies in both directions.
        network_to_device: Communication inside a node and copies from the host.
        network_to_host: Communication inside a node and copies to the host.
        across_to_device: Communication between nodes and copies from the host.
        across_to_host: Communication between nodes and copies to the host.
        source: Where the figures come from.
        spread: Mean relative error of the times that they were fitted to; 0 where nothing was measured.
    """

    compute_network: float
    compute_to_device: float
    compute_to_host: float
    to_device_to_host: float
    network_to_device: float
    network_to_host: float
    across_to_device: float
    across_to_host: float
    source: str
    spread: float = 0.0

    def __post_init__(self) -> None:
        """Check the bounds."""
        for name in COEFFICIENTS:
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} = {value}: a coefficient is between 0 (free) and 1 (taking turns)")

    def between(self, first: Channel, second: Channel, *, across_nodes: bool) -> float:
        """The coefficient of two different channels.

        Args:
            first: One channel.
            second: The other; the order does not matter.
            across_nodes: Whether communication is between nodes.

        Raises:
            ValueError: If they are the same.
        """
        if first == second:
            raise ValueError(f"{first} and {second}: a coefficient belongs to two different channels")
        low, high = sorted((first, second), key=CHANNELS.index)
        name = _NAMES[low, high]
        if across_nodes and low == "network":
            name = name.replace("network", "across")
        value: float = getattr(self, name)
        return value


COEFFICIENTS = (
    "compute_network",
    "compute_to_device",
    "compute_to_host",
    "to_device_to_host",
    "network_to_device",
    "network_to_host",
    "across_to_device",
    "across_to_host",
)
"""Names of the coefficients, in their order in vectors."""

_NAMES: dict[tuple[Channel, Channel], str] = {
    ("compute", "network"): "compute_network",
    ("compute", "to_device"): "compute_to_device",
    ("compute", "to_host"): "compute_to_host",
    ("to_device", "to_host"): "to_device_to_host",
    ("network", "to_device"): "network_to_device",
    ("network", "to_host"): "network_to_host",
}
