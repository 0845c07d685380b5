"""From a user's fit to a plan that every rank has: trace, measure, tune on rank 0, broadcast, check."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch.distributed as dist

from lightning_mist.cost import MemoryEstimate
from lightning_mist.errors import PlanError
from lightning_mist.hardware import AnyCluster, Cluster, HardwareProfile
from lightning_mist.model import (
    LayerSeconds,
    ModelSpec,
    attach_seconds,
    map_module,
    measured_sizes,
    time_layers,
    time_update,
    trace_model,
    whole_tensor_reason,
)
from lightning_mist.model.initial import InitialValues
from lightning_mist.plan import (
    Exclusion,
    Feature,
    Fingerprint,
    ModuleMap,
    Plan,
    StageMesh,
    StagePlan,
    check_plan,
    differences,
    fingerprint_of,
    from_json,
    load,
    render,
    row_slice,
    save,
    split_notes,
    to_json,
)
from lightning_mist.runtime.batches import batch_rows, slice_rows
from lightning_mist.runtime.selfcheck import check_microbatch_invariance, check_stages
from lightning_mist.runtime.signature import batch_signature
from lightning_mist.runtime.support import check_supported
from lightning_mist.strategy import machine
from lightning_mist.strategy.decision import Decision, PlanRequest
from lightning_mist.strategy.estimating import Budget, estimate_given, estimate_made
from lightning_mist.strategy.evaluation import check_evaluation
from lightning_mist.strategy.learning import Basis, with_corrections
from lightning_mist.strategy.namespace import Namespace
from lightning_mist.strategy.peek import peek_batch, silent, step_function
from lightning_mist.strategy.progress import Progress
from lightning_mist.strategy.splitting import degrees_of, with_splits
from lightning_mist.strategy.together import alike, on_rank_zero, same_everywhere
from lightning_mist.tuner import TuneResult, degrees_to_try

_FEATURES: tuple[Feature, ...] = (
    "pipeline",
    "microbatches",
    "checkpointing",
    "tensor",
    "sequence",
    "sharded_gradients",
    "sharded_parameters",
)


@dataclass(slots=True, kw_only=True)
class _Planner:
    """The state of one planning: what to plan for, and how to call the user's step."""

    trainer: Any
    strategy: Any
    request: PlanRequest
    progress: Progress
    plain: str | None
    batch: Any
    call: Callable[[Any], Any]
    initial: InitialValues | None
    cluster: AnyCluster
    spec: ModelSpec | None = None
    basis: Basis | None = None

    def lean(self, found: ModuleMap, *, alone: bool = False) -> AbstractContextManager[None]:
        """Inside, the module can run on real numbers, on every rank or on rank 0 alone."""
        return nullcontext() if self.initial is None else self.initial.lean(found.blocks, alone=alone)

    @property
    def module(self) -> Any:
        return self.strategy.lightning_module

    def map(self) -> ModuleMap:
        """Where the module can be cut, with what the user's other choices rule out."""
        if self.plain is not None and not self.module.automatic_optimization:
            found = ModuleMap(step="training_step", blocks=(), outputs=(), cuts=(), parameters=())
        else:
            rows = batch_rows(self.batch)
            smaller = slice_rows(self.batch, 0, rows - 1) if rows is not None and rows > 1 else None
            found = map_module(self.module, self.call, self.batch, second_batch=smaller, blocks=self.request.blocks)
        if self.plain is not None:
            extra = tuple(Exclusion(feature=feature, reason=self.plain) for feature in _FEATURES)
            found = replace(found, exclusions=found.exclusions + extra)
        for optimizer in self.strategy.optimizers:
            reason = whole_tensor_reason(optimizer)
            if reason is not None:
                found = replace(found, exclusions=(*found.exclusions, Exclusion(feature="tensor", reason=reason)))
        return found

    def split(self, found: ModuleMap, degrees: Sequence[int]) -> ModuleMap:
        """The map with the ways to share layers among so many devices."""
        return with_splits(self.module, self.call, self.batch, found, degrees, self.progress)

    def with_invariance(self, found: ModuleMap) -> ModuleMap:
        """The map, with microbatches ruled out if the loss of a batch is not the mean of the losses of its parts."""
        rows = batch_rows(self.batch)
        if found.excludes("microbatches"):
            return found
        if rows is None or rows < 2:
            reason = "the batch cannot be cut: its tensors do not share a first dimension of at least 2 rows"
        else:
            self.progress.say("checking that a batch may be cut into microbatches")
            with self.lean(found, alone=True):
                answer = check_microbatch_invariance(self.module, self.call, self.batch, 2)
            if answer is None:
                return found
            reason = answer
        return replace(found, exclusions=(*found.exclusions, Exclusion(feature="microbatches", reason=reason)))

    def seconds(self, found: ModuleMap) -> tuple[LayerSeconds, ...]:
        """Measured seconds of the layers, every rank computing at the same time."""
        rows = batch_rows(self.batch)
        if rows is None:
            return ()
        sizes = [rows] if found.excludes("microbatches") else measured_sizes(rows)
        dist.barrier()
        with self.lean(found):
            return time_layers(
                self.module,
                found,
                lambda size: self.batch if size == rows else slice_rows(self.batch, 0, size),
                sizes,
                self.call,
                device=self.strategy.root_device,
                progress=self.progress.update,
            )

    def update_seconds(self) -> float:
        """Measured seconds of the optimizer's step per byte of parameters, every rank computing at the same time."""
        dist.barrier()
        return sum(time_update(item, device=self.strategy.root_device) for item in self.strategy.optimizers[:1])

    def trace(self, found: ModuleMap) -> ModelSpec:
        """What the module costs; on rank 0, kept for later."""
        self.progress.say("tracing the model")
        optimizer = self.strategy.optimizers[0] if self.strategy.optimizers else None
        self.spec = trace_model(
            self.module,
            self.batch,
            call=self.call,
            module_map=found,
            optimizer=optimizer,
            precision=str(self.trainer.precision),
            device_kind=self.strategy.root_device.type,
        )
        return self.spec

    def tune(
        self, found: ModuleMap, profile: HardwareProfile, seconds: tuple[LayerSeconds, ...], update: float
    ) -> TuneResult:
        """The best plan; on rank 0."""
        spec = attach_seconds(self.trace(found), seconds, update)
        cluster, request = self.alike, self.request
        self.basis = Basis(
            spec=spec,
            profile=profile,
            cluster=cluster,
            global_batch_size=(batch_rows(self.batch) or 1) * cluster.world_size,
            memory_limit=request.memory_limit,
            search=request.search,
        )
        if request.correct_profile:
            directory, precision = machine.directory_of(request.profile_directory), str(self.trainer.precision)
            self.basis = with_corrections(self.basis, directory, precision, self.progress.say)
        self.progress.say(f"searching plans for {spec.num_layers} layers on {cluster.world_size} devices")
        return self.basis.tune()

    def fingerprint(self, found: ModuleMap) -> Fingerprint:
        """What a plan made here is made for."""
        return fingerprint_of(
            found,
            world_size=self.strategy.world_size,
            batch_rows=batch_rows(self.batch),
            precision=str(self.trainer.precision),
            versions=[(name, version(name)) for name in ("lightning-mist", "torch")],
        )

    @property
    def alike(self) -> Cluster:
        """The cluster to plan for, whose devices must be alike."""
        return alike(self.cluster)


