import dataclasses

import pytest

from lightning_mist.hardware.interference import CHANNELS, COEFFICIENTS, Interference

MACHINE = Interference(**{name: index / 10 for index, name in enumerate(COEFFICIENTS)}, source="test")


def test_symmetric_and_by_kind_of_group() -> None:
    for first in CHANNELS:
        for second in CHANNELS:
            if first != second:
                for across in (False, True):
                    value = MACHINE.between(first, second, across_nodes=across)
                    assert value == MACHINE.between(second, first, across_nodes=across)
    assert MACHINE.between("network", "to_host", across_nodes=False) == MACHINE.network_to_host
    assert MACHINE.between("to_host", "network", across_nodes=True) == MACHINE.across_to_host
    assert MACHINE.between("compute", "network", across_nodes=True) == MACHINE.compute_network


def test_few_numbers() -> None:
    numbers = [field.name for field in dataclasses.fields(Interference) if field.type is float]
    assert set(numbers) == {*COEFFICIENTS, "spread"}
    assert len(COEFFICIENTS) < 12


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_bounds(value: float) -> None:
    with pytest.raises(ValueError, match=r"across_to_host = .*between 0 \(free\) and 1"):
        dataclasses.replace(MACHINE, across_to_host=value)


def test_one_channel_has_no_coefficient() -> None:
    with pytest.raises(ValueError, match="two different channels"):
        MACHINE.between("network", "network", across_nodes=False)
