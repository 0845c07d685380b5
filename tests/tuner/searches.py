"""Stages of a small network, and searches of them."""

import numpy as np

from lightning_mist.tuner import SearchSpace
from lightning_mist.tuner.inter_stage.exact_solver import solve
from lightning_mist.tuner.inter_stage.problem import InterStageProblem
from lightning_mist.tuner.planner import Planner
from lightning_mist.tuner.search import search_loop as search
from tests.specs import cluster, profile, spec


def stages_of(devices=4, rows=4, memory=10**12, nodes=1, **limits):
    """What the stages of a small network may be."""
    planner = Planner(spec(), cluster(devices, nodes=nodes), profile=profile())
    space = planner.space(rows * devices, SearchSpace(**{"schedules": ("1f1b",), "offload": (), **limits}))
    return planner.stages(space, memory)


def frontier(maker, stage_index, num_stages, num_microbatches):
    """What one stage may be that fits and is not dominated."""
    return maker.frontiers([(stage_index, num_stages, (), None)], num_microbatches)[0]


def each_by_itself(stages):
    """The least step seconds of every pipeline, each solved alone."""
    space, found = stages.space, {}
    for num_stages, num_microbatches in space.pipelines():
        problem = InterStageProblem(
            num_layers=space.num_layers,
            num_devices=(space.world_size,),
            num_microbatches=num_microbatches,
            slots=tuple(frontier(stages.together, index, num_stages, num_microbatches) for index in range(num_stages)),
        )
        found[num_stages, num_microbatches] = solve(problem).objective
    return found


def searched(stages, deadline=np.inf, below=np.inf):
    """What a search of them comes to."""
    return search.search_pipelines(stages, deadline, below)
