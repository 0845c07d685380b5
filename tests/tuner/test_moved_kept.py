import dataclasses

import numpy as np
import pytest

from lightning_mist.cost.candidates import OffloadCandidates
from lightning_mist.cost.offload import host_bytes
from lightning_mist.cost.phases import stage_phases
from lightning_mist.tuner import moved_kept
from lightning_mist.tuner.moved_kept import arranged, floors_of, in_blocks, kept
from lightning_mist.tuner.search_space import OFFLOADED
from tests.tuner.test_moved import make


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


@pytest.mark.parametrize("at_once", [3, 1 << 10])
def test_what_is_kept_of_several_stages_is_what_is_kept_of_each(at_once, monkeypatch):
    maker, tables = known_stages()
    wanted = [(*item, item[0].base_B, stage_phases(index, 3, 4)) for index, item in enumerate(tables)]
    ratios, limits = maker._mover.ratios, (600_000.0, 300_000.0)
    alone = [kept([item], ratios, limits)[0] for item in wanted]
    monkeypatch.setattr(moved_kept, "BASES_AT_ONCE", at_once)
    together = kept(wanted, ratios, limits)
    assert sum(len(found.of_J) for found in alone) > 10
    for found, other in zip(together, alone, strict=True):
        for name in ("of_J", "place_J", "peak_J"):
            np.testing.assert_array_equal(getattr(found, name), getattr(other, name))


def test_what_is_kept_fits_and_has_the_peak_that_the_memory_model_says():
    maker, tables = known_stages("unlike")
    ratios, checked = maker._mover.ratios, 0
    for index, (known, of_table) in enumerate(tables):
        phases = stage_phases(index, 3, 4)
        (found,) = kept([(known, of_table, known.base_B, phases)], ratios, (550_000.0, 200_000.0))
        for shape in np.unique(known.table.shape_K[found.of_J]).tolist():
            at_J = known.table.shape_K[found.of_J] == shape
            slot = known.table.slots[shape]
            stages = with_ratios(
                known.table.candidates(found.of_J[at_J]), ratios.offload_CO[found.place_J[at_J] % len(ratios)]
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
    (found,) = kept([(*tables[0], none, stage_phases(0, 3, 4))], maker._mover.ratios, (1e12, np.inf))
    assert len(found.of_J) == len(found.place_J) == len(found.peak_J) == 0


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
