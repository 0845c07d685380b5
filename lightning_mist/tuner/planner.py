"""A planner of one network on one machine; see :mod:`lightning_mist.tuner.search.search_loop` for the search itself.

The pipelines of a search (:mod:`lightning_mist.tuner.search.search_loop`) are solved by the closed form of the step.
All that are near the best are then run on the clock, and the fastest there is the winner
(:mod:`lightning_mist.tuner.select.selection`).
"""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from time import thread_time

from lightning_mist.attributes import collector_paused
from lightning_mist.cost import (
    MixedCostModel,
    Profiles,
    cost_model,
    profiles_of,
)
from lightning_mist.errors import PlanError
from lightning_mist.hardware import AnyCluster
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import MOST_LAYERS, Plan, SearchSpace
from lightning_mist.tuner.infeasible import explain_infeasible, refuse_late, too_large
from lightning_mist.tuner.search import Outcome, ProvenBounds, Stages, search_copies, search_pipelines
from lightning_mist.tuner.select import (
    Alternative,
    TuneResult,
    TuneStats,
    choose,
    fastest_with_context,
    known_contexts,
    make_plan,
)
from lightning_mist.tuner.space import (
    USABLE_MEMORY,
    Space,
    apply,
    host_notes,
    with_offload,
)
from lightning_mist.units import format_bytes


class Planner:
    """Finds plans for one network on one machine; every question is searched anew, with the cost model made once.

    What a search has proven holds in later ones with no more memory (:mod:`lightning_mist.tuner.search.pipelines`).

    Args:
        profile: How fast they are, one profile for every part of a cluster of unlike devices; by default from the
            catalog.
    """

    def __init__(self, spec: ModelSpec, cluster: AnyCluster, *, profile: Profiles = None) -> None:
        if spec.num_layers > MOST_LAYERS:
            raise PlanError(
                f"{spec.name} has {spec.num_layers:,} layers: plans are searched for at most {MOST_LAYERS:,}; put "
                "several in one (nn.Sequential), or name a container of fewer as blocks"
            )
        self.spec, self.cluster = spec, cluster
        self.model = cost_model(spec, profile, cluster)
        self._proven = ProvenBounds()
        # The stages of the last search.
        self._last: dict[Space, Stages] = {}

    def with_memory(self, memory_bytes: Sequence[int]) -> "Planner":
        """The same on devices with other memory; what has been computed and proven is shared.

        Args:
            memory_bytes: Of a device of each part.
        """
        parts = tuple(
            replace(part, device=replace(part.device, memory_bytes=most))
            for part, most in zip(self.cluster.parts, memory_bytes, strict=True)
        )
        found = copy(self)
        if isinstance(self.model, MixedCostModel):
            found.model = self.model.with_memory(replace(self.model.cluster, parts=parts))
        else:
            found.model = self.model.with_memory(parts[0])
        found.cluster = found.model.cluster
        return found

    def space(self, global_batch_size: int, search: SearchSpace | None = None) -> Space:
        """The search space at a batch size.

        Raises:
            PlanError: If the batch does not come in equal parts from the devices.
        """
        near = self.cluster.devices_per_node
        found = apply(
            search or SearchSpace(), self.spec, self.cluster.world_size, global_batch_size, devices_per_node=near
        )
        return with_offload(found, self.cluster, profiles_of(self.model), self.spec.module_map)

    def stages(
        self,
        space: Space,
        memory_limit: int | None = None,
        host_memory_limit: int | None = None,
        more: float = 0.0,
    ) -> Stages:
        """What stages may be and cost; shares with those of the last call what does not depend on memory.

        Args:
            memory_limit: Bytes of each device that may be used in all.
            host_memory_limit: Bytes of host memory of each node that offloading may take.
            more: Bytes that tensors may take on each device beyond that.
        """
        found = Stages(self.model, space, memory_limit, host_memory_limit, more, self._last.get(space))
        self._last.clear()
        self._last[space] = found
        return found

    def _look(
        self, space: Space, limits: tuple[int | None, int | None], deadline: float, more: float, below: float
    ) -> tuple[Stages, Outcome]:
        """Search the pipelines, with so many more bytes on each device, for plans below so many seconds."""
        stages = self.stages(space, *limits, more)
        if too_large(stages):
            outcome = Outcome.nothing(len(stages.pipelines))
        else:
            outcome = search_pipelines(stages, deadline, below, self._proven.of(stages))
        self._proven.add(stages, outcome.bounds)
        return stages, outcome

    @collector_paused()
    def tune(
        self,
        *,
        global_batch_size: int,
        memory_limit: int | None = None,
        host_memory_limit: int | None = None,
        search: SearchSpace | None = None,
    ) -> TuneResult:
        """The fastest plan that fits.

        Args:
            global_batch_size: Rows that one Lightning batch brings over all devices.
            memory_limit: Bytes of each device that may be used in all; see :func:`usable_bytes`.
            host_memory_limit: Bytes of host memory of each node that offloading may take, its devices equal parts; by
                default a share of what the hosts have, see
                :func:`~lightning_mist.hardware.host_share.usable_host_bytes`.
            search: Limits of the search; by default none.

        Raises:
            InfeasibleError: If no plan fits, with the least that any needs and what binds; or
                :class:`~lightning_mist.tuner.infeasible.UndecidedError`, if time was up before one was found.
            PlanError: If the batch does not come in equal parts from the devices.
            ProfileError: If the profile lacks what the cost model needs.
        """
        began, search = thread_time(), search or SearchSpace()
        space = self.space(global_batch_size, search)
        deadline = began + search.solver_seconds
        stages, outcome = search_copies(
            lambda item, more, below: self._look(item, (memory_limit, host_memory_limit), deadline, more, below),
            self.spec,
            space,
        )
        # Of devices that are all alike some may share rows.
        context = fastest_with_context(stages.parts[0]) if len(stages.parts) == 1 else None
        if outcome.winner is None and context is not None:
            return _shared_rows(context, _stats(stages, outcome, began), _notes(stages))
        if outcome.winner is None and outcome.is_late:
            refuse_late(stages)
        if outcome.winner is None:
            until = max(deadline, thread_time() + 0.1)
            explain_infeasible(stages, lambda problem, chosen: make_plan(space, problem, chosen, self.cluster), until)
        found = choose(stages, outcome, _stats(stages, outcome, began))
        numbers = _numbers(stages, found.plan, memory_limit, host_memory_limit)
        # Choosing between schedules is part of what the search takes.
        stats = _stats(stages, outcome, began)
        found = replace(found, notes=(*_notes(stages), *found.notes, *numbers), stats=stats)
        return found if context is None else _faster(found, context)


