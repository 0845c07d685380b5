"""A profile of a machine that is not at hand, from the catalog.

* A matrix product of ``f`` operations takes ``OPERATOR_SECONDS + f / (efficiency * peak)``, on devices longer by half a
  wave: results are made in tiles of :data:`TILE` numbers, as many at a time as there are multiprocessors, and of the
  last round about half stay idle (NVIDIA, Matrix Multiplication Background User's Guide, wave quantization). Where the
  limit of power is known to hold large products back, it is the faster rate without it that idle ones diminish.
* What moves ``n`` bytes takes ``KERNEL_SECONDS + n / (efficiency * bandwidth)`` on a device, other kinds of operators
  than element-wise ones at a part of their rate.
* Fused attention in 16 bits computes at a part of the peak of its own.
* A collective of payload ``p`` among ``n`` ranks takes ``latency + crossings(n) * p / rate``; ``crossings`` says how
  often the payload goes over a link.
* Inside a node the rate is the efficiency times a device's own line rate; between nodes it is that of the node's
  network times the part of the node's devices that are in the group, as the others are in groups of their own.
* Where collectives of such a machine have been measured (:data:`MEASURED`), their rates and latencies are taken
  instead, unless the cluster's description says otherwise.

* A device copies from and to its host at an efficiency times its own line rate, and all devices of a node together at a
  multiple of it, unless the cluster's description says otherwise.

Its spreads are zero: nothing was measured here.
"""

from itertools import chain, product

from lightning_mist.hardware.catalog.devices import SOURCES, CatalogDevice, find_device
from lightning_mist.hardware.catalog.interference_kinds import catalog_interference
from lightning_mist.hardware.catalog.rates import (
    CPU_KERNELS,
    CPU_RATES,
    INDEX_BACKWARD,
    INDEX_FORWARD,
    KERNEL_SECONDS,
    REDUCTION_BACKWARD,
)
from lightning_mist.hardware.cluster import Cluster, HostLink
from lightning_mist.hardware.groups import group_shapes
from lightning_mist.hardware.profile import (
    OPERATIONS,
    CollectiveCost,
    ComputeRate,
    HardwareProfile,
    KernelRate,
    MemoryRate,
)

DISPATCH_SECONDS = 2.3e-6
"""Launching one operator on a CPU from Python, autograd recording ("measured" in the catalog's sources)."""

OPERATOR_SECONDS = 7.3e-6
"""The same on a device: 5 us more for submitting a kernel (susun-blog.com, pegainfer part 3: 4 to 6)."""

CROSSINGS = {"all_gather": 1.0, "reduce_scatter": 1.1, "all_reduce": 2.1}
"""Times ``(n - 1) / n``: how often a payload goes over a link (mist; in theory 1, 1 and 2: nccl-tests,
doc/PERFORMANCE.md). Broadcasts and messages go over once."""

MATMUL_EDGES = (256, 512, 1024, 2048, 4096, 8192)
"""Edges of the square products whose rates are listed."""

TILE = 256 * 128
"""Numbers of a result that a multiprocessor makes at a time; the most efficient tile (same guide)."""

MEMORY_SIZES = tuple(float(2**power) for power in range(12, 33, 2))
"""Bytes per operator whose rates are listed."""

MEASURED_PER_NODE = 8
"""Devices in each node of the machines whose collectives were measured."""

GIB = 2**30

MEASURED_SHAPES = ((1, 2), (1, 4), (1, 8), *product((2, 4), (1, 2, 4, 8)))
"""Nodes and devices of each in the groups that were measured."""


def _measured(*rows: tuple[tuple[float, float], ...]) -> dict[tuple[int, int], tuple[float, float]]:
    """Rows of one, two and four nodes, by nodes and devices of each."""
    return dict(zip(MEASURED_SHAPES, chain(*rows), strict=True))


