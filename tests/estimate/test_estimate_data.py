from dataclasses import replace

import pytest

from lightning_mist.estimate.device_need import Interval
from lightning_mist.estimate.estimate_data import Change, MemoryEstimate, StageEstimate, verdict_of
from lightning_mist.plan import plan_of

PLAN = plan_of(4, world_size=2, global_batch_size=8, pipeline_stages=2)
GIB = 2**30


def stage(index, p50, p95):
    size = Interval(p50=p50 * GIB, p95=p95 * GIB)
    return StageEstimate(
        stage=index,
        devices=(1 - index,),
        phase="backward",
        allocated=size,
        reserved=size,
        device_total=size,
        terms=(("parameter_bytes", GIB), ("working_bytes", (p50 - 1) * GIB)),
    )


ESTIMATE = MemoryEstimate(
    model="net",
    cluster="2 x L4",
    memory_limit=8 * GIB,
    plan=PLAN,
    precision="32-true",
    optimizer="AdamW",
    stages=(stage(0, 4, 7), stage(1, 5, 6)),
)


def test_the_worst_stage_makes_the_headline():
    assert ESTIMATE.worst.stage == 0
    assert ESTIMATE.headline() == (
        "Fits in 8.0 GiB per device: stage 0 of 2 needs 4.0 GiB, up to 7.0 GiB in 95 of 100 cases. "
        "Largest: working memory 3.0 GiB, parameters 1.0 GiB."
    )


def test_what_is_no_tensor_is_told_from_what_is():
    worst = replace(stage(0, 4, 7), allocated=Interval(p50=3 * GIB, p95=6 * GIB))
    assert "needs 4.0 GiB (tensors 3.0 GiB), up to 7.0 GiB" in replace(ESTIMATE, stages=(worst,)).headline()


@pytest.mark.parametrize(("limit", "verdict"), [(7, "fits"), (6, "tight"), (4, "tight"), (3, "does not fit")])
def test_verdicts(limit, verdict):
    assert verdict_of(Interval(p50=4 * GIB, p95=7 * GIB), limit * GIB) == verdict
    assert replace(ESTIMATE, memory_limit=limit * GIB, stages=ESTIMATE.stages[:1]).verdict == verdict
    assert ESTIMATE.fits(f"{limit}GiB") == (verdict == "fits")
    assert ESTIMATE.fits()


@pytest.mark.parametrize(("limit", "verdict"), [(7, "fits"), (4, "tight"), (3, "tight"), (2, "does not fit")])
def test_what_may_run_is_not_said_to_be_impossible(limit, verdict):
    """Only what not even the least need has room for does not fit."""
    stages = tuple(replace(item, least=3 * GIB) for item in ESTIMATE.stages)
    found = replace(ESTIMATE, memory_limit=limit * GIB, stages=stages)
    assert found.verdict == verdict
    assert found.is_likely == (limit >= 4)
    assert found.headline().startswith("Very tight: more likely than not it does not fit") == (limit == 3)


def test_any_stage_that_cannot_run_decides():
    stages = (replace(stage(0, 4, 7), least=1 * GIB), replace(stage(1, 5, 6), least=5 * GIB))
    assert replace(ESTIMATE, memory_limit=4 * GIB, stages=stages).verdict == "does not fit"


def test_nonsense_limits_are_refused():
    with pytest.raises(ValueError, match="'22 bananas' is not a size"):
        ESTIMATE.fits("22 bananas")
    with pytest.raises(ValueError, match="a size of -1 bytes"):
        ESTIMATE.fits(-1)


def test_what_would_make_it_fit_is_explained():
    small = replace(ESTIMATE, memory_limit=3 * GIB, notes=("AdamW is assumed",))
    assert "nothing that was tried makes it fit" in small.explain()
    need = Interval(p50=2 * GIB, p95=3 * GIB)
    changes = (
        Change(text="zero_stage=3", plan=PLAN, device_total=need),
        Change(text="optimizer state in host memory", plan=PLAN, device_total=need, runs=False),
    )
    assert replace(small, changes=changes).explain().splitlines()[1:] == [
        "would fit with zero_stage=3: 2.0 GiB, up to 3.0 GiB",
        "would fit with optimizer state in host memory: 2.0 GiB, up to 3.0 GiB (planned, not run yet)",
        "source: traced",
        "AdamW is assumed",
    ]
    assert "would fit" not in ESTIMATE.explain()
