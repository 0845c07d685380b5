"""A plan's predicted seconds and bytes, in total and by term."""

from dataclasses import replace
from functools import partial

from lightning_mist.cost.candidates import placed_slots_of
from lightning_mist.cost.chunks import plan_memory, plan_needs
from lightning_mist.cost.clock import clock_seconds, rules_of, step_times, terms_of
from lightning_mist.cost.memory import StageMemory
from lightning_mist.cost.mixed import CostModel, Profiles, cost_model, profiles_of
from lightning_mist.cost.roofline import step_work_among
from lightning_mist.cost.stage import StageSeconds
from lightning_mist.cost.together import seconds_of_stages
from lightning_mist.errors import PlanError
from lightning_mist.hardware import AnyCluster, HardwareProfile
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import Plan, Predicted, PredictedStage


def predict(spec: ModelSpec, profile: Profiles, cluster: AnyCluster, plan: Plan) -> Predicted:
    """Seconds of one step of a plan, and the seconds and peak bytes of its stages, each by term.

    Args:
        spec: The network.
        profile: How fast the machine is; one for each part if its devices are unlike.
        cluster: How many devices it has.
        plan: The plan.

    Raises:
        PlanError: If the plan does not fit the network or the cluster, or shares out a sequence that it cannot.
        ProfileError: If the profile lacks what the plan needs.
    """
    return predict_with(cost_model(spec, profile, cluster), plan)


def predict_with(model: CostModel, plan: Plan) -> Predicted:
    """As :func:`predict`, with a cost model that exists already, which keeps what it has predicted."""
    return model.predicted.of(replace(plan, predicted=None), partial(_predict, model))


def memory_with(model: CostModel, plan: Plan) -> tuple[StageMemory, ...]:
    """The peak memory of every stage of a plan, by term, with a cost model that exists already and keeps it."""
    return model.remembered.of(replace(plan, predicted=None), partial(plan_memory, model.memory))


def seconds_with(model: CostModel, plan: Plan) -> float:
    """Seconds of one step of a plan, the same that :func:`predict_with` predicts, and nothing else."""
    terms = [terms_of(item) for item in _stage_seconds(model, plan)]
    return clock_seconds(plan, terms, rules_of(model.cluster, model.spec.precision))


def _stage_seconds(model: CostModel, plan: Plan) -> tuple[StageSeconds, ...]:
    _check(model, plan)
    return seconds_of_stages(model, placed_slots_of(plan, model.cluster))


def _predict(model: CostModel, plan: Plan) -> Predicted:
    seconds = _stage_seconds(model, plan)
    terms = [terms_of(item) for item in seconds]
    rules = rules_of(model.cluster, model.spec.precision)
    times = step_times(plan, terms, rules)
    stages = [
        PredictedStage(
            steady_seconds=float(item.steady_K[0]),
            boundary_seconds=float(item.boundary_K[0]),
            forward_seconds=float(item.forward_K[0]),
            backward_seconds=float(item.backward_K[0] + item.recompute_K[0]),
            peak_bytes=memory.peak_bytes,
            breakdown=(*((name, float(value)) for name, value in memory.terms), *term.items()),
            spent=spent.terms,
            needs=needs,
        )
        for item, term, spent, (memory, needs) in zip(
            seconds, terms, times.spent, plan_needs(model.memory, plan), strict=True
        )
    ]
    return Predicted(
        step_seconds=times.step_seconds,
        stages=tuple(stages),
        work=step_work_among(model.whole, _kinds(model), plan.global_batch_size),
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
        near = min(parts[model.cluster.part_of(device)].devices_per_node for device in stage.devices)
        if stage.mesh.tensor_parallel_degree > near:
            raise PlanError(
                f"stages[{index}] has tensor_parallel_degree {stage.mesh.tensor_parallel_degree} with {near} devices "
                f"per node: tensor-parallel ranks are modelled within one node; use at most {near}"
            )


def _kinds(model: CostModel) -> tuple[tuple[HardwareProfile, int], ...]:
    """The profile of every part, and how many devices it has."""
    return tuple(zip(profiles_of(model), (part.world_size for part in model.cluster.parts), strict=True))
