from lightning_mist.tuner.bounds.pipeline_bounds import quick_bounds
from tests.tuner.searches import each_by_itself, stages_of


def test_quick_bounds_hold():
    stages = stages_of()
    lower, wanted = quick_bounds(stages, stages.space), each_by_itself(stages)
    assert lower.keys() == wanted.keys()
    assert all(lower[key] <= wanted[key] for key in lower)
