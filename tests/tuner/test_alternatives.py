"""Plans beside the chosen one, predicted when somebody looks at them."""

import copy
import dataclasses
import pickle

from lightning_mist.cost import StageCostModel, predict
from lightning_mist.tuner import alternatives as module
from lightning_mist.tuner.alternatives import Alternative, Alternatives
from tests.specs import cluster, profile, spec
from tests.tuner.plans import pipeline

NETWORK, MACHINE = spec(8, parameter_bytes=4000, edge_bytes=4000, measured=True), profile(link=1e9, latency=1e-5)
MODEL = StageCostModel(NETWORK, MACHINE, cluster(4))
PLANS = {
    "2 stages": pipeline({"layers": 4, "data": 2}, {"layers": 4, "data": 2}),
    "1 stage": pipeline({"layers": 8, "data": 4}),
}


def made():
    return Alternatives(MODEL, list(PLANS.items()))


def test_each_has_its_name_and_prediction():
    found = made()
    assert len(found) == 2
    assert [item.name for item in found] == list(PLANS)
    for item, plan in zip(found, PLANS.values(), strict=True):
        assert item.predicted == predict(NETWORK, MACHINE, cluster(4), plan)
        assert item.plan == dataclasses.replace(plan, predicted=item.predicted)
    assert found[1].plan.num_stages == 1
    assert [item.name for item in found[:1]] == ["2 stages"]


def test_nothing_is_predicted_before_somebody_looks_and_nothing_twice(monkeypatch):
    asked, real = [], module.predictions
    monkeypatch.setattr(module, "predictions", lambda model, plans: asked.append(len(plans)) or real(model, plans))
    found = made()
    assert len(found) == 2
    assert asked == []
    assert found[0] is found[0]
    assert list(found)
    assert asked == [2]


def test_they_equal_a_tuple_of_the_same_and_are_pickled_as_one():
    found, known = made(), tuple(made())
    assert found == known
    assert known == found
    assert found == made()
    assert hash(found) == hash(known)
    assert found != known[:1]
    assert repr(found) == repr(known)
    assert pickle.loads(pickle.dumps(made())) == known
    assert copy.deepcopy(made()) == known
    assert all(type(item) is Alternative for item in known)
