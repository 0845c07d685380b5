"""From a user's fit to a plan that every rank has: trace, measure, tune on rank 0, broadcast, check."""

from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from lightning_mist.errors import InfeasibleError, PlanError, TraceError
from lightning_mist.estimate import MemoryEstimate
from lightning_mist.explain import estimate_of
from lightning_mist.model.initialization import InitialValues
from lightning_mist.model.user_code import same_generators, unchanged
from lightning_mist.plan import (
    Feature,
    ModuleMap,
    Plan,
    check_plan,
    differences,
    from_json,
    parts_of,
    proved_features,
    render,
    split_notes,
    to_json,
)
from lightning_mist.plan.plan_tables import speed_line
from lightning_mist.plan.plan_text import recipe_of
from lightning_mist.runtime.checks import check_stages, refuse_unchecked
from lightning_mist.runtime.support import check_supported
from lightning_mist.schedule.stage_units import ratio_notes
from lightning_mist.strategy.planning import local_machine
from lightning_mist.strategy.planning.decision import Decision, PlannedStep, PlanRequest, given_plan
from lightning_mist.strategy.planning.division_proofs import degrees_of, other_masks
from lightning_mist.strategy.planning.first_batch import load_the_same
from lightning_mist.strategy.planning.memory_budget import estimate_given, lack_for_whole, unless_out_of_memory
from lightning_mist.strategy.planning.plain_parallelism import plain_plan, uneven_hooks
from lightning_mist.strategy.planning.planning_state import FitPlanner
from lightning_mist.strategy.planning.trial_step import TriedStep, leaves_no_trace
from lightning_mist.strategy.ranks import Progress, any_reason, everywhere, on_rank_zero, same_everywhere
from lightning_mist.strategy.training import recorded_logs
from lightning_mist.tensors import batch_rows, batch_signature, slice_rows
from lightning_mist.tuner import TuneResult, degrees_to_try, unshared
from lightning_mist.tuner.space import tensor_share
from lightning_mist.units import format_bytes, format_seconds


def decide(
    trainer: Any,
    strategy: Any,
    request: PlanRequest,
    step: PlannedStep,
    *,
    plain: str | None,
    initial: InitialValues | None = None,
) -> Decision:
    """The plan for this fit, the same on every rank.

    Args:
        trainer: Lightning's trainer, its loaders and module attached, or what stands for it where there is none.
        strategy: The strategy, its process group and optimizers made.
        step: What is to be trained.
        plain: Why only plain data parallelism is possible, if so.

    Raises:
        InfeasibleError: If nothing fits.
        PlanError: If a given plan does not fit the module, the batch or the processes.
        TraceError: If the module would train wrongly under the plan.
    """
    started, search = perf_counter(), replace(request.search, data_parallel_size=strategy.num_loaders)
    request.host_of_each(strategy.num_processes, strategy.root_device)  # refused before anything else
    plan = request.plan if request.plan == "auto" else everywhere(partial(given_plan, request.plan))
    request = replace(request, search=search, plan=plan)
    progress = Progress(enabled=strategy.is_global_zero, verbose=request.verbose)
    is_auto, reason = request.plan == "auto", None
    # What one rank alone knows holds for all: the others would wait for it.
    at_once, plain = any_reason(step.at_once), any_reason(plain)
    if is_auto and initial is None:
        reason = at_once or (plain if request.memory_limit is None else None)
    request.refuse_plain(reason or plain)
    if reason is None:
        try:
            # Trials look at operators, and nothing must be compiled for them.
            with same_generators(), torch.compiler.set_stance("force_eager"), progress:
                progress.say("looking at the first batch and finding where the module can be cut")
                module, metrics = strategy.lightning_module, step.records_metrics
                made = partial(TriedStep, trainer, module, step.call, name=step.name, records_metrics=metrics)
                call = everywhere(made)
                planner = FitPlanner(
                    trainer=trainer,
                    strategy=strategy,
                    request=request,
                    progress=progress,
                    plain=plain,
                    batch=step.batch(),
                    call=call,
                    restrictions=step.restrictions,
                    prepare=step.prepare if leaves_no_trace(strategy.root_device) else None,
                    initial=initial,
                    cluster=local_machine.cluster_for(request.cluster, strategy),
                )
                if load_the_same(planner.batch, request.loaders or strategy.world_size):
                    # A project may share out its data only under strategies that it knows by name.
                    progress.tell(f"all processes load the same first batch{step.hint}")
                # Trials log nothing; the loader and its hooks are asked for good, so that what they must not log is
                # refused.
                with recorded_logs(module):
                    return _made(planner, started)
        except (TraceError, PlanError) as error:
            if not is_auto or initial is not None or request.master_weights:
                raise
            request.refuse_plain(str(error))
            reason = str(error)
    progress.tell(f"plain data parallelism: {reason}")
    if request.memory_limit is not None:
        progress.tell(f"memory_limit of {format_bytes(request.memory_limit)} is not checked")
    return Decision(
        plan=plain_plan(strategy.world_size, None, 0),
        module_map=ModuleMap(step=step.name, blocks=(), cuts=(), parameters=()),
        # Nothing was traced that would say so.
        has_unused_parameters=True,
        planning_seconds=perf_counter() - started,
        plan_path=None,
    )


