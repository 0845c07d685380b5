import itertools

import numpy as np

from lightning_mist.tuner import SearchSpace
from lightning_mist.tuner.offload_ratios import Ratios
from lightning_mist.tuner.search_space import OFFLOADED

RATIOS = Ratios.of(SearchSpace(offload=("parameters", "optimizer", "activations")), (0.5, 1.0))


def test_what_may_not_be_moved_stays():
    assert RATIOS.sizes == (3, 1, 3, 3)
    assert len(RATIOS) == 27
    assert RATIOS.pairs == 3
    assert not RATIOS.offload_CO[0].any()
    assert RATIOS.each.gradients == (0.0,)
    assert RATIOS.each.optimizer == (0.0, 0.5, 1.0)
    places = RATIOS.of_kinds(np.arange(27))
    for combination, place in enumerate(places):
        found = [getattr(RATIOS.each, name)[at] for name, at in zip(OFFLOADED, place, strict=True)]
        assert RATIOS.offload_CO[combination].tolist() == found


def test_only_what_moves_no_more_than_it_has_to():
    fits = np.random.default_rng(0).random((20, 27)) < 0.4
    least = RATIOS.least(fits, ("parameters", "activations"))
    ordered = [OFFLOADED.index(name) for name in ("parameters", "activations")]
    others = [OFFLOADED.index("gradients"), OFFLOADED.index("optimizer")]
    defers = (RATIOS.offload_CO[:, :3] > 0).any(axis=1)
    for row, combination in itertools.product(range(20), range(1, 27)):
        mine = RATIOS.offload_CO[combination]
        smaller = (RATIOS.offload_CO <= mine)[:, ordered].all(axis=1) & (RATIOS.offload_CO == mine)[:, others].all(
            axis=1
        )
        smaller &= (defers == defers[combination]) & (np.arange(27) != combination) & (np.arange(27) > 0)
        expected = fits[row, combination] and not (fits[row] & smaller).any()
        assert least[row, combination] == expected
