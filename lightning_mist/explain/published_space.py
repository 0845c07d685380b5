"""The best plan of the space that the paper of Mist searches (Zhu et al., 2025).

All stages have the same devices, arranged alike, without sequence parallelism; microbatches have 1, 2 or 4 rows on each
device, and their number is a power of two. Under these, every stage has its own layers (at most two more or fewer than
an even share), recomputed layers, ZeRO stage from 1 to 3 (0 without data-parallel ranks) and offload ratios; the
schedule is 1F1B. The ratios are those of the grid that the search for a plan uses.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from time import thread_time
from typing import TypeAlias

import numpy as np

from lightning_mist.plan import Plan, SearchSpace
from lightning_mist.tuner.candidates import IntraStage, SlotChoices
from lightning_mist.tuner.inter_stage import Answer, InterStageProblem, solve
from lightning_mist.tuner.planner import Planner
from lightning_mist.tuner.select import CLOCKED, clocked, make_plan, step_seconds_of_plan
from lightning_mist.tuner.space import Space, divisors

MOST_PIPELINES = 64
"""The most pipelines whose stages are evaluated, after which the best plan is only the best that was found: of the
presets up to 70 billion parameters, on up to 512 devices, at most 20 are."""

UNEVEN_LAYERS = 2
"""Layers by which a stage may differ from an even share (``layers_offset`` of the published tuner)."""

MICROBATCH_ROWS = (1, 2, 4)
"""Rows of a microbatch on each device."""

ZERO_STAGES = (1, 2, 3)
"""ZeRO stages of data-parallel ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a plan of the published space is asked for.

    Attributes:
        global_batch_size: Rows that one Lightning batch brings over all devices.
        memory_limit: Bytes that a plan may use of each device.
        host_memory_limit: Bytes of host memory of each node that offloading may take.
        search: Limits, of which those of tensor parallelism, offload and the seconds of solving count.
    """

    global_batch_size: int
    memory_limit: int | None
    host_memory_limit: int | None
    search: SearchSpace


_Solved: TypeAlias = tuple[Space, InterStageProblem, Answer]
"""A pipeline's problem and its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The best plan of the published space.

    Attributes:
        plan: The plan with its prediction; None if none fits.
        is_best: Whether everything was looked at.
    """

    plan: Plan | None
    is_best: bool


def has_published(planner: Planner, asked: Asked) -> bool:
    """Whether the published space has any plan for the batch, whatever memory it needs."""
    return next(_pipelines(planner, replace(asked, search=replace(asked.search, offload=()))), None) is not None


def published_plan(planner: Planner, asked: Asked) -> Published:
    """The fastest plan of the published space that fits.

    Pipelines are compared by the closed form of the step, and the best are run on the clock. What can be done without
    offload is looked at first: with offload only what is faster needs to be.
    """
    deadline = thread_time() + asked.search.solver_seconds
    found: list[_Solved] = []
    plain = replace(asked, search=replace(asked.search, offload=()))
    is_best = _solve(planner, plain, found, deadline)
    if asked.search.offload and is_best:
        is_best = _solve(planner, asked, found, deadline)
    best = sorted(found, key=lambda item: item[2].objective)[:CLOCKED]
    plans = [make_plan(space, problem, answer.chosen) for space, problem, answer in best]
    run = [clocked(planner.model, plan) for plan in plans]
    return Published(plan=min(run, key=step_seconds_of_plan, default=None), is_best=is_best)


def _solve(planner: Planner, asked: Asked, found: list[_Solved], deadline: float) -> bool:
    """Add answers that are better than those that are there; say whether there was time to look at everything."""
    least = min((answer.objective for _, _, answer in found), default=np.inf)
    stages: dict[Space, IntraStage] = {}
    evaluated = 0
    for bound, space, key in sorted(_pipelines(planner, asked), key=lambda item: (item[0], item[2])):
        if bound >= least:
            break
        if evaluated == MOST_PIPELINES or thread_time() > deadline:
            return False
        evaluated += 1
        if space not in stages:
            stages[space] = planner.stages(space, asked.memory_limit, asked.host_memory_limit)
        problem = _problem(stages[space], *key, below=least)
        if problem.lower_bound() >= least:
            continue
        answer = solve(problem, below=least, deadline=deadline)
        if answer.chosen:
            least = min(least, answer.objective)
            found.append((space, problem, answer))
    return True


def _pipelines(planner: Planner, asked: Asked) -> Iterator[tuple[float, Space, tuple[int, int]]]:
    """Every uniform pipeline ``(S, G)`` in a space of its own, with seconds that none of its plans goes below."""
    batch, wide = asked.global_batch_size, planner.space(asked.global_batch_size, asked.search)
    for num_stages in divisors(wide.world_size):
        devices = wide.world_size // num_stages
        for tensor in sorted({degree for degree, _ in wide.tensor if devices % degree == 0}):
            data = devices // tensor
            counts = {batch // (rows * data) for rows in MICROBATCH_ROWS if batch % (rows * data) == 0}
            powers = tuple(sorted(count for count in counts if count & (count - 1) == 0))
            if num_stages > wide.max_stages or not powers:
                continue
            space = planner.space(
                batch,
                SearchSpace(
                    num_stages=(num_stages,),
                    num_microbatches=powers,
                    devices_per_stage=(devices,),
                    zero_stages=ZERO_STAGES,
                    tensor_parallel_degrees=(tensor,),
                    data_parallel_size=asked.search.data_parallel_size,
                    sequence_parallel=False,
                    offload=asked.search.offload,
                    offload_ratios=asked.search.offload_ratios,
                    schedules=("1f1b",),
                ),
            )
            for key in space.pipelines():
                seconds = planner.model.region_seconds(space.rows(key[1], data), tensor)
                once = float((seconds.forward_R + seconds.backward_R).sum())
                yield (key[1] - 1) * once / num_stages + once, space, key


def _problem(intra: IntraStage, num_stages: int, num_microbatches: int, *, below: float) -> InterStageProblem:
    """The choices of every stage that plans of fewer seconds can have, with as many layers as they may have."""
    space, slowest = intra.space, below / num_microbatches

    def near(slot: SlotChoices) -> SlotChoices:
        even = round(space.num_layers / num_stages)
        return slot.take(np.abs(slot.layers_K - even) <= UNEVEN_LAYERS)

    return InterStageProblem(
        num_layers=space.num_layers,
        num_devices=(space.world_size,),
        num_microbatches=num_microbatches,
        slots=tuple(near(intra.frontier(index, num_stages, num_microbatches, slowest)) for index in range(num_stages)),
    )
