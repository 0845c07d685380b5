"""What is known of a machine's coefficients before anything was measured running together.

Two properties that need no such measurement tell machines apart:

* *staged copies*: where copies alone are slow (:data:`STAGED_BYTES_PER_SECOND`), the host moves the bytes through a
  buffer of its own and nothing else is launched meanwhile: of five machines the two slow ones take turns between
  copies and anything else, and on the others copies and computation are free of each other;
* *shared lanes*: without NVLink, communication inside a node goes over the PCIe lanes of the copies.

Causes of taking turns are taken to be independent: with ``c`` the causes that a machine has,

    1 - a_k = (1 - base_k) * prod over c of (1 - cause_ck)

so that coefficients stay in [0, 1]. The numbers are fitted to three machines' measurements and to the pairs of five
machines' published tables by ``benchmarks.hardware.interference``, which also predicts each machine from the others.
"""

from dataclasses import dataclass

from lightning_mist.hardware.catalog.devices import canonical_name
from lightning_mist.hardware.catalog.memory_overheads import has_nvlink
from lightning_mist.hardware.cluster import Cluster
from lightning_mist.hardware.profile import COEFFICIENTS, Interference

STAGED_BYTES_PER_SECOND = 5.05e9
"""Copies below this rate are staged: halfway (as a ratio) between the fastest that take turns with computation, 4.13
GiB/s, and the slowest that do not, 5.36 GiB/s (mist: all devices of a node copying)."""

SHARED_RATIO = 2.0
"""Collectives inside a node that are this many times faster than copies to the host do not go over the same lanes: at
most 1.1 without NVLink (L4), at least 8.8 with it (V100-32) (mist)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Causes:
    """How much each cause makes channels take turns, all in [0, 1].

    Attributes:
        base: What every machine does, in the order of ``COEFFICIENTS``.
    """

    base: tuple[float, ...]
    staged_compute: float
    staged_copies: float
    staged_network: float
    shared_copies: float
    shared_network: float


CAUSES = Causes(
    base=(0.03, 0.05, 0.31, 0.25, 0.21, 0.24, 0.13, 0.59, 0.39),
    staged_compute=0.92,
    staged_copies=0.89,
    staged_network=0.75,
    shared_copies=0.52,
    shared_network=0.78,
)
"""Fitted to all machines (the record ``interference``, row of kind "causes")."""

MEASURED: dict[str, tuple[float, ...]] = {
    "A100-40": (0.00, 0.02, 0.28, 0.50, 0.10, 0.04, 0.12, 0.73, 1.00),
    "L4": (0.01, 0.00, 0.68, 0.21, 0.78, 0.90, 0.13, 0.59, 0.38),
    "V100-16": (0.96, 0.97, 0.95, 0.14, 0.90, 0.94, 0.01, 0.85, 0.90),
}
"""Coefficients of machines with eight devices a node (the record, rows of kind "own"), in the order of
``COEFFICIENTS``. Of L4s only one node was measured: between nodes they have their kind's."""

MEASURED_SPREAD = {"A100-40": 0.059, "L4": 0.064, "V100-16": 0.033}
"""Mean errors of these coefficients on what they were not fitted to (same rows)."""

RECORD = "benchmarks/records, theme interference"
"""Where the numbers come from."""


def copies_are_staged(bytes_per_second: float) -> bool:
    """Whether copies of this rate, all devices of a node copying, must go through a buffer of the host's."""
    return bytes_per_second < STAGED_BYTES_PER_SECOND


def lanes_are_shared(network_bytes_per_second: float, copy_bytes_per_second: float) -> bool:
    """Whether communication inside a node must go over the lanes that copies use, judged by both rates alone."""
    return network_bytes_per_second < SHARED_RATIO * copy_bytes_per_second


def interference_of_kind(*, staged: bool, shared: bool, causes: Causes = CAUSES) -> Interference:
    """Coefficients of machines with staged or direct copies, and a network that shares their lanes or not."""
    values = dict(zip(COEFFICIENTS, causes.base, strict=True))
    if staged:
        for name in ("compute_to_device", "compute_to_host"):
            values[name] = _either(values[name], causes.staged_compute)
        values["to_device_to_host"] = _either(values["to_device_to_host"], causes.staged_copies)
        for name in ("network_to_device", "network_to_host", "across_to_device", "across_to_host"):
            values[name] = _either(values[name], causes.staged_network)
    if shared:
        values["to_device_to_host"] = _either(values["to_device_to_host"], causes.shared_copies)
        for name in ("network_to_device", "network_to_host"):
            values[name] = _either(values[name], causes.shared_network)
    copies = "staged" if staged else "direct"
    lanes = "lanes shared with the network" if shared else "a network with links of its own"
    return Interference(**values, source=f"machines with {copies} copies and {lanes}: {RECORD}")


def catalog_interference(cluster: Cluster) -> Interference | None:
    """Coefficients of a cluster of known devices.

    Devices that were measured have their own coefficients, unless the links of the cluster's nodes are described.
    Of others it is assumed that copies are direct, as ours are, from pinned memory, and a link inside the nodes that is
    not faster than PCIe shares their lanes.

    Returns:
        Its coefficients; None for a CPU, whose cores compute, copy and communicate in turns.
    """
    if cluster.device.kind != "cuda":
        return None
    name = canonical_name(cluster.device.name)
    if cluster.intra_node is None and name in MEASURED:
        values = dict(zip(COEFFICIENTS, MEASURED[name], strict=True))
        return Interference(**values, source=f"8 {name} a node: {RECORD}", spread=MEASURED_SPREAD[name])
    return interference_of_kind(staged=False, shared=not has_nvlink(cluster))


def _either(first: float, second: float) -> float:
    return 1.0 - (1.0 - first) * (1.0 - second)
