"""Why nothing fits: the least that any plan needs, what it is needed for, and what would help."""

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import NoReturn

import numpy as np

from lightning_mist.cost import stage_memory
from lightning_mist.cost.memory import TERMS
from lightning_mist.errors import InfeasibleError
from lightning_mist.plan import Plan
from lightning_mist.tuner.bound import least_peak
from lightning_mist.tuner.budget import tensor_share
from lightning_mist.tuner.intra_stage import EVERY_PART, IntraStage, SlotChoices, with_peaks_as_seconds
from lightning_mist.tuner.mixed import MixedStages, Pipeline, Stages
from lightning_mist.tuner.pareto import non_dominated
from lightning_mist.tuner.problem import InterStageProblem
from lightning_mist.tuner.search_space import COUNTS, SearchSpace
from lightning_mist.units import format_bytes

LOOK_SECONDS = 10.0
"""Seconds after which the search for the least memory stops at the best found."""

SHOWN_TERMS = 3
"""Terms of the peak that the message names."""


class UndecidedError(InfeasibleError):
    """Time was up before a plan was found; whether one fits is not known."""


def refuse_late(intra: Stages) -> NoReturn:
    """Say that time was up before anything was found.

    Raises:
        UndecidedError: Always.
    """
    search = intra.space.search
    raise UndecidedError(
        f"no plan was found in solver_seconds={search.solver_seconds:g}, and not everything was looked at: whether one "
        "fits is not known. Give more seconds, or leave less to search, for example with num_stages or "
        "num_microbatches"
    )


def explain_infeasible(
    intra: Stages, make_plan: Callable[[InterStageProblem, tuple[int, ...]], Plan], deadline: float = np.inf
) -> NoReturn:
    """Raise the error that says what the least demanding plan needs.

    Args:
        intra: Makes choices, and knows the limits.
        make_plan: The plan that one choice per stage of a problem describes.
        deadline: Value of ``perf_counter()`` at which to stop looking for the least that a plan needs.

    Raises:
        InfeasibleError: Always.
    """
    space, search = intra.space, intra.space.search
    pipelines = (
        intra.pipelines
        if isinstance(intra, MixedStages)
        else tuple(Pipeline(*numbers, ()) for numbers in space.pipelines())
    )
    if not pipelines:
        raise InfeasibleError(
            f"no plan of the search space uses all {space.world_size} devices with {space.batch_rows} rows each: "
            f"{_pins(search)} leave no number of stages and microbatches that cut every batch into equal parts. "
            f"{_excluded(space.notes)}Leave these out of the search space"
        )
    plan, is_least = _least(intra, pipelines, make_plan, deadline)
    if plan is None:
        raise InfeasibleError(
            f"no plan of the search space deals {space.num_layers} layers and {space.world_size} devices out to "
            f"{', '.join(str(count) for count in sorted({item.num_stages for item in pipelines}))} stages: "
            "allow other numbers in devices_per_stage or num_stages"
        )
    raise InfeasibleError(_message(intra, plan, is_least))


def _least(
    intra: Stages,
    pipelines: tuple[Pipeline, ...],
    make_plan: Callable[[InterStageProblem, tuple[int, ...]], Plan],
    deadline: float,
) -> tuple[Plan | None, bool]:
    """The plan that needs the least memory, and whether all were looked at."""
    deadline, best, plan = min(deadline, perf_counter() + LOOK_SECONDS), np.inf, None
    # Many microbatches need little memory each, so the first pipelines are good and rule out others.
    for pipeline in sorted(pipelines, key=lambda item: (-item.num_microbatches, -item.num_stages, item.parts)):
        if perf_counter() > deadline and plan is not None:
            return plan, False
        problem = _problem(intra, pipeline)
        if max(float(slot.steady_K.min(initial=np.inf)) for slot in problem.slots) >= best:
            continue
        found = least_peak(problem)
        if found is not None and found[0] < best:
            best, plan = found[0], make_plan(problem, found[1])
    return plan, True


