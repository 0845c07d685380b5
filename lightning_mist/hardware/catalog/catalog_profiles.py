"""A profile of a machine that is not at hand, from the catalog.

* A matrix product of ``f`` operations takes ``OPERATOR_SECONDS + f / (efficiency * peak)``, on devices longer by half a
  wave: results are made in tiles of :data:`TILE` numbers, as many at a time as there are multiprocessors, and of the
  last round about half stay idle (NVIDIA, Matrix Multiplication Background User's Guide, wave quantization). Where the
  limit of power is known to hold large products back, it is the faster rate without it that idle ones diminish.
* What moves ``n`` bytes takes ``KERNEL_SECONDS + n / (efficiency * bandwidth)`` on a device, other kinds of operators
  than element-wise ones at a part of their rate.
* Fused attention in 16 bits computes as :mod:`lightning_mist.hardware.catalog.rates` says.
* Collectives take what :mod:`lightning_mist.hardware.catalog.catalog_profiles` says.
* Inside a node the rate is the efficiency times a device's own line rate; between nodes it is that of the node's
  network times the part of the node's devices that are in the group, as the others are in groups of their own.
* Where collectives of such a machine have been measured, their rates are taken instead, unless the cluster's
  description says otherwise.

* A device copies from and to its host at an efficiency times its own line rate, and all devices of a node together at a
  multiple of it, unless the cluster's description says otherwise.

Its spreads are zero: nothing was measured here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain, product
from math import log2
from typing import Literal, get_args

from lightning_mist.errors import ProfileError
from lightning_mist.hardware.catalog.catalog_device import GIB, CatalogDevice
from lightning_mist.hardware.catalog.devices import SOURCES, find_device
from lightning_mist.hardware.catalog.interference_kinds import catalog_interference
from lightning_mist.hardware.catalog.memory_overheads import has_nvlink
from lightning_mist.hardware.catalog.rates import (
    AMPERE,
    CPU_KERNELS,
    CPU_RATES,
    HOPPER_FLASH2,
    INDEX_BACKWARD,
    INDEX_FORWARD,
    KERNEL_SECONDS,
    TRITON_AMPERE,
    TRITON_HOPPER,
    AttentionKernel,
    attention_rates,
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


# What collectives of catalog machines take: their floor, what large messages take to get going, and their rate.
#
# An operation of payload ``p`` takes ``floor + fill min(1, p / FILL_BYTES) + crossings p / rate``. The floor is what
# NCCL takes for a few bytes, launched from a stream as torch does (no CUDA graph, no symmetric memory). Small messages
# go by protocols of low latency and half the rate (LL, LL128), large ones by one that first fills a pipeline: the two
# lines meet at :data:`FILL_BYTES`. So a rate measured on large messages and a floor measured on small ones both hold.
#
# Sources of figures are names of ``LINK_SOURCES`` of :mod:`lightning_mist.hardware.catalog.catalog_device`; busbw and
# sizes are those of nccl-tests.


CROSSINGS = {"all_gather": 1.0, "reduce_scatter": 1.1, "all_reduce": 2.1}
"""Times ``(n - 1) / n``: how often a payload goes over a link (mist; in theory 1, 1 and 2: nccl-tests,
doc/PERFORMANCE.md). Broadcasts and messages go over once."""

NODE_DOUBLING = 12e-6
"""More floor for each doubling of nodes beyond two: A100s on HDR 33.5, 42.3, 57.3 and 67.9 us among 2 to 16 nodes,
V100s on EDR 18.0, 31.3, 41.4, 56.2 (abci); GH200s on Slingshot 19.4, 30.7, 42.6, 55.4 (alps)."""

RING_STEP = 2.3e-6
"""Floor of gathering and of reducing to shards between nodes, for each rank but one: they go around a ring, where
all-reduce has trees. All-gathers of 16 A100s in two nodes on InfiniBand 35 us, 8 H100 in one 16; four in a node on
Slingshot 65, 250 and 3850 us among 8, 32 and 512, which is 8 us a step (alcf, odissei)."""

SWITCHED_REDUCE = {9: 480 / 450, 10: 840 / 900}
"""All-reduce's busbw beyond four devices of a node whose switch reduces (NVLS), of NVLink's line rate, by major compute
capability: 8 H100 480 GB/s of 450, 7 460, 6 440, but 4 and fewer 367, as rings do (nccl_1455); 8 H200 482
(stas00_net); 8 B200 840 of 900 (gke_a4), 72 GB200 835 (coreweave_nccl)."""

PAIR_OF_NODES, MORE_NODES = 1.6, 0.95
"""All-reduce's busbw of the line rate of a node's network, from compute capability 9.0 on: trees between two nodes send
a payload once, not twice as rings do. Two nodes: GH200 158 GB/s of 100, B200 684 of 400, H100 472 to 487 of 400, where
NVLink's 480 limits (alps, gke_a4, dgx_h100_pair, keita_p5). More nodes: H100 387 of 400 in 8 (coreweave_nccl), GH200 92
of 100 in 4 to 128 (alps)."""

FILL_BYTES = 16 * 2**20
"""Payload from which on :func:`_fill_seconds` are paid whole: all-reduce of 8 H100 takes 22.7 us for 32 KiB, 32.4 for 1
MiB, 59.4 for 4, 90.5 for 8, 136 for 16 (triton_dist_57) and 1120 for 256 (h100_guide), whose last two lie on a line of
480 GB/s that begins at 80 us."""

MEASURED_PER_NODE = 8
"""Devices in each node of the machines whose collectives were measured."""

MEASURED_SHAPES = ((1, 2), (1, 4), (1, 8), *product((2, 4), (1, 2, 4, 8)))
"""Nodes and devices of each in the groups that were measured."""


def _measured(*rows: tuple[tuple[float, float], ...]) -> dict[tuple[int, int], tuple[float, float]]:
    """Rows of one, or of one, two and four nodes, by nodes and devices of each."""
    return dict(zip(MEASURED_SHAPES, chain(*rows), strict=False))


# Rates in GiB/s of the whole payload times (n - 1) / n, and latencies in seconds, of all-gathers by (nodes, devices per
# node), eight devices in each node, all of them communicating (mist). Latencies are what a line through messages of
# many MiB has at zero: on machines with NVLink far above what small messages take, so that there the floors of the
# device count (:attr:`CatalogDevice.intra_node`), while PCIe and TCP have nothing better. The A100s' nodes had a
# network of 100 Gbit/s, not the 400 of the catalog's, so that only what they did inside nodes is here.
MEASURED = {
    "L4": _measured(
        ((2.964, 0.0001), (4.1635, 0.0004), (4.6832, 0.0003)),
        ((0.4895, 0.0045), (0.9791, 0.0076), (1.7183, 0.0), (3.3215, 0.0013)),
        ((0.4609, 0.0102), (0.9195, 0.0008), (1.6759, 0.0045), (2.9659, 0.003)),
    ),
    "A100-40": _measured(((139.0363, 0.0001), (192.6217, 0.0004), (210.306, 0.0004))),
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


@dataclass(frozen=True, slots=True)
class _Path:
    """Seconds of an empty message, bytes per second on the slowest link, and whether large messages take more."""

    floor: float
    rate: float
    fills: bool


def collective_cost(
    cluster: Cluster, device: CatalogDevice, operation: str, num_nodes: int, per_node: int
) -> CollectiveCost:
    """One operation in groups of one shape."""
    size = num_nodes * per_node
    path = _path(cluster, device, num_nodes, per_node)
    rate = path.rate
    if operation == "all_reduce":
        rate = max(rate, _reduced_by_switches(cluster, device, num_nodes, per_node))
    crossings = CROSSINGS[operation] * (size - 1) / size if operation in CROSSINGS else 1.0
    fill = _fill_seconds(cluster, operation, num_nodes) if path.fills else 0.0
    floor = path.floor
    if operation in ("all_gather", "reduce_scatter") and path.fills and not _in_domain(cluster, device, num_nodes):
        floor = max(floor, RING_STEP * (size - 1))
    return CollectiveCost(
        operation=operation,
        group_size=size,
        num_nodes=num_nodes,
        latency_seconds=floor,
        bytes_per_second=rate / crossings,
        spread=0.0,
        fill_seconds=fill,
        fill_bytes=FILL_BYTES if fill else 0.0,
    )


def _fill_seconds(cluster: Cluster, operation: str, num_nodes: int) -> float:
    """What large messages take beyond a floor and their rate.

    All-reduce is a reduction and a gathering one after the other. Inside: 8 H100, as at :data:`FILL_BYTES`, and 4 H100
    64 us; all-gather of 4 H100 10 to 36 us beyond 457 GB/s (odissei). Over PCIe: all-reduce of 4 L40S 27 us beyond 6.4
    GB/s (l40s_ocp). Between nodes: all-reduce of 2 x 8 H200 102 us for 32 MiB, 209 for 512 beyond 259 GB/s (h200_ocp),
    of A100s on HDR 89 for 16 MiB; all-gather of these 29 us for 32 MiB, of 2 x 4 H100 94 for 16 (alcf, odissei).
    """
    if operation == "send_recv":
        return 0.0
    if num_nodes == 1:
        return (6e-5 if operation == "all_reduce" else 2e-5) if has_nvlink(cluster) else 2.5e-5
    return 1.5e-4 if operation == "all_reduce" else 6e-5


def _in_domain(cluster: Cluster, device: CatalogDevice, num_nodes: int) -> bool:
    """Whether so many nodes are connected by the link inside nodes."""
    return num_nodes == 1 or num_nodes * cluster.devices_per_node <= device.nvlink_domain


def _inside(cluster: Cluster, device: CatalogDevice, per_node: int) -> _Path:
    link = cluster.intra_node or device.intra_node
    table = MEASURED.get(device.name)
    if cluster.intra_node is None and table is not None:
        gib_per_second, latency = table[1, _at_most(per_node, {2, 4, 8})]
        is_fitted = not has_nvlink(cluster)
        return _Path(latency if is_fitted else link.latency_seconds, gib_per_second * GIB, not is_fitted)
    return _Path(link.latency_seconds, link.bytes_per_second * device.intra_efficiency, device.kind == "cuda")


def _path(cluster: Cluster, device: CatalogDevice, num_nodes: int, per_node: int) -> _Path:
    """The slowest link that collectives in groups of this shape go over."""
    if num_nodes == 1 or (cluster.inter_node is None and _in_domain(cluster, device, num_nodes)):
        return _inside(cluster, device, num_nodes * per_node)
    described, table = cluster.inter_node, MEASURED.get(device.name, {})
    rows = {row for row, _ in table if row > 1}
    if described is None and rows:
        # What counts is the part of a node that is in the group, so nodes of another size are scaled.
        column = _at_most(per_node * MEASURED_PER_NODE / cluster.devices_per_node, {1, 2, 4, 8})
        gib_per_second, latency = table[_at_most(num_nodes, rows), column]
        return _Path(latency, gib_per_second * GIB, fills=False)
    link = described or device.inter_node
    # A described link inside the nodes may be the slower one.
    inside = cluster.intra_node or device.intra_node
    share = per_node / cluster.devices_per_node * (1.0 if described else _networks(device))
    rate = min(
        link.bytes_per_second * device.inter_efficiency * share, inside.bytes_per_second * device.intra_efficiency
    )
    more = 0.0 if described else NODE_DOUBLING * log2(num_nodes / 2)
    return _Path(link.latency_seconds + more, rate, device.kind == "cuda")


def _networks(device: CatalogDevice) -> float:
    """Networks of nodes that what leaves a domain of NVLink goes over at once.

    Two domains of 72 GB200 reach 810 GB/s, nearly what one does, where a node of 4 has 200 (coreweave_nccl).
    """
    return max(1.0, device.nvlink_domain / device.devices_per_host)


def _reduced_by_switches(cluster: Cluster, device: CatalogDevice, num_nodes: int, per_node: int) -> float:
    """All-reduce's rate where switches or trees make it faster than a ring; 0 where they do not."""
    part = SWITCHED_REDUCE.get(device.capability[0] if device.capability else 0)
    if part is None or not has_nvlink(cluster):
        return 0.0
    # Rates are of a payload that goes over twice; of rings, CROSSINGS knows how much more than twice it is.
    scale = CROSSINGS["all_reduce"] / 2
    inside = (cluster.intra_node or device.intra_node).bytes_per_second * part
    if num_nodes == 1 or (cluster.inter_node is None and _in_domain(cluster, device, num_nodes)):
        return inside * scale if num_nodes * per_node > 4 else 0.0
    share = per_node / cluster.devices_per_node * (1.0 if cluster.inter_node else _networks(device))
    line = (cluster.inter_node or device.inter_node).bytes_per_second * share
    return min(inside, line * (PAIR_OF_NODES if num_nodes == 2 else MORE_NODES)) * scale


