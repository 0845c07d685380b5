import numpy as np
import pytest

from lightning_mist.cost.overlap import concurrent_seconds
from lightning_mist.cost.overlap_floor import corners, least_seconds
from lightning_mist.hardware import catalog_profile, parse_cluster
from lightning_mist.hardware.profile.interference import COEFFICIENTS, Interference


def machines():
    rng = np.random.default_rng(3)
    drawn = [dict(zip(COEFFICIENTS, rng.choice([0.0, 0.2, 0.7, 1.0], 9).tolist(), strict=True)) for _ in range(6)]
    known = [catalog_profile(parse_cluster(name)).interference for name in ("2x8xL4", "2x8xH100")]
    return [*known, *(Interference(**values, source="drawn") for values in drawn), None]


@pytest.mark.parametrize("interference", machines())
@pytest.mark.parametrize("across", [False, True])
def test_no_less_is_taken_by_one_group_of_loads_or_several(interference, across):
    rng = np.random.default_rng(0)
    loads = rng.exponential(size=(4, 5, 400)) * rng.choice([0.0, 0.1, 1.0], (4, 5, 400))
    weights = corners(interference, across)
    taken = concurrent_seconds(*loads, interference, across)
    assert (least_seconds(weights, *loads.reshape(4, -1)) <= taken.reshape(-1) * (1 + 1e-12)).all()
    several = least_seconds(weights, *loads.sum(axis=1))
    assert (several <= taken.sum(axis=0) * (1 + 1e-12)).all()
    # It is no less than the largest load.
    assert (several >= loads.sum(axis=1).max(axis=0) * (1 - 1e-8)).all()


def test_of_two_channels_it_is_what_they_take():
    interference = catalog_profile(parse_cluster("1x8xL4")).interference
    rng = np.random.default_rng(1)
    for pair in ((0, 1), (0, 2), (0, 3), (1, 2), (2, 3)):
        loads = np.zeros((4, 50))
        loads[list(pair)] = rng.exponential(size=(2, 50))
        taken = concurrent_seconds(*loads, interference, False)
        assert least_seconds(corners(interference, False), *loads) == pytest.approx(taken, rel=1e-8)


def test_channels_that_take_turns_add_up():
    loads = np.random.default_rng(2).exponential(size=(4, 30))
    assert least_seconds(corners(None, False), *loads) == pytest.approx(loads.sum(axis=0))
