import dataclasses

import numpy as np
import pytest

from lightning_mist.cost import StageCostModel, predict
from lightning_mist.cost.inputs.candidates import slots_of
from lightning_mist.cost.time.stage_seconds import CORRECTED
from lightning_mist.hardware import Correction, corrected, factor_of
from tests.cost.memory.test_memory_model import make_plan
from tests.specs import cluster, profile, spec

FACTORS = {"forward": 1.5, "backward": 0.75, "communication": 2.0, "update": 0.5}
CORRECTIONS = tuple(Correction(term=term, factor=factor) for term, factor in FACTORS.items())
PLAN = make_plan([2, 4], degree=2, microbatches=4, rows=2, zero=1, checkpointed=1)


def seconds(network, machine, plan=PLAN):
    model = StageCostModel(network, machine, cluster(plan.world_size))
    return [model.seconds(slot, candidates) for slot, candidates in slots_of(plan)]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_term_takes_its_factor(zero):
    plan = make_plan([2, 4], degree=2, microbatches=4, rows=2, zero=zero, checkpointed=1)
    network, machine = spec(6, tied=True, measured=True), profile()
    term_of = {name: term for term, names in CORRECTED for name in names}
    term_of |= {"forward": "forward", "recompute": "forward", "backward": "backward", "weight": "backward"}
    term_of["accumulate"] = "backward"
    for plain, found in zip(
        seconds(network, machine, plan), seconds(network, corrected(machine, CORRECTIONS), plan), strict=True
    ):
        for field in dataclasses.fields(plain):
            name = field.name.removesuffix("_K")
            factor = FACTORS[term_of[name]] if name in term_of else 1.0
            np.testing.assert_allclose(getattr(found, field.name), factor * getattr(plain, field.name))


def test_without_corrections_nothing_changes():
    network, machine = spec(6, measured=True), profile()
    neutral = [Correction(term=term, factor=1.0) for term in FACTORS]
    plain = predict(network, machine, cluster(4), PLAN)
    assert predict(network, corrected(machine, neutral), cluster(4), PLAN) == plain
    assert predict(network, corrected(machine, CORRECTIONS), cluster(4), PLAN) != plain


def test_computation_that_was_not_measured_is_not_corrected():
    network, machine = spec(6), profile()
    plain, found = seconds(network, machine), seconds(network, corrected(machine, CORRECTIONS))
    for before, after in zip(plain, found, strict=True):
        assert np.array_equal(before.forward_K, after.forward_K)
        assert np.array_equal(before.backward_K, after.backward_K)
        np.testing.assert_allclose(after.update_K, FACTORS["update"] * before.update_K)


def test_the_factor_of_what_is_not_known_is_one():
    assert factor_of(CORRECTIONS, "update") == 0.5
    assert factor_of(CORRECTIONS, "overhead") == 1.0
