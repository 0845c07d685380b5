from dataclasses import replace

import pytest

from lightning_mist.explain.explanation import Finding, Kind, Version, closed_form_of, differences, kind_of
from lightning_mist.plan import Checkpointing, OffloadRatios, Predicted, PredictedStage, ZeroStage
from tests.plans import plan_of
from tests.tuner import plans


def pipeline(**changes):
    return plan_of(4, 4, {"layers": 2}, {"layers": 2}, **changes)


def changed(plan, at, **changes):
    stages = list(plan.stages)
    stages[at] = replace(stages[at], **changes)
    return replace(plan, stages=tuple(stages))


PLAIN = Kind(stages=2, tensor=(1,), zero=(0,), checkpointing=False, offload=(), schedule="1f1b")


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, {}),
        ({"checkpointing": Checkpointing(layers=1)}, {"checkpointing": True}),
        ({"offload": OffloadRatios(optimizer=0.5)}, {"offload": ("optimizer",)}),
        ({"zero_stage": ZeroStage.PARAMETERS}, {"zero": (0, 3)}),
    ],
)
def test_kind_says_what_any_stage_does(changes, kind):
    assert kind_of(changed(pipeline(), 1, **changes)) == replace(PLAIN, **kind)


def test_chunks_are_no_stages_of_their_own():
    plan = plan_of(4, 4, *[{}] * 4, groups=2, schedule="interleaved-1f1b")
    assert kind_of(plan) == replace(PLAIN, schedule="interleaved-1f1b")


def test_schedules_of_a_single_stage_are_one_kind():
    one = plan_of(4, 4, {"layers": 4}, schedule="zb-h1")
    assert kind_of(one) == replace(PLAIN, stages=1)


def test_what_lacks_memory_or_does_not_exist_does_not_fit():
    assert Version(plan=pipeline()).fits
    assert not Version(plan=pipeline(), missing_bytes=1).fits
    assert not Version(plan=pipeline(), missing_host_bytes=1).fits
    assert not Version(plan=None, reason="nothing fits").fits
    assert Version(plan=None, reason="nothing fits").seconds is None


def test_what_a_plan_lacks_is_told():
    both = Version(plan=pipeline(), missing_bytes=2**30, missing_host_bytes=2**20)
    assert both.lacks == "1.0 GiB of memory and 1.0 MiB of host memory"
    assert replace(both, missing_bytes=0).lacks == "1.0 MiB of host memory"
    assert not Version(plan=pipeline()).lacks


def test_numbers_of_a_finding_are_found_by_name():
    finding = Finding(stage=0, limit="memory", binds=True, values=(("free_bytes", 5.0),), text="")
    assert finding.value("free_bytes") == 5.0


KIND = Kind(stages=2, tensor=(1,), zero=(0,), checkpointing=False, offload=("optimizer",), schedule="1f1b")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ()),
        ({"stages": 1}, ("1 stage in place of 2 stages",)),
        ({"tensor": (2,)}, ("tensor parallelism over 2 devices",)),
        ({"tensor": (1, 2, 4)}, ("tensor parallelism over 2 and 4 devices on some stages",)),
        ({"zero": (0, 1, 3)}, ("no ZeRO, ZeRO-1 and ZeRO-3 in place of no ZeRO",)),
        ({"checkpointing": True}, ("recomputes layers",)),
        ({"offload": ()}, ("does not offload optimizer state",)),
        ({"offload": ("parameters", "optimizer", "activations")}, ("offloads parameters and activations",)),
        ({"schedule": "zb-h1"}, ("schedule zb-h1 in place of 1f1b",)),
    ],
)
def test_what_another_kind_does_differently(changes, words):
    assert differences(KIND, replace(KIND, **changes)) == words


def test_one_stage_has_no_schedule_to_speak_of():
    other = replace(KIND, stages=1)
    assert differences(replace(KIND, schedule="zb-h1"), other) == ("1 stage in place of 2 stages",)
    assert differences(other, replace(KIND, schedule="zb-h1")) == ("2 stages in place of 1 stage",)


def test_the_way_back_is_told_too():
    other = replace(KIND, tensor=(2,), checkpointing=True)
    assert differences(other, KIND) == ("no tensor parallelism", "recomputes no layer")


def test_chunks_share_the_devices_of_their_group():
    chunks = plans.pipeline(*[{"layers": 1}] * 4, groups=2, schedule="interleaved-1f1b", microbatches=4)
    stages = tuple(
        PredictedStage(
            steady_seconds=1.0, boundary_seconds=8.0, forward_seconds=0.3, backward_seconds=0.7, peak_bytes=1
        )
        for _ in chunks.stages
    )
    chunks = replace(chunks, predicted=Predicted(step_seconds=11.0, stages=stages))
    # Groups take 2 s of each of 4 microbatches, and 16 s once, which nothing hides for the first.
    assert closed_form_of(chunks) == 3 * 2.0 + 2 * 2.0 + 16.0
