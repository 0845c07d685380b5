import itertools
from functools import lru_cache

import numpy as np
import pytest

from lightning_mist.cost import step_seconds, step_seconds_of
from lightning_mist.schedule import ActionSeconds, StepRules, generate, simulate
from lightning_mist.schedule.lowering import program_of
from lightning_mist.schedule.program_clock import finish, run
from lightning_mist.schedule.seconds import crossing_seconds, slot_seconds


def makespan(forward, backward, update, microbatches, schedule="1f1b"):
    """Seconds of one step on a clock; the update comes after a stage's last backward."""
    lists = generate(len(forward), microbatches, schedule)
    stages = [ActionSeconds(forward=f, backward=b) for f, b in zip(forward, backward, strict=True)]
    spans = simulate(lists, stages).spans
    return max(line[-1].end + u for line, u in zip(spans, update, strict=True))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "microbatches"), [*itertools.product([1, 2, 3, 5], [1, 2, 4, 9])])
def test_equal_stages_take_exactly_as_long_as_on_a_clock(stages, microbatches, schedule):
    forward, backward, update = [1.0] * stages, [2.0] * stages, [0.5] * stages
    steady = [f + b for f, b in zip(forward, backward, strict=True)]
    wanted = makespan(forward, backward, update, microbatches, schedule)
    # Stage 0 finishes last, so only its update shows.
    assert step_seconds(steady, update, microbatches) == pytest.approx(wanted)


@pytest.mark.parametrize("seed", range(40))
def test_uneven_stages_take_no_longer_than_predicted(seed):
    rng = np.random.default_rng(seed)
    stages, microbatches = int(rng.integers(1, 6)), int(rng.integers(1, 12))
    forward = rng.uniform(0.5, 2.0, stages)
    backward = 2 * forward
    wanted = makespan(forward, backward, [0.0] * stages, microbatches)
    predicted = step_seconds(forward + backward, np.zeros(stages), microbatches)
    assert predicted >= wanted * (1 - 1e-12)
    # At most the pace, and the way through, can be wrong.
    assert wanted >= max(microbatches * (forward + backward).max(), (forward + backward).sum()) * (1 - 1e-12)


def test_boundary_work_hides_behind_earlier_stages():
    steady = [1.0, 2.0, 3.0]
    assert step_seconds(steady, [0.0, 0.0, 0.0], 4) == 3 * 3 + 6
    assert step_seconds(steady, [0.5, 0.0, 0.0], 4) == 15.5
    assert step_seconds(steady, [0.0, 1.5, 0.0], 4) == 15.5
    assert step_seconds(steady, [0.0, 1.0, 3.0], 4) == 15.0
    assert step_seconds(steady, [0.25, 1.0, 3.75], 4) == 15.75


def second_form(steady, boundary, microbatches, together):
    """What no stage begins before all have come as far hides behind nothing."""
    return step_seconds_of(steady, boundary - together, microbatches) + together.max(axis=0)


def test_the_second_form_is_never_less_than_the_first():
    rng = np.random.default_rng(0)
    steady, boundary = rng.random((4, 200)), 3 * rng.random((4, 200))
    together = boundary * rng.random((4, 200))
    assert (second_form(steady, boundary, 7, together) >= step_seconds_of(steady, boundary, 7) - 1e-12).all()


RULES = {
    "device": StepRules(transfers="beside", update_after="last"),
    "cpu": StepRules(transfers="within", update_after="all"),
}
_program = lru_cache(program_of)


def on_the_clock_and_in_closed_form(rng, machine):
    """Seconds of a random pipeline on the clock, and by both closed forms."""
    stages, microbatches = int(rng.integers(2, 9)), int(rng.integers(2, 65))
    forward, backward = rng.uniform(1, 2, stages), 2 * rng.uniform(1, 2, stages)
    activations, gradients = 0.1 * rng.uniform(0, 1, stages - 1), 0.1 * rng.uniform(0, 1, stages - 1)
    reduce, update = rng.uniform(0, 2, stages), rng.uniform(0, 2, stages)
    each = [
        ActionSeconds(forward=f, backward=b, reduce=r, step=u)
        for f, b, r, u in zip(forward, backward, reduce, update, strict=True)
    ]
    program = _program(stages, microbatches)
    times = run(program, slot_seconds(each), crossing_seconds(activations, gradients), RULES[machine])
    step = finish(program, times, [stage.epilogue for stage in each], RULES[machine], is_tied=False).makespan
    steady = forward + backward + np.append(0, activations) + np.append(gradients, 0)
    if machine == "cpu":
        steady += np.append(activations, 0) + np.append(0, gradients)
    forms = (
        step_seconds(steady, reduce + update, microbatches),
        float(second_form(*(each[:, None] for each in (steady, reduce + update)), microbatches, update[:, None])[0]),
    )
    return step, forms


@pytest.mark.parametrize(("machine", "least", "most"), [("device", 0.87, 1.01), ("cpu", 0.88, 1.08)])
def test_the_clock_and_the_closed_form_differ_by_no_more_than_is_said(machine, least, most):
    rng = np.random.default_rng(0)
    found = [on_the_clock_and_in_closed_form(rng, machine) for _ in range(500)]
    first = np.array([step / forms[0] for step, forms in found])
    second = np.array([step / forms[1] for step, forms in found])
    assert least - 0.005 < first.min()
    assert first.max() < most + 0.005
    assert second.min() > 0.855
    assert second.max() <= 1 + 1e-12


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_equal_stages_that_update_together_take_the_second_form(stages):
    each = [ActionSeconds(forward=1, backward=2, reduce=0.25, step=0.5)] * stages
    program = _program(stages, 6)
    times = run(program, slot_seconds(each), [0.0] * (2 * stages - 2), RULES["cpu"])
    step = finish(program, times, [stage.epilogue for stage in each], RULES["cpu"], is_tied=False).makespan
    assert step == second_form(*(np.full((stages, 1), seconds) for seconds in (3.0, 0.75)), 6, np.full((1, 1), 0.5))


def test_many_pipelines_at_once():
    rng = np.random.default_rng(0)
    steady, boundary = rng.random((3, 50)), 2 * rng.random((3, 50))
    together = step_seconds_of(steady, boundary, 7)
    for index in range(50):
        assert step_seconds(steady[:, index], boundary[:, index], 7) == pytest.approx(together[index], rel=1e-14)


@pytest.mark.parametrize(
    ("steady", "boundary", "microbatches"), [([], [], 1), ([1.0], [1.0, 2.0], 1), ([1.0], [1.0], 0)]
)
def test_nonsense_is_refused(steady, boundary, microbatches):
    with pytest.raises(ValueError, match="at least one stage and one microbatch"):
        step_seconds(steady, boundary, microbatches)