def tune(
    spec: ModelSpec,
    cluster: AnyCluster,
    *,
    profile: Profiles = None,
    global_batch_size: int,
    memory_limit: int | None = None,
    host_memory_limit: int | None = None,
    search: SearchSpace | None = None,
) -> TuneResult:
    """The fastest plan that fits.

    Args:
        profile: How fast they are, one profile for every part of a cluster of unlike devices; by default from the
            catalog.
        global_batch_size: Rows that one Lightning batch brings over all devices.
        memory_limit: Bytes of each device that may be used in all; see
            :func:`~lightning_mist.tuner.space.usable_memory.usable_bytes`.
        host_memory_limit: Bytes of host memory of each node that offloading may take, of which every device may take
            an equal part; by default a share of what the hosts have, see
            :func:`~lightning_mist.hardware.host_share.usable_host_bytes`.
        search: Limits of the search; by default none.

    Raises:
        InfeasibleError: If no plan fits, with the least that any needs and what binds.
        PlanError: If the batch does not come in equal parts from the devices.
        ProfileError: If the profile lacks what the cost model needs.
    """
    return Planner(spec, cluster, profile=profile).tune(
        global_batch_size=global_batch_size,
        memory_limit=memory_limit,
        host_memory_limit=host_memory_limit,
        search=search,
    )


def _stats(stages: Stages, outcome: Outcome, began: float) -> TuneStats:
    return TuneStats(
        seconds=thread_time() - began,
        candidates=stages.evaluated,
        pipelines=outcome.pipelines,
        solved=outcome.solved,
    )


