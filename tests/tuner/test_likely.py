import numpy as np
import pytest

from lightning_mist.tuner.likely import LIKE, likely_seconds, quick_bounds
from lightning_mist.tuner.past import Precedent
from tests.tuner.searches import each_by_itself, stages_of


def test_quick_bounds_hold():
    stages = stages_of()
    lower, wanted = quick_bounds(stages, stages.space), each_by_itself(stages)
    assert lower.keys() == wanted.keys()
    assert all(lower[key] <= wanted[key] for key in lower)


@pytest.mark.parametrize("memory", [10**12, 10**6])
def test_what_is_likely_is_near_the_best(memory):
    stages = stages_of(memory=memory)
    likely = likely_seconds(stages, quick_bounds(stages, stages.space))
    assert likely == pytest.approx(min(each_by_itself(stages).values()), rel=0.5)


def test_nothing_is_likely_where_nothing_fits_or_time_is_up():
    stages = stages_of(memory=100)
    assert likely_seconds(stages, quick_bounds(stages, stages.space)) == np.inf
    stages = stages_of()
    assert likely_seconds(stages, quick_bounds(stages, stages.space), deadline=0.0) == np.inf


def test_what_was_found_for_an_earlier_question_is_likely_again():
    stages = stages_of()
    lower = quick_bounds(stages, stages.space)
    count, number = max(lower)
    other = Precedent(num_microbatches=999, layers=(1, 1), devices=(1, 3), slowest=1.0, seconds=3.0)
    like = Precedent(num_microbatches=number, layers=(1,) * count, devices=(1,) * count, slowest=2.0, seconds=70.0)
    assert likely_seconds(stages, lower, {count: like}) == pytest.approx(70 * LIKE)
    # One that is no pipeline of the space says nothing.
    assert likely_seconds(stages, lower, {2: other}) == likely_seconds(stages, lower)