def _replanned(planner: FitPlanner, limit: int, batch: Any) -> Decision:
    """Another decision, within so many bytes of each device; the whole module is in place."""
    planner.request, planner.batch = replace(planner.request, memory_limit=limit), batch
    planner.is_scarce = True
    planner.progress.tell(f"out of memory: planning again, within {format_bytes(limit)} per device")
    with same_generators(), torch.compiler.set_stance("force_eager"), planner.progress, recorded_logs(planner.module):
        return _made(planner, perf_counter())


def _made(planner: FitPlanner, started: float) -> Decision:
    call, is_auto = planner.call, planner.request.plan == "auto"
    # A model that no device holds whole cannot be made whole to plan for it again.
    is_fixed = planner.initial is not None or planner.request.master_weights
    is_alone = is_auto and planner.strategy.world_size == 1 and not is_fixed
    found = everywhere(planner.map)
    found = replace(found, exclusions=(*found.exclusions, *uneven_hooks(planner.module)))
    found = planner.with_writes(same_everywhere(call.rule_out(found)))
    plan, made, found = _plan(planner, found)
    _check(planner, found, plan)
    if (words := other_masks(plan, found, planner.rules)) is not None:
        planner.progress.tell(words)
    estimate = on_rank_zero(lambda: _estimate(planner, found, plan))
    _self_check(planner, found, plan)
    path = _publish(planner, found, plan, made, estimate)
    return Decision(
        plan=plan,
        module_map=found,
        # Each of several backwards may leave out what others use.
        has_unused_parameters=found.leaves_out or not call.is_automatic,
        planning_seconds=perf_counter() - started,
        plan_path=path,
        estimate=estimate,
        basis=planner.basis,
        signature=batch_signature(planner.batch),
        cached_at=planner.cached_at,
        cache_place=planner.cache_place,
        needs=_needs(planner, plan) if is_auto else None,
        replan=partial(_replanned, planner) if is_alone else None,
        reach=call.reach,
        rules=planner.rules,
        records_metrics=call.records_metrics,
        lack_for_whole=lack_for_whole(plan, planner.module, planner.budget.limits(plan)),
    )


def _needs(planner: FitPlanner, plan: Plan) -> int:
    """The least ``memory_limit`` that a plan was made for: by its prediction, or else the one at hand."""
    limit, share = planner.budget.limit, tensor_share(planner.cluster)
    peaks = [] if plan.predicted is None else [stage.peak_bytes for stage in plan.predicted.stages]
    return min(limit, ceil(max(peaks) / share)) if peaks else limit


def _check(planner: FitPlanner, found: ModuleMap, plan: Plan) -> None:
    """Refuse a plan that cannot run here, or not within what may be used."""
    # Ranks may load batches of different sizes; a plan is for those of rank 0.
    rows = on_rank_zero(lambda: batch_rows(planner.batch))
    layers, ranks, loaders = len(found.blocks), planner.strategy.world_size, planner.request.loaders
    check_plan(plan, world_size=ranks, batch_rows=rows, num_layers=layers, module_map=found, data_parallel_size=loaders)
    check_supported(plan, found)


def _estimate(planner: FitPlanner, found: ModuleMap, plan: Plan) -> MemoryEstimate | None:
    """What the plan needs of every device; refuses a given one that needs too much. On rank 0."""
    budget = replace(planner.budget, host_asked=planner.request.host_limit)
    if planner.basis is not None:
        return estimate_of(planner.basis.spec, planner.cluster, plan, budget.limit)
    changed = differences(plan.fingerprint, planner.fingerprint(found))
    return estimate_given(
        plan,
        found,
        budget,
        believed=not changed,
        refused=planner.request.plan != "auto",
        trace=(lambda: planner.trace(found)) if planner.call.is_automatic else None,
        say=planner.progress.tell,
    )


