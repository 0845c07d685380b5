"""Devices that need not be at hand: what vendors and measurements say of them.

Every figure has its source beside it or in :data:`SOURCES`.
:mod:`lightning_mist.hardware.catalog.catalog_profiles` makes a profile of them.
"""

import difflib
import re
from dataclasses import dataclass
from functools import partial

from lightning_mist.errors import ProfileError
from lightning_mist.hardware.catalog.rates import EFFICIENCIES, RATE_SOURCES, Efficiencies
from lightning_mist.hardware.cluster import Cluster, Link

SOURCES = {
    "datasheet": "NVIDIA data sheets and whitepapers of the device; dense rates, without structured sparsity",
    "mist": "Mist artifact, github.com/Dazz993/Mist at d69e530, Apache-2.0: collectives, copies, operators",
    "mamf": "S. Bekman, ml-engineering, compute/accelerator: Maximum Achievable Matmul FLOPS",
    "nccl": "S. Jeaugey in github.com/NVIDIA/nccl-tests issue 212: NVLink's protocol costs a fifth of its rate",
    "ec2": "AWS EC2 instance types: g4dn.metal, g5.48xlarge, g6.48xlarge, p3, p4d, p4de, p5, p5e, p6-b200",
    "mli": "github.com/mli/transformers-benchmarks issue 4: RTX 4090 and A800 matrix products and memory bandwidth",
    "calculon": "github.com/calculon-ai/calculon, systems/a100_80g.json: network efficiencies and latencies",
    "measured": "this project, 2 processes on 2 cores of a virtual AMD EPYC: python -m benchmarks.hardware.profile",
    **RATE_SOURCES,
}
"""Where figures come from, by the name used in comments and in a profile's ``source``."""

GB = 1e9
GIB = 2**30
GBIT = 1e9 / 8

INTRA_NODE_LATENCY, INTER_NODE_LATENCY = 3e-4, 1.95e-3
"""Medians of the latencies fitted to measurements of four machines, inside and between nodes (mist)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogDevice:
    """One kind of device.

    Attributes:
        capability: CUDA's compute capability, from NVIDIA's table at developer.nvidia.com/cuda-gpus.
        memory_bytes: Memory that a program sees; None where it depends on the host.
        peak_flops: Peak FLOP/s by element type; ``float32`` without tensor cores, ``tfloat32`` with them.
        intra_node: What one device sends inside a node, one direction.
        inter_node: What one node sends, as rented or built most often.
        host_bytes_per_second: Line rate to the host, one direction; 0 for the host itself.
        host_efficiency: Part of it that copies of one device reach while the others do not copy.
        host_node_efficiency: What all devices of a node together reach, as a multiple of one device's line rate.
        host_memory_bytes: Memory of the host for each of a node's devices, as rented or built most often: smaller nodes
            are rented as parts of such hosts. None where the device's memory is the host's.
    """

    name: str
    cuda_names: tuple[str, ...]
    capability: tuple[int, int] | None
    memory_bytes: int | None
    peak_flops: tuple[tuple[str, float], ...]
    memory_bytes_per_second: float
    efficiencies: Efficiencies
    intra_node: Link
    intra_efficiency: float
    inter_node: Link
    inter_efficiency: float
    host_bytes_per_second: float
    host_efficiency: float
    host_node_efficiency: float
    host_memory_bytes: int | None
    sources: tuple[str, ...]

    @property
    def kind(self) -> str:
        """``"cpu"`` or ``"cuda"``."""
        return "cuda" if self.host_bytes_per_second else "cpu"


def _flops(
    float32: float, tfloat32: float | None, float16: float, bfloat16: float | None
) -> tuple[tuple[str, float], ...]:
    teras = {"float32": float32, "tfloat32": tfloat32, "float16": float16, "bfloat16": bfloat16}
    return tuple((name, tera * 1e12) for name, tera in teras.items() if tera is not None)


def _intra(gigabytes: float) -> Link:
    return Link(bytes_per_second=gigabytes * GB, latency_seconds=INTRA_NODE_LATENCY)


def _inter(gigabits: float) -> Link:
    return Link(bytes_per_second=gigabits * GBIT, latency_seconds=INTER_NODE_LATENCY)


PCIE3, PCIE4, PCIE5 = 15.75 * GB, 31.5 * GB, 63.0 * GB
"""Sixteen lanes, one direction: 8, 16, 32 GT/s per lane, 128b/130b coding (PCI-SIG)."""

PCIE_EFFICIENCY = 0.16
"""All-gather among 8 L4s reaches 4.68 GiB/s of PCIe 4 (mist)."""

NVLINK_EFFICIENCY = 0.80
"""A100 0.75, V100-16 0.86 of the line rate in all-gathers among 8 (mist); 0.82 on H100 (nccl)."""

NETWORK_EFFICIENCY = 0.9
"""Calculon's; the V100s of mist reach 0.83 of 100 Gbit/s (32 GB) and all of 25 Gbit/s (16 GB)."""

