import itertools

import numpy as np
import pytest

from lightning_mist.cost import step_seconds, step_seconds_of
from lightning_mist.schedule import generate
from lightning_mist.schedule.simulate import StageSeconds, simulate


def makespan(forward, backward, update, microbatches, schedule="1f1b"):
    """Seconds of one step on a clock; the update comes after a stage's last backward."""
    lists = generate(len(forward), microbatches, schedule)
    stages = [StageSeconds(forward=f, backward=b) for f, b in zip(forward, backward, strict=True)]
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
