"""Devices that need not be at hand: what vendors and measurements say of them.

Every figure has its source beside it or in :data:`SOURCES`.
:mod:`lightning_mist.hardware.catalog.catalog_profiles` makes a profile of them.
"""

import difflib
import re
from functools import cache, partial

from lightning_mist.errors import ProfileError
from lightning_mist.hardware.catalog.catalog_device import (
    AMPERE_FLOOR,
    DEVICES_PER_HOST,
    EFA_FLOOR,
    GB,
    GBIT,
    GIB,
    GRACE_FLOOR,
    HOPPER_FLOOR,
    INFINIBAND_FLOOR,
    LINK_SOURCES,
    NETWORK_EFFICIENCY,
    PCIE3,
    PCIE4,
    PCIE5,
    PCIE5_EFFICIENCY,
    SWITCHED_PCIE,
    VOLTA_FLOOR,
    CatalogDevice,
    board,
    peak_flops_of,
)
from lightning_mist.hardware.catalog.rates import EFFICIENCIES, RATE_SOURCES
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
    **LINK_SOURCES,
}
"""Where figures come from, by the name used in comments and in a profile's ``source``."""

_module = partial(board, sources=("mist", "nccl", "ec2"))  # an SXM module with NVLink
_volta = partial(
    _module,
    capability=(7, 0),
    flops=peak_flops_of(15.7, None, 125, None),
    bandwidth=900,
    pcie=PCIE3,
    nvlink=150,
    floor=VOLTA_FLOOR,
)
_ampere = partial(
    _module,
    capability=(8, 0),
    flops=peak_flops_of(19.5, 156, 312, 312),
    pcie=PCIE4,
    nvlink=300,
    network=400,
    floor=AMPERE_FLOOR,
    network_floor=1.77e-4,  # p4d's EFA, as at EFA_FLOOR
    host=1152,
)
_hopper = partial(
    _module,
    capability=(9, 0),
    flops=peak_flops_of(67, 494.5, 989, 989),
    pcie=PCIE5,
    nvlink=450,
    network=3200,
    floor=HOPPER_FLOOR,
    network_floor=EFA_FLOOR,
    host=2048,
)
# Superchips: the host's memory is behind NVLink-C2C, 450 GB/s in one direction; nodes of four with a network adapter
# each.
_superchip = partial(_hopper, link=450, per_host=4, host=4 * 480, floor=GRACE_FLOOR, network_floor=INFINIBAND_FLOOR)
# A GeForce card in a workstation: no peer-to-peer copies, 10 Gbit/s Ethernet. Memory as torch reports it on an RTX 4090
# (github.com/Soul-AILab/SoulX-FlashTalk issue 5); 128 GB beside two RTX 3090, about twice theirs (Puget Systems,
# hardware recommendations for machine learning).
_geforce = partial(board, memory=23.52 * GIB, pcie=PCIE4, network=10, host=64 * DEVICES_PER_HOST, sources=("mist",))

# A professional card in a workstation: 10 Gbit/s Ethernet, memory beside it as beside a GeForce card.
_workstation = partial(board, network=10, host=64 * DEVICES_PER_HOST, sources=())