def _plan(planner: FitPlanner, found: ModuleMap) -> tuple[Plan, TuneResult | None, ModuleMap]:
    """The given plan, or the best one, and the map with the splits that were looked at; equal on every rank."""
    plan = planner.request.plan
    if isinstance(plan, Plan):
        for line in differences(plan.fingerprint, planner.fingerprint(found)):
            planner.progress.say(line)
        found = _with_safe_cuts(planner, found, plan)
        return plan, None, planner.split(found, degrees_of(plan))
    if planner.call.talk:
        raise PlanError(f"the step talks to other processes itself ({planner.call.talk})")
    enough = None
    if planner.may_be_plain:
        device, directory = planner.strategy.root_device, planner.request.directory
        reduction = local_machine.guessed_reduction(planner.alike, device, directory)
        enough = on_rank_zero(lambda: planner.plain_is_enough(reduction))
    if enough is not None:
        planner.progress.tell(f"plain data parallelism: {enough}")
        rows = on_rank_zero(lambda: batch_rows(planner.batch))
        return plain_plan(planner.strategy.world_size, rows, len(found.blocks)), None, found
    cached = planner.cached(found)
    if cached is not None:
        found = _with_safe_cuts(planner, found, cached)
        return cached, None, planner.split(found, degrees_of(cached))
    try:
        plan, made, split = _searched(planner, found)
    except InfeasibleError:
        if planner.wished is None:
            raise
        # No plan keeps within what an earlier run left: what the user asked for counts again.
        planner.progress.tell("no plan needs so little: planning as if there had been no earlier run")
        planner.request, planner.wished = planner.wished, None
        plan, made, split = _searched(planner, found)
    planner.cache(found, plan)  # asked for before the module is split
    return plan, made, split


def _searched(planner: FitPlanner, found: ModuleMap) -> tuple[Plan, TuneResult | None, ModuleMap]:
    """The best plan after measuring and searching; how it was found is known on rank 0."""
    request = planner.request
    device, precision = planner.strategy.root_device, str(planner.trainer.precision)
    profile = local_machine.machine_profile(planner.alike, device, precision, request.directory, planner.progress)
    if request.offload_directory is not None:
        profile = local_machine.with_files(profile, Path(request.offload_directory), device)
    seconds, update = planner.seconds(found), everywhere(planner.update_seconds)
    enough, degrees = None, degrees_to_try(request.search, planner.alike.devices_per_node)
    if planner.may_be_plain:
        enough, useful = on_rank_zero(lambda: planner.worthwhile(found, profile, seconds, update, degrees))
        for degree in sorted({*degrees} - {*useful}):
            planner.progress.say(f"what {degree} devices that share layers exchange takes longer than it could save")
        degrees = useful
    if enough is None:
        found = planner.split(found, (degrees, request.search.context_parallel_degrees or ()))
    else:
        planner.progress.tell(f"plain data parallelism: {enough}")
    made: list[TuneResult] = []

    def search() -> str:
        if enough is None:
            made.append(planner.tune())
            plan = planner.simplest(made[-1]) if planner.may_be_plain else made[-1].plan
        else:
            plan = planner.plainest()
        return to_json(replace(plan, fingerprint=planner.fingerprint(found)))

    def count_and_search() -> str:
        planner.count(found, profile, seconds, update)
        return search()

    plan = from_json(on_rank_zero(count_and_search))
    # Proving that a batch may be cut can take longer than all the rest, and few plans of what fits do it.
    if not (is_cut := bool(proved_features(plan, found))):
        planner.rule_out_cuts("it was not tried whether parts of a batch train as the whole does")
    while is_cut:
        proved = planner.with_invariance(found, plan)
        unsafe, found = _unproved(proved, plan), _as_proved(found, proved)
        if not unsafe:
            break
        unsafe |= {"tail_tokens": reasons} if (reasons := proved.excludes("tail_tokens")) else {}
        for feature, reasons in unsafe.items():
            planner.rule_out_cuts("; ".join(reasons), feature)
        plan = from_json(on_rank_zero(search))
        is_cut = plan.stages[-1].tail_chunks > 1  # where tokens were refused, it is known of rows
    return plan, made[-1] if made else None, found


def _unproved(found: ModuleMap, plan: Plan) -> dict[Feature, tuple[str, ...]]:
    """What of that which a plan needs proved is ruled out, and why."""
    return {feature: reasons for feature in proved_features(plan, found) if (reasons := found.excludes(feature))}


def _as_proved(found: ModuleMap, proved: ModuleMap) -> ModuleMap:
    """The map with what chunks behind the last layer are of."""
    return replace(found, tokens=None if proved.lap is None else proved.tokens, lap=proved.lap)


