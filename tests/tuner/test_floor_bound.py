import numpy as np
import pytest

from lightning_mist.tuner.floor_bound import floor_bound
from tests.tuner.problems import brute_force, floors_of, random_problem, small_seeds
from tests.tuner.test_floor_family import pipelines, random_family


@pytest.mark.parametrize("seed", range(80))
def test_the_bound_is_what_trying_everything_finds(seed):
    family = random_family(seed)
    others = family.num_microbatches - 1
    best = min((others * max(steady) + total for _, _, steady, total in pipelines(family)), default=np.inf)
    if best == np.inf:
        assert floor_bound(family, 1e6) == 1e6
        return
    assert floor_bound(family, 2 * best) == pytest.approx(best, rel=1e-8)
    assert floor_bound(family, best / 2) == best / 2
    assert floor_bound(family, 2 * best, deadline=-np.inf) <= best * (1 + 1e-9)
    assert floor_bound(family, 2 * best, enough=1.5 * best) == pytest.approx(best, rel=1e-8)
    assert 0.9 * best * (1 - 1e-6) <= floor_bound(family, 2 * best, enough=0.9 * best) <= best * (1 + 1e-9)


ALIKE = [seed for seed in small_seeds(120) if len(random_problem(seed).num_devices) == 1]


@pytest.mark.parametrize("seed", [seed for seed in ALIKE if len(random_problem(seed).slots) > 1])
def test_no_pipeline_takes_less(seed):
    problem = random_problem(seed)
    best = brute_force(problem)
    below = 2 * best if np.isfinite(best) else 1.0
    assert floor_bound(floors_of(problem), below) <= best * (1 + 1e-9)
