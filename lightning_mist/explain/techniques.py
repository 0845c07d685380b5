"""The techniques that plans use: where a plan uses each, the plan without it, and the search space without it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

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
from lightning_mist.explain.explanation import ranges_of, state_in_words
from lightning_mist.plan import OFFLOADED, Checkpointing, Plan, ScheduleName, SearchSpace, StagePlan

DEFERRED_UPDATE = "the update then runs layer by layer in the next forward, which hides giving out parameters"
"""What moving any parameters, gradients or optimizer state also does (:mod:`lightning_mist.cost.time.offload_seconds`).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Technique:
    """A technique that plans use, and how plans and search spaces go without it.

    Attributes:
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
    text = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in ranges_of(found))
    return f"stage {text}" if len(found) == 1 else f"stages {text}"


def _where(plan: Plan, is_used: Callable[[StagePlan], bool], text: str = "") -> str:
    """On which stages something is so, behind a text; empty if on none."""
    return f"{text}on {places(plan, is_used)}" if any(map(is_used, plan.stages)) else ""


def _narrowed(search: SearchSpace, name: str, wanted: Iterable[Any]) -> SearchSpace | None:
    """A search space with those of some values that it has (a field that is None has all); None if it has none."""
    asked = getattr(search, name)
    left: Any = tuple(value for value in wanted if asked is None or value in asked)
    return replace(search, **{name: left}) if left else None


def _others(search: SearchSpace, name: str, keeps: Callable[[Any], bool]) -> SearchSpace | None:
    """A search space with some of the values that it has."""
    return _narrowed(search, name, filter(keeps, getattr(search, name)))


_PIPELINE = Technique(
    name="pipeline stages",
    meaning="groups of devices hold different layers and work on different microbatches at a time",
    use=lambda plan: f"{plan.num_groups} stages" if plan.num_groups > 1 else "",
    off=one_stage,
    without=lambda plan, search: None if search.layer_cuts else _narrowed(search, "num_stages", (1,)),
)


def _use_tensor(plan: Plan) -> str:
    degrees = sorted({stage.mesh.tensor_parallel_degree for stage in plan.stages} - {1})
    shared = f"{' and '.join(map(str, degrees))} devices share every layer "
    return _where(plan, lambda stage: stage.mesh.tensor_parallel_degree > 1, shared)


_TENSOR = Technique(
    name="tensor parallelism",
    meaning="several devices share every layer and exchange parts of its results",
    use=_use_tensor,
    off=whole_layers,
    without=lambda plan, search: _narrowed(search, "tensor_parallel_degrees", (1,)),
)

_SEQUENCE = Technique(
    name="sequence parallelism",
    meaning="devices that share layers also share what lies between them along the sequence",
    use=lambda plan: _where(plan, lambda stage: stage.mesh.sequence_parallel),
    off=lambda plan, ground: every_stage(
        plan, lambda stage: replace(stage, mesh=replace(stage.mesh, sequence_parallel=False))
    ),
    without=lambda plan, search: None if search.sequence_parallel else replace(search, sequence_parallel=False),
)

_SHARDED = {1: "optimizer state", 2: "gradients", 3: "parameters"}


def _zero(level: int) -> Technique:
    def lower(stage: StagePlan) -> StagePlan:
        return stage.with_zero(min(level - 1, stage.zero_stage))

    return Technique(
        name=f"ZeRO-{level}" if level == 3 else f"ZeRO-{level} or more",
        meaning=f"data-parallel devices keep a part of the {_SHARDED[level]} each",
        use=lambda plan: _where(plan, lambda stage: stage.zero_stage >= level),
        off=lambda plan, ground: every_stage(plan, lower),
        without=lambda plan, search: _others(search, "zero_stages", lambda number: number < level),
    )


def _use_groups(plan: Plan) -> str:
    sizes = sorted({stage.mesh.shard_degree for stage in plan.stages if stage.mesh.shard_degree})
    text = f"groups of {' and '.join(map(str, sizes))} ranks "
    return _where(plan, lambda stage: stage.mesh.shard_degree is not None, text)


_HYBRID = Technique(
    name="hybrid sharding",
    meaning="ZeRO shards within groups of ranks, and groups average their gradients once per batch",
    use=_use_groups,
    off=lambda plan, ground: every_stage(
        plan, lambda stage: replace(stage, mesh=replace(stage.mesh, shard_degree=None))
    ),
    without=lambda plan, search: replace(search, shard_degrees=()),
)


def _use_checkpointing(plan: Plan) -> str:
    def told(kept: Checkpointing, layers: int) -> str:
        where = places(plan, lambda stage: (stage.checkpointing, stage.num_layers) == (kept, layers))
        what = ", but for products, convolutions and attention," if kept.kind == "selective" else ""
        return f"{kept.layers} of {layers} layers{what} on {where}"

    kinds = {(stage.checkpointing, stage.num_layers): None for stage in plan.stages}
    return "; ".join(told(*kind) for kind in kinds if kind[0].layers)


_CHECKPOINTING = Technique(
    name="activation checkpointing",
    meaning="backward computes what layers would have to keep in memory a second time",
    use=_use_checkpointing,
    off=lambda plan, ground: every_stage(plan, lambda stage: replace(stage, checkpointing=Checkpointing())),
    without=lambda plan, search: replace(search, checkpointing=False),
)


def _offload(kind: str) -> Technique:
    def ratio(stage: StagePlan) -> float:
        value: float = getattr(stage.offload, kind)
        return value

    def use(plan: Plan) -> str:
        used = sorted({ratio(stage) for stage in plan.stages} - {0.0})
        return _where(plan, lambda stage: ratio(stage) > 0, f"{' and '.join(f'{value:.0%}' for value in used)} ")

    def resident(stage: StagePlan) -> StagePlan:
        return replace(stage, offload=replace(stage.offload, **{kind: 0.0}))

    words = state_in_words(kind)
    meaning = f"a part of the {words} waits in the memory of the host and is copied when it is needed"
    return Technique(
        name=f"offload of {words}",
        meaning=meaning if kind == "activations" else f"{meaning}; {DEFERRED_UPDATE}",
        use=use,
        off=lambda plan, ground: every_stage(plan, resident),
        without=lambda plan, search: replace(search, offload=tuple(name for name in search.offloaded if name != kind)),
    )


def _use_uneven(plan: Plan) -> str:
    lengths = [stage.num_layers for stage in plan.stages]
    return f"{min(lengths)} to {max(lengths)} layers per stage" if max(lengths) - min(lengths) > 1 else ""


def _without_uneven(plan: Plan, search: SearchSpace) -> SearchSpace | None:
    if search.layer_cuts is not None or plan.num_groups < plan.num_stages:
        return None  # Cuts of chunks cannot be asked for.
    return replace(search, layer_cuts=tuple(accumulate(even_lengths(plan)[:-1])))


_UNEVEN = Technique(
    name="uneven stages",
    meaning="stages have different numbers of layers, more where there is more speed or room",
    use=_use_uneven,
    off=lambda plan, ground: with_lengths(plan, even_lengths(plan)),
    without=_without_uneven,
)


def _schedule(name: ScheduleName, meaning: str) -> Technique:
    return Technique(
        name=name,
        meaning=meaning,
        use=lambda plan: f"{plan.num_stages} stages" if plan.schedule == name and plan.num_groups > 1 else "",
        off=lambda plan, ground: without_chunks(plan),
        without=lambda plan, search: _others(search, "schedules", lambda other: other != name),
    )


def _least_microbatches(plan: Plan) -> int:
    """The fewest microbatches of any plan on these stages: no device's batch is cut if that can be."""
    ground = Ground(cuts_batches=True, search=SearchSpace())
    return microbatch_counts(plan, [stage.data_parallel_degree for stage in plan.stages], ground)[0]


def _use_microbatches(plan: Plan) -> str:
    fewest = _least_microbatches(plan)
    return f"{plan.num_microbatches} where {fewest} would do" if plan.num_microbatches > fewest else ""


_MICROBATCHES = Technique(
    name="more microbatches",
    meaning="batches are cut into smaller parts, which need less memory each and keep all stages busy",
    use=_use_microbatches,
    off=lambda plan, ground: with_microbatches(plan, _least_microbatches(plan)),
    without=lambda plan, search: _narrowed(search, "num_microbatches", range(1, _least_microbatches(plan) + 1)),
)

TECHNIQUES: tuple[Technique, ...] = (
    _PIPELINE,
    _schedule("interleaved-1f1b", "every group of devices holds several runs of layers, so that it waits less"),
    _schedule("zb-h1", "gradients of weights are put off to fill waiting time"),
    _UNEVEN,
    _MICROBATCHES,
    _TENSOR,
    _SEQUENCE,
    *(_zero(level) for level in (3, 2, 1)),
    _HYBRID,
    _CHECKPOINTING,
    *(_offload(kind) for kind in OFFLOADED),
)
"""Every technique, in the order in which people are told of them."""