def _at_most(value: float, known: set[int]) -> int:
    """The largest known size that is no larger, or the smallest."""
    return max((size for size in known if size <= value), default=min(known))


# Whose kernels a figure is for: torch as this runtime runs it, compiled blocks, or a fused stack such as Megatron's.
#
# A profile of the catalog is for eager torch. :func:`with_stack` makes one for another stack of it. Matrix products and
# collectives are the same in all; what differs:
#
# ========== ================================== ============================================== ======================
# stack      attention                          element-wise operators, copies / reductions    launches
# ========== ================================== ============================================== ======================
# eager      what torch runs on the generation  one kernel for each                            one for each operator
# compiled   the same                           chains in one kernel / a tenth to a third less half as many
# fused      the same                           chains in one kernel / half                    half as many
# flash2     FlashAttention-2 everywhere        as eager                                       as eager
# triton     the Triton kernel of 2023          as eager                                       as eager
# ========== ================================== ============================================== ======================
#
# *Chains.* Seconds of a chain in one kernel, of those of its eager operators, at large sizes (liger): gated SiLU 0.36
# and 0.43 in forward and backward, rotation 0.29 and 0.29, squared ReLU 0.36 and 0.30. Blocks that are compiled get
# kernels of the same kind, from the same compiler. *Reductions.* RMS norms on H200s take 0.76 and 0.90 under
# torch.compile, 0.73 and 0.45 in cuDNN's kernels (norms). *Launches.* A chain has at least two operators.


