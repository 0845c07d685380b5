"""Why nothing fits: the least that any plan needs, what it is needed for, and what would help.

Of a candidate more than one share of each kind of state may be in host memory (:class:`LeastMemory`). Where that is not
too much all shares are looked at; else all or nothing of each kind; else all or nothing of everything together. What is
moved takes no memory of the device but for buffers, so that this last one is near the least.

Array axes
    K  candidates of a table
    C  combinations of shares
    J  candidates with shares
    O  kinds of state, in the order of ``OFFLOAD_KINDS``
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil
from time import thread_time
from typing import Literal, NoReturn, TypeAlias

import numpy as np

from lightning_mist.cost import CostModel, StageSlot, stage_memory
from lightning_mist.cost.inputs import FloatArray, IntArray, OffloadCandidates
from lightning_mist.cost.interleaved_memory import plan_memory
from lightning_mist.cost.memory import TERMS, PeakParts, StageNeeds, moments_of
from lightning_mist.errors import InfeasibleError
from lightning_mist.plan import COUNTS, OFFLOAD_KINDS, Plan, SearchSpace, StagePlan
from lightning_mist.tuner.candidates import (
    ANY_SEAMS,
    EVERY_PART,
    IntraStage,
    RatioGrid,
    SlotChoices,
    Table,
    may_offload,
    non_dominated,
)
from lightning_mist.tuner.inter_stage import InterStageProblem, Pipeline, heads_of, least_peak, tails_of
from lightning_mist.tuner.options import OPTIONS
from lightning_mist.tuner.search import Stages
from lightning_mist.tuner.space import Role, role_of, tensor_share
from lightning_mist.units import format_bytes, format_bytes_up, parse_bytes

MOST = 1 << 15
"""Candidates of a slot that are evaluated with offload; with more of them fewer shares are looked at."""


Wanted = Literal["device", "device without host limit", "host"]


class LateError(Exception):
    """Time was up before all was looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """Candidates with shares, and their bytes, that all stages of a role have in common; whether shares are missing."""

    table: Table
    index_J: IntArray
    offload_JO: FloatArray
    parts: PeakParts
    needs: StageNeeds
    is_coarse: bool


@dataclass(slots=True, kw_only=True)
class LeastMemory:
    """Knows what stages need at least; keeps what those of one role have in common.

    Attributes:
        deadline: Value of ``thread_time()`` at which to stop.
        wanted: What is least: bytes of the device, with or without a limit of host memory, or of host memory where the
            device's limit is kept.
        known: What was computed, by who makes stages, role and arrangement.
    """

    deadline: float = np.inf
    wanted: Wanted = "device"
    known: dict[tuple[int, tuple[int, int] | None, Role, StageSlot], _Known] = field(default_factory=dict)

    @property
    def is_coarse(self) -> bool:
        """Whether not every share of what may be moved was looked at."""
        return any(item.is_coarse for item in self.known.values())

    def choices(self, intra: IntraStage, slot: StageSlot) -> SlotChoices:
        """For every range of layers of a slot what needs least, these bytes as its peak.

        Raises:
            LateError: If time is up.
        """
        if thread_time() > self.deadline:
            raise LateError
        role = role_of(slot.stage_index, slot.num_stages)
        # Where a stage of a role lies in the pipeline only tells how many microbatches it has in flight.
        settled = intra.space.layer_range(slot.stage_index, slot.num_stages)
        key = id(intra), settled, role, replace(slot, stage_index=0, num_stages=1, parts=())
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = self._evaluate(intra, slot)
        moments = moments_of(slot)
        peak_J, host_J = found.parts.peaks(moments), found.needs.host_bytes(moments)
        value_J = host_J if self.wanted == "host" else peak_J
        kept_J = np.flatnonzero(
            {
                "device": host_J <= intra.host_limit,
                "device without host limit": host_J < np.inf,
                "host": peak_J <= intra.memory_limit,
            }[self.wanted]
        )
        choices = found.table.choices(found.index_J[kept_J], value_J[kept_J], None, found.offload_JO[kept_J])
        choices = intra.inside((slot.stage_index, slot.num_stages, slot.parts), choices)
        # Of those with the same layers the one with the least peak.
        group_K = choices.start_K * (intra.space.num_layers + 1) + choices.layers_K
        return choices.take(non_dominated(group_K, choices.peak_K, np.zeros(len(choices))))

    def _evaluate(self, intra: IntraStage, slot: StageSlot) -> _Known:
        table, memory = intra.everything(slot), intra.model.memory(slot)
        offload_CO, is_coarse = _shares(intra, len(table))
        offload_CO = offload_CO[may_offload(slot, offload_CO)]
        index_J = np.repeat(np.arange(len(table)), len(offload_CO))
        offload_JO = np.tile(offload_CO, (len(table), 1))
        candidates = replace(table.candidates(index_J), offload=OffloadCandidates.of_kinds(offload_JO))
        needs = memory.needs(slot, candidates)
        return _Known(
            table=table,
            index_J=index_J,
            offload_JO=offload_JO,
            parts=PeakParts.of(needs),
            needs=needs,
            is_coarse=is_coarse,
        )


