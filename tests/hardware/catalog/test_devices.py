import pytest

from lightning_mist.errors import ProfileError
from lightning_mist.hardware.catalog.devices import DEVICES, SOURCES, canonical_name, find_device


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_every_figure_is_plausible_and_has_a_source(device) -> None:
    assert device.sources
    assert all(name in SOURCES for name in device.sources)
    rates = device.efficiencies
    for efficiency in (rates.matmul, rates.single, rates.memory, device.intra_efficiency):
        assert 0 < efficiency <= 1
    peaks = dict(device.peak_flops)
    assert peaks["float32"] <= min(peaks.values())
    assert device.memory_bytes is None or 2**33 < device.memory_bytes < 2**38
    assert device.intra_node.bytes_per_second > device.inter_node.bytes_per_second / 8
    assert (device.kind == "cpu") == (device.name == "cpu")


def test_names_are_unique_however_they_are_spelled() -> None:
    assert len({find_device(device.name).name for device in DEVICES}) == len(DEVICES)
    names = [name for device in DEVICES for name in device.cuda_names]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("l4", "L4"),
        ("NVIDIA L4", "L4"),
        ("A100-40GB", "A100-40"),
        ("a100 80", "A100-80"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("rtx 4090", "RTX4090"),
        ("GeForce RTX 3090", "RTX3090"),
        ("CPU", "cpu"),
    ],
)
def test_names_are_found_however_they_are_spelled(text: str, name: str) -> None:
    assert find_device(text).name == name


def test_unknown_device_names_the_nearest() -> None:
    with pytest.raises(
        ProfileError, match=r"device 'H10O' is not in the catalog, which has L4, .*: the nearest is H100"
    ):
        find_device("H10O")
    with pytest.raises(ProfileError, match=r"measure it with measure_profile\(\)"):
        find_device("??")


def test_cuda_names_become_catalog_names_and_unknown_ones_stay() -> None:
    assert canonical_name("Tesla V100-SXM2-32GB") == "V100-32"
    assert canonical_name("NVIDIA H100 PCIe") == "H100 PCIe"  # no NVLink: not the module of the catalog
