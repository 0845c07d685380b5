"""A measured machine as a file: its devices beside what was measured of them, so that plans can be made elsewhere."""

import json
from pathlib import Path
from typing import Any

from lightning_mist.errors import ProfileError
from lightning_mist.hardware.cluster import Cluster, Device
from lightning_mist.hardware.profile.hardware_profile import HardwareProfile
from lightning_mist.hardware.profile.profile_files import read_profile


def read_machine(path: Path) -> tuple[Cluster, HardwareProfile]:
    """The devices and the profile of a file that :func:`~lightning_mist.hardware.write_profile` wrote.

    Returns:
        The machine, with as many devices as measured together, and what was measured.

    Raises:
        ProfileError: If the file cannot be read, is not a profile, or does not say what the devices are.
    """
    profile = read_profile(path)
    try:
        return _decode(json.loads(path.read_text(encoding="utf-8"))["cluster"]), profile
    except (KeyError, TypeError, ValueError) as error:
        raise ProfileError(
            f"profile {path} does not say what the devices are ({error!r}): measure again with lightning-mist profile "
            f"--out {path.name}"
        ) from error


def _decode(data: dict[str, Any]) -> Cluster:
    device = data["device"]
    host_memory = data.get("host_memory_bytes")  # Not in files that were written before it was known.
    return Cluster(
        num_nodes=int(data["num_nodes"]),
        devices_per_node=int(data["devices_per_node"]),
        device=Device(name=str(device["name"]), memory_bytes=int(device["memory_bytes"]), kind=str(device["kind"])),
        host_memory_bytes=None if host_memory is None else int(host_memory),
    )