DEVICES: tuple[CatalogDevice, ...] = (
    # Memory as the Mist artifact configures it.
    board(
        "L4",
        "NVIDIA L4",
        capability=(8, 9),
        memory=22.488 * GIB,
        flops=peak_flops_of(30.3, 60, 121, 121),
        bandwidth=300,
        pcie=PCIE4,
        host=768,
    ),
    # Memory as torch reports it on an A10: github.com/zai-org/CogVLM issue 236. Rates: AWS's data sheet of the A10G.
    board(
        "A10G",
        "NVIDIA A10G",
        capability=(8, 6),
        memory=21.99 * GIB,
        flops=peak_flops_of(35, 35, 70, 70),
        bandwidth=600,
        pcie=PCIE4,
        host=768,
    ),
    # Memory as torch reports it.
    board(
        "T4",
        "Tesla T4",
        capability=(7, 5),
        memory=15102 * 2**20,
        flops=peak_flops_of(8.1, None, 65, None),
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
        flops=peak_flops_of(80, 1125, 2250, 2250),
        bandwidth=7672,
        pcie=PCIE5,
        nvlink=900,
        network=3200,
        floor=HOPPER_FLOOR,
        network_floor=5.1e-5,  # p6-b200's EFA, as at EFA_FLOOR
        host=2048,
    ),
    # Memory: github.com/Lightning-AI/litgpt issue 1892; NVLink and 200 Gbit/s of Slingshot for each device (alps).
    _superchip("GH200", "NVIDIA GH200 480GB", memory=94.88 * GIB, bandwidth=4000, network=800),
    # 186 of 192 GB are used; 372 GB, 16 TB/s, 10 PFLOP/s with sparsity in 16 bits for two (data sheet of the GB200
    # NVL72). 400 Gbit/s of InfiniBand for each device (coreweave_nccl).
    _superchip(
        "GB200",
        "NVIDIA GB200",
        capability=(10, 0),
        memory=186 * GB,
        flops=peak_flops_of(80, 1250, 2500, 2500),
        bandwidth=8000,
        nvlink=900,
        network=1600,
        domain=72,
        host=4 * 240,
    ),
    # Memory as torch reports it: github.com/stepfun-ai/Step-Video-T2V issue 8.
    board(
        "L40S",
        "NVIDIA L40S",
        capability=(8, 9),
        memory=44.42 * GIB,
        flops=peak_flops_of(91.6, 183, 362.05, 362.05),
        bandwidth=864,
        pcie=PCIE4,
        shared=SWITCHED_PCIE,
        host=1536,
        sources=("ec2",),
    ),
    # Half of the tensor cores' 309.7 TFLOP/s, which are with sparsity. Of its 48 GB as much as torch reports of 16 GB
    # of the same generation, 15.61 GiB (github.com/DengKaiCQ/VGGT-Long issue 6). NVLink bridges are for pairs alone.
    _workstation(
        "A6000",
        "NVIDIA RTX A6000",
        capability=(8, 6),
        memory=46.83 * GIB,
        flops=peak_flops_of(38.7, 77.4, 154.8, 154.8),
        bandwidth=768,
        pcie=PCIE4,
        shared=SWITCHED_PCIE,
    ),
    # An eighth of the 4000 TOPS in 4 bits with sparsity. Memory: github.com/antirez/ds4 issue 431.
    _workstation(
        "RTXPRO6000",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        host=128 * DEVICES_PER_HOST,
        capability=(12, 0),
        memory=94.97 * GIB,
        flops=peak_flops_of(125, 250, 500, 500),
        bandwidth=1792,
        pcie=PCIE5,
        shared=PCIE5_EFFICIENCY,
    ),
    _geforce(
        "RTX3090", "NVIDIA GeForce RTX 3090", capability=(8, 6), flops=peak_flops_of(35.6, 35.6, 71, 71), bandwidth=936
    ),
    _geforce(
        "RTX4090",
        "NVIDIA GeForce RTX 4090",
        capability=(8, 9),
        flops=peak_flops_of(82.6, 82.6, 165.2, 165.2),
        bandwidth=1008,
    ),
    # A sixteenth of the 3352 TOPS in 4 bits with sparsity: products in 16 bits that add up in 32 have half of the rate
    # that those have that add up in 16. Memory: github.com/Wan-Video/Wan2.1 issue 465.
    _geforce(
        "RTX5090",
        "NVIDIA GeForce RTX 5090",
        capability=(12, 0),
        memory=31.37 * GIB,
        flops=peak_flops_of(104.8, 104.8, 209.5, 209.5),
        bandwidth=1792,
        pcie=PCIE5,
        shared=PCIE5_EFFICIENCY,
        sources=(),
    ),
    # The board with 16 GB, memory as at the A6000; 36 multiprocessors at 2572 MHz, eight lanes of PCIe 5 (techpowerup's
    # review). Its 759 TOPS as above: what the RTX 5060's 614 are for 30 at 2497 MHz.
    _geforce(
        "RTX5060Ti",
        "NVIDIA GeForce RTX 5060 Ti",
        capability=(12, 0),
        memory=15.61 * GIB,
        flops=peak_flops_of(23.7, 23.7, 47.4, 47.4),
        bandwidth=448,
        pcie=PCIE5 / 2,
        shared=PCIE5_EFFICIENCY,
        sources=(),
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
        # As TCP between nodes fits large messages (mist).
        inter_node=Link(bytes_per_second=10 * GBIT, latency_seconds=1.95e-3),
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
    wanted, known = _plain(name), _known()
    if wanted in known:
        return known[wanted]
    near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.3)
    hint = f"the nearest is {known[near[0]].name}" if near else "measure it with measure_profile()"
    raise ProfileError(
        f"device {name!r} is not in the catalog, which has {', '.join(device.name for device in DEVICES)}: {hint}"
    )


@cache
def _known() -> dict[str, CatalogDevice]:
    return {_plain(alias): device for device in DEVICES for alias in (device.name, *device.cuda_names)}


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
