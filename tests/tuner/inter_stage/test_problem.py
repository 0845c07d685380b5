import numpy as np
import pytest

from lightning_mist.tuner.inter_stage.problem import Family, InterStageProblem
from lightning_mist.tuner.space.applied_space import ANYWHERE
from tests.tuner.plans import is_feasible
from tests.tuner.problems import slot


def problem(microbatches=5):
    """Two stages of 2 + 2 or 1 + 3 layers on 1 + 2 or 2 + 1 devices."""
    return InterStageProblem(
        num_layers=4,
        num_devices=(3,),
        num_microbatches=microbatches,
        slots=(
            slot([0, 0], [2, 1], [1, 2], [4.0, 1.0], [0.5, 0.0]),
            slot([2, ANYWHERE, 2], [2, 3, 2], [2, 1, 1], [2.0, 6.0, 4.0], [3.0, 0.0, 0.0]),
        ),
    )


def test_seconds_of_what_was_chosen():
    made = problem()
    assert made.steady((0, 2)).tolist() == [4.0, 4.0]
    assert made.boundary((0, 0)).tolist() == [0.5, 3.0]
    # Four more microbatches at the pace of the slowest stage, and one through both; the second stage's boundary time
    # exceeds what it is waited for anyway by 3 - 0.
    assert made.objective((1, 1)) == 4 * 6.0 + (1.0 + 6.0)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        made.objective((0,))


@pytest.mark.parametrize(
    ("chosen", "fits"),
    [
        ((0, 0), True),
        ((1, 1), True),  # the second stage may lie anywhere
        ((0, 1), False),  # five layers
        ((1, 0), False),  # a gap at layer 1, and four devices
        ((0, 2), False),  # one device is left
    ],
)
def test_layers_and_devices_are_used_up_in_order(chosen, fits):
    assert is_feasible(problem(), chosen) is fits


def test_a_family_ends_where_a_stage_has_no_choice():
    asked = []

    def none(stage, count):
        asked.append((stage, count))
        return problem().slots[0].take(np.array([], dtype=np.int64))

    family = Family.of(6, (4,), 4, (2, 3), none)
    assert asked == [(1, 2)]
    assert not family.heads
    assert not family.tails
