"""A profile of a machine that is not at hand, from the catalog.

* A matrix product of ``f`` operations takes ``OPERATOR_SECONDS + f / (efficiency * peak)``, on devices longer by half a
  wave: results are made in tiles of :data:`TILE` numbers, as many at a time as there are multiprocessors, and of the
  last round about half stay idle (NVIDIA, Matrix Multiplication Background User's Guide, wave quantization). Where the
  limit of power is known to hold large products back, it is the faster rate without it that idle ones diminish.
* What moves ``n`` bytes takes ``KERNEL_SECONDS + n / (efficiency * bandwidth)`` on a device, other kinds of operators
  than element-wise ones at a part of their rate.
* Fused attention in 16 bits computes as :mod:`lightning_mist.hardware.catalog.attention_kernels` says.
* Collectives take what :mod:`lightning_mist.hardware.catalog.collective_costs` says.
* Inside a node the rate is the efficiency times a device's own line rate; between nodes it is that of the node's
  network times the part of the node's devices that are in the group, as the others are in groups of their own.
* Where collectives of such a machine have been measured, their rates are taken instead, unless the cluster's
  description says otherwise.

* A device copies from and to its host at an efficiency times its own line rate, and all devices of a node together at a
  multiple of it, unless the cluster's description says otherwise.

Its spreads are zero: nothing was measured here.
"""

from lightning_mist.hardware.catalog.attention_kernels import attention_rates
from lightning_mist.hardware.catalog.catalog_device import CatalogDevice
from lightning_mist.hardware.catalog.collective_costs import collective_cost
from lightning_mist.hardware.catalog.devices import SOURCES, find_device
from lightning_mist.hardware.catalog.interference_kinds import catalog_interference
from lightning_mist.hardware.catalog.rates import (
    CPU_KERNELS,
    CPU_RATES,
    INDEX_BACKWARD,
    INDEX_FORWARD,
    KERNEL_SECONDS,
)
from lightning_mist.hardware.cluster import Cluster, HostLink
from lightning_mist.hardware.groups import group_shapes
from lightning_mist.hardware.profile import (
    OPERATIONS,
    ComputeRate,
    HardwareProfile,
    KernelRate,
    MemoryRate,
)

DISPATCH_SECONDS = 2.3e-6
"""Launching one operator on a CPU from Python, autograd recording ("measured" in the catalog's sources)."""

OPERATOR_SECONDS = 7.3e-6
"""The same on a device: 5 us more for submitting a kernel (susun-blog.com, pegainfer part 3: 4 to 6)."""

MATMUL_EDGES = (256, 512, 1024, 2048, 4096, 8192)
"""Edges of the square products whose rates are listed."""

TILE = 256 * 128
"""Numbers of a result that a multiprocessor makes at a time; the most efficient tile (same guide)."""

MEMORY_SIZES = tuple(float(2**power) for power in range(12, 33, 2))
"""Bytes per operator whose rates are listed."""


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
            collective_cost(cluster, device, operation, num_nodes, per_node)
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
            ("reduction", *device.efficiencies.reduction),
            ("index", INDEX_FORWARD, INDEX_BACKWARD),
            ("copy", 1.0, 1.0),
        )
    )


def _kernel_rates(device: CatalogDevice) -> tuple[KernelRate, ...]:
    """Of fused attention in 16 bits, the only precision whose rates are published."""
    kernel = device.efficiencies.attention
    halves = tuple(dtype for dtype, _ in device.peak_flops if dtype in ("float16", "bfloat16"))
    return () if kernel is None else attention_rates(kernel, halves, device.efficiencies.multiprocessors)
