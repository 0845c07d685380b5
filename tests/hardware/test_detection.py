from pathlib import Path

import pytest
import torch

from lightning_mist.errors import ProfileError
from lightning_mist.hardware import detect
from lightning_mist.hardware.detection import host_memory_bytes


def test_cpu_processes_share_the_host_s_memory() -> None:
    two, four = detect(2, 1, "cpu"), detect(8, 2, "cpu")
    assert (two.num_nodes, two.devices_per_node, two.device.name, two.device.kind) == (1, 2, "cpu", "cpu")
    assert (four.num_nodes, four.devices_per_node) == (2, 4)
    assert two.device.memory_bytes == host_memory_bytes() // 2
    assert four.device.memory_bytes == host_memory_bytes() // 4
    assert two.host_memory_bytes == four.host_memory_bytes == host_memory_bytes()


@pytest.mark.parametrize(("processes", "nodes"), [(3, 2), (0, 1), (2, 0)])
def test_nodes_are_filled_equally(processes: int, nodes: int) -> None:
    with pytest.raises(ProfileError, match=f"{processes} processes on {nodes} nodes: every node must have as many"):
        detect(processes, nodes, "cpu")


def test_other_devices_are_refused() -> None:
    with pytest.raises(ProfileError, match="device type 'mps': mist runs on cuda and cpu"):
        detect(1, 1, "mps")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused() -> None:
    with pytest.raises(ProfileError, match="'cuda' without a CUDA device"):
        detect(1, 1, "cuda")


@pytest.mark.gpu
def test_cuda_device() -> None:
    found = detect(1, 1, "cuda")
    device = found.device
    assert found.host_memory_bytes == host_memory_bytes()
    assert device.kind == "cuda"
    assert device.memory_bytes == torch.cuda.get_device_properties(0).total_memory


def test_container_limits_count(tmp_path: Path) -> None:
    information, limit, unlimited = tmp_path / "meminfo", tmp_path / "memory.max", tmp_path / "none"
    information.write_text("MemTotal:       1000 kB\nMemFree: 10 kB\n")
    assert host_memory_bytes(information, ()) == 1_024_000
    limit.write_text("4096\n")
    unlimited.write_text("max\n")
    assert host_memory_bytes(information, (unlimited, tmp_path / "missing")) == 1_024_000
    assert host_memory_bytes(information, (unlimited, limit)) == 4096


def test_unreadable_memory_asks_for_a_description(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"cannot be read .*; describe the machine by cluster='2xcpu:8GiB'"):
        host_memory_bytes(tmp_path / "missing", ())
