import dataclasses

import numpy as np
import pytest

from lightning_mist.cost import StageCostModel
from lightning_mist.cost.memory.phases import stage_phases
from lightning_mist.cost.time.overlap import FREE
from lightning_mist.tuner import pieces as module
from lightning_mist.tuner.intra_stage import IntraStage
from lightning_mist.tuner.pieces import Figures, Lines, Pieces
from lightning_mist.tuner.search_space import SearchSpace
from lightning_mist.tuner.space import apply
from lightning_mist.tuner.tables import Wanted, make_tables
from lightning_mist.tuner.windows import fixed_window
from tests.specs import cluster, profile, spec, with_splits
from tests.tuner.test_offload_search import table_of

NETWORK = with_splits(spec(5, tied=True, edge_bytes=120_000), (2, False))
MACHINE = dataclasses.replace(profile(link=1e8), interference=dataclasses.replace(FREE, compute_network=0.4))
MODEL = StageCostModel(NETWORK, MACHINE, cluster(8, nodes=2, kind="cuda"))


def intra(rows, pieces=None, **search):
    space = apply(SearchSpace(**search), NETWORK, 8, 8 * rows, devices_per_node=4)
    return IntraStage(MODEL, space, 1e12, pieces=pieces)


def numbers(table):
    """Everything about the candidates of a table, whatever their order."""
    names = ("window_K", "shape_K", "checkpointed_K", "zero_stage_K", "steady_K", "boundary_K", "floor_K", "again_K")
    rows = np.stack([getattr(table, name) for name in names])
    parts = [table.parts.parts_FK, table.parts.working_WK, table.parts.update_K[None], table.parts.always_K[None]]
    order = np.lexsort(rows[:4])
    return np.concatenate([rows, *parts])[:, order]


def asked(maker, stage, stages, microbatches, pace):
    return numbers(table_of(maker, stage, stages, microbatches, pace))


def test_tables_of_pieces_are_those_of_what_is_evaluated_anew():
    pieces = Pieces()
    # Other numbers of stages, paces that rise and fall, and batches of other sizes.
    for rows, microbatches in ((4, 8), (8, 16), (4, 1), (8, 4)):
        maker = intra(rows, pieces)
        for stage, stages in ((0, 2), (0, 3), (1, 3), (1, 6), (2, 3), (1, 2), (0, 1)):
            reachable = asked(intra(rows), stage, stages, microbatches, np.inf)
            if not reachable.shape[1]:
                continue
            for share in (0.5, 0.9, 0.3):
                pace = float(np.quantile(reachable[4], share))
                fresh = asked(intra(rows), stage, stages, microbatches, pace)
                found = table_of(maker, stage, stages, microbatches, pace)
                if found.pace == pace:
                    np.testing.assert_allclose(numbers(found), fresh, rtol=1e-12)
    assert pieces.of


def test_nothing_is_evaluated_twice():
    pieces = Pieces()
    first, kinds, later = intra(4, pieces), intra(4, pieces), intra(8, pieces)
    asked(first, 0, 3, 8, np.inf)
    assert first.evaluated > 0 == first.known
    # Longer pipelines leave the node, and pay more for what passes between stages only.
    asked(first, 0, 6, 8, np.inf)
    asked(kinds, 0, 3, 8, np.inf)
    # Twice the batch in twice the microbatches: every device sees the same rows of each.
    asked(later, 0, 3, 16, np.inf)
    assert (kinds.evaluated, later.evaluated) == (0, 0)
    assert kinds.known == later.known == first.evaluated
    assert pieces.of.keys() == {key for key in pieces.of if pieces.size(key)}


def test_a_larger_pace_evaluates_what_the_smaller_one_left_out():
    maker, whole = intra(4), intra(4)
    steady = asked(whole, 1, 3, 8, np.inf)[4]
    asked(maker, 1, 3, 8, float(np.quantile(steady, 0.6)))
    some = maker.evaluated
    asked(maker, 1, 3, 8, np.inf)
    assert 0 < some < maker.evaluated == whole.evaluated


def test_what_was_asked_for_longest_ago_is_forgotten(monkeypatch):
    pieces, before = Pieces(), intra(4)
    asked(before, 0, 2, 8, np.inf)
    monkeypatch.setattr(module, "MOST", 100)
    maker = intra(4, pieces)
    table = asked(maker, 0, 2, 8, np.inf)
    assert pieces.count <= 100 or len(pieces.of) == 1
    np.testing.assert_array_equal(table, asked(before, 0, 2, 8, np.inf))
    assert maker.evaluated == before.evaluated


@pytest.mark.parametrize("zero_stages", [(0,), (0, 1, 2, 3)])
def test_lines_are_all_ways_to_recompute_each_window(zero_stages):
    maker = intra(4, zero_stages=zero_stages)
    window = fixed_window(1, 4)
    lines = Lines.of(NETWORK, maker.space, window)
    assert lines.checkpointed_E.tolist() == [0, 1, 2, 3]
    assert set(lines.low_E.tolist()) == {2}
    assert set(lines.high_E.tolist()) == {5}
    slots = [maker.slot(1, 3, 8, shape) for shape in maker.space.shapes(8)]
    for slot in slots:
        assert lines.zeros_of(slot) == (zero_stages if slot.data_parallel_degree > 1 else (0,))
        (table,), evaluated = make_tables(MODEL, maker.space, [Wanted(slots=[slot], windows=window)], np.inf)
        assert len(table) == evaluated == 4 * len(lines.zeros_of(slot))
        least = dict(zip(lines.checkpointed_E.tolist(), lines.least(MODEL, slot).tolist(), strict=True))
        assert all(least[kept] <= steady for kept, steady in zip(table.checkpointed_K, table.steady_K, strict=True))


def test_tables_of_several_roles_ask_about_each_arrangement_once(monkeypatch):
    maker, calls = intra(4), []
    shapes = maker.space.shapes(8)[:2]
    wanted = []
    for index in (0, 1, 2):
        slots, windows = [maker.slot(index, 3, 8, shape) for shape in shapes], maker._windows_of(index, 3)
        keys = maker._piece_keys(slots, windows)
        wanted.append(Wanted(slots=slots, windows=windows, keys=keys))
    alone = [make_tables(MODEL, maker.space, [item], np.inf)[0][0] for item in wanted]
    real = Figures.of
    monkeypatch.setattr(Figures, "of", lambda *args: calls.append(len(args[2])) or real(*args))
    together, evaluated = make_tables(MODEL, maker.space, wanted, np.inf, pieces=Pieces())
    assert len(calls) == len(shapes)
    assert evaluated == sum(calls) == sum(map(len, together))
    for found, other in zip(together, alone, strict=True):
        for name in ("window_K", "shape_K", "checkpointed_K", "zero_stage_K", "steady_K", "boundary_K", "floor_K"):
            np.testing.assert_array_equal(getattr(found, name), getattr(other, name))
        phases = stage_phases(1, 3, 8)
        np.testing.assert_array_equal(found.parts.peaks(phases), other.parts.peaks(phases))