def _shared_rows(plan: Plan, stats: TuneStats, notes: tuple[str, ...]) -> TuneResult:
    """The result where only plans whose devices share rows fit."""
    return TuneResult(
        plan=plan,
        status="explored",
        bound=0.0,
        gap=1.0,
        closed_form_seconds=plan.prediction.step_seconds,
        alternatives=(),
        stats=stats,
        notes=(*notes, "without context parallelism nothing fits"),
    )


def _faster(found: TuneResult, context: Plan) -> TuneResult:
    """A result, with a plan whose devices share rows where that is faster."""
    if context.prediction.step_seconds >= found.predicted.step_seconds:
        return replace(found, alternatives=(*found.alternatives, Alternative(name="context parallelism", plan=context)))
    others = (Alternative(name="without context parallelism", plan=found.plan), *found.alternatives)
    return replace(
        found,
        plan=context,
        status="explored",
        bound=0.0,
        gap=1.0,
        alternatives=others,
        certified=False,
    )


def unshared(plan: Plan, search: SearchSpace) -> tuple[str, ...]:
    """Where a plan has nothing to share out by the ZeRO stages that were asked for; for people."""
    copies = [stage.mesh.data_parallel_degree * stage.mesh.context_parallel_degree for stage in plan.stages]
    alone = ", ".join(str(number) for number, degree in enumerate(copies) if degree == 1)
    said = (
        f"zero_stages = {search.zero_stages}: ZeRO shares nothing out on these stages of the plan: {alone}. One rank "
        "has each parameter there; data_parallel_degrees, such as (2,), or max_stages = 1 ask for more"
    )
    return (said,) if alone and 0 not in search.zero_stages else ()


def _notes(stages: Stages) -> tuple[str, ...]:
    """What was ruled out, whatever was found."""
    return *stages.space.notes, *_context_notes(stages), *_part_notes(stages)


def _context_notes(stages: Stages) -> tuple[str, ...]:
    """Why rows are not shared among so many devices as was asked for."""
    degrees, notes = known_contexts(stages.space, stages.model.spec.module_map)
    if len(stages.parts) == 1 or not (degrees or notes):
        return notes
    return ("without context parallelism: it is not tried on devices that are not all alike",)


def _part_notes(stages: Stages) -> Iterable[str]:
    """What was ruled out on a part of a mixed cluster, and not on all."""
    for part, own in zip(stages.model.cluster.parts, stages.spaces, strict=True):
        yield from (f"on {part.text} {note}" for note in own.notes if note not in stages.space.notes)


def _numbers(stages: Stages, plan: Plan, asked: int | None, asked_of_host: int | None) -> Iterable[str]:
    """Where the numbers behind a plan come from, and what devices may use."""
    model = stages.model
    sources = {model.region_seconds(stage.microbatch_size).source for stage in plan.stages}
    if any(stage.mesh.tensor_parallel_degree > 1 for stage in plan.stages) and model.spec.seconds:
        yield "seconds of split layers shrink as their FLOPs and bytes do; tensor parallelism is not measured"
    profiles = dict.fromkeys(text for item in profiles_of(model) for text in item.source.split("; "))
    compiled = model.spec.compiled and f", {model.spec.compiled}"
    words = {
        "rates": f"seconds of layers follow from FLOPs and bytes and the profile's rates ({'; '.join(profiles)})",
        "extrapolated": "seconds of layers are extrapolated from measured microbatch sizes",
        "measured": f"seconds of layers are measured{compiled}",
    }
    yield from (words[name] for name in words if name in sources)
    if compiled and "rates" in sources:
        yield f"{model.spec.compiled}: their kernels are priced as --stack says, which is eagerly unless asked for"
    names = (part.device.name for part in model.cluster.parts)
    for name, limit in dict.fromkeys(zip(names, (part.memory_limit for part in stages.parts), strict=True)):
        if asked is None or limit < asked:
            whole = f"the memory of {name}" if asked is None else "memory_limit"
            yield (
                f"tensors may take {format_bytes(limit)} per device, {USABLE_MEMORY:.0%} of {whole}: the rest is for "
                "the context, communicators and what the allocator keeps free"
            )
    yield from host_notes(model.cluster, asked_of_host) if stages.space.search.offload else ()