def _with_safe_cuts(planner: FitPlanner, found: ModuleMap, plan: Plan) -> ModuleMap:
    # Decided by the plan alone: every rank must come to the proof, whatever the size of its own batch.
    parts = max(parts_of(plan))
    if parts == 1:
        return found  # nobody's batch is cut
    proved = planner.with_invariance(found, plan)
    unsafe = _unproved(proved, plan)
    at_once = replace(plan, stages=tuple(replace(stage, tail_chunks=1) for stage in plan.stages))
    for feature, reasons in unsafe.items():
        if feature != "microbatches" or max(parts_of(at_once)) == 1:
            what, way_out = ("tokens", "a divisor of microbatch_size") if feature == "tail_tokens" else ("rows", "1")
            raise PlanError(
                f"the plan cuts {what} behind the last layer, but {'; '.join(reasons)}. Use tail_chunks = {way_out}"
            )
        rows = on_rank_zero(lambda: batch_rows(planner.batch))
        raise PlanError(
            f"the plan cuts the batch of a process{'' if rows is None else f' of {rows} rows'} into up to {parts} "
            f"parts, but {'; '.join(reasons)}. Use a plan whose stages all take whole batches: microbatch_size = "
            f"{rows or 1}"
        )
    return _as_proved(found, proved)


def _self_check(planner: FitPlanner, found: ModuleMap, plan: Plan) -> None:
    if plan.num_stages == 1:
        return
    degrees = [stage.mesh.data_parallel_degree for stage in plan.stages]
    divided = [stage for stage in range(len(degrees) - 1) if degrees[stage] != degrees[stage + 1]]
    if not planner.request.self_check or planner.initial is not None:
        refuse_unchecked(found, plan.bounds, divided)
    if not planner.request.self_check:
        return
    if planner.initial is not None:
        planner.progress.say("the cut module is not compared with the whole before training: no device holds the whole")
        return
    rows = batch_rows(planner.batch)

    def small() -> Any:
        return planner.batch if rows is None else slice_rows(planner.batch, 0, min(rows, 2))

    planner.progress.say("checking the cut module against the whole")
    splits, device = plan.schedule == "zb-h1", planner.strategy.root_device
    ways = on_rank_zero(lambda: [keeps for keeps in (False, True) if keeps or not planner.room.is_crowded()])

    def compared(keeps_at_home: bool) -> bool:
        more: Any = {"splits_backwards": splits, "divided": divided, "keeps_at_home": keeps_at_home}

        def check() -> None:
            with unchanged(planner.module):
                check_stages(planner.module, found, plan.bounds, planner.call, small(), **more)

        planner.tried(check)
        return True

    for keeps_at_home in ways:
        # What a CPU has in host memory it has.
        is_idle = keeps_at_home and device.type == "cpu"
        if not is_idle and on_rank_zero(partial(unless_out_of_memory, partial(compared, keeps_at_home), device)):
            return
    planner.progress.say("the cut module is not compared with the whole before training: there is no room for that")
    refuse_unchecked(found, plan.bounds, divided)


def _publish(
    planner: FitPlanner, found: ModuleMap, plan: Plan, made: TuneResult | None, estimate: MemoryEstimate | None
) -> Path | None:
    """Show the plan on rank 0, and say where it will be written if it was made here; every rank asks."""
    path = _plan_file(planner.trainer, planner.request.plan_path)
    if not planner.strategy.is_global_zero:
        return None
    progress = planner.progress
    if plan.is_plain:
        if plan.predicted is not None:
            is_fastest = made is not None and made.plan.is_plain
            what = "plain data parallelism is the fastest plan that was found: " if is_fastest else ""
            progress.tell(f"{what}{format_seconds(plan.predicted.step_seconds)} per step predicted")
    else:
        progress.tell(recipe_of(plan) + ("" if plan.predicted is None else f"; predicted: {speed_line(plan)}"))
    progress.details(render(plan))
    offloads = (note for group in range(plan.num_groups) for note in ratio_notes(plan, found, group))
    for note in (*split_notes(plan, found), *dict.fromkeys(offloads)):
        progress.say(note)
    if estimate is not None:
        progress.tell(estimate.headline())
    for note in unshared(plan, planner.request.search) if planner.request.plan == "auto" else ():
        progress.tell(note)
    # One line of why: what the best plan of another kind would take, or else how sure it is that this is the best.
    why = () if made is None or plan.is_plain else (*made.compared, *made.proof)[:1]
    for note in () if made is None else made.explain():
        (progress.tell if note in why else progress.say)(note)
    if planner.request.plan != "auto" or plan.predicted is None:
        return None  # it was given, or there was nothing to plan
    if path is not None:
        progress.say(f"the plan goes to {path}")
    return path


def _plan_file(trainer: Any, asked: str | None) -> Path | None:
    """Where a plan that was made here is written: as asked, or beside a logger's files, if any; every rank asks."""
    if asked is not None:
        return Path(asked)
    if not trainer.loggers:
        return None
    directory = trainer.log_dir
    return None if directory is None else Path(directory) / "mist_plan.json"
