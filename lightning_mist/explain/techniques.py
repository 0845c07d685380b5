"""The techniques that plans use: where a plan uses each, the plan without it, and the search space without it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

from lightning_mist.explain.changed_plan import (
    Ground,
    even_lengths,
    every_stage,
    microbatch_counts,
    one_stage,
    whole_layers,
    with_lengths,
    with_microbatches,
    without_chunks,
)
from lightning_mist.plan import Checkpointing, Plan, ScheduleName, StagePlan, ZeroStage
from lightning_mist.tuner.space import OFFLOADED, SearchSpace

DEFERRED_UPDATE = "the update then runs layer by layer in the next forward, which hides giving out parameters"
"""What moving any parameters, gradients or optimizer state also does (:mod:`lightning_mist.cost.time.offload_seconds`).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Technique:
    """One technique.

    Attributes:
        name: What it is called.
        meaning: What it does.
        use: How much of it a plan uses and where; empty if it does not.
        off: The plan without it, all else as it is. Raises ``PlanError`` if there is none.
        without: The search space without it; ``None`` if that leaves nothing, or cannot be said.
    """

    name: str
    meaning: str
    use: Callable[[Plan], str]
    off: Callable[[Plan, Ground], Plan]
    without: Callable[[Plan, SearchSpace], SearchSpace | None]


def places(plan: Plan, is_used: Callable[[StagePlan], bool]) -> str:
    """The stages where something is so, for people: ``stage 0``, ``stages 1 to 3``, ``every stage``."""
    found = [index for index, stage in enumerate(plan.stages) if is_used(stage)]
    if len(found) == plan.num_stages:
        return "the only stage" if len(found) == 1 else "every stage"
    runs: list[list[int]] = []
    for index in found:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    text = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in runs)
    return f"stage {text}" if len(found) == 1 else f"stages {text}"


def _within(asked: tuple[int, ...] | None, wanted: tuple[int, ...]) -> tuple[int, ...] | None:
    """Those of some numbers that were asked for; None if there are none."""
    return tuple(number for number in wanted if asked is None or number in asked) or None


def _pipeline() -> Technique:
    def use(plan: Plan) -> str:
        return f"{plan.num_groups} stages" if plan.num_groups > 1 else ""

    def without(plan: Plan, search: SearchSpace) -> SearchSpace | None:
        left = _within(search.num_stages, (1,))
        return None if left is None or search.layer_cuts else replace(search, num_stages=left)

    return Technique(
        name="pipeline stages",
        meaning="groups of devices hold different layers and work on different microbatches at a time",
        use=use,
        off=one_stage,
        without=without,
    )


def _tensor() -> Technique:
    def use(plan: Plan) -> str:
        degrees = sorted({stage.mesh.tensor_parallel_degree for stage in plan.stages} - {1})
        where = places(plan, lambda stage: stage.mesh.tensor_parallel_degree > 1)
        return f"{' and '.join(map(str, degrees))} devices share every layer on {where}" if degrees else ""

    def without(plan: Plan, search: SearchSpace) -> SearchSpace | None:
        left = _within(search.tensor_parallel_degrees, (1,))
        return None if left is None else replace(search, tensor_parallel_degrees=left)

    return Technique(
        name="tensor parallelism",
        meaning="several devices share every layer and exchange parts of its results",
        use=use,
        off=whole_layers,
        without=without,
    )


def _sequence() -> Technique:
    def use(plan: Plan) -> str:
        used = any(stage.mesh.sequence_parallel for stage in plan.stages)
        return f"on {places(plan, lambda stage: stage.mesh.sequence_parallel)}" if used else ""

    def off(plan: Plan, ground: Ground) -> Plan:
        return every_stage(plan, lambda stage: replace(stage, mesh=replace(stage.mesh, sequence_parallel=False)))

    def without(plan: Plan, search: SearchSpace) -> SearchSpace | None:
        return None if search.sequence_parallel else replace(search, sequence_parallel=False)

    return Technique(
        name="sequence parallelism",
        meaning="devices that share layers also share what lies between them along the sequence",
        use=use,
        off=off,
        without=without,
    )


_SHARDED = {1: "optimizer state", 2: "gradients", 3: "parameters"}


def _zero(level: int) -> Technique:
    def use(plan: Plan) -> str:
        used = any(stage.zero_stage >= level for stage in plan.stages)
        return f"on {places(plan, lambda stage: stage.zero_stage >= level)}" if used else ""

    def off(plan: Plan, ground: Ground) -> Plan:
        return every_stage(
            plan, lambda stage: replace(stage, zero_stage=ZeroStage(min(level - 1, int(stage.zero_stage))))
        )

    def without(plan: Plan, search: SearchSpace) -> SearchSpace | None:
        left = tuple(number for number in search.zero_stages if number < level)
        return replace(search, zero_stages=left) if left else None

    return Technique(
        name=f"ZeRO-{level}" if level == 3 else f"ZeRO-{level} or more",
        meaning=f"data-parallel devices keep a part of the {_SHARDED[level]} each",
        use=use,
        off=off,
        without=without,
    )