HOST_EFFICIENCY = 0.80
"""A100 25.1 GB/s of PCIe 4 (github.com/NVIDIA/nvbandwidth issue 42), RTX 4090 24 to 26 (issue 15), H100 52.8 GB/s of
PCIe 5 to the host (issue 24)."""

HOST_NODE_EFFICIENCY = 1.52
"""Eight devices copying at once: L4 5.75, A100 5.36 GiB/s each of PCIe 4; V100 5.75 and 2.87 of PCIe 3 (mist), which is
0.19 of the line rate of each. Sixteen V100s of a DGX-2 get 3.0 GB/s each, 48 together (Rajbhandari et al.,
ZeRO-Infinity, 2021, figure 2b)."""


DEVICES_PER_HOST = 8
"""Devices in each of the nodes whose host memory is listed (ec2; AWS Batch user guide, GPU jobs)."""


def _device(
    name: str,
    cuda_name: str,
    *,
    capability: tuple[int, int],
    memory: float,
    flops: tuple[tuple[str, float], ...],
    bandwidth: float,
    pcie: float,
    host: float,
    nvlink: float | None = None,
    network: float = 100,
    sources: tuple[str, ...] = ("mist", "ec2"),
) -> CatalogDevice:
    """An NVIDIA device with the figures of its class; by default a PCIe board of a data centre.

    Bandwidth and NVLink (in one direction) in GB/s, a node's network in Gbit/s, and its host's memory in GiB.
    """
    efficiencies = EFFICIENCIES[name]
    return CatalogDevice(
        name=name,
        cuda_names=(cuda_name,),
        capability=capability,
        memory_bytes=int(memory),
        peak_flops=flops,
        memory_bytes_per_second=bandwidth * GB,
        efficiencies=efficiencies,
        intra_node=_intra(pcie / GB if nvlink is None else nvlink),
        intra_efficiency=PCIE_EFFICIENCY if nvlink is None else NVLINK_EFFICIENCY,
        inter_node=_inter(network),
        inter_efficiency=NETWORK_EFFICIENCY,
        host_bytes_per_second=pcie,
        host_efficiency=HOST_EFFICIENCY,
        host_node_efficiency=HOST_NODE_EFFICIENCY,
        host_memory_bytes=int(host / DEVICES_PER_HOST * GIB),
        sources=("datasheet", *dict.fromkeys((*efficiencies.sources, *sources))),
    )


_module = partial(_device, sources=("mist", "nccl", "ec2"))  # an SXM module with NVLink
_volta = partial(_module, capability=(7, 0), flops=_flops(15.7, None, 125, None), bandwidth=900, pcie=PCIE3, nvlink=150)
_ampere = partial(
    _module, capability=(8, 0), flops=_flops(19.5, 156, 312, 312), pcie=PCIE4, nvlink=300, network=400, host=1152
)
_hopper = partial(
    _module, capability=(9, 0), flops=_flops(67, 494.5, 989, 989), pcie=PCIE5, nvlink=450, network=3200, host=2048
)
# A GeForce card in a workstation: no peer-to-peer copies, 10 Gbit/s Ethernet. Memory as torch reports it on an RTX 4090
# (github.com/Soul-AILab/SoulX-FlashTalk issue 5); 128 GB beside two RTX 3090, about twice theirs (Puget Systems,
# hardware recommendations for machine learning).
_geforce = partial(_device, memory=23.52 * GIB, pcie=PCIE4, network=10, host=64 * DEVICES_PER_HOST, sources=("mist",))

