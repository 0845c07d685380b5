"""Clusters described in text: ``"4x8xL4"``, ``"1x8xA100-40+2x8xV100-32"``, or a YAML file.

Text is ``[nodes x] [devices per node x] device [: memory per device]``, or several of these with ``+`` between them for
a cluster of unlike devices. A YAML file has these keys, the first three of them required::

    nodes: 4
    devices_per_node: 8
    device: L4
    memory: 22GiB                                     # of one device; the catalog's otherwise
    intra_node: {bandwidth: 32 GB/s, latency: 20 us}  # what one device sends inside its node
    inter_node: {bandwidth: 100 Gbit/s, latency: 50 us}  # what one node sends
    host: {to_device: 25 GB/s, to_host: 26 GB/s, per_node: 100 GB/s}  # pinned copies
    host_memory: 768GiB                               # of each node's host; the catalog's otherwise

Copies to the device and to the host are those of one device, ``per_node`` is what all of a node copy in one direction;
without it they can all copy at once as fast as each alone.

A file of a cluster of unlike devices has a list of parts, each with these keys, and may say what connects them::

    parts:
      - {nodes: 1, devices_per_node: 8, device: A100-40}
      - {nodes: 2, devices_per_node: 8, device: V100-32}
    link: {bandwidth: 25 Gbit/s, latency: 50 us}      # what one node sends to nodes of other parts

Without a link every node sends to nodes of other parts as it sends to those of its own, and the slower end counts.
"""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from lightning_mist.errors import PlanError, ProfileError
from lightning_mist.hardware.catalog import CatalogDevice, find_device
from lightning_mist.hardware.cluster import AnyCluster, Cluster, Device, HostLink, Link, cluster_of
from lightning_mist.units import parse_bytes, parse_rate, parse_seconds

KEYS = ("nodes", "devices_per_node", "device", "memory", "intra_node", "inter_node", "host", "host_memory")
"""Keys of a cluster file."""

LINK_KEYS = ("bandwidth", "latency")
"""Keys of a link."""

MIXED_KEYS = ("parts", "link")
"""Keys of the file of a cluster of unlike devices, the last of them optional."""

HOST_KEYS = ("to_device", "to_host", "per_node")
"""Keys of a host link, the last of them optional."""

T = TypeVar("T")

_TEXT = re.compile(r"^\s*(?:(?:(\d+)\s*x\s*)?(\d+)\s*x\s*)?([^:]+?)\s*(?::\s*(.+?)\s*)?$")


def parse_cluster(value: str) -> AnyCluster:
    """The cluster that a text or a YAML file describes; see the module's text.

    Args:
        value: For example ``"4x8xL4"``, ``"8xA100-40"``, ``"2xcpu:8GiB"``, ``"8xA100-40+2x8xV100-32"``, or the name of
            a file that ends in ``.yaml`` or ``.yml``.
    """
    if value.lower().endswith((".yaml", ".yml")):
        return read_cluster(Path(value))
    return cluster_of([_text_part(text, f"cluster {value!r}") for text in value.split("+")])


def _text_part(text: str, where: str) -> Cluster:
    match = _TEXT.match(text)
    if match is None:
        raise PlanError(
            f"{where}: write nodes x devices x device, for example '4x8xL4', with + between unlike parts, or name a "
            ".yaml file"
        )
    nodes, devices, name, memory = match.groups()
    return Cluster(
        num_nodes=int(nodes or 1),
        devices_per_node=int(devices or 1),
        device=_device(name, memory, where),
    )


def read_cluster(path: Path) -> AnyCluster:
    """The cluster that a YAML file describes.

    Raises:
        PlanError: If the file cannot be read, or has a wrong, missing or unknown key.
        ProfileError: If the device is not in the catalog and its memory is not given.
    """
    where = f"cluster file {path}"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{where} cannot be read ({error.strerror}): give the path of a YAML file") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise PlanError(f"{where} is not YAML that describes a cluster: {_yaml_fault(error)}") from error
    if not isinstance(content, Mapping) or "parts" not in content:
        return _part(content, where)
    data = _mapping(content, MIXED_KEYS, where)
    parts = data["parts"]
    if not isinstance(parts, list) or not parts:
        raise PlanError(f"{where}: parts = {parts!r}: a list of parts is needed, each with {', '.join(KEYS[:3])}")
    link = _link(data.get("link"), "link", where)
    return cluster_of([_part(part, f"{where}: parts[{index}]") for index, part in enumerate(parts)], link)


