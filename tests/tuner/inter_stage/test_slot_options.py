import numpy as np
import pytest

from lightning_mist.tuner.candidates import EVERY_PART
from lightning_mist.tuner.inter_stage.problem import end_options, slot_options
from lightning_mist.tuner.space.applied_space import ANYWHERE
from tests.tuner.problems import slot


def test_only_choices_that_are_not_beaten_in_both_count():
    # Of the three in front the second is slower and ends later than the first; the third ends earlier.
    choices = slot([ANYWHERE] * 4, [2, 2, 2, 1], [1, 1, 1, 1], [1.0, 1.5, 2.0, 0.5], [3.0, 2.9, 1.0, 0.0])
    options = slot_options(choices, 6, (4,))
    assert options.index_KL.tolist() == [[3], [0], [2]]
    assert options.layers_K.tolist() == [1, 2, 2]
    assert options.rank_K.tolist() == [0, 0, 1]
    assert options.steady_KL.tolist() == [[0.5], [1.0], [2.0]]
    assert options.reach_KL.tolist() == [[0.5], [4.0], [3.0]]
    assert options.least_K.tolist() == [0.5, 1.0, 2.0]


def test_choices_of_known_places_lie_in_lines():
    choices = slot([1, 2, 2], [2, 2, 2], [1, 1, 1], [1.0, 3.0, 2.0], [9.0, 0.0, 5.0])
    options = slot_options(choices, 5, (2,))
    # By layers of the suffix: what starts at layer 2 of 5 begins one of 3 layers.
    assert options.index_KL.tolist() == [[-1, -1, -1, 2, 0, -1], [-1, -1, -1, 1, -1, -1]]
    assert options.steady_KL[0, [3, 4]].tolist() == [2.0, 1.0]
    assert np.isinf(options.steady_KL[1, 4])
    assert options.least_K.tolist() == [1.0, 3.0]


def test_an_open_start_beside_known_ones_is_every_place():
    options = slot_options(slot([ANYWHERE, 2], [1, 1], [1, 1], [1.0, 0.5], [0.0, 0.0]), 4, (2,))
    assert set(options.index_KL[0].tolist()) == {0, 1}
    assert options.index_KL[0, 2] == 1
    assert options.index_KL[1, 2] == 0


def test_what_is_too_large_is_left_out():
    choices = slot([ANYWHERE] * 4, [1, 9, 1, 1], [3, 1, 1, 4], [1.0] * 4, [0.0] * 4, part=[0, 0, 1, EVERY_PART])
    options = slot_options(choices, 4, (2, 2))
    assert options.index_KL.tolist() == [[2]]
    assert options.part_K.tolist() == [1]
    assert len(slot_options(choices.take(np.array([0])), 4, (2, 2))) == 0


@pytest.mark.parametrize(
    ("is_first", "start", "kept"), [(True, 0, [0]), (False, 3, [0]), (True, 3, []), (False, 0, [])]
)
def test_ends_touch_their_end(is_first, start, kept):
    ends = end_options(slot([start, 1], [2, 2], [1, 1], [1.0, 0.5], [0.25, 0.0]), 5, (2,), (0,), is_first=is_first)
    assert ends.index_K.tolist() == kept
    assert ends.reach_K.tolist() == [1.25] * len(kept)
