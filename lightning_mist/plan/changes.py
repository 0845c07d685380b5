"""A plan with one thing changed: what techniques it uses, the plan with less or more of each, the search space without.

A *saving* is what a stage does to need less memory, in levels: recomputed layers, its ZeRO stage, each kind of state in
host memory. A *technique* is anything that a plan does beyond computing every layer once on every device. What a plan
would be without one, what would make it fit, and which plan is simpler, are all asked here.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from lightning_mist.errors import PlanError
from lightning_mist.plan.plan import Plan, ScheduleName, StagePlan
from lightning_mist.plan.plan_text import ranges_of
from lightning_mist.plan.search_space import SearchSpace
from lightning_mist.plan.stage_settings import OFFLOAD_KINDS, UPDATED_KINDS, Checkpointing, StageMesh, ZeroStage

DEFERRED_UPDATE = "the update then runs layer by layer in the next forward, which hides giving out parameters"
"""What moving any parameters, gradients or optimizer state also does (:mod:`lightning_mist.cost.time.offload_seconds`).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What stages do to need less memory.

    Attributes:
        level: How much of it a stage does: layers, a ZeRO stage, or a share.
        at: The stage with another level.
        levels: All levels of a stage, given the shares that may be in host memory, ascending.
        lowered: What a stage does at a lower level, in words.
    """

    level: Callable[[StagePlan], float]
    at: Callable[[StagePlan, Any], StagePlan]
    levels: Callable[[StagePlan, Sequence[float]], Sequence[float]]
    lowered: Callable[[StagePlan, float], str]

    def less(self, stage: StagePlan, ratios: Sequence[float]) -> Iterator[tuple[str, StagePlan]]:
        """The stage at the next lower level, if there is one, with words for it."""
        below = [level for level in self.levels(stage, ratios) if level < self.level(stage)]
        for level in below[-1:]:
            yield self.lowered(stage, level), self.at(stage, level)

    def more(self, stage: StagePlan, ratios: Sequence[float]) -> Iterator[StagePlan]:
        """The stage at the next higher level, if there is one."""
        above = [level for level in self.levels(stage, ratios) if level > self.level(stage)]
        for level in above[:1]:
            yield self.at(stage, level)

    def at_least(self, plan: Plan, level: float) -> Plan:
        """The plan with no stage below a level."""
        return every_stage(plan, lambda stage: self.at(stage, max(level, self.level(stage))))

    def at_most(self, plan: Plan, level: float) -> Plan:
        """The plan with no stage above a level."""
        return every_stage(plan, lambda stage: self.at(stage, min(level, self.level(stage))))


def _offloading(kind: str) -> Saving:
    def level(stage: StagePlan) -> float:
        return dict(stage.offload.told).get(kind, 0.0)

    def at(stage: StagePlan, ratio: float) -> StagePlan:
        same = ratio == level(stage)
        return stage if same else replace(stage, offload=replace(stage.offload, **{kind: ratio}))

    return Saving(
        level=level,
        at=at,
        levels=lambda stage, ratios: sorted({0.0, *ratios}),
        lowered=lambda stage, less: (
            f"with {less:.0%} of its {OFFLOAD_KINDS[kind]} in host memory in place of {level(stage):.0%}"
        ),
    )


def _recomputing(stage: StagePlan, layers: int) -> StagePlan:
    kept = replace(stage.checkpointing, layers=min(layers, stage.num_layers)) if layers else Checkpointing()
    return replace(stage, checkpointing=kept)


RECOMPUTATION = Saving(
    level=lambda stage: stage.checkpointing.layers,
    at=_recomputing,
    levels=lambda stage, ratios: range(stage.num_layers + 1),
    lowered=lambda stage, less: "with one layer fewer recomputed",
)

ZERO = Saving(
    level=lambda stage: int(stage.zero_stage),
    at=StagePlan.with_zero,
    levels=lambda stage, ratios: range(ZeroStage.PARAMETERS + 1),
    lowered=lambda stage, less: f"with ZeRO-{less} in place of ZeRO-{int(stage.zero_stage)}",
)

OFFLOADS = {kind: _offloading(kind) for kind in OFFLOAD_KINDS}
"""Savings by the kind of state that is in host memory."""

SAVINGS = (RECOMPUTATION, ZERO, *OFFLOADS.values())
"""Every saving, that first whose smallest step changes least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What the changes of a plan have to keep to."""

    cuts_batches: bool
    search: SearchSpace


@dataclass(frozen=True, slots=True, kw_only=True)
class Technique:
    """A technique that plans use, and how plans and search spaces go without it.

    Attributes:
        use: How much of it a plan uses and where; empty if it does not.
        off: The plan without it, all else as it is. Raises ``PlanError`` if there is none.
        without: The search space without it; ``None`` if that leaves nothing, or cannot be said.
        burden: What more takes part in every step, in words; empty where nothing does, and plans are as simple with it.
    """

    name: str
    meaning: str
    use: Callable[[Plan], str]
    off: Callable[[Plan, Ground], Plan]
    without: Callable[[Plan, SearchSpace], SearchSpace | None]
    burden: str = ""


def burdens(plan: Plan) -> tuple[str, ...]:
    """What a plan does beyond computing every layer once on every rank, in words: the fewer, the simpler."""
    return tuple(item.burden for item in reversed(TECHNIQUES) if item.burden and item.use(plan))


def anywhere(stage: StagePlan) -> StagePlan:
    """A stage on the first layers and devices, without chunks behind the last layer: those that are alike are equal."""
    mesh = replace(stage.mesh, devices=tuple(range(len(stage.devices))))
    return replace(stage, layers=(0, stage.num_layers), mesh=mesh, tail_chunks=1)


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


def every_stage(plan: Plan, change: Callable[[StagePlan], StagePlan]) -> Plan:
    """The same plan with every stage changed; without its prediction."""
    return replace(plan, stages=tuple(map(change, plan.stages)), predicted=None)


def _every_mesh(plan: Plan, **settings: Any) -> Plan:
    return every_stage(plan, lambda stage: replace(stage, mesh=replace(stage.mesh, **settings)))


def microbatch_counts(plan: Plan, data_degrees: Sequence[int], ground: Ground) -> tuple[int, ...]:
    """Numbers of microbatches for which every stage cuts every device's batch into equal parts, ascending."""
    total, loaders = plan.global_batch_size, plan.num_loaders

    def is_equal(count: int, degree: int) -> bool:
        together = count * degree
        return together % loaders == 0 == total % together and (together == loaders or ground.cuts_batches)

    asked = ground.search.num_microbatches
    return tuple(
        count
        for count in range(1, total + 1)
        if total % count == 0
        and all(is_equal(count, degree) for degree in data_degrees)
        and (asked is None or count in asked)
        and (plan.schedule != "interleaved-1f1b" or count % plan.num_groups == 0)
    )