def _yaml_fault(error: Exception) -> str:
    """What a parser of YAML objects to, and where, in one line."""
    if isinstance(error, RecursionError):
        return "it is nested deeper than any cluster; write a line for each key"
    if not isinstance(error, yaml.MarkedYAMLError):
        return f"{' '.join(str(error).split())}; write it as text in UTF-8"
    mark = error.problem_mark or error.context_mark
    place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
    return f"{place}{error.problem or error.context}; write plain keys and values, indented by spaces"


def _part(content: Any, where: str) -> Cluster:
    data = _mapping(content, KEYS, where, needed=3)
    name = data["device"]
    if not isinstance(name, str | int) or isinstance(name, bool):  # a 4090 is read as a number
        raise PlanError(f"{where}: device = {name!r}: the name of a device is needed, such as L4")
    return Cluster(
        num_nodes=_count(data["nodes"], "nodes", where),
        devices_per_node=_count(data["devices_per_node"], "devices_per_node", where),
        device=_device(str(name), data.get("memory"), where),
        intra_node=_link(data.get("intra_node"), "intra_node", where),
        inter_node=_link(data.get("inter_node"), "inter_node", where),
        host=_host(data.get("host"), where),
        host_memory_bytes=_host_memory(data.get("host_memory"), where),
    )


def _device(name: str, memory: Any, where: str) -> Device:
    known: CatalogDevice | None
    try:
        known = find_device(name)
    except ProfileError:
        if memory is None:
            raise
        known = None
    if memory is None:
        if known is None or known.memory_bytes is None:
            raise PlanError(
                f"{where}: the memory of one {name} process depends on the host; say how much it may use, for example "
                f"'{name}:8GiB'"
            )
        return Device(name=known.name, memory_bytes=known.memory_bytes, kind=known.kind)
    size = _read(parse_bytes, memory, f"{where}: memory")
    if size == 0:
        raise PlanError(f"{where}: memory of {memory!r}: a device needs some")
    if known is None:
        return Device(name=name, memory_bytes=size)
    return Device(name=known.name, memory_bytes=size, kind=known.kind)


def _link(value: Any, name: str, where: str) -> Link | None:
    if value is None:
        return None
    place = f"{where}: {name}"
    data = _mapping(value, LINK_KEYS, place, needed=2)
    return Link(
        bytes_per_second=_read(parse_rate, data["bandwidth"], place),
        latency_seconds=_read(parse_seconds, data["latency"], place),
    )


def _host(value: Any, where: str) -> HostLink | None:
    if value is None:
        return None
    place = f"{where}: host"
    data = _mapping(value, HOST_KEYS, place, needed=2)
    rates = {key: _read(parse_rate, data[key], place) for key in data}
    return HostLink(
        to_device_bytes_per_second=rates["to_device"],
        to_host_bytes_per_second=rates["to_host"],
        node_bytes_per_second=rates.get("per_node", 0.0),
    )


def _host_memory(value: Any, where: str) -> int | None:
    if value is None:
        return None
    size = _read(parse_bytes, value, f"{where}: host_memory")
    if size == 0:
        raise PlanError(f"{where}: host_memory of {value!r}: a host has some; leave it out if it is not known")
    return size


def _read(parse: Callable[[Any], T], value: Any, place: str) -> T:
    """A value with its unit; errors get the place in front."""
    try:
        return parse(value)
    except ValueError as error:
        raise PlanError(f"{place}: {error}") from error


def _count(value: Any, name: str, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"{where}: {name} = {value!r}: a whole number of at least 1 is needed")
    return value


def _mapping(value: Any, keys: Sequence[str], where: str, needed: int = 0) -> Mapping[str, Any]:
    """A mapping with no other keys than these, the first ``needed`` of which it must have."""
    if not isinstance(value, Mapping):
        raise PlanError(f"{where} holds {value!r}: keys and values are needed, of {', '.join(keys)}")
    for key in value:
        if key not in keys:
            near = difflib.get_close_matches(str(key), keys, n=1, cutoff=0.0)
            raise PlanError(
                f"{where} has the key {key!r}: known keys are {', '.join(keys)}; the nearest is {near[0]!r}"
            )
    for key in keys[:needed]:
        if key not in value:
            raise PlanError(
                f"{where} has no {key!r}: it needs {(' and ' if needed == 2 else ', ').join(keys[:needed])}"
            )
    return value