def _checkpointing() -> Technique:
    def use(plan: Plan) -> str:
        def told(kind: tuple[int, int]) -> str:
            where = places(plan, lambda stage: (stage.checkpointing.layers, stage.num_layers) == kind)
            return f"{kind[0]} of {kind[1]} layers on {where}"

        kinds = {(stage.checkpointing.layers, stage.num_layers): None for stage in plan.stages}
        return "; ".join(told(kind) for kind in kinds if kind[0])

    def off(plan: Plan, ground: Ground) -> Plan:
        return every_stage(plan, lambda stage: replace(stage, checkpointing=Checkpointing()))

    return Technique(
        name="activation checkpointing",
        meaning="backward computes what layers would have to keep in memory a second time",
        use=use,
        off=off,
        without=lambda plan, search: replace(search, checkpointing=False),
    )


def _offload(kind: str) -> Technique:
    def ratio(stage: StagePlan) -> float:
        value: float = getattr(stage.offload, kind)
        return value

    def use(plan: Plan) -> str:
        used = sorted({ratio(stage) for stage in plan.stages} - {0.0})
        shares = " and ".join(f"{value:.0%}" for value in used)
        return f"{shares} on {places(plan, lambda stage: ratio(stage) > 0)}" if used else ""

    def off(plan: Plan, ground: Ground) -> Plan:
        return every_stage(plan, lambda stage: replace(stage, offload=replace(stage.offload, **{kind: 0.0})))

    def without(plan: Plan, search: SearchSpace) -> SearchSpace | None:
        return replace(search, offload=tuple(name for name in search.offloaded if name != kind))

    words = "optimizer state" if kind == "optimizer" else kind
    meaning = f"a part of the {words} waits in the memory of the host and is copied when it is needed"
    return Technique(
        name=f"offload of {words}",
        meaning=meaning if kind == "activations" else f"{meaning}; {DEFERRED_UPDATE}",
        use=use,
        off=off,
        without=without,
    )


def _uneven() -> Technique:
    def use(plan: Plan) -> str:
        lengths = [stage.num_layers for stage in plan.stages]
        if max(lengths) - min(lengths) <= 1:
            return ""
        return f"{min(lengths)} to {max(lengths)} layers per stage"

    def without(plan: Plan, search: SearchSpace) -> SearchSpace | None:
        if search.layer_cuts is not None or plan.num_groups < plan.num_stages:
            return None  # Cuts of chunks cannot be asked for.
        cuts = tuple(accumulate(even_lengths(plan)[:-1]))
        return replace(search, layer_cuts=cuts)

    return Technique(
        name="uneven stages",
        meaning="stages have different numbers of layers, more where there is more speed or room",
        use=use,
        off=lambda plan, ground: with_lengths(plan, even_lengths(plan)),
        without=without,
    )


def _schedule(name: ScheduleName, meaning: str) -> Technique:
    def without(plan: Plan, search: SearchSpace) -> SearchSpace | None:
        left = tuple(item for item in search.schedules if item != name)
        return replace(search, schedules=left) if left else None

    return Technique(
        name=name,
        meaning=meaning,
        use=lambda plan: f"{plan.num_stages} stages" if plan.schedule == name and plan.num_groups > 1 else "",
        off=lambda plan, ground: without_chunks(plan),
        without=without,
    )


def _microbatches() -> Technique:
    def least(plan: Plan) -> int:
        """The fewest microbatches of any plan on these stages: no device's batch is cut if that can be."""
        ground = Ground(cuts_batches=True, search=SearchSpace())
        return microbatch_counts(plan, [stage.data_parallel_degree for stage in plan.stages], ground)[0]

    def use(plan: Plan) -> str:
        fewest = least(plan)
        return f"{plan.num_microbatches} where {fewest} would do" if plan.num_microbatches > fewest else ""

    def without(plan: Plan, search: SearchSpace) -> SearchSpace | None:
        left = _within(search.num_microbatches, tuple(range(1, least(plan) + 1)))
        return None if left is None else replace(search, num_microbatches=left)

    return Technique(
        name="more microbatches",
        meaning="batches are cut into smaller parts, which need less memory each and keep all stages busy",
        use=use,
        off=lambda plan, ground: with_microbatches(plan, least(plan)),
        without=without,
    )


TECHNIQUES: tuple[Technique, ...] = (
    _pipeline(),
    _schedule("interleaved-1f1b", "every group of devices holds several runs of layers, so that it waits less"),
    _schedule("zb-h1", "gradients of weights are put off to fill waiting time"),
    _uneven(),
    _microbatches(),
    _tensor(),
    _sequence(),
    *(_zero(level) for level in (3, 2, 1)),
    _checkpointing(),
    *(_offload(kind) for kind in OFFLOADED),
)
"""Every technique, in the order in which people are told of them."""
