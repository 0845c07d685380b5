"""Profiles as JSON files: a cache of what was measured of this machine, and files that people keep.

A cached profile is found by a key of everything that changes the numbers: device, number of nodes and devices, host,
torch's version, CPU threads of a process. A file that cannot be read is never used and never fatal: the caller gets a
sentence that says why, and measures again.
"""

import dataclasses
import hashlib
import json
import os
import re
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_mist.errors import ProfileError
from lightning_mist.hardware.cluster import Cluster, Device
from lightning_mist.hardware.profile.hardware_profile import (
    CollectiveCost,
    ComputeRate,
    Correction,
    HardwareProfile,
    KernelRate,
    MemoryRate,
    StepOverheads,
)
from lightning_mist.hardware.profile.interference_model import COEFFICIENTS, Interference

if TYPE_CHECKING:
    import torch

SCHEMA = 2
"""Version of the file format; other versions are not read."""


def profile_key(cluster: Cluster) -> dict[str, str]:
    """What a profile of the machine at hand depends on, as text by name."""
    import torch

    return {
        "device": cluster.device.name,
        "kind": cluster.device.kind,
        "num_nodes": str(cluster.num_nodes),
        "devices_per_node": str(cluster.devices_per_node),
        "host": socket.gethostname(),
        "torch": torch.__version__,
        "num_threads": str(torch.get_num_threads()),
    }


def profile_path(directory: Path, cluster: Cluster) -> Path:
    """The cache file of the machine at hand."""
    key = profile_key(cluster)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    name = f"{cluster.num_nodes}x{cluster.devices_per_node}x{cluster.device.name}"
    return directory / f"profile-{re.sub(r'[^A-Za-z0-9.-]+', '-', name)}-{digest}.json"


def save_profile(profile: HardwareProfile, directory: Path, cluster: Cluster) -> Path:
    """Keep a profile of the machine at hand."""
    path = profile_path(directory, cluster)
    write_profile(profile, path, key=profile_key(cluster), cluster=cluster)
    return path


def load_profile(
    directory: Path, cluster: Cluster, dtypes: "Sequence[torch.dtype]" = ()
) -> tuple[HardwareProfile | None, str | None]:
    """Find a kept profile of the machine at hand.

    Args:
        dtypes: Element types that it must have rates of.

    Returns:
        The profile, or None; and a sentence saying why a file that is there is not used, or None.
    """
    path = profile_path(directory, cluster)
    if not path.exists():
        return None, None
    try:
        profile, key = _read(path)
    except ProfileError as error:
        return None, f"{error}; it is ignored"
    if key != profile_key(cluster):
        return None, f"profile {path} was made for {key}: it is ignored"
    known = {rate.dtype for rate in profile.compute}
    missing = [name for name in (str(dtype).removeprefix("torch.") for dtype in dtypes) if name not in known]
    if missing:
        return None, f"profile {path} has no rates of {', '.join(missing)}: it is ignored"
    return profile, None


def write_profile(
    profile: HardwareProfile, path: Path, *, key: dict[str, str] | None = None, cluster: Cluster | None = None
) -> None:
    """Write a profile to a file; readers see the old file or the new one, never half of one.

    Args:
        key: What the profile depends on, if it is for the cache.
        cluster: The devices that were measured, for
            :func:`~lightning_mist.hardware.profile.profile_files.read_machine`.
    """
    content = {"schema": SCHEMA, "key": key or {}, "profile": dataclasses.asdict(profile)}
    if cluster is not None:
        content["cluster"] = dataclasses.asdict(cluster)
    write_atomically(content, path)


