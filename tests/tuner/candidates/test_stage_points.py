import numpy as np
import pytest

from lightning_mist.cost.memory.moments import device_moments
from lightning_mist.tuner.candidates.candidate_tables import Stage, StagePoints, covers, either
from tests.tuner.candidates.test_offload_search import make, table_of


def table(index=0, **search):
    return table_of(make("alike", "L4", limit=1e12, **search), index, 2, 4, np.inf)


def test_stages_have_the_candidates_that_they_may_be():
    found = table()
    among = np.zeros((5, 5), dtype=bool)
    among[2, 1:3] = True
    stages = [Stage(moments=device_moments(0, count, 4), among_NL=mask) for count, mask in ((2, None), (3, among))]
    slowest = float(found.steady_K[len(found) // 2])
    points = StagePoints.of(found, stages, slowest)
    count = int((found.steady_K <= slowest).sum())
    first, second = (points.index_K[points.stage_K == stage] for stage in (0, 1))
    assert first.tolist() == list(range(count))
    layers_K = found.ranges.layers_K[found.range_K]
    wanted = [index for index in range(count) if found.devices_K[index] == 2 and layers_K[index] in (1, 2)]
    assert second.tolist() == wanted
    assert wanted
    assert (np.diff(points.stage_K) >= 0).all()
    # Numbers of groups tell stages, runs of layers and devices apart.
    keys = [
        (stage, int(found.range_K[index]), int(found.devices_K[index]))
        for stage, index in zip(points.stage_K.tolist(), points.index_K.tolist(), strict=True)
    ]
    assert (
        len(set(keys)) == len(set(points.group_K.tolist())) == len(set(zip(keys, points.group_K.tolist(), strict=True)))
    )


def test_peaks_are_those_of_the_moments_of_each_stage():
    found = table()
    stages = [Stage(moments=device_moments(0, count, 8)) for count in (2, 4, 6)]
    points = StagePoints.of(found, stages, np.inf)
    peak_K = points.peaks()
    for place, stage in enumerate(stages):
        at_P = points.stage_K == place
        np.testing.assert_array_equal(peak_K[at_P], found.parts.peaks(stage.moments)[points.index_K[at_P]])
    assert len(set(np.bincount(points.stage_K, peak_K).tolist())) == 3


def test_nothing_is_asked_of_stages_that_can_be_nothing():
    found, none = table(), np.zeros((5, 5), dtype=bool)
    points = StagePoints.of(found, [Stage(moments=device_moments(0, 2, 4), among_NL=none)] * 2, np.inf)
    assert len(points) == len(points.peaks()) == 0
    assert len(StagePoints.of(found, [], np.inf)) == 0


def test_stages_behind_count_for_what_is_unsharded_again():
    found = table()
    again_K = found.again_K
    assert not again_K[found.zero_stage_K < 3].any()
    assert again_K[found.zero_stage_K == 3].any()
    moments = device_moments(0, 3, 4)
    alone, later = (StagePoints.of(found, [Stage(moments=moments, behind=count)], np.inf) for count in (0, 2))
    np.testing.assert_array_equal(alone.steady_K, found.steady_K)
    np.testing.assert_array_equal(alone.floor_K, found.floor_K)
    np.testing.assert_array_equal(alone.whole_K, found.steady_K + found.boundary_K)
    for name in ("steady_K", "floor_K", "whole_K"):
        assert getattr(later, name) == pytest.approx(getattr(alone, name) + 2 * again_K)
    assert later.later_K == pytest.approx(2 * again_K)


def test_what_is_of_interest_together_and_what_is_known_already():
    some, other = np.eye(3, dtype=bool), np.ones((3, 3), dtype=bool)
    assert either(None, some) is either(some, None) is None
    np.testing.assert_array_equal(either(some, ~some, some), other)
    assert covers(None, None)
    assert covers(None, some)
    assert covers(other, some)
    assert not covers(some, other)
    assert not covers(other, None)