def decide(
    trainer: Any,
    strategy: Any,
    names: Namespace,
    request: PlanRequest,
    *,
    plain: str | None,
    initial: InitialValues | None = None,
) -> Decision:
    """The plan for this fit, the same on every rank.

    Args:
        trainer: Lightning's trainer, its loaders and module attached.
        strategy: The strategy, its process group and optimizers made.
        names: The copy of Lightning in use.
        request: What the user asked for.
        plain: Why only plain data parallelism is possible, if so.
        initial: Gives parameters values that have none yet.

    Raises:
        InfeasibleError: If nothing fits.
        PlanError: If a given plan does not fit the module, the batch or the processes.
        TraceError: If the module would train wrongly under the plan.
    """
    started = perf_counter()
    progress = Progress(enabled=strategy.is_global_zero)
    with names.isolate_rng(), silent(strategy.lightning_module), progress:
        progress.say("looking at one batch and finding where the module can be cut")
        batch = peek_batch(trainer, strategy)
        call = step_function(strategy.lightning_module, names, strategy.precision_plugin.train_step_context)
        planner = _Planner(
            trainer=trainer,
            strategy=strategy,
            request=request,
            progress=progress,
            plain=plain,
            batch=batch,
            call=call,
            initial=initial,
            cluster=machine.cluster_for(request.cluster, strategy),
        )
        found = planner.map()
        same_everywhere(found)
        plan, made, found = _plan(planner, found)
        _check(planner, found, plan)
        estimate = on_rank_zero(lambda: _estimate(planner, found, plan))
        _self_check(planner, found, plan)
        path = _publish(planner, found, plan, made, estimate)
    return Decision(
        plan=plan,
        module_map=found,
        has_unused_parameters=any(use.requires_grad and not use.regions for use in found.parameters),
        planning_seconds=perf_counter() - started,
        plan_path=path,
        estimate=estimate,
        basis=planner.basis,
        search_seconds=0.0 if made is None else made.stats.seconds,
        signature=batch_signature(batch),
    )


def _check(planner: _Planner, found: ModuleMap, plan: Plan) -> None:
    """Refuse a plan that cannot run here, or not within what may be used."""
    request, strategy = planner.request, planner.strategy
    # Ranks may load batches of different sizes; a plan is for those of rank 0.
    rows = on_rank_zero(lambda: batch_rows(planner.batch))
    check_plan(plan, world_size=strategy.world_size, batch_rows=rows, num_layers=len(found.blocks), module_map=found)
    check_supported(plan, found)
    if planner.trainer.enable_validation:
        budget = Budget(cluster=planner.cluster, asked=request.memory_limit)
        check_evaluation(plan, planner.module, budget.limits(plan))


