"""A plan's predicted seconds and bytes, in total and by term."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from lightning_mist.cost.batched_stages import Terms, seconds_of_stages, terms_of_plans
from lightning_mist.cost.inputs import StageCandidates, StageRegions, StageSlot, placed_slots_of, slots_of
from lightning_mist.cost.interleaved_memory import plans_needs
from lightning_mist.cost.memory import NeedTerms, StageMemory
from lightning_mist.cost.mixed_model import CostModel, Profiles, cost_model, profiles_of
from lightning_mist.cost.plan_clock import clock_floor, clock_seconds, rules_of, step_times
from lightning_mist.cost.roofline import step_work
from lightning_mist.cost.time import StageSeconds
from lightning_mist.errors import PlanError
from lightning_mist.hardware import AnyCluster
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import Plan, Predicted, PredictedStage

PLANS = 128
"""Plans of which is kept what was found out; terms of long pipelines take dozens of kilobytes each."""

_Found = TypeVar("_Found")


def predict(spec: ModelSpec, profile: Profiles, cluster: AnyCluster, plan: Plan) -> Predicted:
    """Seconds of one step of a plan, and the seconds and peak bytes of its stages, each by term.

    Raises:
        PlanError: If the plan does not fit the network or the cluster, or shares out a sequence that it cannot.
        ProfileError: If the profile lacks what the plan needs.
    """
    return predict_with(cost_model(spec, profile, cluster), plan)


def predict_with(model: CostModel, plan: Plan) -> Predicted:
    """As :func:`predict`, with a cost model that exists already, which keeps what it predicted last."""
    return predictions(model, [plan])[0]


def predictions(model: CostModel, plans: Sequence[Plan]) -> list[Predicted]:
    """As :func:`predict_with`, of several plans in less time."""
    return _kept(model.predicted, plans, partial(_predict, model))


def _predict(model: CostModel, plans: Sequence[Plan]) -> list[Predicted]:
    terms = _terms(model, plans)
    closed = iter(seconds_of_stages(model, [stage for plan in plans for stage in slots_of(plan, model.cluster)]))
    found = zip(plans, terms, plans_needs(model.memory, plans), strict=True)
    return [_predicted(model, plan, own, memory, [next(closed) for _ in own]) for plan, own, memory in found]


def seconds_with(model: CostModel, plan: Plan) -> float:
    """Seconds of one step of a plan, the same that :func:`predict_with` predicts, and nothing else."""
    return _kept(model.clocked, [plan], partial(_clocked, model))[0]


def _clocked(model: CostModel, plans: Sequence[Plan]) -> list[float]:
    rules = rules_of(model.cluster, model.spec.precision)
    return [clock_seconds(plan, terms, rules) for plan, terms in zip(plans, _terms(model, plans), strict=True)]


def least_seconds(model: CostModel, plans: Sequence[Plan]) -> list[float]:
    """Seconds that one step of each of some plans takes at least, without running it on the clock.

    What the stages take is looked up for all of them together, and known when :func:`seconds_with` asks for it.
    """
    rules = rules_of(model.cluster, model.spec.precision)
    return [clock_floor(plan, terms, rules) for plan, terms in zip(plans, _terms(model, plans), strict=True)]


def with_units(model: CostModel, plan: Plan) -> Plan:
    """A predicted plan that also says what happens unit by unit, for pictures."""
    assert plan.predicted is not None
    places = zip(plan.predicted.stages, placed_slots_of(plan, model.cluster), strict=True)
    stages = tuple(replace(stage, units=tuple(_units(model, *placed))) for stage, placed in places)
    return replace(plan, predicted=replace(plan.predicted, stages=stages))


def _units(model: CostModel, slot: StageSlot, candidates: StageCandidates) -> Iterator[tuple[str, tuple[float, ...]]]:
    # Where devices of several parts wait for each other, it is the slowest that is told of.
    slowest = max(model.models(slot), key=lambda one: float(one.seconds(slot, candidates).steady_K[0]))
    for name, rows in slowest.channels(slot, candidates).items():
        yield f"channels.{name}", rows
    seconds, regions = model.region_seconds(*slot.computed), StageRegions.of(model.spec, candidates)
    units, again_R = slice(int(regions.low_K[0]), int(regions.high_K[0])), np.zeros_like(seconds.recompute_R)
    again = slice(int(regions.first_K[0]), int(regions.middle_K[0]))
    again_R[again] = seconds.recompute_R[again]
    for name, bytes_by_kind_R in model.memory(slot).of_units(slot, candidates).items():
        seconds_R = seconds.forward_R if name == "forward" else seconds.backward_R + again_R
        yield f"bytes.{name}", tuple(np.stack([seconds_R[units], *bytes_by_kind_R], axis=1).reshape(-1).tolist())


def _terms(model: CostModel, plans: Sequence[Plan]) -> list[list[Terms]]:
    """Seconds of every stage of some plans by term."""
    return _kept(model.terms, plans, partial(_find_terms, model))


def _find_terms(model: CostModel, plans: Sequence[Plan]) -> list[list[Terms]]:
    for plan in plans:
        _check(model, plan)
    return terms_of_plans(model, plans)


def _kept(known: dict[Plan, _Found], plans: Sequence[Plan], find: Callable[[list[Plan]], list[_Found]]) -> list[_Found]:
    """What is known of some plans, or found for those together that it is not; kept for the plans asked for last."""
    bare = [plan if plan.predicted is None else replace(plan, predicted=None) for plan in plans]
    new = [plan for plan in dict.fromkeys(bare) if plan not in known]
    if new:
        known.update(zip(new, find(new), strict=True))
    for plan in bare:
        known[plan] = known.pop(plan)  # what was asked for last comes last
    found = [known[plan] for plan in bare]
    for plan in list(known)[:-PLANS]:
        del known[plan]
    return found


def _predicted(
    model: CostModel,
    plan: Plan,
    terms: Sequence[Terms],
    memory: Sequence[tuple[StageMemory, NeedTerms]],
    closed: Sequence[StageSeconds],
) -> Predicted:
    rules = rules_of(model.cluster, model.spec.precision)
    times = step_times(plan, terms, rules, seconds_with(model, plan))
    stages = [
        PredictedStage(
            steady_seconds=float(found.steady_K[0]),
            boundary_seconds=float(found.boundary_K[0]),
            forward_seconds=term["forward_seconds"],
            backward_seconds=term["backward_seconds"] + term["recompute_seconds"],
            peak_bytes=peak.peak_bytes,
            breakdown=(*((name, float(value)) for name, value in peak.terms), *term.items()),
            spent=spent.terms,
            needs=needs,
        )
        for term, spent, (peak, needs), found in zip(terms, times.spent, memory, closed, strict=True)
    ]
    sizes = [part.world_size for part in model.cluster.parts]
    kinds = tuple(zip(profiles_of(model), sizes, strict=True))
    return Predicted(
        step_seconds=times.step_seconds,
        stages=tuple(stages),
        work=step_work(model.whole, kinds, plan.global_batch_size),
        transfers=rules.transfers,
        update_after=rules.update_after,
    )


def _check(model: CostModel, plan: Plan) -> None:
    if plan.num_layers != model.spec.num_layers:
        raise PlanError(
            f"the plan has {plan.num_layers} layers, {model.spec.name} has {model.spec.num_layers}: "
            "a plan must cover every layer; plan again for this network"
        )
    if plan.world_size != model.cluster.world_size:
        raise PlanError(
            f"the plan has {plan.world_size} devices, the cluster {model.cluster.world_size}: "
            "a plan uses every device; plan again for this cluster"
        )
    parts = model.cluster.parts
    for index, stage in enumerate(plan.stages):
        own = {model.cluster.part_of(device) for device in stage.devices} if len(parts) > 1 else {0}
        near = min(parts[part].devices_per_node for part in own)
        degree = stage.mesh.tensor_parallel_degree
        if degree > near and degree % near:
            raise PlanError(
                f"stages[{index}] has tensor_parallel_degree {degree} with {near} devices per node: tensor-parallel "
                f"ranks are modelled within one node or filling several; use at most {near}, or a multiple of it"
            )
