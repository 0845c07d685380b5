from dataclasses import replace
from math import inf
from types import SimpleNamespace

import pytest

from lightning_mist.tuner import SearchSpace
from lightning_mist.tuner.inter_stage import Answer, Incumbent
from lightning_mist.tuner.search import Outcome
from lightning_mist.tuner.search.search_loop import degrees_of_copies, most_saved, search_copies
from lightning_mist.tuner.space.applied_space import apply
from tests.specs import spec


@pytest.mark.parametrize(
    ("devices", "limits", "wanted"),
    [
        (4, {}, {(2, 4), (4,)} - {(4,)}),
        (12, {}, {(2, 4, 6, 12), (3, 6, 12), (4, 12), (6, 12)}),
        (8, {"data_parallel_degrees": (2, 4)}, {(4,)}),
        (8, {"data_parallel_degrees": (2,)}, set()),
        (8, {"num_stages": (1,)}, set()),
        (1, {}, set()),
    ],
)
def test_degrees_are_multiples_of_every_number_of_copies(devices, limits, wanted):
    assert set(degrees_of_copies(apply(SearchSpace(**limits), spec(8), devices, 4 * devices))) == wanted


def test_at_most_the_batches_of_all_other_ranks_are_saved():
    assert most_saved(spec(4), apply(SearchSpace(), spec(4), 4, 32)) == 3 * 8 * 16


@pytest.mark.parametrize(("share", "asked"), [(0.005, 1), (0.015, 2)])
def test_copies_that_save_little_are_passed_over(share, asked):
    network = spec(4)
    space = apply(SearchSpace(), network, 4, 32)
    limits, problem = SimpleNamespace(memory_limit=most_saved(network, space) / share), object()
    answer, looks = Answer(chosen=(0,), objective=1.0, bound=1.0), []
    outcome = replace(Outcome.nothing(1), winner=Incumbent(problem=problem, answer=answer), bound=1.0)

    def look(item, more, below):
        looks.append((more, below))
        return limits, outcome

    _, found = search_copies(look, network, space)
    assert looks == [(0.0, inf), (most_saved(network, space), 1.0)][:asked]
    assert found.least == 1.0
