from dataclasses import replace

import pytest

from lightning_mist.cost import predict
from lightning_mist.hardware import Correction, StepOverheads, corrected
from lightning_mist.strategy.monitoring.observed_terms import observe
from lightning_mist.strategy.monitoring.stage_times import Measured, StageTimes, predicted_times
from tests.cost.memory.test_memory_model import make_plan
from tests.specs import cluster, profile, spec

OVERHEADS = StepOverheads(step_seconds=2.0, action_seconds=0.5, message_seconds=0.25)
NONE = StepOverheads()


def planned(corrections=(), **kwargs):
    machine = corrected(replace(profile(), overheads=kwargs.pop("overheads", NONE)), corrections)
    plan = make_plan(kwargs.pop("layers", [2, 4]), **kwargs)
    return replace(plan, predicted=predict(spec(6, measured=True), machine, cluster(plan.world_size), plan))


def exactly(plan, **kwargs):
    """What stages measure if everything is as predicted."""
    return [Measured(times=replace(item, **kwargs), spread=StageTimes(), steps=4) for item in predicted_times(plan)]


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize(("degree", "microbatches"), [(2, 4), (2, 1), (1, 4)])
def test_what_is_expected_is_what_was_predicted(zero, degree, microbatches):
    plan = planned(degree=degree, microbatches=microbatches, rows=2, zero=zero, checkpointed=1)
    found = observe(plan, exactly(plan), corrections=(), is_plain=False, knows_layers=True)
    total = 0.0
    for item in found:
        assert sum(seconds for _, seconds in item.expected) == pytest.approx(item.seconds)
        assert item.spread == pytest.approx(0.0)
        total += item.seconds
    times = predicted_times(plan)
    assert total == pytest.approx(sum(stage.total - stage.waiting_seconds for stage in times))
    terms = [dict(item.expected) for item in found]
    is_lumped = degree > 1 and microbatches == 1 and zero < 2
    assert any(item.get("backward") and item.get("communication") for item in terms) == (
        is_lumped or (zero == 3 and degree > 1)
    )


def test_corrections_that_a_prediction_contains_are_taken_out_of_what_is_expected():
    known = (
        Correction(term="forward", factor=1.5, spread=0.1, samples=1),
        Correction(term="update", factor=0.75, spread=0.1, samples=1),
    )
    plain, plan = planned(microbatches=4, checkpointed=1), planned(known, microbatches=4, checkpointed=1)
    before = observe(plain, exactly(plain), corrections=(), is_plain=False, knows_layers=True)
    after = observe(plan, exactly(plan), corrections=known, is_plain=False, knows_layers=True)
    for one, other in zip(before, after, strict=True):
        assert dict(one.expected) == pytest.approx(dict(other.expected))
        assert one.seconds != pytest.approx(other.seconds) or "backward" not in dict(one.expected)


def test_overheads_are_expected_of_every_action_and_of_the_step():
    plan = planned(microbatches=4, overheads=OVERHEADS)
    found = observe(plan, exactly(plan, other_seconds=3.0), corrections=(), is_plain=False, knows_layers=True)
    overheads = [dict(item.expected).get("overhead", 0.0) for item in found]
    # Two stages of 4 forwards, or 4 backwards, at each of which a message is posted to or from the one boundary.
    assert overheads == [0.0, 2 * 4 * (0.5 + 0.25), 2 * 4 * (0.5 + 0.25), 2.0]
    for item in found[:-1]:
        assert sum(seconds for _, seconds in item.expected) == pytest.approx(item.seconds)
    assert found[-1].seconds == 3.0
    plain = observe(plan, exactly(plan, other_seconds=3.0), corrections=(), is_plain=True, knows_layers=True)
    assert not any(dict(item.expected).get("overhead") for item in plain)


def test_nothing_is_learned_of_computation_that_was_not_measured():
    plan = planned(degree=2, microbatches=4)
    (found,) = observe(plan, exactly(plan), corrections=(), is_plain=True, knows_layers=False)
    assert {term for term, seconds in found.expected if seconds} == {"update"}


def test_scatter_of_steps_and_disagreement_of_stages_are_the_spread():
    plan = planned(microbatches=4, layers=[3, 3])
    measured = exactly(plan)
    exact = observe(plan, measured, corrections=(), is_plain=True, knows_layers=True)
    scattering = [
        replace(item, spread=StageTimes(forward_seconds=0.1 * item.times.forward_seconds)) for item in measured
    ]
    spreads = observe(plan, scattering, corrections=(), is_plain=True, knows_layers=True)
    assert [item.spread > 0 for item in spreads] == [False, True, False]
    slower = replace(measured[0].times, backward_seconds=1.2 * measured[0].times.backward_seconds)
    differing = observe(
        plan, [replace(measured[0], times=slower), measured[1]], corrections=(), is_plain=True, knows_layers=True
    )
    assert differing[2].spread == pytest.approx(0.1 / 1.1 / 2**0.5, rel=1e-6)
    assert differing[2].seconds > exact[2].seconds


def test_plans_without_prediction_or_measurement_teach_nothing():
    plan = planned()
    assert observe(replace(plan, predicted=None), exactly(plan), corrections=(), is_plain=True, knows_layers=True) == ()
    assert observe(plan, [None, exactly(plan)[1]], corrections=(), is_plain=True, knows_layers=True) == ()
