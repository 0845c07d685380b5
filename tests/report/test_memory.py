from lightning_mist.report.draw_memory import MOST_GROUPS, memory_picture, moments
from tests.report.networks import predicted


def test_the_worst_stage_is_the_one_with_the_highest_peak():
    plan = predicted(4, 8)
    picture = memory_picture(plan, (5e6,) * 4)
    peaks = [stage.peak_bytes for stage in plan.predicted.stages]
    assert picture.worst.peak_bytes == max(peaks)
    assert picture.worst.group == peaks.index(max(peaks))
    assert picture.limit(picture.worst) == 5e6
    assert [curve.group for curve in picture.shown] == [0, 1, 2, 3]


def test_of_many_stages_some_are_shown():
    picture = memory_picture(predicted(16, 32, layers=16))
    shown = [curve.group for curve in picture.shown]
    assert len(shown) == MOST_GROUPS
    assert {0, 15, picture.worst.group} <= set(shown)
    assert shown == sorted(shown)


def test_moments_are_when_peaks_begin():
    picture = memory_picture(predicted(2, 4))
    for moment, curve in zip(moments(picture.curves), picture.curves, strict=True):
        at = list(curve.times_E).index(moment)
        assert curve.total_E[at] == curve.total_E.max()
