"""Counts of situations give the bytes that going through them one by one gives."""

import numpy as np
import pytest

from lightning_mist.cost.interleaved_memory import situation_terms
from lightning_mist.cost.memory.interleaved_phases import counts_of_groups, situations_of_groups
from lightning_mist.cost.memory.stage_bytes import StageNeeds

ARRAYS = tuple(name for name in StageNeeds.__slots__ if name.endswith("_K"))
SHAPES = [(4, 2, 8), (6, 2, 4), (6, 3, 12), (8, 4, 4)]


def random_needs(rng, count):
    arrays = {name: rng.integers(0, 1000, count).astype(float) for name in ARRAYS}
    return StageNeeds(always={}, update=(), **arrays)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_pending", [True, False])
def test_counts_say_what_every_situation_needs(shape, has_pending):
    num_stages, num_groups, _ = shape
    rng = np.random.default_rng(sum(shape))
    for group in range(num_groups):
        stages = range(group, num_stages, num_groups)
        needs = {stage: random_needs(rng, 2) for stage in stages}
        if not has_pending:
            for item in needs.values():
                item.pending_K[:] = 0.0
        found_XK = counts_of_groups(*shape)[group].bytes(list(needs.values()))
        situations = situations_of_groups(*shape)[group]
        assert len(found_XK) == len(situations)
        for candidate in range(2):
            own = {stage: item.take(slice(candidate, candidate + 1)) for stage, item in needs.items()}
            wanted = [sum(situation_terms(own, situation).values()) for situation in situations]
            assert found_XK[:, candidate].tolist() == wanted


@pytest.mark.parametrize("shape", SHAPES)
def test_the_most_microbatches_in_flight_are_those_of_some_situation(shape):
    num_stages, num_groups, _ = shape
    for group, (counts, situations) in enumerate(
        zip(counts_of_groups(*shape), situations_of_groups(*shape), strict=True)
    ):
        for chunk, stage in enumerate(range(group, num_stages, num_groups)):
            most = 0
            for at, _, _, there in situations:
                held = {where: number for kind, where, number in there if kind == "others"}
                most = max(most, held.get(stage, 0) + (at == stage))
            assert counts.in_flight_G[chunk] == most
