import itertools

import numpy as np
import pytest

from lightning_mist.tuner.narrowed import narrowed
from tests.tuner.problems import floors_of, random_problem, slot, small_seeds


def answers_of(problem):
    """Every feasible answer with its step seconds."""
    for chosen in itertools.product(*(range(len(item)) for item in problem.slots)):
        if problem.is_feasible(chosen):
            yield chosen, problem.objective(chosen)


SEEDS = [
    seed
    for seed in small_seeds(250)
    if len(random_problem(seed).slots) > 1 and len(random_problem(seed).num_devices) == 1
]


@pytest.mark.parametrize("seeds", [SEEDS[start::4] for start in range(4)])
def test_what_is_fast_enough_is_never_left_out(seeds):
    left_out = 0
    for seed in seeds:
        problem = random_problem(seed)
        answers = list(answers_of(problem))
        best = min((seconds for _, seconds in answers), default=1.0)
        for below in (best * 1.01, best * 1.5, best * 20):
            found = narrowed(floors_of(problem), below)
            for chosen, seconds in answers:
                if seconds < below:
                    assert len(chosen) in found.counts
                    assert problem.steady(chosen).max() <= found.slowest * (1 + 1e-9)
                    for stage, (item, index) in enumerate(zip(problem.slots, chosen, strict=True)):
                        at = item.devices_K[index], item.layers_K[index]
                        assert found.of(stage, len(chosen))[at]
            every = {
                (n, length) for item in problem.slots for n, length in zip(item.devices_K, item.layers_K, strict=True)
            }
            left_out += len(every) - (found.heads_CNL.any(axis=0) | found.tails_BNL.any(axis=0)).sum()
    assert left_out > 0


def test_what_the_others_cannot_complete_is_left_out():
    # Three layers on three devices: a first stage with one leaves two layers to two, not to one.
    first = slot([0, 0], [1, 1], [1, 2], [1.0, 0.5], [0.0, 0.0])
    last = slot([1], [2], [2], [1.0], [0.0])
    problem = random_problem(SEEDS[0])
    problem = type(problem)(num_layers=3, num_devices=(3,), num_microbatches=4, slots=(first, last))
    found = narrowed(floors_of(problem), 100.0)
    assert np.argwhere(found.of(0, 2)).tolist() == [[1, 1]]
    assert np.argwhere(found.of(1, 2)).tolist() == [[2, 2]]
    assert len(found.tails_BNL) == 1
    # Both take a second: of four rounds and one more at least two are each stage's own.
    assert found.slowest == pytest.approx(min(100 / 4, (100 - 2) / 3))
    assert not narrowed(floors_of(problem), 3.0).counts
