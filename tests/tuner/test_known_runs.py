import numpy as np

from lightning_mist.cost import StageCostModel
from lightning_mist.tuner import SearchSpace
from lightning_mist.tuner.intra_stage import IntraStage
from lightning_mist.tuner.known_runs import AllRuns, KnownRuns
from lightning_mist.tuner.least_runs import joined_runs, slot_runs, slots_of
from lightning_mist.tuner.pieces import piece_key
from lightning_mist.tuner.space import apply
from tests.specs import cluster, profile, spec


def known(pace=np.inf, devices=4):
    network = spec(4)
    model = StageCostModel(network, profile(), cluster(devices, kind="cuda"))
    maker = IntraStage(model, apply(SearchSpace(), network, devices, 4 * devices), 1e12)
    slots = slots_of(maker.space, maker.slot, 4)
    return KnownRuns(runs=joined_runs(model, 4, [slot_runs(model, maker.space, slot, pace) for slot in slots]))


def test_what_is_known_is_not_worked_out_again_unless_it_is_far_too_much():
    every = known().at("first", None, np.inf)
    pace = float(np.median(every.steady_R))
    runs = known(pace)
    first = runs.at("first", None, pace)
    assert runs.at("first", None, 0.9 * pace) is first
    assert len(runs.at("first", None, 0.5 * pace)) < len(first)
    assert len(runs.at("first", None, pace)) == len(first)


def test_runs_are_worked_out_once_whatever_the_batch():
    network = spec(4)
    model = StageCostModel(network, profile(), cluster(4, kind="cuda"))
    kept, found = AllRuns(), []
    for batch, microbatches in ((32, 8), (16, 4), (32, 4)):
        space = apply(SearchSpace(), network, 4, batch)
        maker = IntraStage(model, space, 1e12)
        slots = {piece_key(model, slot, space, ()): slot for slot in slots_of(space, maker.slot, microbatches)}
        found.append(kept.up_to(model, space, slots, 1e3))
        assert kept.up_to(model, space, slots, 1e2) is found[-1]
        assert len(kept.up_to(model, space, slots, 1e3).runs)
    assert found[1] is found[0]
    assert found[2] is not found[0]
    assert found[2].runs.pace >= 1e3
    faster = kept.up_to(model, space, slots, 1e5)
    assert faster.runs.pace >= 1e5
    assert len(faster.runs) == len(found[2].runs)
