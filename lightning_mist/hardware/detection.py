"""Detecting the machine this process runs on."""

from pathlib import Path

from lightning_mist.errors import ProfileError
from lightning_mist.hardware.catalog import canonical_name
from lightning_mist.hardware.cluster import Cluster, Device

MEMORY_INFORMATION = Path("/proc/meminfo")
"""The kernel's figures of the host's memory (proc(5))."""

CONTROL_GROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Memory limits of a container, in versions 2 and 1 of control groups (kernel documentation, cgroup-v2, cgroup-v1)."""


def detect(world_size: int, num_nodes: int, device_type: str) -> Cluster:
    """The cluster that this process is part of, supposing that all nodes and devices are like its own.

    Args:
        world_size: Number of processes, one per device.
        device_type: ``"cuda"`` or ``"cpu"``. A CPU process gets an equal share of the host's memory (of the container's
            where that is limited).

    Raises:
        ProfileError: If processes do not fill nodes equally, or the kind of device is another or is not there.
    """
    if num_nodes < 1 or world_size < 1 or world_size % num_nodes:
        raise ProfileError(
            f"{world_size} processes on {num_nodes} nodes: every node must have as many; for example "
            f"{max(num_nodes, 1) * max(1, round(world_size / max(num_nodes, 1)))} processes"
        )
    devices_per_node, memory = world_size // num_nodes, None
    if device_type == "cpu":
        memory = host_memory_bytes()
        device = Device(name="cpu", memory_bytes=memory // devices_per_node, kind="cpu")
    elif device_type == "cuda":
        device = _cuda_device()
        if MEMORY_INFORMATION.exists():  # Elsewhere than on Linux the catalog's figure has to do.
            memory = host_memory_bytes()
    else:
        raise ProfileError(f"device type {device_type!r}: mist runs on cuda and cpu")
    return Cluster(num_nodes=num_nodes, devices_per_node=devices_per_node, device=device, host_memory_bytes=memory)


def host_memory_bytes(information: Path = MEMORY_INFORMATION, limits: tuple[Path, ...] = CONTROL_GROUP_LIMITS) -> int:
    """Bytes of memory that this host, or the container, has.

    Args:
        limits: Files with the container's limit; those missing or without a number set none.
    """
    try:
        fields = dict(line.split(":", 1) for line in information.read_text().splitlines() if ":" in line)
        total = int(fields["MemTotal"].split()[0]) * 1024
    except (OSError, KeyError, ValueError) as error:
        raise ProfileError(
            f"the host's memory cannot be read from {information}: {error!r}; describe the machine by "
            "cluster='2xcpu:8GiB', with its devices and their memory"
        ) from error
    texts = [path.read_text().strip() for path in limits if path.is_file()]
    return min([total, *(int(text) for text in texts if text.isdigit())])


def _cuda_device() -> Device:
    import torch

    if not torch.cuda.is_available():
        raise ProfileError(
            "device type 'cuda' without a CUDA device: run where there is one, or with accelerator='cpu'"
        )
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Device(name=canonical_name(properties.name), memory_bytes=properties.total_memory)
