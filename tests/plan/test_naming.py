from dataclasses import replace

import pytest
from hypothesis import given

from lightning_mist.plan import OffloadRatios
from lightning_mist.plan.plan_text import short_name
from tests.integration.parity import make_plan
from tests.plans import plans


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        (make_plan([12], degrees=[2]), "1 stage x dp 2, G=1"),
        (
            make_plan([6, 6], degrees=[2, 2], parts=4, zero=1, checkpointed=2),
            "2 stages x dp 2, G=8, ZeRO 1, 4 of 12 layers recomputed",
        ),
        (make_plan([2, 6], degrees=[1, 2], rows=2, zero=[0, 3]), "2 stages x dp 1-2, G=3, layers 2-6, ZeRO 0-3"),
        (
            make_plan([4, 4], tensor=2, sequence=True, schedule="zb-h1"),
            "2 stages x dp 1 x tp 2, G=4, zb-h1, sequence parallel",
        ),
        (
            make_plan([2, 2, 2, 2], schedule="interleaved-1f1b", chunks=2, degrees=[1, 1], parts=1),
            "4 stages in 2 groups x dp 1, G=2, interleaved-1f1b",
        ),
    ],
)
def test_names(plan, name):
    assert short_name(plan) == name


def test_offload_is_told():
    plan = make_plan([4])
    offloading = replace(plan.stages[0], offload=OffloadRatios(optimizer=0.5))
    assert short_name(replace(plan, stages=(offloading,))) == "1 stage x dp 1, G=1, offload"


@given(plans())
def test_every_plan_has_a_name_on_one_line(plan):
    assert "\n" not in short_name(plan)
    assert f"G={plan.num_microbatches}" in short_name(plan)
