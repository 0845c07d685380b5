import itertools

import numpy as np

from lightning_mist.plan.search_space import OFFLOADED
from lightning_mist.tuner import SearchSpace
from lightning_mist.tuner.candidates.offload_search import RatioGrid

RATIOS = RatioGrid.of(SearchSpace(offload=("parameters", "optimizer", "activations")), (0.5, 1.0))


def test_what_may_not_be_moved_stays():
    assert RATIOS.each.shape == (3, 1, 3, 3)
    assert len(RATIOS) == 27
    assert not RATIOS.offload_CO[0].any()
    assert RATIOS.each.gradients == (0.0,)
    assert RATIOS.each.optimizer == (0.0, 0.5, 1.0)
    assert RATIOS.each.kept == ((0.0, 0.0), (0.5, 0.5), (1.0, 1.0))
    every = itertools.product(*(RATIOS.values if count > 1 else (0.0,) for count in RATIOS.counts[:-1]))
    assert RATIOS.offload_CO.tolist() == [[*ratios, ratios[-1]] for ratios in every]


def test_checkpoints_have_a_ratio_of_their_own_where_they_are_named():
    own = RatioGrid.of(SearchSpace(offload=("activations", "checkpoints")), (0.5, 1.0))
    assert own.each.kept == tuple(itertools.product(own.values, own.values))
    alone = RatioGrid.of(SearchSpace(offload=("checkpoints",)), (0.5, 1.0))
    assert alone.offload_CO.tolist() == [[0.0] * 4 + [ratio] for ratio in (0.0, 0.5, 1.0)]


def test_only_what_moves_no_more_than_it_has_to():
    fits = np.random.default_rng(0).random((20, 27)) < 0.4
    least = RATIOS.minimal(fits, ("parameters", "activations"))
    ordered = [OFFLOADED.index(name) for name in ("parameters", "activations")]
    others = [OFFLOADED.index("gradients"), OFFLOADED.index("optimizer")]
    defers = (RATIOS.offload_CO[:, :3] > 0).any(axis=1)
    for row, combination in itertools.product(range(20), range(1, 27)):
        mine = RATIOS.offload_CO[combination]
        # Of what is not ordered it is known of nothing alone that it takes no longer than something.
        is_same_or_none = (RATIOS.offload_CO == mine) | (RATIOS.offload_CO == 0)
        smaller = (RATIOS.offload_CO <= mine)[:, ordered].all(axis=1) & is_same_or_none[:, others].all(axis=1)
        smaller &= (defers == defers[combination]) & (np.arange(27) != combination) & (np.arange(27) > 0)
        expected = fits[row, combination] and not (fits[row] & smaller).any()
        assert least[row, combination] == expected
