"""What the catalog keeps of a device, and the figures that devices of a class have in common."""

from dataclasses import dataclass

from lightning_mist.hardware.catalog.rates import EFFICIENCIES, Efficiencies
from lightning_mist.hardware.cluster import Link

LINK_SOURCES = {
    "abci": "github.com/aistabci/abci2.0benchmark: all-reduce of A100s and V100s, 1 to 32 nodes",
    "alps": "github.com/boeschf/nccl-benchmark-on-alps-2025: all-reduce of GH200s, 1 to 128 nodes",
    "triton_dist_57": "github.com/ByteDance-Seed/Triton-distributed issue 57: all-reduce of 8 H100",
    "odissei": "github.com/odissei-benchmarks/nccl-tests: collectives of 4 and 8 H100",
    "coreweave_nccl": "github.com/coreweave/nccl-tests README: H100 in 8 nodes, GB200 in 1 to 20 domains of 72",
    "aws_tester_585": "github.com/aws/aws-k8s-tester pull request 585: all-reduce of two p5.48xlarge",
    "aws_efa_eks": "github.com/aws-samples/aws-efa-eks README: all-reduce of two p4d.24xlarge",
    "kalavai_4090": "public notes of a cluster of RTX 4090: all-reduce of 2 and 4 over PCIe",
    "gke_a4": "public walk-through of GKE A4: all-reduce of one and two nodes of 8 B200",
    "gcp_a3mega": "github.com/lessizzmore/create-a3mega-ztan-fork: all-reduce of two a3-mega over TCPXO",
    "dstack_3961": "github.com/dstackai/dstack pull request 3961: all-reduce of two p6-b200",
    "dgx_h100_pair": "public notes of a run on two DGX H100",
    "h200_ocp": "public OpenShift guide to RDMA: all-reduce of two nodes of 8 H200",
    "l40s_ocp": "public OpenShift guide to RDMA: all-reduce of L40S in two nodes",
    "keita_p5": "github.com/KeitaW/p5-nccl-test-2024-07-19: all-reduce of two p5.48xlarge",
    "alcf": "github.com/argonne-lcf/alcf-nccl-tests: collectives of two nodes of 8 A100",
    "h100_guide": "public operator guide: all-reduce of 8 H100",
    "stas00_net": "github.com/stas00/ml-engineering network/benchmarks: all-reduce of 8 H200",
    "flux_l20": "github.com/bytedance/flux docs/performance.md: collectives of 8 L20 over PCIe",
    "nccl_1639": "github.com/NVIDIA/nccl issue 1639: all-reduce of 4 and 8 RTX 5090",
    "nccl_1455": "github.com/NVIDIA/nccl issue 1455: all-reduce of 2 to 8 H100, ring and NVLS",
}
"""Where figures come from, by the name used in comments and in a profile's ``source``."""

GB = 1e9
GIB = 2**30
GBIT = 1e9 / 8

TCP_FLOOR, EFA_FLOOR, INFINIBAND_FLOOR = 1.23e-4, 7e-5, 3.9e-5
"""All-reduce of a few bytes between two nodes with all their devices. TCPXO, a transport over Ethernet, on two a3-mega
(gcp_a3mega: 123 to 136 us); EFA on two p5 (aws_tester_585: 68 to 71), 51 on p6-b200 (dstack_3961), 177 on p4d
(aws_efa_eks); InfiniBand 39 on two nodes of 8 H100 (dgx_h100_pair), 33 of A100s (abci), 45 of H200s (h200_ocp)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogDevice:
    """One kind of device.

    Attributes:
        capability: CUDA's compute capability, from NVIDIA's table at developer.nvidia.com/cuda-gpus.
        memory_bytes: Memory that a program sees; None where it depends on the host.
        peak_flops: Peak FLOP/s by element type; ``float32`` without tensor cores, ``tfloat32`` with them.
        intra_node: What one device sends inside a node, one direction; the latency is that of an operation on a few
            bytes among all devices of a node.
        inter_node: What one node sends, as rented or built most often; the latency is that among two nodes.
        nvlink_domain: Devices that NVLink connects, beyond nodes; 1 where it ends with the node.
        devices_per_host: Devices of the node that ``inter_node`` and host memory are about.
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
    nvlink_domain: int = 1
    devices_per_host: int = 8

    @property
    def kind(self) -> str:
        """``"cpu"`` or ``"cuda"``."""
        return "cuda" if self.host_bytes_per_second else "cpu"


