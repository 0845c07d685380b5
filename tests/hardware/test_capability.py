from lightning_mist.hardware.catalog.devices import DEVICES, capability_of


def test_every_cuda_device_of_the_catalog_has_one() -> None:
    assert all((device.capability is not None) == (device.kind == "cuda") for device in DEVICES)


def test_devices_by_any_name_that_the_catalog_knows() -> None:
    assert capability_of("L4") == capability_of("NVIDIA L4") == (8, 9)
    assert capability_of("cpu") is None
    assert capability_of("abacus") is None