Stack = Literal["eager", "compiled", "fused", "flash2", "triton"]
"""Names of stacks; see the module."""

STACKS: tuple[Stack, ...] = get_args(Stack)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernels:
    """Parts of what eager operators take, forward and backward."""

    chains: tuple[float, float] = (1.0, 1.0)
    reductions: tuple[float, float] = (1.0, 1.0)
    launches: float = 1.0
    attention: Mapping[int, AttentionKernel] | None = None


_CHAINS = (0.36, 0.30)

_KERNELS: Mapping[Stack, _Kernels] = {
    "eager": _Kernels(),
    "compiled": _Kernels(chains=_CHAINS, reductions=(0.76, 0.90), launches=0.5),
    "fused": _Kernels(chains=_CHAINS, reductions=(0.73, 0.45), launches=0.5),
    # By major compute capability; Ada's consumer boards run FlashAttention-2 anyway.
    "flash2": _Kernels(attention={8: AMPERE, 9: HOPPER_FLASH2}),
    "triton": _Kernels(attention={8: TRITON_AMPERE, 9: TRITON_HOPPER}),
}


def with_stack(profile: HardwareProfile, stack: str) -> HardwareProfile:
    """What a catalog machine is like under a stack.

    Raises:
        ProfileError: If the stack is not known, the profile was measured, or the stack has no attention kernel that was
            measured on the device.
    """
    kernels = _KERNELS.get(stack)  # type: ignore[call-overload]
    if kernels is None:
        raise ProfileError(f"stack = {stack!r}: whose kernels to price is one of {', '.join(STACKS)}")
    if stack == profile.stack:
        return profile
    if profile.stack != "eager" or not profile.source.startswith("catalog"):
        raise ProfileError(
            f"stack = {stack!r}: the profile of {profile.device} ({profile.source[:40]}) is of {profile.stack} "
            "kernels, and others are known of machines of the catalog only; describe the machine, or leave it out"
        )
    return replace(
        profile,
        stack=stack,
        operator_seconds=profile.operator_seconds * kernels.launches,
        rates=tuple(_faster(rate, kernels) for rate in profile.rates),
        kernels=profile.kernels if kernels.attention is None else _attention(profile, stack, kernels.attention),
    )