def _shares(intra: IntraStage, candidates: int) -> tuple[FloatArray, bool]:
    """The combinations of shares to look at, as many as there is room for, and whether some are left out."""
    ratios = (0.0, *intra.space.offload_ratios)
    for offered in (ratios, (0.0, ratios[-1])):
        grid = RatioGrid.of(intra.space.search, offered)
        if candidates * len(grid) <= MOST or len(grid) == 1:
            return grid.offload_CO, len(offered) < len(ratios)
    return grid.offload_CO[[0, -1]], True


MakePlan: TypeAlias = Callable[[InterStageProblem, tuple[int, ...]], Plan]
"""The plan that one choice per stage of a problem describes."""

SHOWN_TERMS = 3
"""Terms of the peak that the message names."""


class UndecidedError(InfeasibleError):
    """Time was up before a plan was found; whether one fits is not known."""


def kept_bytes(model: CostModel) -> float:
    """Bytes of all parameters and of the optimizer state of those that are trained."""
    table, spec = model.whole.holdings.table, model.spec
    return float(table.bytes_P.sum() + spec.optimizer.state_bytes_per_parameter_byte * table.trainable_P.sum())


def held_bytes(stages: Stages) -> float:
    """Bytes that all devices may use together with their hosts; infinite where a host has no limit."""
    return sum(
        count * (part.memory_limit + (part.host_limit if part.space.offload_ratios else 0.0))
        for part, count in zip(stages.parts, stages.sizes, strict=True)
    )


def too_large(stages: Stages) -> str | None:
    """Why a network is too large for all devices and hosts together, for people; nothing if it need not be."""
    kept, held = kept_bytes(stages.model), held_bytes(stages)
    if kept <= held or not np.isfinite(held):
        return None
    hosts = " and their hosts" if stages.space.offload_ratios else ""
    return (
        f"Parameters and optimizer state alone are {format_bytes(kept)}, of which all {stages.space.world_size} "
        f"devices{hosts} together may hold {format_bytes(held)}. "
    )


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


def explain_infeasible(intra: Stages, make_plan: MakePlan, deadline: float = np.inf) -> NoReturn:
    """Raise the error that says what the least demanding plan needs.

    Args:
        intra: Makes choices, and knows the limits.
        make_plan: The plan that one choice per stage of a problem describes.
        deadline: Value of ``thread_time()`` at which to stop looking for the least that a plan needs.

    Raises:
        InfeasibleError: Always.
    """
    space, search, pipelines = intra.space, intra.space.search, intra.pipelines
    if not pipelines:
        raise InfeasibleError(
            f"no plan of the search space uses all {space.world_size} devices with {space.global_batch_size} rows: "
            f"{_pins(search)} leave no degrees, number of stages and microbatches that cut every batch into equal "
            "parts. "
            f"{_excluded(space.notes)}Leave these out of the search space"
        )
    until = min(deadline, thread_time() + (OPTIONS.hopeless_seconds if too_large(intra) else OPTIONS.least_seconds))
    look = LeastMemory(deadline=until)
    plan, is_least = _least(intra, pipelines, make_plan, look)
    if plan is None:
        raise InfeasibleError(
            f"no plan of the search space deals {space.num_layers} layers and {space.world_size} devices out to "
            f"{', '.join(str(count) for count in sorted({item.num_stages for item in pipelines}))} stages: "
            "allow other numbers in devices_per_stage or num_stages"
        )
    with_more_host = _with_more_host(intra, pipelines, make_plan, look)
    error = InfeasibleError(_message(intra, plan, is_least, with_more_host))
    error.shortage = _shortage(intra, plan, is_least, with_more_host)
    raise error


