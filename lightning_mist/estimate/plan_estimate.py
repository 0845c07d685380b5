"""What a plan needs of the memory of every device, of a network whose costs are known."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, TypeAlias

from lightning_mist.cost.memory import TERMS, StageMemory
from lightning_mist.errors import PlanError
from lightning_mist.estimate.device_need import Interval
from lightning_mist.estimate.estimate_data import Change, HostNeed, MemoryEstimate, StageEstimate, verdict_of, worst_of
from lightning_mist.estimate.stage_estimates import (
    Estimator,
    Replaying,
    describe_cluster,
    summed_estimate,
    what_is_not_run,
)
from lightning_mist.hardware import AnyCluster, Cluster, host_memory, single, usable_host_bytes
from lightning_mist.plan import Feature, ModuleMap, Plan, PredictedStage, plan_of
from lightning_mist.plan.changes import OFFLOADS, RECOMPUTATION, ZERO, anywhere, with_microbatches
from lightning_mist.plan.plan_tables import counted
from lightning_mist.units import format_bytes, parse_bytes


def estimate_plan(
    estimator: Estimator, plan: Plan, *, advise: bool = True, replay: Replaying = "all"
) -> MemoryEstimate:
    """The estimate of a plan by an estimator that exists already; see :func:`estimate_memory`.

    Raises:
        PlanError: If the plan does not fit the network or the machine.
    """
    spec, cluster, limit = estimator.spec, estimator.cluster, estimator.limit
    stages = estimator.stages(plan, replay=replay)
    worst = worst_of(stages)
    fits = verdict_of(worst.device_total, worst.limit or limit) == "fits"
    advises = advise and not fits and isinstance(cluster, Cluster)
    return MemoryEstimate(
        model=spec.name,
        cluster=describe_cluster(cluster),
        memory_limit=limit,
        plan=plan,
        precision=spec.precision_text,
        optimizer=spec.optimizer.name,
        stages=stages,
        source=estimator.source,
        changes=changes_that_fit(estimator, plan) if advises else (),
        host=host_need(cluster, plan, stages),
        notes=(*spec.notes, *what_is_not_run(plan), *_flush_notes(stages, limit)),
    )


def host_need(cluster: AnyCluster, plan: Plan, stages: Sequence[StageEstimate]) -> HostNeed | None:
    """The node on which offload takes most of what it may.

    None if none takes any, nothing is known of the hosts, or devices are CPUs, which offload into files.
    """
    if cluster.kind != "cuda":
        return None
    nodes: dict[tuple[int, int], int] = {}
    for group in range(plan.num_groups):
        held = stages[group].host_bytes
        for rank in plan.stages[group].devices if held else ():
            part = cluster.part_of(rank)
            node = part, (rank - cluster.offsets[part]) // cluster.parts[part].devices_per_node
            nodes[node] = nodes.get(node, 0) + held
    found = []
    for (index, _), nbytes in nodes.items():
        there, usable = host_memory(cluster.parts[index]), usable_host_bytes(cluster.parts[index])
        if there is not None:
            found.append(HostNeed(bytes=nbytes, usable=int(usable), there=there))
    return max(found, key=lambda need: need.bytes / max(need.usable, 1), default=None)


def limit_of(cluster: Cluster, memory_limit: str | int | None) -> int:
    """Bytes of each device that may be used.

    Raises:
        ValueError: If the limit is not a size, is nothing, or is more than the device has.
    """
    has = cluster.device.memory_bytes
    if memory_limit is None:
        return has
    try:
        limit = parse_bytes(memory_limit)
    except ValueError as error:
        raise ValueError(f"memory_limit: {error}") from None
    if not 0 < limit <= has:
        raise ValueError(
            f"memory_limit = {memory_limit}: it must be more than nothing and at most the {format_bytes(has)} of one "
            f"{cluster.device.name}; leave it out to allow all of it"
        )
    return limit


def _flush_notes(stages: Sequence[StageEstimate], limit: int) -> tuple[str, ...]:
    """Stages whose allocator has to give memory back within a step, which costs time."""
    found = [item for item in stages if item.flushes and item.device_total.p50 <= (item.limit or limit)]
    names = ", ".join(str(item.stage) for item in found)
    if not names:
        return ()
    return (
        f"on stage {names} there is room only if the allocator gives back what is free within a step, which waits for "
        "the device; expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF may avoid it",
    )


def estimate_prediction(plan: Plan, module_map: ModuleMap, cluster: AnyCluster, limit: int) -> MemoryEstimate:
    """What a plan needs by its own prediction.

    Raises:
        PlanError: If the plan predicts nothing.
    """
    if plan.predicted is None:
        raise PlanError("the plan predicts nothing: estimate it from a trace of the module")
    stages = tuple(
        summed_estimate(plan, index, _memory(stage), cluster, module_map, limit)
        for index, stage in enumerate(plan.predicted.stages)
    )
    made_for = dict(plan.fingerprint)
    return MemoryEstimate(
        model="the module",
        cluster=describe_cluster(cluster),
        memory_limit=limit,
        plan=plan,
        precision=made_for.get("precision", "unknown precision"),
        optimizer="its optimizer",
        stages=stages,
        source="the plan's own prediction",
        host=host_need(cluster, plan, stages),
        notes=what_is_not_run(plan),
    )


def _memory(stage: PredictedStage) -> StageMemory:
    """The peak by term, as far as the prediction has terms."""
    known = dict(stage.breakdown)
    terms = {name: round(known.get(name, 0.0)) for name in TERMS}
    terms["working_bytes"] += stage.peak_bytes - sum(terms.values())
    return StageMemory(phase="peak", terms=tuple(terms.items()))


# What would make a plan fit: changes of it, the smallest first, each estimated like the plan itself.


SHOWN = 6
"""Changes that are kept at most."""

LOOKS = 3
"""Trials of a ladder that are replayed at most where those that should fit do not."""

MOST_TIMES_AS_MANY = 64
"""How many times the devices at hand are looked at."""

USUAL_NODE = 8
"""Devices that one node is taken to hold where a single node is described: those of the machines in the catalog."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """A changed plan in words, and the machine for it."""

    text: str
    plan: Plan
    cluster: Cluster


OFFLOAD_RATIOS = (0.25, 0.5, 0.75, 1.0)
"""Shares that are tried."""

Ladder: TypeAlias = Sequence[_Trial]
"""Trials of one kind, from the smallest change to the largest; each needs no more than the one before."""


def changes_that_fit(estimator: Estimator, plan: Plan) -> tuple[Change, ...]:
    """The smallest change of every kind with which a plan fits, smallest first.

    Kinds are tried alone, then together; more devices are looked at only if nothing helps on those at hand. What is
    not run yet comes last.
    """
    plan = replace(plan, predicted=None, fingerprint=())
    steps = _Steps(estimator, plan)
    found = [_least(estimator, ladder) for ladder in (steps.recomputed(plan), steps.cut(plan), steps.sharded())]
    if not any(found):
        found = [next((item for item in (_least(estimator, way) for way in steps.together()) if item), None)]
    found += [_first(estimator, trials) for trials in steps.regrouped()]
    found += [_least(estimator, ladder) for ladder in steps.offloaded()]
    if not any(change is not None and change.runs for change in found):
        found += [_first(estimator, [trial for trials in steps.larger() for trial in trials])]
    return tuple(change for change in found if change is not None)[:SHOWN]


def _least(estimator: Estimator, ladder: Ladder) -> Change | None:
    """The first trial of a ladder that fits: found by bisection without replay, then looked at around there."""
    if not ladder:
        return None
    fitting = bisect_left(ladder, True, key=lambda trial: _need(estimator, trial, "none") is not None)
    at = min(fitting, len(ladder) - 1)
    for index in range(at, min(at + LOOKS, len(ladder))):
        found = _look(estimator, ladder[index])
        if found is not None:
            break
    else:
        return None
    # Without replay a little more is predicted than with it, so that a smaller change may do.
    smaller = _look(estimator, ladder[at - 1]) if index == at > 0 else None
    return smaller or found


def _first(estimator: Estimator, trials: Sequence[_Trial]) -> Change | None:
    """The first trial that fits, of trials in no order of what they need."""
    likely = (trial for trial in trials if _need(estimator, trial, "none") is not None)
    return next((found for trial in likely if (found := _look(estimator, trial)) is not None), None)


def _need(estimator: Estimator, trial: _Trial, replay: Replaying) -> Interval | None:
    """What a trial needs if it fits; None if it does not, or if the network does not allow it."""
    try:
        stages = replace(estimator, cluster=trial.cluster).stages(trial.plan, replay=replay)
    except PlanError:
        return None
    need = worst_of(stages).device_total
    return need if verdict_of(need, estimator.limit) == "fits" else None


def _look(estimator: Estimator, trial: _Trial) -> Change | None:
    need = _need(estimator, trial, "worst")
    if need is None:
        return None
    return Change(text=trial.text, plan=trial.plan, device_total=need, runs=not what_is_not_run(trial.plan))


class _Steps:
    """The changes of a plan that the network allows."""

    def __init__(self, estimator: Estimator, plan: Plan) -> None:
        self._plan, self._spec = plan, estimator.spec
        self._cluster = single(estimator.cluster, "looking for changes that fit")

    def recomputed(self, plan: Plan, text: str = "") -> Ladder:
        """More layers recomputed, on every stage as many."""
        if self._excludes("checkpointing"):
            return ()
        most = max(stage.num_layers for stage in plan.stages)
        have = min(stage.checkpointing.layers for stage in plan.stages)
        where = " of every stage" if plan.num_stages > 1 else ""
        return [
            self._trial(f"{text}{words}{where} checkpointed", RECOMPUTATION.at_least(plan, n))
            for n in range(have + 1, most + 1)
            for words in ["all layers" if n == most else counted(n, "layer")]
        ]

    def cut(self, plan: Plan, text: str = "") -> Ladder:
        """Smaller microbatches, more of them."""
        if self._excludes("microbatches"):
            return ()
        common = gcd(*(stage.microbatch_size for stage in plan.stages))
        parts = [number for number in range(2, common + 1) if common % number == 0]
        cut = [with_microbatches(plan, plan.num_microbatches * number) for number in parts]
        words = "{text}num_microbatches={plan.num_microbatches} of {plan.stages[0].microbatch_size} rows"
        return [self._trial(words.format(text=text, plan=smaller), smaller) for smaller in cut]

    def sharded(self) -> Ladder:
        """More of the state shared out among data-parallel devices."""
        if all(stage.data_parallel_degree == 1 for stage in self._plan.stages):
            return ()
        have = min(int(stage.zero_stage) for stage in self._plan.stages)
        return [self._trial(f"zero_stage={level}", ZERO.at_least(self._plan, level)) for level in range(have + 1, 4)]

    def together(self) -> Iterator[Ladder]:
        """Several changes at once, as few as possible."""
        sharded, cut = self.sharded(), self.cut(self._plan)
        for first in (cut[-1:], sharded[-1:]):
            for trial in first:
                yield self.recomputed(trial.plan, f"{trial.text} and ")
        for trial in sharded[-1:]:
            yield self.cut(trial.plan, f"{trial.text} and ")
            for both in self.cut(trial.plan, f"{trial.text}, ")[-1:]:
                yield self.recomputed(both.plan, f"{both.text} and ")

    def regrouped(self) -> Iterator[Sequence[_Trial]]:
        """The same devices in other degrees: more of them share layers, or there are more stages."""
        shape = _shape_of(self._plan)
        if shape is None:
            return
        kinds: tuple[tuple[str, Feature], ...] = (("tensor_parallel_degree", "tensor"), ("pipeline_stages", "pipeline"))
        for name, feature in kinds:
            if not self._excludes(feature):
                degrees = _doublings(shape[name], self._cluster.world_size)
                yield self._grids([{**shape, name: degree} for degree in degrees], name)

    def offloaded(self) -> Iterator[Ladder]:
        """More of optimizer state in host memory, then of everything."""
        for kind, words in (("optimizer", "optimizer state"), ("activations", "the activations")):
            have = min(OFFLOADS[kind].level(stage) for stage in self._plan.stages)
            # What recomputation by operator keeps stays on the device.
            stays = any(stage.checkpointing.kind == "selective" for stage in self._plan.stages)
            if kind == "optimizer" or not (have or stays):
                yield [
                    self._trial(f"{ratio:.0%} of {words} in host memory", OFFLOADS[kind].at_least(self._plan, ratio))
                    for ratio in OFFLOAD_RATIOS
                    if ratio > have
                ]

    def larger(self) -> Iterator[Sequence[_Trial]]:
        """More devices, with everything that saves memory."""
        shape = _shape_of(self._plan)
        if shape is None:
            return
        for options in ({"zero_stage": 3}, {"zero_stage": 3, "checkpointed_layers": "all"}):
            shapes = [
                {**shape, **options, "world_size": size}
                for size in _doublings(self._plan.world_size, MOST_TIMES_AS_MANY * self._plan.world_size)
            ]
            yield self._grids(shapes, "world_size", "zero_stage", *options)

    def _grids(self, shapes: Sequence[dict[str, Any]], *names: str) -> Sequence[_Trial]:
        """Plans of equal stages, as many as there are."""
        found = []
        for shape in shapes:
            cluster = _of_size(self._cluster, shape["world_size"])
            # Devices that work on the same rows.
            sharing = shape["tensor_parallel_degree"] * shape["context_parallel_degree"] * shape["pipeline_stages"]
            rows = gcd(shape["global_batch_size"] * sharing // shape["world_size"], shape["microbatch_size"])
            try:
                options = {**shape, "microbatch_size": rows, "devices_per_node": cluster.devices_per_node}
                plan = plan_of(self._spec.num_layers, **options)
            except PlanError:
                continue
            chunks = self._plan.stages[-1].tail_chunks
            chunks = chunks if self._spec.module_map.cuts_tokens else gcd(chunks, rows)
            if chunks > 1 and shape["tensor_parallel_degree"] == shape["context_parallel_degree"] == 1:
                plan = replace(plan, stages=(*plan.stages[:-1], replace(plan.stages[-1], tail_chunks=chunks)))
            text = ", ".join(_WORDS_OF.get(name, f"{name}={{}}").format(shape[name]) for name in dict.fromkeys(names))
            found.append(_Trial(text=text, plan=plan, cluster=cluster))
        return found

    def _trial(self, text: str, plan: Plan) -> _Trial:
        return _Trial(text=text, plan=plan, cluster=self._cluster)

    def _excludes(self, feature: Feature) -> bool:
        return bool(self._spec.module_map.excludes(feature))


_WORDS_OF = {"world_size": "{} devices", "checkpointed_layers": "{} layers checkpointed"}
"""How changes of degrees are said where it is not by their name."""


def _shape_of(plan: Plan) -> dict[str, Any] | None:
    """What :func:`~lightning_mist.plan.plan_of` makes a plan like this one of; None if its stages differ."""
    stage = plan.stages[0]
    if len(set(map(anywhere, plan.stages))) > 1:
        return None
    return {
        "world_size": plan.world_size,
        "global_batch_size": plan.global_batch_size,
        "tensor_parallel_degree": stage.mesh.tensor_parallel_degree,
        "context_parallel_degree": stage.mesh.context_parallel_degree,
        "sequence_parallel": stage.mesh.sequence_parallel,
        "pipeline_stages": plan.num_groups,
        "chunks": plan.num_stages // plan.num_groups,
        "microbatch_size": stage.microbatch_size,
        "zero_stage": int(stage.zero_stage),
        "checkpointed_layers": "all" if stage.checkpointing.layers == stage.num_layers else stage.checkpointing.layers,
        "checkpointing": stage.checkpointing.kind,
        "schedule": plan.schedule,
        "offload": stage.offload,
    }


def _doublings(have: int, most: int) -> list[int]:
    """Twice as many, four times as many, and so on."""
    return [have * 2**power for power in range(1, 12) if have * 2**power <= most]


def _of_size(cluster: Cluster, world_size: int) -> Cluster:
    """As many of the same devices."""
    if world_size == cluster.world_size:
        return cluster
    most = cluster.devices_per_node if cluster.num_nodes > 1 else max(cluster.devices_per_node, USUAL_NODE)
    per_node = gcd(world_size, most) if world_size > most else world_size
    return replace(cluster, num_nodes=world_size // per_node, devices_per_node=per_node)
