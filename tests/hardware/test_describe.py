from pathlib import Path

import pytest

from lightning_mist.errors import PlanError, ProfileError
from lightning_mist.hardware import Cluster, Device, HostLink, Link, MixedCluster, parse_cluster


@pytest.mark.parametrize(
    ("text", "nodes", "devices", "name"),
    [
        ("4x8xL4", 4, 8, "L4"),
        ("8xA100-40", 1, 8, "A100-40"),
        ("H100", 1, 1, "H100"),
        (" 2 x 4 x rtx 4090 ", 2, 4, "RTX4090"),
    ],
)
def test_text(text: str, nodes: int, devices: int, name: str) -> None:
    cluster = parse_cluster(text)
    assert (cluster.num_nodes, cluster.devices_per_node, cluster.device.name) == (nodes, devices, name)
    assert cluster.device.kind == "cuda"
    assert cluster.device.memory_bytes > 2**33


def test_memory_can_be_said() -> None:
    assert parse_cluster("2xcpu:8GiB").device == Device(name="cpu", memory_bytes=2**33, kind="cpu")
    assert parse_cluster("2xL4 : 20GiB").device == Device(name="L4", memory_bytes=20 * 2**30)
    assert parse_cluster("2xMyGPU:40GB").device == Device(name="MyGPU", memory_bytes=40 * 10**9)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", PlanError, "write nodes x devices x device, for example '4x8xL4'"),
        ("0x8xL4", PlanError, "both must be at least 1"),
        ("2xcpu", PlanError, "the memory of one cpu process depends on the host; .* 'cpu:8GiB'"),
        ("8xL5", ProfileError, "the nearest is L4"),
        ("8xL4:many", PlanError, "'many' is not a size"),
        ("8xL4:0", PlanError, "a device needs some"),
    ],
)
def test_wrong_text_says_what_is_right(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse_cluster(text)


def write(path: Path, text: str) -> str:
    file = path / "cluster.yaml"
    file.write_text(text)
    return str(file)


def test_file(tmp_path: Path) -> None:
    name = write(
        tmp_path,
        """
        nodes: 4
        devices_per_node: 8
        device: L4
        memory: 20GiB
        intra_node: {bandwidth: 32 GB/s, latency: 20 us}
        inter_node: {bandwidth: 100 Gbit/s, latency: 5e-5}
        """,
    )
    assert parse_cluster(name) == Cluster(
        num_nodes=4,
        devices_per_node=8,
        device=Device(name="L4", memory_bytes=20 * 2**30),
        intra_node=Link(bytes_per_second=32e9, latency_seconds=20e-6),
        inter_node=Link(bytes_per_second=12.5e9, latency_seconds=5e-5),
    )


def test_host_link(tmp_path: Path) -> None:
    machine = "nodes: 1\ndevices_per_node: 2\ndevice: L4\n"
    both = "host: {to_device: 25 GB/s, to_host: 24 GB/s}"
    assert parse_cluster(write(tmp_path, machine + both)).host == HostLink(
        to_device_bytes_per_second=25e9, to_host_bytes_per_second=24e9
    )
    shared = "host: {to_device: 25 GB/s, to_host: 24 GB/s, per_node: 400 Gbit/s}"
    assert parse_cluster(write(tmp_path, machine + shared)).host == HostLink(
        to_device_bytes_per_second=25e9, to_host_bytes_per_second=24e9, node_bytes_per_second=50e9
    )


def test_host_memory(tmp_path: Path) -> None:
    machine = "nodes: 1\ndevices_per_node: 2\ndevice: L4\n"
    assert parse_cluster(write(tmp_path, machine + "host_memory: 64GiB")).host_memory_bytes == 64 * 2**30
    assert parse_cluster(write(tmp_path, machine)).host_memory_bytes is None
    parts = "parts:\n  - {nodes: 1, devices_per_node: 8, device: A100-40, host_memory: 1TiB}\n"
    parts += "  - {nodes: 2, devices_per_node: 8, device: A100-40}\n"
    assert [part.host_memory_bytes for part in parse_cluster(write(tmp_path, parts)).parts] == [2**40, None]


@pytest.mark.parametrize(
    ("size", "message"), [("much", "host_memory: 'much' is not a size"), ("0", "host_memory of 0: a host has some")]
)
def test_wrong_host_memory_says_what_is_needed(tmp_path: Path, size: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse_cluster(write(tmp_path, f"nodes: 1\ndevices_per_node: 2\ndevice: L4\nhost_memory: {size}"))


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("{to_device: 25 GB/s}", "host has no 'to_host': it needs to_device and to_host"),
        ("{to_device: 25 GB/s, to_hots: 1 GB/s}", "host has the key 'to_hots': .*; the nearest is 'to_host'"),
        ("{to_device: 25 GB/s, to_host: fast}", "host: 'fast' is not a rate"),
        ("{to_device: 0, to_host: 1 GB/s}", "a host link of 0.0 bytes/s to the device, 1000000000.0 to the host"),
        ("25 GB/s", "host holds '25 GB/s': keys and values are needed, of to_device, to_host, per_node"),
    ],
)
def test_wrong_host_link_says_what_is_needed(tmp_path: Path, host: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse_cluster(write(tmp_path, f"nodes: 1\ndevices_per_node: 2\ndevice: L4\nhost: {host}"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: 1\ndevices_per_node: 2\ndevice: L4\nmemry: 1", "key 'memry': .*; the nearest is 'memory'"),
        ("nodes: 1\ndevice: L4", "has no 'devices_per_node'"),
        ("nodes: two\ndevices_per_node: 2\ndevice: L4", "nodes = 'two': a whole number of at least 1"),
        ("nodes: true\ndevices_per_node: 2\ndevice: L4", "nodes = True: a whole number"),
        ("[1, 2]", "keys and values are needed"),
        ("nodes: [", "is not YAML that describes a cluster: line 1, column 9: expected the node content"),
        (
            "nodes: 1\ndevices_per_node: 2\ndevice: L4\nintra_node: {bandwidth: 1 GB/s, latncy: 1}",
            "intra_node has the key 'latncy': .*; the nearest is 'latency'",
        ),
        ("nodes: 1\ndevices_per_node: 2\ndevice: L4\ninter_node: {latency: 1}", "inter_node has no 'bandwidth'"),
        (
            "nodes: 1\ndevices_per_node: 2\ndevice: L4\ninter_node: {latency: 1, bandwidth: fast}",
            "inter_node: 'fast' is not a rate",
        ),
    ],
)
def test_wrong_file_says_where_and_what(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse_cluster(write(tmp_path, text))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot be read \(No such file"):
        parse_cluster(str(tmp_path / "nowhere.yml"))


def test_unlike_parts() -> None:
    found = parse_cluster("8xA100-40 + 2x8xV100-32:30GiB")
    assert isinstance(found, MixedCluster)
    first, second = found.parts
    assert (first.num_nodes, first.devices_per_node, first.device.name) == (1, 8, "A100-40")
    assert (second.num_nodes, second.devices_per_node, second.device.memory_bytes) == (2, 8, 30 * 2**30)
    assert found.link is None
    assert found.text == "1x8xA100-40+2x8xV100-32"


def test_alike_parts_are_one() -> None:
    assert parse_cluster("8xL4+3x8xL4") == parse_cluster("4x8xL4")


def test_wrong_part_says_which_text() -> None:
    with pytest.raises(PlanError, match=r"cluster '8xL4\+': write nodes x devices x device, .* with \+ between"):
        parse_cluster("8xL4+")


PARTS = """
parts:
  - {nodes: 1, devices_per_node: 8, device: A100-40}
  - {nodes: 2, devices_per_node: 8, device: V100-32, inter_node: {bandwidth: 50 Gbit/s, latency: 1 ms}}
"""


def test_file_of_parts(tmp_path: Path) -> None:
    found = parse_cluster(write(tmp_path, PARTS + "link: {bandwidth: 10 Gbit/s, latency: 2 ms}\n"))
    assert isinstance(found, MixedCluster)
    assert [part.text for part in found.parts] == ["1x8xA100-40", "2x8xV100-32"]
    assert found.parts[1].inter_node == Link(bytes_per_second=6.25e9, latency_seconds=1e-3)
    assert found.link == Link(bytes_per_second=1.25e9, latency_seconds=2e-3)
    one = write(tmp_path, "parts: [{nodes: 4, devices_per_node: 8, device: L4}]")
    assert parse_cluster(one) == parse_cluster("4x8xL4")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("parts: []", r"parts = \[\]: a list of parts is needed"),
        ("parts: {nodes: 1}", "a list of parts is needed"),
        ("parts: [{nodes: 1, device: L4}]", r"parts\[0\] has no 'devices_per_node'"),
        (PARTS + "lnk: 1", "has the key 'lnk': known keys are parts, link"),
        (PARTS + "nodes: 1", "has the key 'nodes': known keys are parts, link"),
        (PARTS + "link: {latency: 1 ms}", "link has no 'bandwidth'"),
    ],
)
def test_wrong_file_of_parts(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse_cluster(write(tmp_path, text))