def _estimate(planner: _Planner, found: ModuleMap, plan: Plan) -> MemoryEstimate | None:
    """What the plan needs of every device; refuses a given one that needs too much. On rank 0."""
    budget = Budget(cluster=planner.cluster, asked=planner.request.memory_limit)
    if planner.spec is not None:
        return estimate_made(planner.spec, plan, budget)
    changed = differences(Fingerprint.from_pairs(plan.fingerprint), planner.fingerprint(found))
    traces = planner.module.automatic_optimization
    return estimate_given(
        plan,
        found,
        budget,
        believed=not changed,
        trace=(lambda: planner.trace(found)) if traces else None,
        say=planner.progress.say,
    )


def _plan(planner: _Planner, found: ModuleMap) -> tuple[Plan, TuneResult | None, ModuleMap]:
    """The given plan, or the best one, and the map with the splits that were looked at; equal on every rank."""
    given = planner.request.plan
    if given != "auto":
        plan = from_json(on_rank_zero(lambda: to_json(given if isinstance(given, Plan) else load(Path(given)))))
        for line in differences(Fingerprint.from_pairs(plan.fingerprint), planner.fingerprint(found)):
            planner.progress.say(line)
        _refuse_unsafe_cuts(planner, found, plan)
        return plan, None, planner.split(found, degrees_of(plan))
    if not planner.module.automatic_optimization:
        return _data_parallel(planner), None, found
    request = planner.request
    found = planner.split(found, degrees_to_try(request.search, planner.alike.devices_per_node))
    profile = machine.machine_profile(
        planner.alike,
        planner.strategy.root_device,
        str(planner.trainer.precision),
        machine.directory_of(request.profile_directory),
        planner.progress,
    )
    seconds, update = planner.seconds(found), planner.update_seconds()
    made: list[TuneResult] = []

    def make() -> str:
        made.append(planner.tune(planner.with_invariance(found), profile, seconds, update))
        return to_json(replace(made[0].plan, fingerprint=planner.fingerprint(found).pairs()))

    text = on_rank_zero(make)
    return from_json(text), made[0] if made else None, found


def _refuse_unsafe_cuts(planner: _Planner, found: ModuleMap, plan: Plan) -> None:
    # Decided by the plan alone: every rank must come to `on_rank_zero`, whatever the size of its own batch.
    parts = max(row_slice(plan, rank, 0).parts for rank in range(plan.world_size))
    if parts == 1:
        return  # nobody's batch is cut

    def check() -> None:
        reasons = planner.with_invariance(found).excludes("microbatches")
        if reasons:
            rows = batch_rows(planner.batch)
            raise PlanError(
                f"the plan cuts the batch of a process{'' if rows is None else f' of {rows} rows'} into up to {parts} "
                f"parts, but {'; '.join(reasons)}. Use a plan whose stages all take whole batches: microbatch_size = "
                f"{rows or 1}"
            )

    on_rank_zero(check)


def _data_parallel(planner: _Planner) -> Plan:
    """Plain data parallelism without a prediction, for steps that cannot be traced."""
    world = planner.strategy.world_size
    rows = batch_rows(planner.batch) or 1
    mesh = StageMesh(devices=tuple(range(world)), data_parallel_degree=world)
    stage = StagePlan(layers=(0, 0), mesh=mesh, microbatch_size=rows)
    planner.progress.say(f"plain data parallelism: {planner.plain}")
    return Plan(global_batch_size=rows * world, num_microbatches=1, stages=(stage,))


def _self_check(planner: _Planner, found: ModuleMap, plan: Plan) -> None:
    if not planner.request.self_check or plan.num_stages == 1:
        return
    if planner.initial is not None:
        planner.progress.say("the cut module is not compared with the whole before training: no device holds the whole")
        return
    rows = batch_rows(planner.batch)
    small = planner.batch if rows is None else slice_rows(planner.batch, 0, min(rows, 2))
    planner.progress.say("checking the cut module against the whole")
    splits = plan.schedule == "zb-h1"
    on_rank_zero(lambda: check_stages(planner.module, found, plan.bounds, planner.call, small, splits_backwards=splits))


def _publish(
    planner: _Planner, found: ModuleMap, plan: Plan, made: TuneResult | None, estimate: MemoryEstimate | None
) -> Path | None:
    """Show the plan on rank 0, and write it if it was made here."""
    if not planner.strategy.is_global_zero:
        return None
    planner.progress.show(render(plan))
    for note in split_notes(plan, found):
        planner.progress.say(note)
    if estimate is not None:
        planner.progress.say(estimate.headline())
    if made is None:
        return None
    for note in made.explain():
        planner.progress.say(note)
    root = Path(planner.trainer.default_root_dir)
    path = Path(planner.request.plan_path) if planner.request.plan_path else root / "mist_plan.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    save(plan, path)
    planner.progress.say(f"plan written to {path}")
    return path
