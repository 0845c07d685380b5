import dataclasses

import numpy as np

from lightning_mist.tuner import moved_known
from lightning_mist.tuner.moved_known import Known, Moved
from tests.tuner.test_moved import make


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


def test_all_of_several():
    parts = [
        Moved(
            index_J=np.array([count]),
            offload_JO=np.zeros((1, 4)),
            steady_J=np.array([1.0]),
            boundary_J=np.array([2.0]),
            peak_J=np.array([3.0]),
        )
        for count in (4, 1)
    ]
    assert Moved.joined(parts).index_J.tolist() == [4, 1]


def test_knowledge_is_kept_by_table_and_ratios_up_to_so_many_bases(monkeypatch):
    maker = make("alike", "L4", limit=500_000)
    maker.frontier(0, 2, 4)
    table = next(iter(maker._tables.values()))
    knowledge = maker._mover.knowledge
    (found,) = knowledge._of.values()
    assert len(found) > 0
    assert knowledge.of(table, maker._mover.ratios.key) is found
    other = knowledge.of(table, "other ratios")
    assert other is not found
    assert len(other) == 0
    # What was asked for longest ago goes first.
    monkeypatch.setattr(moved_known, "MOST", 0)
    assert knowledge.of(table, "other ratios") is other
    assert list(knowledge._of.values()) == [other]


def test_tables_without_bases_are_forgotten_too(monkeypatch):
    monkeypatch.setattr(moved_known, "MOST_TABLES", 2)
    maker = make("alike", "L4", limit=500_000)
    maker.frontier(0, 2, 4)
    table, knowledge = next(iter(maker._tables.values())), moved_known.Knowledge()
    found = [knowledge.of(table, name) for name in ("first", "second", "third")]
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
