from dataclasses import replace

from lightning_mist.cli.found_plan import memory_words
from lightning_mist.estimate.uncertainty import Interval
from lightning_mist.explain import estimate_of
from tests.explain.test_fitting import planned


def test_a_tight_plan_says_how_to_leave_room():
    planner, result, _ = planned()
    estimate = estimate_of(planner.spec, planner.cluster, result.plan, None)
    stage = replace(estimate.stages[0], device_total=Interval(p50=8 * 2**30, p95=12 * 2**30))
    tight = replace(estimate, memory_limit=10 * 2**30, stages=(stage,))
    assert memory_words(tight).endswith("To be surer, plan with less: --memory-limit 8.3GiB.")


def test_a_plan_that_fits_has_nothing_to_say_but_that():
    planner, result, _ = planned(memory=10**11)
    estimate = estimate_of(planner.spec, planner.cluster, result.plan, None)
    assert estimate.verdict == "fits"
    assert memory_words(estimate) == estimate.headline()