def _faster(rate: MemoryRate, kernels: _Kernels) -> MemoryRate:
    forward, backward = kernels.reductions if rate.kind == "reduction" else kernels.chains
    if rate.kind == "index":
        return rate
    return replace(
        rate,
        forward_bytes_per_second=tuple(value / forward for value in rate.forward_bytes_per_second),
        backward_bytes_per_second=tuple(value / backward for value in rate.backward_bytes_per_second),
    )


def _attention(profile: HardwareProfile, stack: str, known: Mapping[int, AttentionKernel]) -> tuple[KernelRate, ...]:
    device = find_device(profile.device)
    kernel = known.get(device.capability[0] if device.capability else 0)
    if kernel is None or device.efficiencies.attention is None:
        capabilities = ", ".join(f"{major}.x" for major in known)
        raise ProfileError(
            f"stack = {stack!r}: its attention was measured on devices of compute capability {capabilities}, not on "
            f"{device.name}; use eager"
        )
    peaks = dict(device.peak_flops)
    halves = tuple(dtype for dtype in peaks if dtype in ("float16", "bfloat16"))
    # Kernels of one generation in proportion to the peaks of A100 and H100.
    scale = peaks["float16"] / {8: 312e12, 9: 989e12}[device.capability[0]]  # type: ignore[index]
    return attention_rates(kernel.scaled(scale), halves, device.efficiencies.multiprocessors)
