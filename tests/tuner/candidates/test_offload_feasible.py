import dataclasses

import numpy as np
import pytest

from lightning_mist.cost.inputs.candidates import OffloadCandidates
from lightning_mist.cost.memory.moments import device_moments
from lightning_mist.plan.search_space import OFFLOADED
from lightning_mist.tuner import SearchSpace
from lightning_mist.tuner.candidates import offload_search
from lightning_mist.tuner.candidates.candidate_tables import Stage, StagePoints
from lightning_mist.tuner.candidates.offload_search import Feasible, RatioGrid, feasible
from tests.tuner.bounds.test_stage_bounds import question, stages_of
from tests.tuner.candidates.test_offload_search import RATIOS, make, table_of

GRID = RatioGrid.of(SearchSpace(offload=OFFLOADED), RATIOS)
LIMIT = 600_000


def middle(network="alike"):
    """The cost model of a network, and the table of stages between others."""
    maker = make(network, "L4", limit=LIMIT)
    return maker.model, table_of(maker, 1, 3, 8, np.inf)


def found_of(model, table, stages, limits, index=None):
    """What stages with some moments may offload, and their candidates; of some candidates of the table if given."""
    points = StagePoints.of(table, [Stage(moments=moments) for moments in stages], np.inf)
    point_S = np.flatnonzero(np.ones(len(points), dtype=bool) if index is None else np.isin(points.index_K, index))
    found = Feasible.joined(
        [Feasible.none(), *(block for _, block in feasible(model, GRID, [(points, point_S)], limits))]
    )
    return points, found.take(np.lexsort((found.combination_J, found.point_J)))


@pytest.mark.parametrize("blocks", [None, (1, 1), (2 * 9, 3 * 81)])
def test_stages_that_share_a_table_may_offload_what_each_may_alone(blocks, monkeypatch):
    model, table = middle()
    stages = [device_moments(1, count, 8) for count in (3, 5, 7)]
    some, sizes = np.arange(0, len(table), 7), []
    for limits in ((LIMIT, np.inf), (LIMIT, 60_000.0), (LIMIT, 1e12)):
        every = [found_of(model, table, [moments], limits, some) for moments in stages]
        with monkeypatch.context() as patch:
            for name, value in zip(("PAIRS_AT_ONCE", "PEAKS_AT_ONCE"), blocks or (), strict=False):
                patch.setattr(offload_search, name, value)
            points, together = found_of(model, table, stages, limits, some)
        for stage, (own, alone) in enumerate(every):
            mine_J = points.stage_K[together.point_J] == stage
            np.testing.assert_array_equal(points.index_K[together.point_J[mine_J]], own.index_K[alone.point_J])
            np.testing.assert_array_equal(together.combination_J[mine_J], alone.combination_J)
            np.testing.assert_array_equal(together.peak_J[mine_J], alone.peak_J)
        sizes.append(len(together.point_J))
    # A limit of host memory counts where there is not enough for everything.
    assert 10 < sizes[1] < sizes[0] == sizes[2]


def test_what_is_feasible_fits_and_has_the_peak_that_the_memory_model_says():
    model, table = middle("unlike")
    moments = device_moments(1, 3, 8)
    points, found = found_of(model, table, [moments], (550_000.0, 200_000.0))
    shape_J = table.shape_K[points.index_K[found.point_J]]
    assert len(np.unique(shape_J)) > 1
    for shape in np.unique(shape_J).tolist():
        at_J, slot = shape_J == shape, table.slots[shape]
        offload_JO = GRID.offload_CO[found.combination_J[at_J]]
        ratios = OffloadCandidates.of_kinds(offload_JO)
        stages = dataclasses.replace(table.candidates(points.index_K[found.point_J[at_J]]), offload=ratios)
        memory = model.memory(slot)
        needs = memory.needs(slot, stages)
        np.testing.assert_allclose(found.peak_J[at_J], needs.peaks(moments), rtol=1e-12)
        assert (found.peak_J[at_J] <= 550_000).all()
        assert (needs.host_bytes(moments) <= 200_000).all()


def test_nothing_is_feasible_of_no_candidates():
    model, table = middle()
    _, found = found_of(model, table, [device_moments(1, 3, 8)], (1e12, np.inf), np.empty(0, dtype=np.int64))
    assert len(found.point_J) == len(found.combination_J) == len(found.peak_J) == 0


def seconds_of(model, table, index_J, offload_JO):
    """Steady seconds of candidates of a table that offload something."""
    seconds_J = np.empty(len(index_J))
    for shape in np.unique(table.shape_K[index_J]).tolist():
        at_J = table.shape_K[index_J] == shape
        ratios = OffloadCandidates.of_kinds(offload_JO[at_J])
        stages = dataclasses.replace(table.candidates(index_J[at_J]), offload=ratios)
        seconds_J[at_J] = model.seconds(table.slots[shape], stages).steady_K
    return seconds_J


def left_out(seed, **options):
    """How many candidates with ratios are left out for being slower than half of them; none may be faster."""
    found, rng = question(seed, **options)
    maker, count = stages_of(found), 0
    grid = RatioGrid.of(maker.space.search, maker.space.offload_ratios)
    pipelines = [pipeline for pipeline in maker.space.pipelines() if pipeline[0] > 1]
    for place in rng.permutation(len(pipelines))[:4] if len(grid) > 1 else ():
        stages, microbatches = pipelines[place]
        index = int(rng.integers(stages))
        shapes = [shape for shape in maker.space.shapes(microbatches) if shape.devices < maker.space.world_size]
        shape = shapes[int(rng.integers(len(shapes)))]
        table = maker.everything(maker.slot(index, stages, microbatches, shape))
        points = StagePoints.of(table, [Stage(moments=device_moments(index, stages, microbatches))], np.inf)
        asked = maker.model, grid, [(points, np.arange(len(points)))], (maker.memory_limit, np.inf)
        every = Feasible.joined([Feasible.none(), *(block for _, block in feasible(*asked))])
        index_J = points.index_K[every.point_J]
        seconds_J = seconds_of(maker.model, table, index_J, grid.offload_CO[every.combination_J])
        slowest = float(np.median(seconds_J)) if len(seconds_J) else 0.0
        some = Feasible.joined([Feasible.none(), *(block for _, block in feasible(*asked, slowest))])
        kept = set(zip(some.point_J.tolist(), some.combination_J.tolist(), strict=True))
        codes = zip(every.point_J.tolist(), every.combination_J.tolist(), strict=True)
        is_kept_J = np.array([code in kept for code in codes], dtype=bool)
        assert is_kept_J[seconds_J <= slowest].all()
        count += int((~is_kept_J).sum())
    return count


@pytest.mark.parametrize("first_seed", range(0, 90, 30))
def test_nothing_is_left_out_for_being_too_slow_that_is_not(first_seed):
    assert sum(left_out(seed) for seed in range(first_seed, first_seed + 30)) > 30


def test_nor_where_checkpoints_have_a_share_of_their_own():
    assert sum(left_out(seed, checkpoints=True) for seed in range(15)) > 30
