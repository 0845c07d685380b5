"""The machine as data: devices, links, how many of each."""

from dataclasses import dataclass

from lightning_mist.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one CPU process.

    Attributes:
        name: Catalog name, for example ``"L4"`` or ``"cpu"``.
        memory_bytes: Memory of the device (for a CPU process, its share of the host's).
        kind: ``"cuda"`` or ``"cpu"``.
    """

    name: str
    memory_bytes: int
    kind: str = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """``num_nodes`` equal nodes with ``devices_per_node`` equal devices.

    Attributes:
        num_nodes: Number of nodes.
        devices_per_node: Devices in each node.
        device: What each device is.
    """

    num_nodes: int
    devices_per_node: int
    device: Device

    def __post_init__(self) -> None:
        """Check the counts."""
        if self.num_nodes < 1 or self.devices_per_node < 1:
            raise PlanError(f"a cluster of {self.num_nodes} nodes x {self.devices_per_node}: both must be at least 1")

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return self.num_nodes * self.devices_per_node
