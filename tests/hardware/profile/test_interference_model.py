import dataclasses
from itertools import combinations

import numpy as np
import pytest

from lightning_mist.hardware.profile.interference_model import (
    CHANNELS,
    COEFFICIENTS,
    Interference,
    seconds_together,
    speed_table,
)

MACHINE = Interference(**{name: index / 10 for index, name in enumerate(COEFFICIENTS)}, source="test")


def between(first: str, second: str, *, across_nodes: bool) -> float:
    """The coefficient of two different channels."""
    name = "_".join((first, second))
    value: float = getattr(MACHINE, name.replace("network", "across") if across_nodes else name)
    return value


def test_few_numbers() -> None:
    numbers = [field.name for field in dataclasses.fields(Interference) if field.type is float]
    assert set(numbers) == {*COEFFICIENTS, "spread"}
    assert len(COEFFICIENTS) < 12


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_bounds(value: float) -> None:
    with pytest.raises(ValueError, match=r"across_to_host = .*between 0 \(free\) and 1"):
        dataclasses.replace(MACHINE, across_to_host=value)


def test_pairs_have_their_coefficient() -> None:
    for across in (False, True):
        table = speed_table(MACHINE, across)
        for first, second in combinations(range(4), 2):
            slow = between(CHANNELS[first], CHANNELS[second], across_nodes=across)
            speed = table[1 << first | 1 << second]
            assert speed[[first, second]].tolist() == pytest.approx([1 / (1 + slow)] * 2)
            assert np.delete(speed, [first, second]).tolist() == [1.0, 1.0]


def test_a_third_channel_waits_for_the_others_as_they_run() -> None:
    free = Interference(**dict.fromkeys(COEFFICIENTS, 0.0), source="test")
    copies = dict.fromkeys(("compute_to_device", "network_to_device"), 1.0)
    beside = speed_table(dataclasses.replace(free, **copies), False)
    # Computation and communication have their turns together, so that each of the three has every second one.
    assert beside[0b0111, :3].tolist() == [0.5, 0.5, 0.5]
    turns = speed_table(dataclasses.replace(free, compute_network=1.0, **copies), False)
    assert turns[0b0111, :3].tolist() == pytest.approx([1 / 3] * 3)
    # Turns of half a second, themselves at 1 / 1.5 of their speed: together they take 0.5 * 1.5.
    half = dataclasses.replace(free, **dict.fromkeys(COEFFICIENTS, 0.5))
    assert speed_table(half, False)[0b0111, :3].tolist() == pytest.approx([1 / 1.75] * 3)


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        speed_table(MACHINE, False)[0, 0] = 2.0


def test_channels_that_take_turns() -> None:
    table = speed_table(None, False)
    assert table[0b1111].tolist() == [0.25] * 4
    assert table[0b0011].tolist() == [0.5, 0.5, 1.0, 1.0]
    loads = np.array([1.0, 2.0, 3.0, 0.0])
    assert float(seconds_together(loads, table)) == pytest.approx(6.0)


def test_nothing_to_do_takes_no_time() -> None:
    assert seconds_together(np.zeros((4, 3)), speed_table(MACHINE, True)).tolist() == [0.0] * 3