def _problem(intra: Stages, pipeline: Pipeline) -> InterStageProblem:
    """What every stage needs at least, in place of seconds: bytes, on unlike devices as parts of what there is."""
    stages, microbatches, parts = pipeline
    if isinstance(intra, MixedStages):
        own = [intra.parts[part] for part in parts] or [intra.together]
        slots = tuple(
            _as_parts(_by_memory(item, index, stages, microbatches, parts), item.memory_limit, part)
            for index, (item, part) in enumerate(zip(own, parts or (EVERY_PART,), strict=True))
        )
        sizes = intra.sizes
    else:
        slots = tuple(_by_memory(intra, index, stages, microbatches) for index in range(stages))
        sizes = (intra.space.world_size,)
    return InterStageProblem(
        num_layers=intra.space.num_layers, num_devices=sizes, num_microbatches=microbatches, slots=slots
    )


def _as_parts(choices: SlotChoices, limit: float, part: int) -> SlotChoices:
    """Choices of a part of a cluster, what they need as a part of its limit."""
    return replace(choices, steady_K=choices.steady_K / max(limit, 1.0), part_K=np.full(len(choices), part))


def _by_memory(
    intra: IntraStage, stage_index: int, num_stages: int, num_microbatches: int, pipeline: tuple[int, ...] = ()
) -> SlotChoices:
    """For every range and number of devices the choice with the least peak, its bytes in place of seconds."""
    parts = []
    for shape in intra.space.shapes(num_microbatches):
        choices = intra.choices(intra.slot(stage_index, num_stages, num_microbatches, shape, pipeline))
        group_K = choices.start_K * (intra.space.num_layers + 1) + choices.layers_K
        parts.append(choices.take(non_dominated(group_K, choices.peak_K, np.zeros(len(choices)))))
    return with_peaks_as_seconds(SlotChoices.joined(parts))


def _message(intra: Stages, plan: Plan, is_least: bool) -> str:
    stages, limits, cluster = stage_memory(intra.model.spec, plan), intra.limits(plan), intra.model.cluster
    index = max(range(len(stages)), key=lambda i: stages[i].peak_bytes / max(limits[i], 1.0))
    worst, stage = stages[index], plan.stages[index]
    terms = sorted(worst.terms, key=lambda item: -item[1])[:SHOWN_TERMS]
    needs = ", ".join(f"{name.removesuffix('_bytes')} {format_bytes(value)}" for name, value in terms)
    # What is in host memory is not counted: a plan that offloads may need less, though too much as well.
    kept = " without offload" if intra.space.offload_ratios else ""
    least = (
        f"The least that any plan{kept} needs"
        if is_least
        else f"The least that a plan{kept} needs, of those looked at in time,"
    )
    limit, share = limits[index], tensor_share(cluster)
    more = worst.peak_bytes - int(limit)
    names = sorted({cluster.parts[cluster.part_of(device)].device.name for device in stage.devices})
    kind = "devices" if len(cluster.parts) == 1 else " and ".join(names)
    allowed = f"memory_limit is {format_bytes(limit / share)} per device"
    if share < 1:
        allowed += f", of which tensors may take {format_bytes(limit)}"
    host = intra.host_limits(plan)[index]
    if kept and np.isfinite(host):
        allowed += f", and offload {format_bytes(host)} of its host's memory"
    return (
        f"no plan fits. {least} is {format_bytes(worst.peak_bytes)}, on stage {index} of {plan.num_stages} "
        f"(layers {stage.layers[0]} to {stage.layers[1]} on {len(stage.devices)} {kind}, {stage.microbatch_size} rows "
        f"per microbatch, {stage.checkpointing.layers} layers recomputed, ZeRO-{int(stage.zero_stage)}) in its "
        f"{worst.phase}; {allowed}. Largest terms: {needs}. "
        f"{_excluded(intra.space.notes)}Raise memory_limit by {format_bytes(more / share)}, use more devices, or use "
        f"{_way_out(terms[0][0])}"
    )


def _pins(search: SearchSpace) -> str:
    """The limits that say how devices and batches are divided, those that were given."""
    given = ((name, getattr(search, name)) for name in ("max_stages", "layer_cuts", *COUNTS))
    return ", ".join(f"{name}={value}" for name, value in given if value is not None) or "the defaults"


def _excluded(notes: tuple[str, ...]) -> str:
    return f"The search went {'; '.join(notes)}. " if notes else ""


def _way_out(term: str) -> str:
    assert term in TERMS
    return {
        "activation_bytes": "smaller batches",
        "working_bytes": "smaller batches or shorter samples",
        "transfer_bytes": "smaller batches",
        "batch_bytes": "smaller batches",
        "optimizer_bytes": "an optimizer that keeps less state",
    }.get(term, "a smaller model or a lower precision of its parameters")
