import dataclasses

import numpy as np
import pytest

from lightning_mist.cost import StageCostModel
from lightning_mist.cost.candidates import OffloadCandidates
from lightning_mist.tuner.moved_known import Known
from lightning_mist.tuner.moved_settled import FEW, Unsettled, learn_seconds, next_ones
from lightning_mist.tuner.search_space import OFFLOADED
from tests.tuner.test_offload_search import make


def with_ratios(stages, ratios):
    columns = {f"{name}_K": ratios[:, place] for place, name in enumerate(OFFLOADED)}
    return dataclasses.replace(stages, offload=OffloadCandidates(**columns))


def unsettled(steady, whole, fitting=((), ()), known=None):
    count = len(steady)
    return Unsettled(
        known=known or FakeKnown({}),
        place_J=np.arange(count) + 7,
        group_J=np.zeros(count, dtype=int),
        steady_J=np.array(steady, dtype=float),
        whole_J=np.array(whole, dtype=float),
        later_J=np.full(count, 0.5),
        fitting=(np.zeros(len(fitting[0]), dtype=int), *(np.array(values, dtype=float) for values in fitting)),
        open_J=np.arange(count),
    )


class FakeKnown:
    def __init__(self, found):
        self.found = found

    def seconds(self, places):
        return tuple(
            np.array([self.found.get(int(place), (np.nan, np.nan))[side] for place in places]) for side in (0, 1)
        )


def test_what_is_known_to_fit_rules_out_what_takes_at_least_as_long():
    item = unsettled([1.0, 3.0, 2.0], [9.0, 4.0, 6.0], fitting=([2.0], [5.0]))
    assert item.narrow()
    # The third takes at least as long per microbatch, and longer in all; the others may each be better in one.
    assert item.open_J.tolist() == [0, 1]


def test_what_was_learned_counts_with_what_stages_behind_add():
    item = unsettled([1.0, 2.0], [3.0, 4.0], known=FakeKnown({7: (1.4, 1.0)}))
    assert not item.narrow()
    assert item.fitting[1].tolist() == [1.9]
    assert item.fitting[2].tolist() == [2.9]
    slower = unsettled([1.0, 2.0], [3.0, 4.0], known=FakeKnown({7: (1.6, 1.0)}))
    assert slower.narrow()
    assert slower.every().tolist() == [8]


def test_few_are_asked_about_at_once_and_of_many_those_that_promise_most():
    # Every next one promises a hundredth less: those within an eighth come first.
    count = FEW + 1
    values = 1.01 ** np.arange(count)
    flat = unsettled(values, values)
    assert len(flat.promising()) == 12
    ((known, places),) = next_ones([flat])
    assert known is flat.known
    assert places.tolist() == list(range(7, 19))
    few = unsettled([1.0, 2.0], [1.0, 1.0])
    ((_, places),) = next_ones([few])
    assert places.tolist() == [7, 8]


def test_tables_are_asked_about_once_for_all_stages():
    first, other = unsettled([1.0], [1.0]), unsettled([1.0], [1.0])
    again = unsettled([1.0, 2.0], [1.0, 0.5], known=first.known)
    found = next_ones([first, other, again])
    assert [(known is first.known, places.tolist()) for known, places in found] == [(True, [7, 8]), (False, [7])]


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("machine", ["cpu", "L4"])
def test_seconds_are_those_of_the_cost_model(machine, corrected, monkeypatch):
    maker = make("split", machine, limit=600_000)
    if corrected:
        monkeypatch.setattr(StageCostModel, "adds_copies", lambda self, slot: False)
    places = [(0, 2), (1, 2), (1, 3)]
    maker.prepare([(*place, (), None) for place in places], 4)
    mover, checked = maker._mover, 0
    for known in mover.knowledge._of.values():
        assert isinstance(known, Known)
        count = len(mover.ratios)
        places_S = known.place_S
        index_S = known.base_B[places_S // count]
        fresh = Known.nothing(known.table)
        fresh.base_B, fresh.learned = known.base_B, known.learned
        learn_seconds(maker.model, mover.ratios, [(fresh, places_S)])
        assert fresh.steady_S == pytest.approx(known.steady_S, rel=1e-12)
        assert known.row_K[index_S].tolist() == (places_S // count).tolist()
        for place, index, steady, boundary in zip(places_S, index_S, known.steady_S, known.boundary_S, strict=True):
            stage = known.table.candidates(np.array([index]))
            moved = with_ratios(stage, mover.ratios.offload_CO[[place % count]])
            wanted = maker.model.seconds(known.table.slots[known.table.shape_K[index]], moved)
            assert steady == pytest.approx(wanted.steady_K[0], rel=1e-12)
            assert boundary == pytest.approx(wanted.boundary_K[0], rel=1e-12)
            checked += 1
    assert checked
