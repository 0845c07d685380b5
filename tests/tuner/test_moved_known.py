import dataclasses

import numpy as np
import pytest

from lightning_mist.cost.phases import stage_phases
from lightning_mist.tuner import moved_known
from lightning_mist.tuner.moved_known import Known
from lightning_mist.tuner.moved_settled import learn_seconds
from lightning_mist.tuner.offload_ratios import Ratios
from tests.tuner.test_offload_search import make, table_of


def no_batch(slot):
    """Batches of no bytes."""
    return 0.0


def test_seconds_are_found_again_wherever_they_were_noted():
    maker = make("alike", "L4", limit=1e12)
    maker.frontier(0, 2, 4)
    known = Known.nothing(next(iter(maker._tables.values())))
    steady, boundary = known.seconds(np.array([3, 1]))
    assert np.isnan(steady).all()
    assert np.isnan(boundary).all()
    known.note(np.array([7, 2]), np.array([0.7, 0.2]), np.array([7.0, 2.0]))
    known.note(np.array([5]), np.array([0.5]), np.array([5.0]))
    steady, boundary = known.seconds(np.array([2, 3, 5, 7, 9]))
    assert np.array_equal(steady, [0.2, np.nan, 0.5, 0.7, np.nan], equal_nan=True)
    assert np.array_equal(boundary, [2.0, np.nan, 5.0, 7.0, np.nan], equal_nan=True)


def test_knowledge_is_kept_by_table_and_ratios_up_to_so_many_bases(monkeypatch):
    maker = make("alike", "L4", limit=500_000)
    maker.frontier(0, 2, 4)
    table = next(iter(maker._tables.values()))
    knowledge = maker._mover.knowledge
    (found,) = knowledge._of.values()
    assert len(found) > 0
    assert knowledge.of(table, maker._mover.ratios, no_batch) is found
    ratios = Ratios.of(maker.space.search, (0.1,))
    other = knowledge.of(table, ratios, no_batch)
    assert other is not found
    assert len(other) == 0
    # What was asked for longest ago goes first.
    monkeypatch.setattr(moved_known, "MOST", 0)
    assert knowledge.of(table, ratios, no_batch) is other
    assert list(knowledge._of.values()) == [other]


def test_tables_without_bases_are_forgotten_too(monkeypatch):
    monkeypatch.setattr(moved_known, "MOST_TABLES", 2)
    maker = make("alike", "L4", limit=500_000)
    maker.frontier(0, 2, 4)
    table, knowledge = next(iter(maker._tables.values())), moved_known.Knowledge()
    found = [knowledge.of(table, Ratios.of(maker.space.search, (ratio,)), no_batch) for ratio in (0.1, 0.2, 0.3)]
    assert not any(map(len, found))
    assert list(knowledge._of.values()) == found[1:]


def test_what_one_search_has_learned_another_with_other_limits_need_not():
    knowledge = moved_known.Knowledge()
    tight, loose = (make("alike", "L4", limit=limit) for limit in (500_000, 520_000))
    tight._mover = dataclasses.replace(tight._mover, knowledge=knowledge)
    tight.frontier(0, 2, 4)
    loose._tables = tight._tables
    alone = loose.frontier(0, 2, 4)
    loose._frontiers.clear()
    loose._mover = dataclasses.replace(loose._mover, knowledge=knowledge)
    shared = loose.frontier(0, 2, 4)
    np.testing.assert_array_equal(shared.steady_K, alone.steady_K)
    np.testing.assert_array_equal(shared.peak_K, alone.peak_K)


@pytest.mark.parametrize("network", ["alike", "unlike"])
@pytest.mark.parametrize(("stage", "batch", "microbatches"), [(0, 32, 8), (1, 32, 8), (0, 16, 4), (2, 64, 16)])
def test_what_is_known_of_one_batch_holds_for_another(network, stage, batch, microbatches):
    heir, donor = (make(network, "L4", limit=500_000, batch=rows) for rows in (16, batch))
    donor.frontier(stage, 3, microbatches)
    (known,) = donor._mover.knowledge._of.values()
    table = table_of(heir, stage, 3, 4, np.inf)
    found, ratios = Known.nothing(table), heir._mover.ratios
    count = len(ratios)
    places = np.random.default_rng(batch).choice(len(known) * count, 40, replace=False)
    learn_seconds(donor.model, ratios, [(known, np.sort(places))])
    found.inherit(known, count, lambda slot: heir.model.memory(slot).batch_bytes(slot))
    assert len(found) == len(known) > 0
    assert len(found.place_S) == len(known.place_S) > 0
    # Nothing comes twice.
    found.inherit(known, count, no_batch)
    assert len(found) == len(known)
    # All of it is what is evaluated for the new batch.
    wanted = Known.nothing(table)
    for shape in np.unique(table.shape_K[found.base_B]).tolist():
        heir._mover._learn_bytes([(wanted, found.base_B[table.shape_K[found.base_B] == shape])])
    order = wanted.row_K[found.base_B]
    phases = stage_phases(stage, 3, 4)
    np.testing.assert_allclose(found.parts.peaks(phases), wanted.parts.peaks(phases)[order], rtol=1e-12)
    np.testing.assert_allclose(found.parts.host_bytes(phases), wanted.parts.host_bytes(phases)[order], rtol=1e-12)
    learn_seconds(heir.model, ratios, [(wanted, np.unique(new_places(found, order, count)))])
    here, there = found.seconds(found.place_S), wanted.seconds(new_places(found, order, count))
    for mine, theirs in zip(here, there, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-11, atol=1e-15)


def new_places(found, order, count):
    """Where what is known of bases in one order is in another."""
    return order[found.place_S // count] * count + found.place_S % count


def test_tables_that_nothing_is_known_of_inherit_nothing():
    maker, other = make("alike", "L4", limit=500_000), make("alike", "L4", limit=500_000, batch=48)
    maker.frontier(0, 3, 4)
    other.frontier(1, 3, 4)
    (known,) = maker._mover.knowledge._of.values()
    (table,) = other._tables.values()
    for heir in (table, dataclasses.replace(known.table, keys=())):
        found = Known.nothing(heir)
        found.inherit(known, len(maker._mover.ratios), no_batch)
        assert len(found) == 0
