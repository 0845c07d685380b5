import pytest

from lightning_mist.tuner import Planner
from lightning_mist.tuner.family_floors import FamilyFloors
from lightning_mist.tuner.pipelines import AlikePipelines
from tests.tuner.instances import random_instance
from tests.tuner.searches import searched


def prepared(seed):
    found = random_instance(seed, unlike=0)
    planner = Planner(found.network, found.machine, profile=found.rates)
    space = planner.space(found.rows * found.machine.world_size, found.search)
    return planner.stages(space, found.memory_limit, found.host_memory_limit)


def found_and_floors(seed):
    """Numbers of stages and of microbatches with the seconds of pipelines that were found, and bounds of them."""
    maker = prepared(seed)
    outcome, floors = searched(maker), AlikePipelines(maker).floors
    return [(*key[:2], found.answer.objective) for key, found in outcome.found.items() if key[0] > 1], floors


@pytest.mark.parametrize("seed", range(40))
def test_no_pipeline_takes_less_than_its_bound(seed):
    found, floors = found_and_floors(seed)
    for count, microbatches, seconds in found:
        assert floors.bound((count,), microbatches, 2 * seconds) <= seconds * (1 + 1e-9)
        assert floors.bound((count,), microbatches, seconds / 2) <= seconds / 2


def test_what_is_enough_is_not_asked_again_and_more_is():
    compared = 0
    for maker in map(prepared, range(30)):
        microbatches = [count for stages, count in maker.space.pipelines() if stages == 2]
        if not microbatches:
            continue
        floors, wanted = (counting(maker) for _ in range(2))
        most = wanted.bound((2,), microbatches[-1], 1e9)
        for enough in (most / 2, most * 2):
            some = floors.bound((2,), microbatches[-1], 1e9, enough=enough)
            assert min(most, enough) * 0.9 <= some <= most * (1 + 1e-9)
            Counting.solved = 0
            assert floors.bound((2,), microbatches[-1], 1e9, enough=enough) == some
            assert Counting.solved == 0
        assert floors.bound((2,), microbatches[-1], 1e9) == pytest.approx(most, rel=0.1)
        compared += most < 1e9
    assert compared > 5


class Counting(FamilyFloors):
    """Counts how often a problem is solved."""

    solved = 0

    def _solve(self, *args):
        Counting.solved += 1
        return super()._solve(*args)


def counting(maker):
    return Counting(model=maker.model, space=maker.space, slot_of=maker.slot, memory_limit=maker.memory_limit)


def test_what_is_known_is_not_asked_again():
    maker = next(maker for maker in map(prepared, range(50)) if maker.space.max_stages > 1)
    floors = counting(maker)
    microbatches = max(count for stages, count in maker.space.pipelines() if stages == 2)
    Counting.solved = 0
    least = floors.bound((2,), microbatches, 1e9)
    assert floors.bound((2,), microbatches, 2e9) == least if least < 1e9 else True
    assert floors.bound((2,), microbatches, least / 2) == least / 2
    assert Counting.solved == (1 if least < 1e9 else 2)