def _with_more_host(
    intra: Stages, pipelines: tuple[Pipeline, ...], make_plan: MakePlan, look: LeastMemory
) -> Plan | None:
    """The plan that fits with the least host memory, if host memory is what is missing."""
    if not intra.space.offload_ratios or all(np.isinf(own.host_limit) for own in intra.parts):
        return None
    for wanted in ("device without host limit", "host"):
        plan, _ = _least(intra, pipelines, make_plan, replace(look, wanted=wanted))
        if plan is None:
            return None
        peaks = [stage.peak_bytes for stage in stage_memory(intra.model.spec, plan)]
        if any(peak > limit for peak, limit in zip(peaks, intra.limits(plan), strict=True)):
            return None
    return plan


def _least(
    intra: Stages, pipelines: tuple[Pipeline, ...], make_plan: MakePlan, look: LeastMemory
) -> tuple[Plan | None, bool]:
    """The plan that needs least, and whether all were looked at."""
    best, plan = np.inf, None
    # Many microbatches need little memory each, so the first pipelines are good and rule out others.
    for pipeline in sorted(pipelines, key=lambda item: (-item.num_microbatches, -item.num_stages, item.parts)):
        if thread_time() > look.deadline and plan is not None:
            return plan, False
        try:
            problem = _problem(intra, pipeline, look if plan is not None else replace(look, deadline=np.inf))
        except LateError:
            return plan, False
        if max(float(slot.steady_K.min(initial=np.inf)) for slot in problem.slots) >= best:
            continue
        found = least_peak(problem)
        if found is not None and found[0] < best:
            best, plan = found[0], make_plan(problem, found[1])
    return plan, not look.is_coarse


def _problem(intra: Stages, pipeline: Pipeline, look: LeastMemory) -> InterStageProblem:
    """What every stage needs at least, in place of seconds: bytes, as a part of what there is."""
    stages, microbatches, order = pipeline
    if stages == 1:
        one = _by_memory(intra.together, 0, 1, microbatches, look)
        slots = [_as_parts(one, _limit(intra.together, look), EVERY_PART if len(intra.parts) > 1 else 0)]
    else:
        slots = [_in_some_part(intra, pipeline, index, look) for index in range(stages)]
    return InterStageProblem(
        num_layers=intra.space.num_layers,
        num_devices=intra.sizes,
        num_microbatches=microbatches,
        slots=tuple(slots),
        order=order or (0,),
    )


def _in_some_part(intra: Stages, pipeline: Pipeline, index: int, look: LeastMemory) -> SlotChoices:
    """What a stage of several needs at least in each part in which it may lie, wherever those next to it do."""
    stages, microbatches, order = pipeline
    places = tails_of(order, stages - 1 - index, (stages,)) if index else heads_of(order, stages)
    found = [SlotChoices.none()]
    for place in {place.part: place for place in places}.values():
        own = intra.parts[place.part]
        choices = _by_memory(own, index, stages, microbatches, look, place.pipeline)
        found.append(_as_parts(choices, _limit(own, look), place.part))
    return SlotChoices.joined(found)


def _limit(intra: IntraStage, look: LeastMemory) -> float:
    """The limit of what is to be least."""
    return intra.host_limit if look.wanted == "host" else intra.memory_limit


def _as_parts(choices: SlotChoices, limit: float, part: int) -> SlotChoices:
    """Choices of a part of a cluster, what they need as a part of its limit."""
    return replace(choices, steady_K=choices.steady_K / max(limit, 1.0)).placed(part, ANY_SEAMS)


def _by_memory(
    intra: IntraStage,
    stage_index: int,
    num_stages: int,
    num_microbatches: int,
    look: LeastMemory,
    pipeline: tuple[int, ...] = (),
) -> SlotChoices:
    """For every range and number of devices the choice that needs least, its bytes in place of seconds."""
    shapes = intra.space.shapes_at(stage_index, num_stages, num_microbatches)
    slots = (intra.slot(stage_index, num_stages, num_microbatches, shape, pipeline) for shape in shapes)
    found = SlotChoices.joined([look.choices(intra, slot) for slot in slots])
    return replace(found, steady_K=found.peak_K)


def _shortage(intra: Stages, plan: Plan, is_least: bool, with_more_host: Plan | None) -> tuple[bool, float, str]:
    """What is needed where most is missing, of what may be used there; of host memory where that is what binds."""
    if with_more_host is None:
        needs_S = [stage.peak_bytes for stage in stage_memory(intra.model.spec, plan)]
        limits_S, where = intra.limits(plan), ""
    else:
        needs_S = [item.host_bytes for item in plan_memory(intra.model.memory, with_more_host)]
        limits_S, where = intra.host_limits(with_more_host), " in host memory"
    share, needed, limit = max(
        (needed / max(limit, 1.0), needed, limit) for needed, limit in zip(needs_S, limits_S, strict=True)
    )
    most = "" if is_least else " at most"
    text = f"needs{most} {format_bytes(needed)} of {format_bytes(limit)} per device{where}"
    return bool(where), share, text


