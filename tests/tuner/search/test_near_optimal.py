"""What the clock and other schedules choose among depends on the question, and not on how the search came to it."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.planner.apart import spec_of
from lightning_mist.errors import InfeasibleError
from lightning_mist.hardware import parse_cluster
from lightning_mist.model.presets import PRESETS
from lightning_mist.plan.search_space import OFFLOADED
from lightning_mist.tuner import SearchSpace, tune
from lightning_mist.tuner.bounds.pipeline_bounds import OpenStages, PipelineBounds
from lightning_mist.tuner.inter_stage.problem import PRECISION
from lightning_mist.tuner.options import OPTIONS
from tests.tuner.instances import random_instance
from tests.tuner.searches import each_by_itself, searched, stages_of

EVERY_SCHEDULE = ("1f1b", "interleaved-1f1b", "zb-h1")


def without_bounds(monkeypatch):
    """Switch off the lower bounds of families, and variable fixing by them."""

    def everything(self, group, counts, below, kinds):
        size = max(self.num_devices) + 1, self.num_layers + 1
        return OpenStages(
            counts=tuple(counts),
            slowest=below / group.num_microbatches,
            heads_NL=np.ones((len(counts), *size), dtype=bool),
            tails_NL=np.ones((max(counts) - 1, 1, *size), dtype=bool),
        )

    monkeypatch.setattr(PipelineBounds, "bound", lambda *asked: 0.0)
    monkeypatch.setattr(PipelineBounds, "open_stages", everything)


def plan_of(seed):
    """The plan of a random instance under any schedule; nothing if none fits."""
    asked = random_instance(seed, unlike=0.0)
    try:
        found = tune(
            asked.network,
            asked.machine,
            profile=asked.rates,
            global_batch_size=asked.rows * asked.machine.world_size,
            memory_limit=asked.memory_limit,
            search=replace(asked.search, schedules=EVERY_SCHEDULE),
        )
    except InfeasibleError:
        return None
    return found.plan


# Of these 19 and 74 came to other plans without bounds when what the search had met was tried.
@pytest.mark.parametrize("seed", [*range(12), 19, 74])
def test_bounds_do_not_change_the_plan(seed, monkeypatch):
    plan = plan_of(seed)
    without_bounds(monkeypatch)
    assert plan_of(seed) == plan


# A single stage is 8 % slower than the best, is the best, does not fit.
@pytest.mark.parametrize(("gib", "offload"), [(20, ()), (20, OFFLOADED), (10, ())])
def test_it_does_not_matter_when_a_single_stage_is_looked_at(gib, offload, monkeypatch):
    spec = spec_of(PRESETS["gpt3-1.3b"], "gpt3-1.3b", "1x2xL4", rows=16, sequence_length=2048)
    asked = {"global_batch_size": 64, "memory_limit": gib << 30, "search": SearchSpace(offload=offload)}
    first = tune(spec, parse_cluster("1x2xL4"), **asked)
    monkeypatch.setattr(OPTIONS, "likely", 0.0)
    last = tune(spec, parse_cluster("1x2xL4"), **asked)
    assert last.plan == first.plan
    assert last.alternatives == first.alternatives


@pytest.mark.parametrize("offload", [(), OFFLOADED])
def test_bounds_do_not_change_the_plan_of_a_preset(offload, monkeypatch):
    asked = {"global_batch_size": 64, "search": SearchSpace(offload=offload)}
    spec = spec_of(PRESETS["gpt3-2.7b"], "gpt3-2.7b", "1x4xL4", rows=16, sequence_length=2048)
    found = tune(spec, parse_cluster("1x4xL4"), **asked)
    without_bounds(monkeypatch)
    assert tune(spec, parse_cluster("1x4xL4"), **asked).plan == found.plan
    assert found.plan.schedule == ("1f1b" if offload else "zb-h1")


@pytest.mark.parametrize("likely", [OPTIONS.likely, 0.0])  # With none that is likely a single stage comes last.
@pytest.mark.parametrize("memory", [10**12, 10**6, 600_000])
def test_every_pipeline_near_the_best_is_solved(memory, likely, monkeypatch):
    monkeypatch.setattr(OPTIONS, "likely", likely)
    stages = stages_of(memory=memory)
    wanted = each_by_itself(stages)
    least = min(wanted.values())
    found = {key[:2]: item for key, item in searched(stages).found.items()}
    for key, value in wanted.items():
        if value < least * OPTIONS.near_resident:
            assert found[key].answer.objective == pytest.approx(value, rel=2 * PRECISION)
    alone = min(value for key, value in wanted.items() if key[0] == 1)
    if alone < least * OPTIONS.compared:
        values = [item.answer.objective for key, item in found.items() if key[0] == 1]
        assert min(values) == pytest.approx(alone, rel=2 * PRECISION)
