"""What becomes of the best pipelines: on the clock, and the simplest where the clock cannot tell."""

import dataclasses

import numpy as np
import pytest

from lightning_mist.cost import StageCostModel, predict
from lightning_mist.plan.changes import burdens
from lightning_mist.tuner import Planner, SearchSpace
from lightning_mist.tuner.inter_stage import InterStageProblem
from lightning_mist.tuner.options import OPTIONS
from lightning_mist.tuner.select.selection import clocked, ending_sooner, simplicity
from tests.specs import cluster, profile, spec
from tests.tuner.plans import pipeline
from tests.tuner.problems import slot

NETWORK = spec(6, tied=True, measured=True, widths=(3000,))
SPACE = SearchSpace(schedules=("1f1b",))


def tuned(memory=10**9, rows=4, **changes):
    planner = Planner(NETWORK, cluster(4), profile=profile())
    search = SearchSpace(**{"schedules": ("1f1b",), **changes})
    return planner.tune(global_batch_size=4 * rows, memory_limit=memory, search=search)


def test_the_fastest_on_the_clock_is_chosen_and_the_others_are_alternatives():
    found = tuned(rows=32, memory=10**6)
    others = [item.predicted.step_seconds for item in found.alternatives]
    assert others == sorted(others)
    assert others[0] > found.predicted.step_seconds
    counts = [item.plan.num_stages for item in found.alternatives]
    assert len({*counts, found.plan.num_stages}) == len(counts) + 1


def test_where_the_clock_cannot_tell_the_simplest_is_chosen(monkeypatch):
    # Little memory: the fastest plan has to save some.
    tight = max(stage.peak_bytes for stage in tuned().predicted.stages) * 0.5 / 0.8
    fastest = tuned(memory=int(tight))
    monkeypatch.setattr(OPTIONS, "alike", 10.0)
    found = tuned(memory=int(tight))
    assert simplicity(found.plan) < simplicity(fastest.plan)
    every = [found.plan, *(item.plan for item in found.alternatives)]
    assert simplicity(found.plan) == min(map(simplicity, every))
    assert min(item.prediction.step_seconds for item in every) == fastest.predicted.step_seconds
    slower = found.predicted.step_seconds / fastest.predicted.step_seconds - 1
    (note,) = [note for note in found.notes if "is simpler" in note]
    assert note.startswith(f"the plan, {slower:.2%} slower than {fastest.plan.num_stages} stage")
    # What is proven is not about it.
    assert (found.status, found.bound, found.gap) == (fastest.status, fastest.bound, fastest.gap)
    assert found.closed_form_seconds > found.bound
    assert "on the clock none so much that it could be told" in found.proof[0]


def test_other_schedules_have_to_gain_on_the_fastest(monkeypatch):
    asked = {"schedules": ("1f1b", "interleaved-1f1b"), "num_stages": (2,), "num_microbatches": (2, 4)}
    fast = profile(link=1e12, latency=0.0)
    planner = Planner(NETWORK, cluster(2), profile=fast)
    explored = planner.tune(global_batch_size=8, memory_limit=10**9, search=SearchSpace(**asked))
    assert explored.plan.schedule == "interleaved-1f1b"
    assert explored.status == "explored"
    assert burdens(explored.plan) == ("interleaved-1f1b",)
    assert np.isfinite(explored.closed_form_seconds)
    # What gains less than can be told apart is left.
    monkeypatch.setattr(OPTIONS, "alike", 0.9)
    again = planner.tune(global_batch_size=8, memory_limit=10**9, search=SearchSpace(**asked))
    assert (again.plan.schedule, again.status) == ("1f1b", "optimal")
    assert any("gains 90% under interleaved-1f1b" in note for note in again.notes)


@pytest.mark.parametrize("memory", [10**9, 10**6])
def test_asked_twice_it_chooses_the_same(memory):
    assert tuned(memory=memory).plan == tuned(memory=memory).plan


def test_a_plan_on_the_clock_has_its_prediction():
    network, machine = spec(4), cluster(2)
    plan = pipeline({"layers": 2}, {"layers": 2})
    found = clocked(StageCostModel(network, profile(), machine), plan)
    assert dataclasses.replace(found, predicted=None) == plan
    assert found.predicted == predict(network, profile(), machine, plan)


def test_of_choices_that_take_as_long_per_microbatch_the_one_that_ends_sooner_is_tried_too():
    # Two layers on one device: as long and sooner, as long and later, longer and soonest; and others elsewhere.
    first = slot([0, 0, 0, 0], [2, 2, 2, 1], [1, 1, 1, 1], [4.0, 4.0, 4.1, 1.0], [2.0, 3.0, 1.0, 0.0])
    second = slot([2, 2, 2], [2, 2, 2], [1, 1, 2], [5.0, 5.0, 5.0], [2.0, 1.0, 0.0])
    problem = InterStageProblem(num_layers=4, num_devices=(2,), num_microbatches=4, slots=(first, second))
    # Of all that are alike the third takes least: 4 x 4.1 + 1 against 4 x 4 + 2.
    assert ending_sooner(problem, (1, 0)) == ending_sooner(problem, (0, 1)) == ((0, 1), (2, 1))