# Rates in GiB/s of the whole payload times (n - 1) / n, and latencies in seconds, of all-gathers by (nodes, devices per
# node), eight devices in each node, all of them communicating (mist).
MEASURED = {
    "L4": _measured(
        ((2.964, 0.0001), (4.1635, 0.0004), (4.6832, 0.0003)),
        ((0.4895, 0.0045), (0.9791, 0.0076), (1.7183, 0.0), (3.3215, 0.0013)),
        ((0.4609, 0.0102), (0.9195, 0.0008), (1.6759, 0.0045), (2.9659, 0.003)),
    ),
    "A100-40": _measured(
        ((139.0363, 0.0001), (192.6217, 0.0004), (210.306, 0.0004)),
        ((1.2972, 0.0015), (2.6049, 0.0015), (5.4178, 0.0014), (10.7032, 0.001)),
        ((1.2526, 0.002), (2.4864, 0.0021), (5.2995, 0.0022), (10.6044, 0.0019)),
    ),
    "V100-16": _measured(
        ((57.361, 0.0004), (46.608, 0.0003), (119.5433, 0.0002)),
        ((0.4485, 0.0006), (0.8981, 0.0012), (1.545, 0.0), (2.9385, 0.0)),
        ((0.4493, 0.001), (0.7754, 0.0025), (1.4927, 0.0), (2.9449, 0.0)),
    ),
    "V100-32": _measured(
        ((15.6803, 0.0007), (40.2922, 0.0), (50.6314, 0.0)),
        ((0.9767, 0.0007), (2.5278, 0.0046), (4.9768, 0.003), (9.694, 0.0025)),
        ((1.1313, 0.0063), (2.2718, 0.0027), (4.5509, 0.0033), (9.737, 0.0049)),
    ),
}


def catalog_profile(cluster: Cluster) -> HardwareProfile:
    """The profile that a cluster of known devices should have.

    Returns:
        The profile, with collectives of every shape of group in
        :func:`~lightning_mist.hardware.groups.group_shapes`.
    """
    device = find_device(cluster.device.name)
    launch = OPERATOR_SECONDS if device.kind == "cuda" else DISPATCH_SECONDS
    host = cluster.host or _host(device)
    return HardwareProfile(
        device=device.name,
        source="catalog: " + "; ".join(SOURCES[name] for name in device.sources),
        compute=tuple(_compute(device, dtype, peak, launch) for dtype, peak in device.peak_flops),
        memory_bytes_per_second=device.memory_bytes_per_second * device.efficiencies.memory,
        operator_seconds=launch,
        collectives=tuple(
            _collective(cluster, device, operation, num_nodes, per_node)
            for num_nodes, per_node in group_shapes(cluster)
            for operation in OPERATIONS
            if operation != "send_recv" or num_nodes * per_node == 2
        ),
        host_to_device_bytes_per_second=host.to_device_bytes_per_second if host else 0.0,
        device_to_host_bytes_per_second=host.to_host_bytes_per_second if host else 0.0,
        host_bytes_per_second_per_node=host.node_bytes_per_second if host else 0.0,
        rates=_memory_rates(device) if device.kind == "cuda" else CPU_RATES,
        kernels=_kernel_rates(device) if device.kind == "cuda" else CPU_KERNELS,
        interference=catalog_interference(cluster),
    )


def _host(device: CatalogDevice) -> HostLink | None:
    """What the catalog says of a device's copies; ``None`` of one that has no host beside it."""
    if device.host_bytes_per_second == 0.0:
        return None
    alone = device.host_bytes_per_second * device.host_efficiency
    return HostLink(
        to_device_bytes_per_second=alone,
        to_host_bytes_per_second=alone,
        node_bytes_per_second=device.host_bytes_per_second * device.host_node_efficiency,
    )


def _compute(device: CatalogDevice, dtype: str, peak: float, launch: float) -> ComputeRate:
    flops = tuple(2.0 * edge**3 for edge in MATMUL_EDGES)
    efficiency = device.efficiencies.single if dtype == "float32" else device.efficiencies.matmul
    burst = max(efficiency, 0.0 if dtype == "float32" else device.efficiencies.burst)
    rates = tuple(
        count / (launch + count / (min(efficiency, burst * _filled(device, edge)) * peak))
        for edge, count in zip(MATMUL_EDGES, flops, strict=True)
    )
    return ComputeRate(dtype=dtype, flops=flops, flops_per_second=rates, spread=0.0)


