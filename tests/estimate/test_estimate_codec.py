import json
from dataclasses import replace

from lightning_mist.estimate.estimate_data import Change, PeakTensor, estimate_to_json
from lightning_mist.plan import to_json
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


def test_readers_find_verdict_and_bytes():
    document = json.loads(estimate_to_json(FULL))
    assert (document["verdict"], document["worst_stage"]) == ("fits", 0)
    assert document["stages"][0]["terms"]["parameter_bytes"] == 2**30
    assert document["stages"][0]["device_total"] == {"p50": 4 * 2**30, "p95": 7 * 2**30}
    assert document["stages"][0]["tensors"][0]["operator"] == "aten.mm.default"
    assert document["changes"][0]["plan"] == document["plan"] == json.loads(to_json(PLAN))
