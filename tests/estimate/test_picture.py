from dataclasses import replace

import numpy as np
import pytest

from lightning_mist.errors import PlanError
from lightning_mist.estimate import Estimator, estimate_plan
from lightning_mist.estimate.picture import MOST_STAGES, _shown, draw_memory, timeline_of
from lightning_mist.estimate.replay.rank_replay import replay_plan
from lightning_mist.hardware import parse_cluster
from lightning_mist.plan import OffloadRatios, plan_of
from tests.cost.events import with_events
from tests.specs import spec

NETWORK = with_events(spec(8))
PLAN = plan_of(8, world_size=4, global_batch_size=16, pipeline_stages=4)


def estimator(world_size=4, network=NETWORK):
    return Estimator(network, parse_cluster(f"1x{world_size}xL4"), 2**30)


def test_a_timeline_is_that_of_the_replay():
    for stage, replay in enumerate(replay_plan(NETWORK, PLAN)):
        line = timeline_of(replay, stage)
        assert line.stage == stage
        assert line.total_E.tolist() == replay.live_E[replay.begin :].tolist()
        assert line.total_E.max() == replay.peak_bytes
        assert (np.diff(line.places_E) >= 0).all()
        names = [name for name, _, _ in line.computations]
        assert {"F0", "B0", f"F{PLAN.num_microbatches - 1}", "step"} <= set(names)
        widths = {name[0]: round(end - begin, 6) for name, begin, end in line.computations}
        assert widths == {"F": 1.0, "B": 2.0, "s": 1.0}


@pytest.mark.parametrize("name", ["a.png", "b.svg"])
def test_a_picture_is_drawn(tmp_path, name):
    known = estimator()
    draw_memory(estimate_plan(known, PLAN), known.timelines(PLAN), str(tmp_path / name))
    written = (tmp_path / name).read_bytes()
    assert written.startswith(b"\x89PNG" if name == "a.png" else b"<?xml")
    if name == "b.svg":
        assert len(written) > 10_000


def test_of_many_stages_the_worst_first_and_last_are_shown():
    plan = plan_of(8, world_size=8, global_batch_size=16, pipeline_stages=8)
    known = estimator(8)
    estimate, lines = estimate_plan(known, plan), known.timelines(plan)
    shown = [line.stage for line in _shown(estimate, lines)]
    assert len(shown) == MOST_STAGES
    assert {0, 7, estimate.worst.stage} <= set(shown)
    assert shown == sorted(shown)


def test_what_is_not_known_is_not_drawn():
    offloading = plan_of(8, world_size=4, global_batch_size=16, offload=OffloadRatios(optimizer=1.0))
    assert estimator().timelines(offloading)
    with pytest.raises(PlanError, match="synthetic was described without its allocations"):
        estimator(network=spec(8)).timelines(PLAN)


def test_without_an_allocator_only_tensors_are_drawn(tmp_path):
    known = replace(estimator(), cluster=parse_cluster("4xcpu:1GiB"))
    draw_memory(estimate_plan(known, PLAN), known.timelines(PLAN), str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").stat().st_size > 0