def with_microbatches(plan: Plan, count: int) -> Plan:
    """The same plan with another number of microbatches."""
    rows = plan.global_batch_size // count
    stages = tuple(stage.on_rows(rows // stage.data_parallel_degree) for stage in plan.stages)
    return replace(plan, num_microbatches=count, stages=stages, predicted=None)


def _least_microbatches(plan: Plan) -> int:
    """The fewest microbatches of any plan on these stages: no device's batch is cut if that can be."""
    ground = Ground(cuts_batches=True, search=SearchSpace())
    return microbatch_counts(plan, [stage.data_parallel_degree for stage in plan.stages], ground)[0]


def _use_microbatches(plan: Plan) -> str:
    fewest = _least_microbatches(plan)
    return f"{plan.num_microbatches} where {fewest} would do" if plan.num_microbatches > fewest else ""


def _rearranged(
    plan: Plan, stages: Sequence[StagePlan], shapes: Sequence[tuple[int, int, int, bool]], ground: Ground
) -> Plan:
    """Stages whose devices are arranged otherwise, ``(data, context, tensor, sequence)``, and stay where they are.

    Microbatches are as large as they can be, but no larger than those of the plan, if there are such.
    """
    degrees = [data for data, *_ in shapes]
    most = max(stage.microbatch_size for stage in plan.stages)
    counts = microbatch_counts(plan, degrees, ground)
    if not counts:
        raise PlanError(
            f"data-parallel degrees {degrees} with {plan.global_batch_size} rows on {plan.world_size} devices: no "
            "number of microbatches cuts every device's batch into equal parts"
        )
    rows = {count: plan.global_batch_size // (count * min(degrees)) for count in counts}
    count = min(counts, key=lambda count: (rows[count] > most, abs(rows[count] - most)))
    made = tuple(
        replace(
            stage.on_rows(
                plan.global_batch_size // (count * data),
                StageMesh(
                    devices=stage.devices,
                    data_parallel_degree=data,
                    tensor_parallel_degree=tensor,
                    context_parallel_degree=context,
                    sequence_parallel=sequence,
                ),
            ),
            zero_stage=stage.zero_stage if data * context > 1 else ZeroStage.NONE,
        )
        for stage, (data, context, tensor, sequence) in zip(stages, shapes, strict=True)
    )
    return replace(plan, num_microbatches=count, stages=made, predicted=None)


def _one_stage(plan: Plan, ground: Ground) -> Plan:
    """Everything on all devices, with as much of every other technique as any stage uses."""
    tensor = max(stage.mesh.tensor_parallel_degree for stage in plan.stages)
    context = max(stage.mesh.context_parallel_degree for stage in plan.stages)
    sequence = any(stage.mesh.sequence_parallel for stage in plan.stages)
    recomputed = [stage for stage in plan.stages if stage.checkpointing.layers]
    users = {kind: recomputed if kind == "checkpoints" else plan.stages for kind in OFFLOAD_KINDS}
    # Not what is told: nothing is of recomputed layers' inputs where the ratio of activations holds for them.
    ratios: dict[str, Any] = {
        kind: max((stage.offload.of(kind) for stage in of), default=None) for kind, of in users.items()
    }
    stage = replace(
        plan.stages[0],
        layers=(0, plan.num_layers),
        offload=replace(plan.stages[0].offload, **ratios),
        mesh=StageMesh(devices=tuple(range(plan.world_size)), data_parallel_degree=plan.world_size),
        checkpointing=_joined(plan.stages),
        tail_chunks=plan.stages[-1].tail_chunks,
    )
    stage = ZERO.at(stage, max(map(ZERO.level, plan.stages)))
    data, rest = divmod(plan.world_size, tensor * context)
    if rest:
        raise PlanError(f"tensor-parallel degree {tensor} does not divide {plan.world_size} devices")
    return _rearranged(_without_chunks(plan), (stage,), [(data, context, tensor, sequence)], ground)


def _joined(stages: Sequence[StagePlan]) -> Checkpointing:
    """What one stage recomputes in place of several: as many layers, by operator if that is enough for all."""
    kinds = [stage.checkpointing.kind for stage in stages if stage.checkpointing.layers]
    layers = sum(stage.checkpointing.layers for stage in stages)
    return Checkpointing(layers=layers, kind="selective" if set(kinds) == {"selective"} else "full")


def _without_chunks(plan: Plan) -> Plan:
    """An interleaved plan's devices as they are, with one stage each, under 1F1B."""
    if plan.schedule != "interleaved-1f1b":
        return replace(plan, schedule="1f1b" if plan.schedule == "zb-h1" else plan.schedule, predicted=None)
    stages, first = [], 0
    for group in range(plan.num_groups):
        chunks = [plan.stages[index] for index in plan.chunks(group)]
        end = first + sum(chunk.num_layers for chunk in chunks)
        made = replace(chunks[0], layers=(first, end), checkpointing=_joined(chunks))
        stages.append(replace(made, tail_chunks=chunks[-1].tail_chunks))
        first = end
    return replace(plan, stages=tuple(stages), schedule="1f1b", predicted=None)


def _regrouped(plan: Plan, shape: Callable[[StageMesh], tuple[int, int, int, bool]], ground: Ground) -> Plan:
    """The same plan with the devices of every stage arranged otherwise."""
    shapes = [shape(stage.mesh) for stage in plan.stages[: plan.num_groups]]
    if plan.num_groups == plan.num_stages:
        return _rearranged(plan, plan.stages, shapes, ground)
    joined = _without_chunks(plan)
    made = _rearranged(joined, joined.stages, shapes, ground)
    if made.num_microbatches % plan.num_groups:
        raise PlanError("microbatches go through chunks in rounds of as many as there are groups of devices")
    stages = tuple(
        stage.on_rows(mine.microbatch_size, mine.mesh)
        for stage, mine in zip(plan.stages, made.stages * (plan.num_stages // plan.num_groups), strict=True)
    )
    return replace(plan, num_microbatches=made.num_microbatches, stages=stages, predicted=None)


def _whole_layers(mesh: StageMesh) -> tuple[int, int, int, bool]:
    return mesh.data_parallel_degree * mesh.tensor_parallel_degree, mesh.context_parallel_degree, 1, False


def _whole_rows(mesh: StageMesh) -> tuple[int, int, int, bool]:
    data = mesh.data_parallel_degree * mesh.context_parallel_degree
    return data, 1, mesh.tensor_parallel_degree, mesh.sequence_parallel


def even_lengths(plan: Plan) -> tuple[int, ...]:
    """Layers of every stage if they are dealt out evenly."""
    count, stages = plan.num_layers, plan.num_stages
    return tuple(count * (index + 1) // stages - count * index // stages for index in range(stages))


def with_lengths(plan: Plan, lengths: Sequence[int]) -> Plan:
    """The same plan with other numbers of layers per stage; of recomputed ones as many as there are then."""
    stages, first = [], 0
    for stage, length in zip(plan.stages, lengths, strict=True):
        kept = replace(stage.checkpointing, layers=min(length, stage.checkpointing.layers))
        stages.append(replace(stage, layers=(first, first + length), checkpointing=kept))
        first += length
    return replace(plan, stages=tuple(stages), predicted=None)


def _use_uneven(plan: Plan) -> str:
    lengths = [stage.num_layers for stage in plan.stages]
    return f"{min(lengths)} to {max(lengths)} layers per stage" if max(lengths) - min(lengths) > 1 else ""


def _without_uneven(plan: Plan, search: SearchSpace) -> SearchSpace | None:
    if search.layer_cuts is not None or plan.num_groups < plan.num_stages:
        return None  # Cuts of chunks cannot be asked for.
    return replace(search, layer_cuts=tuple(accumulate(even_lengths(plan)[:-1])))


def _use_recomputation(plan: Plan) -> str:
    def told(kept: Checkpointing, layers: int) -> str:
        where = places(plan, lambda stage: (stage.checkpointing, stage.num_layers) == (kept, layers))
        what = ", but for products, convolutions and attention," if kept.kind == "selective" else ""
        return f"{kept.layers} of {layers} layers{what} on {where}"

    kinds = {(stage.checkpointing, stage.num_layers): None for stage in plan.stages}
    return "; ".join(told(*kind) for kind in kinds if kind[0].layers)


def _sharing(counted: Callable[[StageMesh], int], words: str) -> Callable[[Plan], str]:
    """How many devices share something, in words with that number, and where."""

    def use(plan: Plan) -> str:
        counts = sorted({counted(stage.mesh) for stage in plan.stages} - {0, 1})
        text = f"{words.format(' and '.join(map(str, counts)))} "
        return _where(plan, lambda stage: counted(stage.mesh) > 1, text)

    return use


def _schedule(name: ScheduleName, meaning: str) -> Technique:
    return Technique(
        name=name,
        meaning=meaning,
        # One stage has no schedule to speak of.
        use=lambda plan: f"{plan.num_stages} stages" if plan.schedule == name and plan.num_groups > 1 else "",
        off=lambda plan, ground: _without_chunks(plan),
        without=lambda plan, search: _others(search, "schedules", lambda other: other != name),
        burden=name,
    )


def _zero(level: int) -> Technique:
    state = {1: "optimizer state", 2: "gradients", 3: "parameters"}[level]
    return Technique(
        name=f"ZeRO-{level}" if level == 3 else f"ZeRO-{level} or more",
        meaning=f"data-parallel devices keep a part of the {state} each",
        # Alone a rank has nobody to share anything with.
        use=lambda plan: _where(plan, lambda stage: stage.zero_stage >= level and stage.mesh.num_peers > 1),
        off=lambda plan, ground: ZERO.at_most(plan, level - 1),
        without=lambda plan, search: _others(search, "zero_stages", lambda number: number < level),
        burden=f"sharded {state}",
    )


def _offload(kind: str) -> Technique:
    saving, words = OFFLOADS[kind], OFFLOAD_KINDS[kind]
    meaning = f"a part of the {words} waits in the memory of the host and is copied when it is needed"

    def use(plan: Plan) -> str:
        shares = sorted({saving.level(stage) for stage in plan.stages} - {0.0})
        return _where(plan, lambda stage: saving.level(stage) > 0, f"{' and '.join(map('{:.0%}'.format, shares))} ")

    return Technique(
        name=f"offload of {words}",
        meaning=f"{meaning}; {DEFERRED_UPDATE}" if kind in UPDATED_KINDS else meaning,
        use=use,
        off=lambda plan, ground: saving.at_most(plan, 0.0),
        without=lambda plan, search: replace(search, offload=tuple(name for name in search.offloaded if name != kind)),
        burden=f"{words} in host memory",
    )


TECHNIQUES: tuple[Technique, ...] = (
    Technique(
        name="pipeline stages",
        meaning="groups of devices hold different layers and work on different microbatches at a time",
        use=lambda plan: f"{plan.num_groups} stages" if plan.num_groups > 1 else "",
        off=_one_stage,
        without=lambda plan, search: None if search.layer_cuts else _narrowed(search, "num_stages", (1,)),
    ),
    _schedule("interleaved-1f1b", "every group of devices holds several runs of layers, so that it waits less"),
    _schedule("zb-h1", "gradients of weights are put off to fill waiting time"),
    Technique(
        name="uneven stages",
        meaning="stages have different numbers of layers, more where there is more speed or room",
        use=_use_uneven,
        off=lambda plan, ground: with_lengths(plan, even_lengths(plan)),
        without=_without_uneven,
    ),
    Technique(
        name="more microbatches",
        meaning="batches are cut into smaller parts, which need less memory each and keep all stages busy",
        use=_use_microbatches,
        off=lambda plan, ground: with_microbatches(plan, _least_microbatches(plan)),
        without=lambda plan, search: _narrowed(search, "num_microbatches", range(1, _least_microbatches(plan) + 1)),
    ),
    Technique(
        name="tensor parallelism",
        meaning="several devices share every layer and exchange parts of its results",
        use=_sharing(lambda mesh: mesh.tensor_parallel_degree, "{} devices share every layer"),
        off=lambda plan, ground: _regrouped(plan, _whole_layers, ground),
        without=lambda plan, search: _narrowed(search, "tensor_parallel_degrees", (1,)),
        burden="tensor parallelism",
    ),
    Technique(
        name="sequence parallelism",
        meaning="devices that share layers also share what lies between them along the sequence",
        use=lambda plan: _where(plan, lambda stage: stage.mesh.sequence_parallel),
        off=lambda plan, ground: _every_mesh(plan, sequence_parallel=False),
        without=lambda plan, search: None if search.sequence_parallel else replace(search, sequence_parallel=False),
        burden="sequence parallelism",
    ),
    Technique(
        name="context parallelism",
        meaning="several devices share the tokens of every row and gather keys and values",
        use=_sharing(lambda mesh: mesh.context_parallel_degree, "{} devices share every row"),
        off=lambda plan, ground: _regrouped(plan, _whole_rows, ground),
        without=lambda plan, search: replace(search, context_parallel_degrees=()),
        burden="context parallelism",
    ),
    *(_zero(level) for level in (3, 2, 1)),
    Technique(
        name="hybrid sharding",
        meaning="ZeRO shards within groups of ranks, and groups average their gradients once per batch",
        use=_sharing(lambda mesh: mesh.shard_degree or 0, "groups of {} ranks"),
        off=lambda plan, ground: _every_mesh(plan, shard_degree=None),
        without=lambda plan, search: replace(search, shard_degrees=()),
        burden="groups that share out",
    ),
    Technique(
        name="activation checkpointing",
        meaning="backward computes what layers would have to keep in memory a second time",
        use=_use_recomputation,
        off=lambda plan, ground: RECOMPUTATION.at_most(plan, 0),
        without=lambda plan, search: replace(search, checkpointing=False),
        burden="recomputation",
    ),
    Technique(
        name="chunks behind the last layer",
        meaning="what is behind the last layer runs forward and backward on some tokens, or rows, after others",
        use=lambda plan: f"{plan.stages[-1].tail_chunks} chunks" if plan.stages[-1].tail_chunks > 1 else "",
        off=lambda plan, ground: every_stage(plan, lambda stage: replace(stage, tail_chunks=1)),
        without=lambda plan, search: _narrowed(search, "tail_chunks", (1,)),
        burden="chunks behind the last layer",
    ),
    *(_offload(kind) for kind in OFFLOAD_KINDS),
)
"""Every technique, in the order in which people are told of them."""