def _message(intra: Stages, plan: Plan, is_least: bool, with_more_host: Plan | None) -> str:
    stages, limits, cluster = stage_memory(intra.model.spec, plan), intra.limits(plan), intra.model.cluster
    index = max(range(len(stages)), key=lambda i: stages[i].peak_bytes / max(limits[i], 1.0))
    worst, stage = stages[index], plan.stages[index]
    terms = sorted(worst.terms, key=lambda item: -item[1])[:SHOWN_TERMS]
    needs = ", ".join(f"{name.removesuffix('_bytes')} {format_bytes(value)}" for name, value in terms)
    kept = " without offload" if cluster.kind == "cuda" and not intra.space.offload_ratios else ""
    least = (
        f"The least that any plan{kept} needs"
        if is_least
        else f"The least that a plan{kept} needs, of those looked at,"
    )
    limit, share = limits[index], tensor_share(cluster)
    allowed = f"memory_limit is {format_bytes(limit / share)} per device"
    if share < 1:
        allowed += f", of which tensors may take {format_bytes(limit)}"
    if worst.peak_bytes > limit and format_bytes(worst.peak_bytes) == format_bytes(limit):
        allowed += f" ({format_bytes_up(worst.peak_bytes - limit)} less than that)"
    host = intra.host_limits(plan)[index]
    if intra.space.offload_ratios and np.isfinite(host):
        allowed += f", and offload {format_bytes(host)} of its host's memory"
    return (
        f"no plan fits. {least} is {format_bytes(worst.peak_bytes)}, on stage {index} of {plan.num_stages} "
        f"({_stage(intra, stage)}) in its {worst.phase}; {allowed}. Largest terms: {needs}. "
        f"{too_large(intra) or ''}{_excluded(intra.space.notes)}"
        f"{_ways_out(intra, plan, index, worst.peak_bytes / share, with_more_host)}"
        f"{_way_out(terms[0][0])}"
    )


def _stage(intra: Stages, stage: StagePlan) -> str:
    """A stage in words."""
    cluster, (first, end) = intra.model.cluster, stage.layers
    names = sorted({cluster.parts[cluster.part_of(device)].device.name for device in stage.devices})
    kind = " and ".join(names) if len(cluster.parts) > 1 else "device" if len(stage.devices) == 1 else "devices"
    layers = f"layers {first} to {end - 1}" if end > first + 1 else f"layer {first}" if end > first else "no layers"
    moved = [f"{ratio:.0%} of {OFFLOAD_KINDS[kind]}" for kind, ratio in stage.offload.told]
    words = (
        f"{layers} on {len(stage.devices)} {kind}",
        f"{stage.microbatch_size} {'row' if stage.microbatch_size == 1 else 'rows'} per microbatch",
        f"{stage.checkpointing.layers} layers recomputed",
        f"ZeRO-{int(stage.zero_stage)}",
        *([f"with {', '.join(moved)} in host memory"] if moved else []),
    )
    return ", ".join(words)


def _ways_out(intra: Stages, plan: Plan, index: int, needed: float, with_more_host: Plan | None) -> str:
    """What would make something fit: more of what binds, first of all."""
    cluster = intra.model.cluster
    has = min(cluster.parts[cluster.part_of(device)].device.memory_bytes for device in plan.stages[index].devices)
    if with_more_host is not None:
        memory = plan_memory(intra.model.memory, with_more_host)
        wanted = max(item.host_bytes for item in memory) * max(part.devices_per_node for part in cluster.parts)
        return (
            f"Host memory is what binds: with {format_bytes_up(wanted)} of it per node a plan fits. Raise "
            "host_memory_limit to that where hosts have it, use more devices, or use "
        )
    enough = format_bytes_up(needed)
    if needed <= has:
        # Rounded up it may be more than there is.
        enough = enough if parse_bytes(enough) <= has else f"{ceil(needed)} B"
        return f"Raise memory_limit to {enough}, use more devices, or use "
    return f"Use devices with {enough} of memory (these have {format_bytes(has)}), more of them, or use "


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
