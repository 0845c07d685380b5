from tests.tuner.searches import each_by_itself, stages_of


def test_quick_bounds_hold():
    stages = stages_of()
    lower, wanted = stages.quick_bounds(), each_by_itself(stages)
    assert {key[:2] for key in lower} == wanted.keys()
    assert all(lower[key] <= wanted[key[:2]] for key in lower)
