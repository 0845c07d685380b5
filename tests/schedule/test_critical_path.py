import pytest

from lightning_mist.schedule import ActionSeconds, StepRules, generate, simulate
from lightning_mist.schedule.lowering import add_transfers, add_update
from lightning_mist.schedule.schedule_simulation import critical_path


def run(seconds, *, microbatches=4, schedule="1f1b", crossing=0.0, rules=None, groups=None):
    stages = [ActionSeconds(forward=t, backward=2 * t, weight=t, step=0.5, reduce=0.25) for t in seconds]
    groups = groups or len(stages)
    lists = add_transfers(generate(len(stages), microbatches, schedule, num_groups=groups))
    lists = add_update(lists, tied=False, gathers=[False] * groups)
    crossings = [crossing] * (len(stages) - 1)
    return simulate(lists, stages, activation_seconds=crossings, gradient_seconds=crossings, rules=rules)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "interleaved-1f1b"])
@pytest.mark.parametrize("seconds", [[1, 1, 1, 1], [1, 3, 1, 2], [4, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("crossing", [0.0, 0.1, 2.0])
def test_a_path_fills_the_step(schedule, seconds, crossing):
    groups = 2 if schedule == "interleaved-1f1b" else 4
    simulation = run(seconds, schedule=schedule, crossing=crossing, rules=StepRules(update_after="all"), groups=groups)
    path = critical_path(simulation)
    assert path.spans[0].start == 0.0
    assert path.spans[-1].end == simulation.makespan
    for before, behind in zip(path.spans[:-1], path.spans[1:], strict=True):
        assert before.end == pytest.approx(behind.start)
    total = sum(path.work_seconds) + path.transfer_seconds + path.other_seconds
    assert total == pytest.approx(simulation.makespan)
    assert path.other_seconds == pytest.approx(0.0, abs=1e-9)


def test_a_slow_stage_is_what_a_step_hangs_on():
    path = critical_path(run([1, 5, 1]))
    assert path.work_seconds[1] == pytest.approx(4 * 15 + 0.75, abs=0.8)
    assert max(path.work_seconds) == path.work_seconds[1]


def test_slow_transfers_are_on_the_path():
    path = critical_path(run([1, 1], crossing=3.0))
    assert path.transfer_seconds >= 6.0


def test_one_stage_is_its_own_path():
    simulation = run([1], microbatches=2)
    path = critical_path(simulation)
    assert [str(span.action) for span in path.spans] == ["0F0", "0B0", "0F1", "0B1", "0REDUCE", "0STEP"]
    assert path.work_seconds == (simulation.makespan,)


def test_receiving_with_the_cores_that_compute_is_told_apart():
    simulation = run([1, 1], crossing=0.5, rules=StepRules(transfers="within", update_after="all"))
    path = critical_path(simulation)
    total = sum(path.work_seconds) + path.transfer_seconds + path.other_seconds
    assert total == pytest.approx(simulation.makespan, rel=1e-6)
