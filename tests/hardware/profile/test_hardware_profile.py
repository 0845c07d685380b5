import dataclasses

import pytest

from lightning_mist.hardware.profile.hardware_profile import HardwareProfile
from tests.specs import profile


def test_a_profile_is_a_value():
    one, same, other = profile(), profile(), profile(latency=2e-4)
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert len({one, same, other}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.operator_seconds = 0.0


def test_host_copies_are_free_unless_there_is_a_separate_device():
    made = HardwareProfile(
        device="cpu", source="", compute=(), memory_bytes_per_second=1.0, operator_seconds=1.0, collectives=()
    )
    assert (made.host_to_device_bytes_per_second, made.device_to_host_bytes_per_second) == (0.0, 0.0)
    assert made != dataclasses.replace(made, host_to_device_bytes_per_second=1.0)
