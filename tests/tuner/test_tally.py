import numpy as np
import pytest

from lightning_mist.tuner import search
from lightning_mist.tuner.problem import PRECISION
from lightning_mist.tuner.tally import HEADROOM, family_of, single_stage
from tests.tuner.searches import each_by_itself, stages_of, tally_of


@pytest.mark.parametrize("memory", [10**12, 600_000])
def test_floors_are_bounds_and_remembered_with_room_for_slower_questions(memory):
    stages = stages_of(memory=memory)
    wanted, tally = each_by_itself(stages), tally_of(stages)
    counts = (2, 3, 4)
    numbers = sorted({number for count, number in wanted if count in counts})
    # One microbatch passes stages one after another, so that not every number of them occurs.
    counts_of = {number: tuple(count for count in counts if (count, number) in wanted) for number in numbers}
    below, has_risen = min(wanted.values()), False
    for number, some in counts_of.items():
        before = min(tally.lower[count, number] for count in some)
        found, least = tally.floor(some, number, below), min(wanted[count, number] for count in some)
        assert found <= least * (1 + PRECISION)
        known = max(before, min(tally.proven.get((count, number), 0.0) for count in some))
        assert known <= max(below * HEADROOM, before) * (1 + PRECISION)
        assert known <= least * (1 + PRECISION)
        has_risen |= known > before
    # Without a limit nothing is known that a cheap estimate does not know.
    assert has_risen == (memory < 10**12)


def test_families_below_a_bound_have_the_best_of_all():
    stages = stages_of()
    wanted, tally = each_by_itself(stages), tally_of(stages)
    least = min(value for key, value in wanted.items() if key[0] > 1)
    (count, number) = next(key for key, value in wanted.items() if value == least)
    every, some = (family_of(tally, [count], number, below) for below in (np.inf, least * 1.01))
    assert 0 < sum(map(len, some.tails)) <= sum(map(len, every.tails))
    alone = single_stage(stages, stages.space, 1, np.inf)
    assert len(alone.slots) == 1


def test_the_least_of_some_pipelines_is_of_those_that_were_found():
    stages = stages_of(memory=600_000)
    outcome, tally = search.search_pipelines(stages, stages.space, np.inf), tally_of(stages)
    assert tally.least_in((2, 3), 4) == np.inf
    for found in outcome.found.values():
        tally.note(found)
    for number in {key[1] for key in outcome.found}:
        known = [item.answer.objective for key, item in outcome.found.items() if key[1] == number and key[0] < 4]
        assert tally.least_in((1, 2, 3), number) == min(known, default=np.inf)