def _filled(device: CatalogDevice, edge: int) -> float:
    """Part of a device at work in square products of an edge, as against those that efficiencies are about."""

    def part(size: int) -> float:
        return 1 / (1 + TILE * device.efficiencies.multiprocessors / (2 * size**2))

    return min(1.0, part(edge) / part(MATMUL_EDGES[-1]))


def _memory_rates(device: CatalogDevice) -> tuple[MemoryRate, ...]:
    large = device.memory_bytes_per_second * device.efficiencies.memory

    def at(part: float) -> tuple[float, ...]:
        return tuple(size / (KERNEL_SECONDS + size / (part * large)) for size in MEMORY_SIZES)

    return tuple(
        MemoryRate(
            kind=kind,
            bytes=MEMORY_SIZES,
            forward_bytes_per_second=at(forward),
            backward_bytes_per_second=at(backward),
            spread=0.0,
        )
        for kind, forward, backward in (
            ("elementwise", 1.0, 1.0),
            ("reduction", 1.0, REDUCTION_BACKWARD),
            ("index", INDEX_FORWARD, INDEX_BACKWARD),
            ("copy", 1.0, 1.0),
        )
    )


def _kernel_rates(device: CatalogDevice) -> tuple[KernelRate, ...]:
    """Of fused attention in 16 bits, the only precision whose rates are published."""
    return tuple(
        KernelRate(
            kind=kind,
            dtype=dtype,
            forward_flops_per_second=forward * peak,
            backward_flops_per_second=backward * peak,
            spread=0.0,
        )
        for dtype, peak in device.peak_flops
        if dtype in ("float16", "bfloat16")
        for kind, (forward, backward) in (
            ("attention", device.efficiencies.attention),
            ("causal_attention", device.efficiencies.causal),
        )
    )


def _collective(
    cluster: Cluster, device: CatalogDevice, operation: str, num_nodes: int, per_node: int
) -> CollectiveCost:
    size = num_nodes * per_node
    rate, latency = _link(cluster, device, num_nodes, per_node)
    crossings = CROSSINGS[operation] * (size - 1) / size if operation in CROSSINGS else 1.0
    return CollectiveCost(
        operation=operation,
        group_size=size,
        num_nodes=num_nodes,
        latency_seconds=latency,
        bytes_per_second=rate / crossings,
        spread=0.0,
    )


def _link(cluster: Cluster, device: CatalogDevice, num_nodes: int, per_node: int) -> tuple[float, float]:
    """Bytes per second that collectives in groups of this shape reach on the slowest link, and the latency."""
    described = cluster.intra_node if num_nodes == 1 else cluster.inter_node
    table = MEASURED.get(device.name)
    if described is None and table is not None:
        # Between nodes what counts is the part of a node that is in the group, so nodes of another size are scaled.
        column = per_node if num_nodes == 1 else per_node * MEASURED_PER_NODE / cluster.devices_per_node
        shape = (
            _at_most(num_nodes, {row for row, _ in table}),
            _at_most(column, {2, 4, 8} if num_nodes == 1 else {1, 2, 4, 8}),
        )
        gib_per_second, latency = table[shape]
        return gib_per_second * GIB, latency
    if num_nodes == 1:
        link = described or device.intra_node
        return link.bytes_per_second * device.intra_efficiency, link.latency_seconds
    link = described or device.inter_node
    share = per_node / cluster.devices_per_node
    # A described link inside the nodes may be the slower one.
    inside = cluster.intra_node or device.intra_node
    rate = min(
        link.bytes_per_second * device.inter_efficiency * share, inside.bytes_per_second * device.intra_efficiency
    )
    return rate, link.latency_seconds


def _at_most(value: float, known: set[int]) -> int:
    """The largest known size that is no larger, or the smallest."""
    return max((size for size in known if size <= value), default=min(known))
