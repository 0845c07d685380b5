import pytest

from lightning_mist.errors import PlanError
from lightning_mist.estimate import estimate_prediction
from lightning_mist.hardware import parse_cluster
from lightning_mist.plan import plan_of
from tests.specs import spec


def test_a_plan_without_prediction_is_refused():
    plan = plan_of(4, world_size=1, global_batch_size=1)
    with pytest.raises(PlanError, match="the plan predicts nothing"):
        estimate_prediction(plan, spec(4).module_map, parse_cluster("1xL4"), 2**30)