def peak_flops_of(
    float32: float, tfloat32: float | None, float16: float, bfloat16: float | None
) -> tuple[tuple[str, float], ...]:
    """Peaks by element type, of TFLOP/s."""
    teras = {"float32": float32, "tfloat32": tfloat32, "float16": float16, "bfloat16": bfloat16}
    return tuple((name, tera * 1e12) for name, tera in teras.items() if tera is not None)


PCIE3, PCIE4, PCIE5 = 15.75 * GB, 31.5 * GB, 63.0 * GB
"""Sixteen lanes, one direction: 8, 16, 32 GT/s per lane, 128b/130b coding (PCI-SIG)."""

PCIE_EFFICIENCY = 0.16
"""All-gather among 8 L4s reaches 4.68 GiB/s of PCIe 4 (mist)."""

SWITCHED_PCIE = 0.25
"""All-gathers and reduce-scatters of 8 L20 reach 7.9 and 7.2 GB/s of PCIe 4 (flux_l20), all-reduce of L40S 8 to 10."""

PCIE5_EFFICIENCY = 0.44
"""All-reduce of 8 RTX 5090 reaches 28 GB/s of PCIe 5, of 4 35 (nccl_1639)."""

PCIE_FLOOR, VOLTA_FLOOR, AMPERE_FLOOR, HOPPER_FLOOR, GRACE_FLOOR = 1.9e-5, 8.5e-6, 1.73e-5, 1.92e-5, 7.7e-6
"""All-reduce of a few bytes inside a node: 4 RTX 4090 18.9 us and 2 9 to 11 (kalavai_4090), 4 L40S 17 (l40s_ocp); 4
V100 8.5, 8 A100 17.3 (abci); 8 H100 19.2 (triton_dist_57), 4 17 to 23 (odissei); 4 GH200 7.7 (alps)."""

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


def board(
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
    floor: float = PCIE_FLOOR,
    network_floor: float = TCP_FLOOR,
    shared: float = PCIE_EFFICIENCY,
    link: float | None = None,
    domain: int = 1,
    per_host: int = 8,
    sources: tuple[str, ...] = ("mist", "ec2"),
) -> CatalogDevice:
    """An NVIDIA device with the figures of its class; by default a PCIe board of a data centre.

    Bandwidth, NVLink (in one direction) and what a host's link sends if it is not PCIe in GB/s, a node's network in
    Gbit/s, and its host's memory in GiB. ``shared`` is the part of PCIe that each of a node's devices has in
    collectives.
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
        intra_node=Link(bytes_per_second=pcie if nvlink is None else nvlink * GB, latency_seconds=floor),
        intra_efficiency=shared if nvlink is None else NVLINK_EFFICIENCY,
        inter_node=Link(bytes_per_second=network * GBIT, latency_seconds=network_floor),
        inter_efficiency=NETWORK_EFFICIENCY,
        host_bytes_per_second=pcie if link is None else link * GB,
        host_efficiency=HOST_EFFICIENCY,
        host_node_efficiency=HOST_NODE_EFFICIENCY if link is None else per_host * HOST_EFFICIENCY,
        host_memory_bytes=int(host / per_host * GIB),
        sources=("datasheet", *dict.fromkeys((*efficiencies.sources, *sources))),
        nvlink_domain=domain,
        devices_per_host=per_host,
    )
