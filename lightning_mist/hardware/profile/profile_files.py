"""Profiles as JSON files: a cache of what was measured of this machine, and files that people keep.

A cached profile is found by a key of everything that changes the numbers: device, number of nodes and devices, host,
torch's version, CPU threads of a process. A file that cannot be read is never used and never fatal: the caller gets a
sentence that says why, and measures again.
"""

import dataclasses
import hashlib
import json
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from lightning_mist.errors import ProfileError
from lightning_mist.hardware.cluster import Cluster
from lightning_mist.hardware.profile.hardware_profile import HardwareProfile
from lightning_mist.plan.codec import write_text

if TYPE_CHECKING:
    import torch

SCHEMA = 2
"""Version of the file format; other versions are not read."""


_LEAST = 1e-12
"""Smaller sizes and rates are no measurements: what is divided by them would be no number."""


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


def profile_path(directory: Path, cluster: Cluster, kind: str = "profile") -> Path:
    """The cache file of the machine at hand, for its profile or what else is kept of it."""
    key = profile_key(cluster)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    name = f"{kind}-{cluster.num_nodes}x{cluster.devices_per_node}x{cluster.device.name}-{digest}.json"
    return directory / re.sub(r"[^A-Za-z0-9.-]+", "-", name)


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
        profile, key = read_profile(path)
    except ProfileError as error:
        return None, f"{error}; it is ignored"
    present = profile_key(cluster)
    name = next((name for name in (*present, *key) if key.get(name) != present.get(name)), None)
    if name is not None:
        was, now = key.get(name), present.get(name)
        return None, f"profile {path} was made for {name} {was!r:.60}, not {now!r}: it is ignored"
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
    """
    content = {"schema": SCHEMA, "key": key or {}, "profile": dataclasses.asdict(profile)}
    if cluster is not None:
        content["cluster"] = dataclasses.asdict(cluster)
    write_atomically(content, path)


def write_atomically(content: dict[str, Any], path: Path) -> None:
    """Write JSON to a file; readers see the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(content, indent=1) + "\n")


def read_profile(path: Path) -> tuple[HardwareProfile, dict[str, str]]:
    """Read a profile from a file, and what it depends on, if it is of the cache.

    Raises:
        ProfileError: If it cannot be read or is not a profile of this schema.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # the last for text nested beyond any profile
        raise ProfileError(f"profile {path} cannot be read: {error}; measure again") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        found = content.get("schema") if isinstance(content, dict) else None
        raise ProfileError(f"profile {path} has schema {found!r}: schema {SCHEMA} is read; measure again")
    try:
        return _check_sizes(decode(HardwareProfile, content["profile"])), dict(content["key"])
    except (KeyError, TypeError, ValueError) as error:
        raise ProfileError(f"profile {path} is not a profile of schema {SCHEMA}: {error!r}; measure again") from error


def decode(kind: Any, data: Any) -> Any:
    """A value of a type from what JSON has of it: numbers, text, tuples of one type, dataclasses by their fields.

    Fields with a default may be missing: what was written before they were known does not have them.

    Raises:
        KeyError: If a field without a default is missing.
        ValueError: If something is of another type, or a number is negative or not finite: nothing measured is.
    """
    if dataclasses.is_dataclass(kind):
        if not isinstance(data, dict):
            raise ValueError(f"{data!r:.60} in place of an object with keys")
        hints = get_type_hints(kind)
        known = [
            field.name
            for field in dataclasses.fields(kind)
            if field.name in data or field.default is dataclasses.MISSING
        ]
        return kind(**{name: decode(hints[name], data[name]) for name in known})  # type: ignore[operator]
    options = get_args(kind)
    if get_origin(kind) is tuple:
        if not isinstance(data, list):
            raise ValueError(f"{data!r:.60} in place of a list")
        return tuple(decode(options[0], item) for item in data)
    if type(None) in options:
        return None if data is None else decode(options[0], data)
    if kind is str:
        if not isinstance(data, str):
            raise ValueError(f"{data!r:.60} in place of text")
        return data
    allowed = int if kind is int else (int, float)
    if not isinstance(data, allowed) or isinstance(data, bool) or not 0 <= data < 2**63:
        raise ValueError(f"{data!r:.60} in place of a {'whole ' if kind is int else ''}number that is not negative")
    return kind(data)


def _check_sizes(profile: HardwareProfile) -> HardwareProfile:
    """Refuse rates that are not as many as the sizes that they belong to."""
    for rate in profile.compute:
        if not rate.flops or len(rate.flops) != len(rate.flops_per_second):
            raise ValueError(f"{len(rate.flops)} sizes and {len(rate.flops_per_second)} rates of {rate.dtype}")
    for rates in profile.rates:
        lengths = {len(rates.bytes), len(rates.forward_bytes_per_second), len(rates.backward_bytes_per_second)}
        if not rates.bytes or len(lengths) > 1:
            raise ValueError(f"{sorted(lengths)} sizes and rates of {rates.kind}")
    divisors = [
        profile.memory_bytes_per_second,
        *(value for rate in profile.compute for value in (*rate.flops, *rate.flops_per_second)),
        *(
            value
            for rate in profile.rates
            for value in (*rate.bytes, *rate.forward_bytes_per_second, *rate.backward_bytes_per_second)
        ),
        *(
            value
            for rate in profile.kernels
            for value in (rate.forward_flops_per_second, rate.backward_flops_per_second)
        ),
        *(cost.bytes_per_second for cost in profile.collectives),
    ]
    copies = (profile.host_to_device_bytes_per_second, profile.device_to_host_bytes_per_second)
    divisors += [rate for rate in (*copies, profile.host_bytes_per_second_per_node) if rate]  # 0 where there is none
    if min(divisors) < _LEAST:
        raise ValueError(f"a size or rate of {min(divisors)}: what is measured is more")
    for sizes in (*(rate.flops for rate in profile.compute), *(rates.bytes for rates in profile.rates)):
        if list(sizes) != sorted(sizes):
            raise ValueError(f"sizes of {sizes}: they ascend")
    if profile.corrections:
        raise ValueError("corrections: they are in a file of their own")
    return profile


def read_machine(path: Path) -> tuple[Cluster, HardwareProfile]:
    """The devices and the profile of a file that :func:`~lightning_mist.hardware.write_profile` wrote.

    Raises:
        ProfileError: If the file cannot be read, is not a profile, or does not say what the devices are.
    """
    profile, _ = read_profile(path)
    try:
        cluster: Cluster = decode(Cluster, json.loads(path.read_text(encoding="utf-8"))["cluster"])
        if cluster.device.memory_bytes < 1 or cluster.device.kind not in ("cpu", "cuda"):
            raise ValueError(f"{cluster.device}")
        if not profile.compute:
            raise ValueError("no rates of computation")
        return cluster, profile
    except (KeyError, TypeError, ValueError) as error:
        raise ProfileError(
            f"profile {path} does not say what the devices are ({error!r}): measure again with lightning-mist profile "
            f"--out {path.name}"
        ) from error