def write_atomically(content: dict[str, Any], path: Path) -> None:
    """Write JSON to a file; readers see the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_profile(path: Path) -> HardwareProfile:
    """Read a profile from a file.

    Raises:
        ProfileError: If it cannot be read or is not a profile of this schema.
    """
    return _read(path)[0]


def _read(path: Path) -> tuple[HardwareProfile, dict[str, str]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProfileError(f"profile {path} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        found = content.get("schema") if isinstance(content, dict) else None
        raise ProfileError(f"profile {path} has schema {found!r}: schema {SCHEMA} is read; measure again")
    try:
        return _decode(content["profile"]), dict(content["key"])
    except (KeyError, TypeError, ValueError) as error:
        raise ProfileError(f"profile {path} is not a profile of schema {SCHEMA}: {error!r}; measure again") from error


def _decode(data: dict[str, Any]) -> HardwareProfile:
    compute = [
        ComputeRate(
            dtype=str(rate["dtype"]),
            flops=_numbers(rate["flops"]),
            flops_per_second=_numbers(rate["flops_per_second"]),
            spread=float(rate["spread"]),
        )
        for rate in data["compute"]
    ]
    for rate in compute:
        if not rate.flops or len(rate.flops) != len(rate.flops_per_second):
            raise ValueError(f"{len(rate.flops)} sizes and {len(rate.flops_per_second)} rates of {rate.dtype}")
    collectives = [
        CollectiveCost(
            operation=str(cost["operation"]),
            group_size=int(cost["group_size"]),
            num_nodes=int(cost["num_nodes"]),
            latency_seconds=float(cost["latency_seconds"]),
            bytes_per_second=float(cost["bytes_per_second"]),
            spread=float(cost["spread"]),
        )
        for cost in data["collectives"]
    ]
    return HardwareProfile(
        device=str(data["device"]),
        source=str(data["source"]),
        compute=tuple(compute),
        memory_bytes_per_second=float(data["memory_bytes_per_second"]),
        operator_seconds=float(data["operator_seconds"]),
        collectives=tuple(collectives),
        host_to_device_bytes_per_second=float(data["host_to_device_bytes_per_second"]),
        device_to_host_bytes_per_second=float(data["device_to_host_bytes_per_second"]),
        host_bytes_per_second_per_node=float(data.get("host_bytes_per_second_per_node", 0.0)),
        rates=tuple(map(_memory_rate, data["rates"])),
        kernels=tuple(map(_kernel_rate, data["kernels"])),
        interference=_interference(data.get("interference")),
        # Profiles that were kept before overheads were known have none.
        overheads=StepOverheads(**{str(name): float(value) for name, value in data.get("overheads", {}).items()}),
        corrections=tuple(
            Correction(
                term=str(item["term"]),
                factor=float(item["factor"]),
                spread=float(item["spread"]),
                samples=int(item["samples"]),
            )
            for item in data.get("corrections", [])
        ),
    )


def _memory_rate(rate: dict[str, Any]) -> MemoryRate:
    found = MemoryRate(
        kind=str(rate["kind"]),
        bytes=_numbers(rate["bytes"]),
        forward_bytes_per_second=_numbers(rate["forward_bytes_per_second"]),
        backward_bytes_per_second=_numbers(rate["backward_bytes_per_second"]),
        spread=float(rate["spread"]),
    )
    lengths = {len(found.bytes), len(found.forward_bytes_per_second), len(found.backward_bytes_per_second)}
    if not found.bytes or len(lengths) > 1:
        raise ValueError(f"{sorted(lengths)} sizes and rates of {found.kind}")
    return found


def _kernel_rate(rate: dict[str, Any]) -> KernelRate:
    return KernelRate(
        kind=str(rate["kind"]),
        dtype=str(rate["dtype"]),
        forward_flops_per_second=float(rate["forward_flops_per_second"]),
        backward_flops_per_second=float(rate["backward_flops_per_second"]),
        spread=float(rate["spread"]),
    )


def _interference(data: dict[str, Any] | None) -> Interference | None:
    if data is None:
        return None
    coefficients = {name: float(data[name]) for name in COEFFICIENTS}
    return Interference(**coefficients, source=str(data["source"]), spread=float(data["spread"]))


def _numbers(values: list[float]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def read_machine(path: Path) -> tuple[Cluster, HardwareProfile]:
    """The devices and the profile of a file that :func:`~lightning_mist.hardware.write_profile` wrote.

    Returns:
        The machine, with as many devices as measured together, and what was measured.

    Raises:
        ProfileError: If the file cannot be read, is not a profile, or does not say what the devices are.
    """
    profile = read_profile(path)
    try:
        return _decode_cluster(json.loads(path.read_text(encoding="utf-8"))["cluster"]), profile
    except (KeyError, TypeError, ValueError) as error:
        raise ProfileError(
            f"profile {path} does not say what the devices are ({error!r}): measure again with lightning-mist profile "
            f"--out {path.name}"
        ) from error


def _decode_cluster(data: dict[str, Any]) -> Cluster:
    device = data["device"]
    host_memory = data.get("host_memory_bytes")  # Not in files that were written before it was known.
    return Cluster(
        num_nodes=int(data["num_nodes"]),
        devices_per_node=int(data["devices_per_node"]),
        device=Device(name=str(device["name"]), memory_bytes=int(device["memory_bytes"]), kind=str(device["kind"])),
        host_memory_bytes=None if host_memory is None else int(host_memory),
    )
