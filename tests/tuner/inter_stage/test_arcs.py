import itertools

import numpy as np
import pytest

from lightning_mist.tuner.inter_stage.flow_program import arcs_of
from tests.tuner.plans import is_feasible
from tests.tuner.problems import brute_force, random_problem, small_seeds


def paths(arcs, node=0):
    """The choices along every way from the first node behind the last stage."""
    for arc in np.flatnonzero(arcs.from_K == node):
        if arcs.to_K[arc] < 0:
            yield (int(arcs.choice_K[arc]),)
        else:
            yield from ((int(arcs.choice_K[arc]), *rest) for rest in paths(arcs, int(arcs.to_K[arc])))


@pytest.mark.parametrize("seed", small_seeds(60))
def test_every_way_is_an_answer_and_the_best_one_is_among_them(seed):
    problem = random_problem(seed)
    wanted = brute_force(problem)
    found = list(itertools.islice(paths(arcs_of(problem)), 20_000))
    assert all(is_feasible(problem, chosen) for chosen in found)
    assert min((problem.objective(chosen) for chosen in found), default=np.inf) == pytest.approx(wanted, rel=1e-9)
    if np.isinf(wanted):
        return
    near = arcs_of(problem, wanted)
    assert len(near) <= len(arcs_of(problem))
    assert min(problem.objective(chosen) for chosen in paths(near)) == pytest.approx(wanted, rel=1e-9)
    assert not len(arcs_of(problem, wanted * 0.5))


@pytest.mark.parametrize("seed", small_seeds(30))
def test_arcs_know_what_they_cost(seed):
    problem = random_problem(seed)
    arcs = arcs_of(problem)
    for stage, slot in enumerate(problem.slots):
        at = arcs.stage_K == stage
        assert (arcs.steady_K[at] == slot.steady_K[arcs.choice_K[at]]).all()
        assert (arcs.boundary_K[at] == slot.boundary_K[arcs.choice_K[at]]).all()
