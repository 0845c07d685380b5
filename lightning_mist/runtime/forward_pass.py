"""Running a step that is only evaluated by the forwards of a plan: on whole batches, without a graph."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from lightning_mist.plan import ModuleMap, OffloadRatios, Plan, ZeroStage, of_whole_batches, replica_ranks
from lightning_mist.runtime.batch_run import RankContext
from lightning_mist.runtime.communication import Neighbours
from lightning_mist.runtime.parameters import CastKeeper
from lightning_mist.runtime.stage import RankStages, UnitRunner, make_stages
from lightning_mist.schedule import Action, arrived_sends, check, lower_forwards
from lightning_mist.schedule.stage_units import used_elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPass:
    """What a rank does for every batch of one evaluated step.

    Attributes:
        plan: The plan of whole batches; see :func:`~lightning_mist.plan.rows.of_whole_batches`.
        lines: What its actions consist of, where a stage shards or moves anything.
    """

    plan: Plan
    actions: tuple[Action, ...]
    context: RankContext
    lines: Mapping[Action, Sequence[Action]]

    def running(self) -> AbstractContextManager[None]:
        """Inside, layers' parameters come and go by this list."""
        runner = self.context.runner
        return nullcontext() if runner is None else runner.running(self.lines)


def is_whole(plan: Plan, *, has_masters: bool) -> bool:
    """Whether every rank has all parameters all the time, and room for a whole row."""
    return plan.num_stages == 1 and not any(
        stage.mesh.num_row_peers > 1
        or stage.offload.parameters > 0.0
        or (
            stage.mesh.num_peers > 1
            and stage.zero_stage >= (ZeroStage.OPTIMIZER if has_masters else ZeroStage.PARAMETERS)
        )
        for stage in plan.stages
    )


def without_training(plan: Plan) -> Plan:
    """The plan of whole batches, which there must be, of ranks that hold nothing but parameters and activations."""
    whole = of_whole_batches(plan)
    assert whole is not None
    stages = (replace(stage, offload=OffloadRatios(parameters=stage.offload.parameters)) for stage in whole.stages)
    return replace(whole, stages=tuple(stages))


def hindrance(plan: Plan, module_map: ModuleMap, found: ModuleMap) -> str | None:
    """Why a step cannot be evaluated by the forwards of a plan, if so.

    Args:
        module_map: Of the step that the plan trains.
        found: Of the step to evaluate.
    """
    if (whole := of_whole_batches(plan)) is None:
        return "the plan's stages cut batches differently, and evaluation takes them whole"
    moves = any(stage.zero_stage >= ZeroStage.PARAMETERS or stage.offload.parameters > 0.0 for stage in plan.stages)
    elsewhere = used_elsewhere(module_map, plan.bounds, found) if plan.num_stages > 1 or moves else None
    # These hold for all that lets a rank run the step for others: what it leaves behind, it would leave there.
    reasons = found.excludes("pipeline") if len(replica_ranks(whole, 0)) > 1 else ()
    return elsewhere or next(iter(reasons), None)


def evaluated_map(module_map: ModuleMap, found: ModuleMap) -> ModuleMap:
    """The map by which a step is evaluated: its own cuts, and of parameters that it does not use what training does."""
    trained = {use.name: use for use in module_map.parameters}
    uses = tuple(use if use.regions else trained[use.name] for use in found.parameters)
    return replace(
        found,
        parameters=uses,
        splits=module_map.splits,
        unsplit=module_map.unsplit,
        contexts=module_map.contexts,
        uncontexts=module_map.uncontexts,
    )


def make_forward_pass(context: RankContext, found: ModuleMap) -> ForwardPass:
    """The forward pass of a rank for a step with this map, which nothing hinders."""
    mesh, runner = context.mesh, context.runner
    plan = of_whole_batches(mesh.plan)
    assert plan is not None
    schedule = lower_forwards(plan)
    check(schedule, plan.num_microbatches, is_trained=False)
    module = next(iter(context.stages)).module
    stages = make_stages(module, found, plan, mesh.rank, context.transport)
    for stage in stages:
        stage.observer = runner
    live = tuple(found.cuts[stage.layers[1] - 1] for stage in plan.stages[:-1])
    mine = replace(mesh, plan=plan)
    return ForwardPass(
        plan=plan,
        actions=schedule[mesh.stage],
        context=replace(
            context,
            mesh=mine,
            stages=RankStages(stages),
            live=live,
            neighbours=Neighbours(mine),
            casts=CastKeeper(may_keep=False),
            tags_per_boundary=max((len(tensors) for tensors in live), default=0) + 1,
            arrivals=arrived_sends(schedule)[mesh.stage],
        ),
        lines=_lines_of(runner, schedule[mesh.stage]),
    )


def _lines_of(runner: UnitRunner | None, actions: Sequence[Action]) -> Mapping[Action, Sequence[Action]]:
    return {} if runner is None else runner.lines_of(actions)
