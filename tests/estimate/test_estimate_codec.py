import json
from dataclasses import replace

import pytest

from lightning_mist.errors import PlanError
from lightning_mist.estimate.estimate_codec import estimate_from_json, estimate_to_json
from lightning_mist.estimate.estimate_data import Change, PeakTensor
from tests.estimate.test_estimate_data import ESTIMATE, PLAN

TENSOR = PeakTensor(bytes=5, term="working_bytes", stage=0, microbatch=1, module="a.b", operator="aten.mm.default")
FULL = replace(
    ESTIMATE,
    stages=(
        replace(ESTIMATE.stages[0], tensors=(TENSOR,), kinds=(replace(TENSOR, count=3),), host_bytes=7),
        ESTIMATE.stages[1],
    ),
    changes=(Change(text="more", plan=PLAN, device_total=ESTIMATE.worst.device_total, runs=False),),
    notes=("a", "b"),
)


@pytest.mark.parametrize("estimate", [ESTIMATE, FULL])
def test_there_and_back(estimate):
    assert estimate_from_json(estimate_to_json(estimate)) == estimate


def test_readers_find_verdict_and_bytes():
    document = json.loads(estimate_to_json(FULL))
    assert (document["verdict"], document["worst_stage"]) == ("fits", 0)
    assert document["stages"][0]["terms"]["parameter_bytes"] == 2**30
    assert document["stages"][0]["device_total"] == {"p50": 4 * 2**30, "p95": 7 * 2**30}
    assert document["stages"][0]["tensors"][0]["operator"] == "aten.mm.default"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema=2), "schema = 2: .* reads estimates of schema 1"),
        (lambda d: d.update(stagez=[]), "the key 'stagez' is not known; the nearest is 'stages'"),
        (lambda d: d.pop("model"), "the key 'model' is missing"),
        (lambda d: d["stages"][0].pop("phase"), r"stages\[0\]: the key 'phase' is missing"),
        (lambda d: d["stages"].insert(0, 3), r"stages\[0\] = 3: an object with keys is needed"),
    ],
)
def test_what_is_no_estimate_is_refused(change, message):
    document = json.loads(estimate_to_json(FULL))
    change(document)
    with pytest.raises(ValueError, match=message):
        estimate_from_json(json.dumps(document))


def test_what_is_no_json_or_holds_no_plan_is_refused():
    with pytest.raises(ValueError, match="the estimate is not JSON"):
        estimate_from_json("{")
    document = json.loads(estimate_to_json(FULL))
    document["plan"]["num_microbatches"] = 3
    with pytest.raises(PlanError, match="must equal global_batch_size"):
        estimate_from_json(json.dumps(document))
