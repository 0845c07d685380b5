"""Device memory that no tensor asks for: the context, communicators, workspaces of libraries.

None of it is in torch's statistics but the workspaces, which are allocated like tensors. It is measured, not derived,
and depends on driver and library versions: figures are pairs of what is to be expected and what is seldom exceeded.
Every one has its source beside it, by a name of :data:`SOURCES`.
"""

from dataclasses import dataclass

from lightning_mist.errors import ProfileError
from lightning_mist.hardware.catalog.catalog_device import PCIE5
from lightning_mist.hardware.catalog.devices import capability_of, find_device
from lightning_mist.hardware.cluster import Cluster

MIB = 2**20

SOURCES = {
    "lazy": "github.com/pytorch/pytorch pull request 86509: 287 MB used with lazily loaded kernels, 667 MB with all",
    "context": "github.com/pytorch/pytorch issue 109888: around 400 MB where kernels are loaded lazily",
    "ada": "github.com/unslothai/unsloth-zoo pull request 1053: 426 MiB on an RTX 6000 Ada before any kernel is loaded",
    "l4": "benchmarks.accuracy.published_memory: of 26 stages on 8 L4s with torch 2.1 the fullest left 948 MiB of the "
    "device; those that gave memory back would not have with 794 MiB; 120 MiB of it are communicators",
    "a100": "A100, torch 2.1: 0.47 GiB with lazily loaded kernels, 0.92 GiB with all",
    "groups": "github.com/NVIDIA/nccl issue 964: 544 MB for 2 A100s, 688 MB for 3 or 4, in groups made one by one",
    "buffers": "github.com/NVIDIA/nccl issue 1685: 10 MiB to receive and 2 MiB to send for each peer and channel",
    "channels": "github.com/NVIDIA/nccl issue 1953: 2 channels between devices without NVLink",
    "scale": "S. Jeaugey in github.com/NVIDIA/nccl issue 986: beyond 2 nodes the size of a group does not matter",
    "hopper": "benchmarks.hardware.device_memory on an H200 with torch 2.11: after a step of common operators; then by "
    "the first collective of a process group of one",
    "cublas": "torch, aten/src/ATen/cuda/CublasHandlePool.cpp: :4096:2:16:8, from compute capability 9.0 on 32 MiB",
}
"""Where figures come from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Bytes that are measured rather than derived.

    Attributes:
        high: What is seldom exceeded.
    """

    expected: int
    high: int
    source: str

    def __post_init__(self) -> None:
        if not 0 <= self.expected <= self.high:
            raise ValueError(f"expected = {self.expected}, high = {self.high}: 0 <= expected <= high")


NOTHING = Overhead(expected=0, high=0, source="a CPU process has no device context and its groups use host memory")


# 2 x 4096 KiB + 8 x 16 KiB (cublas).
_WORKSPACE, _HOPPER_WORKSPACE = 2 * 4096 * 1024 + 8 * 16 * 1024, 32 * MIB

_AMPERE = Overhead(expected=int(0.47 * 2**30), high=int(0.92 * 2**30), source="a100")

CONTEXTS = {
    (7, 0): Overhead(expected=287_047_680, high=666_632_192, source="lazy"),
    (8, 0): _AMPERE,
    (8, 6): _AMPERE,
    # The middle between 794 and 948 MiB less communicators. With all kernels: as many more as on an A100.
    (8, 9): Overhead(expected=751 * MIB, high=426 * MIB + _AMPERE.high - _AMPERE.expected, source="l4, ada, a100"),
    # With all kernels: as many more as on an A100.
    (9, 0): Overhead(expected=767 * MIB, high=767 * MIB + _AMPERE.high - _AMPERE.expected, source="hopper, a100"),
}
"""What CUDA's context takes by compute capability, of those on which it was measured."""

_ALONE = Overhead(expected=556 * MIB, high=556 * MIB, source="hopper")
"""What NCCL takes for a group of one rank of compute capability 9.0."""

# A pair over NVLink; larger groups; what is seldom exceeded lies as far above as the larger of them above the smaller.
_PAIR, _LARGER = 544 * MIB, 688 * MIB

# Without NVLink: 2 channels, each with 12 MiB for a neighbour on either side; twice the channels at most.
_PER_PEER_AND_CHANNEL, _CHANNELS = 12 * MIB, 2


def context_overhead(device: str) -> Overhead:
    """What CUDA's context takes on a device; where it is not known, what it takes on a device where it is largest."""
    return CONTEXTS.get(capability_of(device) or (0, 0)) or Overhead(
        expected=max(context.expected for context in CONTEXTS.values()),
        high=max(context.high for context in CONTEXTS.values()),
        source=f"not known for {device}; the largest of the devices where it is",
    )


def alone_overhead(device: str) -> Overhead:
    """What NCCL takes on a device that trains alone; where nobody measured it, from nothing up to what is known."""
    if capability_of(device) == (9, 0):
        return _ALONE
    return Overhead(expected=0, high=_ALONE.high, source=f"not known for {device}; {_ALONE.source}")


def workspace_bytes(device: str) -> int:
    """What cuBLAS keeps for each handle and stream that multiply; the larger figure for devices that are not known."""
    return _WORKSPACE if (capability_of(device) or (9, 0)) < (9, 0) else _HOPPER_WORKSPACE


def has_nvlink(cluster: Cluster) -> bool:
    """Whether devices of a node are connected faster than by PCIe 5."""
    link = cluster.intra_node
    if link is None:
        try:
            link = find_device(cluster.device.name).intra_node
        except ProfileError:
            return True  # the larger figures
    return link.bytes_per_second > PCIE5


def communicator_overhead(cluster: Cluster, num_ranks: int, channels: int | None = None) -> Overhead:
    """What one NCCL communicator takes on each of its devices, once it has been used.

    Args:
        channels: The most channels that it was made with; as many as links are good for where it was not said.
    """
    if num_ranks < 2:
        raise ValueError(f"a communicator of {num_ranks} ranks: it connects at least 2")
    if cluster.device.kind != "cuda":
        return NOTHING
    is_pair = num_ranks == 2
    if has_nvlink(cluster) and channels is None:
        expected = _PAIR if is_pair else _LARGER
        return Overhead(expected=expected, high=expected * _LARGER // _PAIR, source="groups, scale")
    made = _CHANNELS if channels is None or not has_nvlink(cluster) else channels
    expected = made * _PER_PEER_AND_CHANNEL * (1 if is_pair else 2)
    return Overhead(expected=expected, high=2 * expected, source="buffers, channels, scale")
