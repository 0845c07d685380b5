"""The golden example of the paper, by the paper's rules."""

import pytest

from tests.cost import paper_time
from tests.cost.paper_time import PaperStage

WHOLE = PaperStage(layers=24, recomputed=24, has_head=True, has_tail=True)
HALVES = (
    PaperStage(layers=12, recomputed=5, has_head=True, has_tail=False),
    PaperStage(layers=12, recomputed=0, has_head=False, has_tail=True),
)


def test_the_base_plan_takes_what_was_published():
    seconds = paper_time.step_seconds([WHOLE], rows=8, devices=2, microbatches=2, flash=False)
    assert seconds == pytest.approx(10.659405381925026, rel=2e-8)
    steady, boundary = paper_time.stage_seconds(WHOLE, rows=8, devices=2, microbatches=2, flash=False)
    assert (steady, boundary) == pytest.approx((5.223716881233454, 0.21197175531731155), rel=1e-7)


def test_the_tuned_plan_takes_what_was_published():
    seconds = paper_time.step_seconds(HALVES, rows=2, devices=1, microbatches=16, flash=False)
    assert seconds == pytest.approx(9.26892465, rel=1e-7)
    times = [paper_time.stage_seconds(item, rows=2, devices=1, microbatches=16, flash=False) for item in HALVES]
    assert [t for t, _ in times] == pytest.approx([0.5455452454864979, 0.5402001697748899], rel=1e-8)
    assert [d for _, d in times] == [0.0, 0.0]


def test_channels_that_run_together_slow_one_another_until_the_first_has_ended():
    slowdown = {"compute and gpu_gpu": {"compute": 2.0, "gpu_gpu": 1.0}}
    assert paper_time.together({"compute": 1.0, "gpu_gpu": 0.0}, slowdown) == 1.0
    # In one second the copy ends and half of the computation is done.
    assert paper_time.together({"compute": 1.0, "gpu_gpu": 1.0}, slowdown) == pytest.approx(1.5)