DEVICES: tuple[CatalogDevice, ...] = (
    # Memory as the Mist artifact configures it.
    _device(
        "L4",
        "NVIDIA L4",
        capability=(8, 9),
        memory=22.488 * GIB,
        flops=_flops(30.3, 60, 121, 121),
        bandwidth=300,
        pcie=PCIE4,
        host=768,
    ),
    # Memory as torch reports it on an A10: github.com/zai-org/CogVLM issue 236. Rates: AWS's data sheet of the A10G.
    _device(
        "A10G",
        "NVIDIA A10G",
        capability=(8, 6),
        memory=21.99 * GIB,
        flops=_flops(35, 35, 70, 70),
        bandwidth=600,
        pcie=PCIE4,
        host=768,
    ),
    # Memory as torch reports it.
    _device(
        "T4",
        "Tesla T4",
        capability=(7, 5),
        memory=15102 * 2**20,
        flops=_flops(8.1, None, 65, None),
        bandwidth=320,
        pcie=PCIE3,
        host=384,
    ),
    # Memory: github.com/meta-llama/llama issue 918; the 32 GB module has twice that.
    _volta("V100-16", "Tesla V100-SXM2-16GB", memory=15.77 * GIB, network=25, host=488),
    _volta("V100-32", "Tesla V100-SXM2-32GB", memory=31.54 * GIB, network=100, host=768),
    # Memory: github.com/bottlerocket-os/bottlerocket pull request 3873; the 80 GB module has twice that.
    _ampere("A100-40", "NVIDIA A100-SXM4-40GB", memory=42298834944, bandwidth=1555),
    _ampere("A100-80", "NVIDIA A100-SXM4-80GB", memory=2 * 42298834944, bandwidth=2039),
    # Memory: github.com/vllm-project/vllm issue 27508.
    _hopper("H100", "NVIDIA H100 80GB HBM3", memory=79.11 * GIB, bandwidth=3350),
    # Memory as sold; what a program sees is a little more.
    _hopper("H200", "NVIDIA H200", memory=141 * GB, bandwidth=4800),
    # Memory and its 7.672 TB/s: github.com/pytorch/ao pull request 4002.
    _module(
        "B200",
        "NVIDIA B200",
        capability=(10, 0),
        memory=178.35 * GIB,
        flops=_flops(80, 1125, 2250, 2250),
        bandwidth=7672,
        pcie=PCIE5,
        nvlink=900,
        network=3200,
        host=2048,
    ),
    _geforce("RTX3090", "NVIDIA GeForce RTX 3090", capability=(8, 6), flops=_flops(35.6, 35.6, 71, 71), bandwidth=936),
    _geforce(
        "RTX4090", "NVIDIA GeForce RTX 4090", capability=(8, 9), flops=_flops(82.6, 82.6, 165.2, 165.2), bandwidth=1008
    ),
    # One process per core, rates measured and so without efficiencies; the link is the median of the rates that
    # the measured collectives between two processes imply; Ethernet as above.
    CatalogDevice(
        name="cpu",
        cuda_names=(),
        capability=None,
        memory_bytes=None,
        peak_flops=(("float32", 117e9), ("bfloat16", 490e9)),
        memory_bytes_per_second=20 * GB,
        efficiencies=EFFICIENCIES["cpu"],
        intra_node=Link(bytes_per_second=2.4 * GB, latency_seconds=1.5e-4),
        intra_efficiency=1.0,
        inter_node=_inter(10),
        inter_efficiency=NETWORK_EFFICIENCY,
        host_bytes_per_second=0.0,
        host_efficiency=0.0,
        host_node_efficiency=0.0,
        host_memory_bytes=None,
        sources=("measured", "calculon"),
    ),
)
"""The known devices."""


def find_device(name: str) -> CatalogDevice:
    """The device of a name, spelled with or without maker, spaces and dashes.

    Args:
        name: For example ``"L4"``, ``"A100-40GB"`` or ``"rtx 4090"``, or CUDA's name of the device.

    Raises:
        ProfileError: If there is none; the message names the nearest.
    """
    wanted = _plain(name)
    known = {_plain(alias): device for device in DEVICES for alias in (device.name, *device.cuda_names)}
    if wanted in known:
        return known[wanted]
    near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.3)
    hint = f"the nearest is {known[near[0]].name}" if near else "measure it with measure_profile()"
    raise ProfileError(
        f"device {name!r} is not in the catalog, which has {', '.join(device.name for device in DEVICES)}: {hint}"
    )


def canonical_name(cuda_name: str) -> str:
    """The catalog's name of a device that CUDA names, or CUDA's if the catalog does not have it."""
    for device in DEVICES:
        if cuda_name in device.cuda_names:
            return device.name
    return cuda_name.removeprefix("NVIDIA ")


def _plain(name: str) -> str:
    letters = re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia").removeprefix("geforce")
    return letters.removesuffix("gb")


def host_memory(cluster: Cluster) -> int | None:
    """Bytes of memory that the host of each node has.

    Where the cluster does not say it, this is the catalog's memory for each device times the devices of a node.
    """
    if cluster.host_memory_bytes is not None:
        return cluster.host_memory_bytes
    try:
        each = find_device(cluster.device.name).host_memory_bytes
    except ProfileError:  # The catalog does not have the device.
        return None
    return None if each is None else each * cluster.devices_per_node


def capability_of(device: str) -> tuple[int, int] | None:
    """The compute capability of a device; None where it is not known, as for CPUs."""
    try:
        return find_device(device).capability
    except ProfileError:
        return None
