"""The paper's example, tuned by our search under the paper's rules and over its space."""

import numpy as np
import pytest

from lightning_mist.cost import step_seconds
from lightning_mist.tuner.inter_stage.exact_solver import PRECISION
from tests.cost import paper_time
from tests.cost.paper_time import PaperStage
from tests.tuner import paper_space
from tests.tuner.paper_space import GPT, NOTHING, PUBLISHED, PUBLISHED_SECONDS, Place, tuned


def by_trying_everything(**limits):
    """The least seconds over every pair of stages, and of one stage alone."""
    best = np.inf
    for count, options in paper_space.pipelines(**limits):
        if len(options) == 1:
            best = min(best, (count * options[0].steady_K + np.maximum(options[0].boundary_K, 0)).min())
            continue
        first, second = options
        fits = first.layers_K[:, None] + second.layers_K == GPT.layers
        steady, late = first.steady_K[:, None], second.boundary_K - first.steady_K[:, None]
        total = (count - 1) * np.maximum(steady, second.steady_K) + steady + second.steady_K
        best = min(best, (total + np.maximum(0.0, np.maximum(first.boundary_K[:, None], late)))[fits].min())
    return best


def test_the_published_plan_is_found_where_nothing_may_be_offloaded():
    found = tuned(**PUBLISHED)
    assert found.seconds == pytest.approx(PUBLISHED_SECONDS, rel=1e-7)
    assert found.checked == pytest.approx(found.seconds, rel=PRECISION)
    assert found.bound >= found.seconds * (1 - 1e-6)
    assert [stage[:2] for stage in found.stages] == [(12, 5), (12, 0)]


@pytest.mark.sample
@pytest.mark.parametrize("ratios", [(NOTHING,), paper_space.RATIOS])
def test_over_the_whole_space_the_answer_is_at_least_as_good_and_proven(ratios):
    found = tuned(all_ratios=ratios)
    assert found.seconds <= PUBLISHED_SECONDS
    assert (found.seconds - found.bound) / found.seconds <= 0.01
    assert found.checked == pytest.approx(found.seconds, rel=PRECISION)
    assert found.seconds == pytest.approx(by_trying_everything(all_ratios=ratios), rel=1e-9)


def test_the_published_plan_has_the_least_recomputation_that_fits():
    limit = paper_space.USABLE_SHARE * paper_time.read()["memory_gib"] * 2**30
    first, last = (Place(index=index, stages=2, rows=2) for index in (0, 1))
    need = paper_space.peaks(first, NOTHING, np.array([12, 12]), np.array([4, 5]))
    assert need[1] <= limit < need[0]
    assert paper_space.peaks(last, NOTHING, np.array([12]), np.array([0]))[0] <= limit


def test_the_plan_to_beat():
    place = Place(index=0, stages=1, rows=8)
    peak = paper_space.peaks(place, NOTHING, np.array([24]), np.array([24]))[0]
    assert peak / 2**20 == pytest.approx(19503.125 * 1.01)
    steady_K, boundary_K = paper_space.seconds(place, NOTHING, np.array([24]), np.array([24]))
    assert step_seconds(steady_K, boundary_K, 2) == pytest.approx(10.659405381925026, rel=2e-8)


@pytest.mark.parametrize(("rows", "index"), [(2, 0), (2, 1), (4, 0)])
def test_without_offload_a_stage_takes_what_its_rules_say(rows, index):
    place = Place(index=index, stages=2, rows=rows)
    layers_K, recomputed_K = np.array([1, 2, 12, 12, 12, 13]), np.array([1, 1, 0, 5, 12, 12])
    steady_K, boundary_K = paper_space.seconds(place, NOTHING, layers_K, recomputed_K)
    for place_K, layers, recomputed in zip(range(6), layers_K, recomputed_K, strict=True):
        stage = PaperStage(layers=layers, recomputed=recomputed, has_head=index == 0, has_tail=index == 1)
        wanted = paper_time.stage_seconds(stage, rows=rows, devices=1, microbatches=32 // rows, flash=False)
        assert (steady_K[place_K], boundary_K[place_K]) == pytest.approx(wanted, rel=1e-12, abs=1e-12)


def test_offload_saves_bytes_and_takes_seconds():
    place = Place(index=0, stages=2, rows=2)
    layers_K, recomputed_K = np.array([1, 2, 12, 12, 12]), np.array([1, 0, 0, 5, 12])
    steady_K, boundary_K = paper_space.seconds(place, NOTHING, layers_K, recomputed_K)
    for kind in range(4):
        ratios = tuple(1.0 if index == kind else 0.0 for index in range(4))
        slower_K, later_K = paper_space.seconds(place, ratios, layers_K, recomputed_K)
        if kind == 2:  # Optimizer states move once a batch.
            np.testing.assert_allclose(slower_K, steady_K)
            assert (later_K > boundary_K).all()
        else:
            assert (slower_K > steady_K).all()
    kept, moved = (paper_space.peaks(place, ratios, layers_K, recomputed_K) for ratios in (NOTHING, (0, 0, 0, 1)))
    assert moved[2] < kept[2]
