import dataclasses

import numpy as np
import pytest

from lightning_mist.cost.candidates import OffloadCandidates
from lightning_mist.cost.offload import host_bytes
from lightning_mist.cost.phases import stage_phases
from lightning_mist.tuner import offload_feasible
from lightning_mist.tuner.offload_feasible import arranged, floors_of, in_blocks, kept
from lightning_mist.tuner.search_space import OFFLOADED
from lightning_mist.tuner.stage_points import Stage, StagePoints
from tests.tuner.test_offload_search import make


def known_stages(network="alike", limit=600_000):
    """What is known of the tables of three stages that were asked for, and what is so of their arrangements."""
    maker = make(network, "L4", limit=limit)
    for index, stages in ((0, 3), (1, 3), (2, 3)):
        maker.frontier(index, stages, 4)
    every = maker._mover.knowledge._of.values()
    return maker, [(known, arranged(maker.model, known.table, maker._mover.ratios)) for known in every if len(known)]


def with_ratios(candidates, offload_CO):
    columns = {f"{name}_K": offload_CO[:, place] for place, name in enumerate(OFFLOADED)}
    return dataclasses.replace(candidates, offload=OffloadCandidates(**columns))


def points_of(known, *situations):
    """All candidates of a table, for stages in some situations; those of the first have their own numbers."""
    return StagePoints.of(known.table, [Stage(phases=phases) for phases in situations], np.inf)


@pytest.mark.parametrize("at_once", [3, 1 << 10])
def test_what_is_kept_of_several_stages_is_what_is_kept_of_each(at_once, monkeypatch):
    maker, tables = known_stages()
    wanted = [
        (*item, points_of(item[0], stage_phases(index, 3, 4)), item[0].base_B) for index, item in enumerate(tables)
    ]
    ratios, limits = maker._mover.ratios, (600_000.0, 300_000.0)
    alone = [kept([item], ratios, limits)[0] for item in wanted]
    monkeypatch.setattr(offload_feasible, "BASES_AT_ONCE", at_once)
    together = kept(wanted, ratios, limits)
    assert sum(len(found.point_J) for found in alone) > 10
    for found, other in zip(together, alone, strict=True):
        for name in ("point_J", "place_J", "peak_J"):
            np.testing.assert_array_equal(getattr(found, name), getattr(other, name))


def test_stages_that_share_a_table_keep_what_each_keeps_alone():
    maker, tables = known_stages()
    (known, of_table), ratios = tables[1], maker._mover.ratios
    situations, base_B = [stage_phases(1, count, 8) for count in (3, 5, 7)], np.sort(known.base_B)
    points = points_of(known, *situations)
    every_B = np.concatenate([base_B + stage * len(known.table) for stage in range(3)])
    sizes = []
    for limits in ((600_000.0, np.inf), (600_000.0, 200_000.0), (600_000.0, 1e12)):
        (together,) = kept([(known, of_table, points, every_B)], ratios, limits)
        for stage, phases in enumerate(situations):
            (alone,) = kept([(known, of_table, points_of(known, phases), base_B)], ratios, limits)
            mine_J = points.stage_P[together.point_J] == stage
            np.testing.assert_array_equal(points.index_P[together.point_J[mine_J]], alone.point_J)
            np.testing.assert_array_equal(together.place_J[mine_J], alone.place_J)
            np.testing.assert_array_equal(together.peak_J[mine_J], alone.peak_J)
        sizes.append(len(together.point_J))
    # Each stage has its own peaks, and a limit of host memory counts where there is not enough for everything.
    assert sizes[1] < sizes[0] == sizes[2]
    assert len(set(np.bincount(points.stage_P[together.point_J], together.peak_J).tolist())) == 3


def test_what_is_kept_fits_and_has_the_peak_that_the_memory_model_says():
    maker, tables = known_stages("unlike")
    ratios, checked = maker._mover.ratios, 0
    for index, (known, of_table) in enumerate(tables):
        phases = stage_phases(index, 3, 4)
        (found,) = kept([(known, of_table, points_of(known, phases), known.base_B)], ratios, (550_000.0, 200_000.0))
        for shape in np.unique(known.table.shape_K[found.point_J]).tolist():
            at_J = known.table.shape_K[found.point_J] == shape
            slot = known.table.slots[shape]
            stages = with_ratios(
                known.table.candidates(found.point_J[at_J]), ratios.offload_CO[found.place_J[at_J] % len(ratios)]
            )
            memory = maker.model.memory(slot)
            needs = memory.needs(slot, stages)
            np.testing.assert_allclose(found.peak_J[at_J], needs.peaks(phases), rtol=1e-12)
            assert (found.peak_J[at_J] <= 550_000).all()
            assert (host_bytes(memory, slot, stages, needs, phases) <= 200_000).all()
            checked += int(at_J.sum())
    assert checked


def test_nothing_is_kept_of_no_candidates():
    maker, tables = known_stages()
    none = np.empty(0, dtype=np.int64)
    points = points_of(tables[0][0], stage_phases(0, 3, 4))
    (found,) = kept([(*tables[0], points, none)], maker._mover.ratios, (1e12, np.inf))
    assert len(found.point_J) == len(found.place_J) == len(found.peak_J) == 0


def test_floors_are_never_above_what_copies_add():
    maker, tables = known_stages()
    mover, checked = maker._mover, 0
    for known, of_table in tables:
        place_J = known.place_S
        of_J = known.base_B[place_J // len(mover.ratios)]
        more_J, once_J = floors_of(known, of_table, mover.ratios, of_J, place_J)
        slack = 1 + 1e-9
        assert (known.table.steady_K[of_J] + more_J <= known.steady_S * slack).all()
        assert (known.table.floor_K[of_J] + once_J <= (known.steady_S + known.boundary_S) * slack).all()
        checked += len(place_J)
    assert checked


def test_blocks_have_every_candidate_once_in_order_and_not_too_many():
    index = [np.arange(5), np.empty(0, dtype=np.int64), np.arange(10, 13), np.arange(20, 29)]
    for most in (1, 2, 4, 100):
        blocks = list(in_blocks(index, most))
        assert all(0 < sum(len(some) for _, some in block) <= most for block in blocks)
        found = [(place, item) for block in blocks for place, some in block for item in some.tolist()]
        assert found == [(place, item) for place, of_place in enumerate(index) for item in of_place.tolist()]
    assert list(in_blocks([], 3)) == []
