"""Compute capabilities: which kernels a CUDA device can run."""

from lightning_mist.errors import ProfileError
from lightning_mist.hardware.catalog import find_device

CAPABILITIES: dict[str, tuple[int, int]] = {
    "V100-16": (7, 0),
    "V100-32": (7, 0),
    "T4": (7, 5),
    "A100-40": (8, 0),
    "A100-80": (8, 0),
    "A10G": (8, 6),
    "RTX3090": (8, 6),
    "L4": (8, 9),
    "RTX4090": (8, 9),
    "H100": (9, 0),
    "H200": (9, 0),
    "B200": (10, 0),
}
"""By catalog name; from NVIDIA's table at developer.nvidia.com/cuda-gpus."""


def capability_of(device: str) -> tuple[int, int] | None:
    """The compute capability of a device; None where it is not known, as for CPUs."""
    try:
        return CAPABILITIES.get(find_device(device).name)
    except ProfileError:
        return None
