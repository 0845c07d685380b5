"""Why a plan: what binds, what each technique buys, what else there was, and what a better machine would buy.

Everything said is computed: a technique is switched off in the plan itself, and then a plan is searched for in the
space without it; other kinds of plans and better machines are searched for in the same way. Each such search takes a
part of the seconds that explaining may take; what there was no time for is listed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

from lightning_mist.cost import predict_with, profiles_of
from lightning_mist.cost.chunks import plan_memory
from lightning_mist.errors import InfeasibleError, MistError, PlanError
from lightning_mist.plan import Plan
from lightning_mist.tuner.changed_plan import Ground, microbatch_counts, with_microbatches
from lightning_mist.tuner.explanation import Explanation, Finding, OtherPlan, TechniqueValue, Version, WhatIf, kind_of
from lightning_mist.tuner.findings import batch_finding, findings_of
from lightning_mist.tuner.kinds import differences
from lightning_mist.tuner.planner import Planner
from lightning_mist.tuner.result import TuneResult
from lightning_mist.tuner.space import SearchSpace
from lightning_mist.tuner.techniques import TECHNIQUES, Technique
from lightning_mist.tuner.what_if import Machine, better_machines

OTHERS = 3
"""Plans of other kinds that are kept."""

EXPLAIN_SECONDS = 10.0
"""The most seconds that explaining takes by default, but for the search at hand when they are over."""


def explain_plan(
    planner: Planner,
    result: TuneResult,
    *,
    global_batch_size: int,
    memory_limit: int | None = None,
    host_memory_limit: int | None = None,
    search: SearchSpace | None = None,
    seconds: float = EXPLAIN_SECONDS,
) -> Explanation:
    """Why a plan was chosen.

    Args:
        planner: What found the plan; it is asked for others.
        result: What it found.
        global_batch_size: Rows that one batch brings over all devices, as in the search for the plan.
        memory_limit: Bytes of each device that may be used in all, as there.
        host_memory_limit: Bytes of host memory of each node, as there.
        search: The search space, as there.
        seconds: The most seconds to search for other plans: with 0 only what needs no search is said. A search that
            has begun is stopped by its own limits, so that it may take somewhat longer.

    Raises:
        ValueError: If ``seconds`` is negative.
    """
    if seconds < 0:
        raise ValueError(f"seconds={seconds}: explaining takes some time; give 0 for what needs no search")
    began = perf_counter()
    asker = _Asker(
        planner=planner,
        machine=Machine(
            change="",
            cluster=planner.cluster,
            profiles=profiles_of(planner.model),
            memory_limit=memory_limit,
            host_memory_limit=host_memory_limit,
            is_other=False,
        ),
        global_batch_size=global_batch_size,
        search=search or SearchSpace(),
        deadline=began + seconds,
        is_searching=seconds > 0,
        slowest=result.stats.seconds,
    )
    asker.found += [result.plan, *(item.plan for item in result.alternatives)]
    plan = result.plan
    findings = _findings(asker, plan)
    used = [technique for technique in TECHNIQUES if technique.use(plan)]
    switched_off = [_switched_off(asker, technique, plan) for technique in used]
    more_memory = _what_ifs(asker, plan, is_other=False)
    techniques = tuple(
        replace(value, best_without=_best_without(asker, technique, plan))
        for technique, value in zip(used, switched_off, strict=True)
    )
    others = _others(asker, plan)
    faster = _what_ifs(asker, plan, is_other=True)
    return Explanation(
        plan=plan,
        limits=asker.machine.limits(plan),
        findings=findings,
        techniques=techniques,
        others=others,
        what_ifs=(*more_memory, *faster),
        left_out=tuple(asker.left_out),
        seconds=perf_counter() - began,
    )


@dataclass(slots=True, kw_only=True)
class _Asker:
    """Asks for plans until time is up, and remembers them.

    Attributes:
        planner: Who is asked about the machine at hand.
        machine: The machine at hand.
        global_batch_size: Rows of a batch.
        search: The search space.
        deadline: When time is up.
        is_searching: Whether plans are searched for at all.
        slowest: Seconds of a search from scratch.
        other: The last machine that needed another planner, and that planner.
        longest: Seconds of the longest search so far that could build on others.
        found: Plans for the machine at hand that fit.
        left_out: What was not asked.
    """

    planner: Planner
    machine: Machine
    global_batch_size: int
    search: SearchSpace
    deadline: float
    is_searching: bool
    slowest: float
    longest: float = 0.0
    other: tuple[Machine, Planner] | None = None
    found: list[Plan] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def ground(self) -> Ground:
        """What changes of plans keep to."""
        return Ground(
            cuts_batches=not self.planner.spec.module_map.excludes("microbatches"),
            search=self.search,
        )

    def planner_of(self, machine: Machine) -> Planner:
        """Who is asked about a machine."""
        if not machine.is_other:
            return self.planner
        if self.other is None or self.other[0] != machine:
            profiles = machine.profiles if len(machine.profiles) > 1 else machine.profiles[0]
            self.other = machine, Planner(self.planner.spec, machine.cluster, profile=profiles)
        return self.other[1]

    def predicted(self, plan: Plan, machine: Machine | None = None) -> Version:
        """A plan as it is."""
        on = machine or self.machine
        try:
            model = self.planner_of(on).model
            known = replace(plan, predicted=predict_with(model, replace(plan, predicted=None)))
            held = [memory.host_bytes for memory in plan_memory(model.memory, plan)]
        except MistError as error:
            return Version(plan=None, reason=str(error))
        assert known.predicted is not None
        peaks = [stage.peak_bytes for stage in known.predicted.stages]
        return Version(
            plan=known,
            missing_bytes=_missing(peaks, on.limits(plan)),
            missing_host_bytes=_missing(held, on.host_limits(plan)),
        )

    def best(self, what: str, search: SearchSpace | None = None, machine: Machine | None = None) -> Version | None:
        """The best plan of a search space; None if there is no time, or no machine to ask for."""
        on, left = machine or self.machine, self.deadline - perf_counter()
        if not self.is_searching:
            return None
        if left < (self.longest if not on.is_other else self.slowest):
            self.left_out.append(f"{what}: there was no time for another search")
            return None
        wanted, began = search or self.search, perf_counter()
        try:
            result = self.planner_of(on).tune(
                global_batch_size=self.global_batch_size,
                memory_limit=on.memory_limit,
                host_memory_limit=on.host_memory_limit,
                search=replace(wanted, solver_seconds=min(wanted.solver_seconds, left)),
            )
        except InfeasibleError as error:
            return Version(plan=None, reason=str(error))
        except MistError as error:
            self.left_out.append(f"{what}: {error}")
            return None
        finally:
            if not on.is_other:
                self.longest = max(self.longest, perf_counter() - began)
        if on is self.machine:
            self.found += [result.plan, *(item.plan for item in result.alternatives)]
        return Version(plan=result.plan, proven=result.status != "time limit")


def _missing(needed: Sequence[int], limits: Sequence[float]) -> int:
    """Bytes that the stage that lacks most needs beyond what there is."""
    return round(max(0.0, *(need - limit for need, limit in zip(needed, limits, strict=True))))


def _findings(asker: _Asker, plan: Plan) -> tuple[Finding, ...]:
    """What binds on every stage, and what other numbers of microbatches would take."""
    stages = findings_of(
        asker.planner.model,
        plan,
        limits=asker.machine.limits(plan),
        host_limits=asker.machine.host_limits(plan),
        ratios=asker.search.offload_ratios,
    )
    degrees = [stage.data_parallel_degree for stage in plan.stages]
    counts = microbatch_counts(plan, degrees, asker.ground)
    near = [max((count for count in counts if count < plan.num_microbatches), default=None)]
    near.append(min((count for count in counts if count > plan.num_microbatches), default=None))
    versions = [(count, asker.predicted(with_microbatches(plan, count))) for count in near if count is not None]
    return (*stages, batch_finding(plan, versions))


def _switched_off(asker: _Asker, technique: Technique, plan: Plan) -> TechniqueValue:
    try:
        version = asker.predicted(technique.off(plan, asker.ground))
    except PlanError as error:
        version = Version(plan=None, reason=str(error))
    return TechniqueValue(name=technique.name, meaning=technique.meaning, use=technique.use(plan), switched_off=version)


def _best_without(asker: _Asker, technique: Technique, plan: Plan) -> Version | None:
    search = technique.without(plan, asker.search)
    if search is None:
        return None
    return asker.best(f"the best plan without {technique.name}", search)


def _others(asker: _Asker, plan: Plan) -> tuple[OtherPlan, ...]:
    """The fastest plans of other kinds that were found, after some of them were searched for."""
    for what, search in _other_spaces(asker, plan):
        asker.best(what, search)
    mine, best = kind_of(plan), dict[object, Plan]()
    for other in asker.found:
        kind = kind_of(other)
        if kind != mine and (kind not in best or _seconds(other) < _seconds(best[kind])):
            best[kind] = other
    fastest = sorted(best.values(), key=lambda other: (_seconds(other), kind_of(other)))[:OTHERS]
    return tuple(OtherPlan(plan=other, differences=differences(mine, kind_of(other))) for other in fastest)


def _other_spaces(asker: _Asker, plan: Plan) -> Iterable[tuple[str, SearchSpace]]:
    """Search spaces of plans that differ from the one at hand in what it uses none or all of."""
    search, spec = asker.search, asker.planner.spec
    most = min(plan.world_size, max(1, spec.num_layers), search.max_stages or plan.world_size)
    asked = range(1, most + 1) if search.num_stages is None else search.num_stages
    stages = tuple(count for count in asked if count != plan.num_groups and count <= most)
    if stages:
        yield "the best plan with another number of stages", replace(search, num_stages=stages)
    degrees = sorted({split.degree for split in spec.splits})
    sharing = tuple(
        degree
        for degree in degrees
        if search.tensor_parallel_degrees is None or degree in search.tensor_parallel_degrees
    )
    if sharing and kind_of(plan).tensor == (1,):
        yield "the best plan with tensor parallelism everywhere", replace(search, tensor_parallel_degrees=sharing)
    sharded = tuple(level for level in search.zero_stages if level)
    if sharded and len(sharded) < len(search.zero_stages) and kind_of(plan).zero == (0,):
        yield "the best plan with ZeRO wherever there is data parallelism", replace(search, zero_stages=sharded)


def _what_ifs(asker: _Asker, plan: Plan, *, is_other: bool) -> tuple[WhatIf, ...]:
    """What better machines would buy: those that differ in limits only, or the others."""
    if not asker.is_searching:
        return ()
    machines, left_out = better_machines(asker.machine, global_batch_size=asker.global_batch_size, search=asker.search)
    found = []
    for machine in machines:
        if machine.is_other != is_other:
            continue
        grows = machine.cluster.world_size != plan.world_size
        same = None if grows else asker.predicted(plan, machine)
        found.append(WhatIf(change=machine.change, same_plan=same, best=asker.best(machine.change, machine=machine)))
    if is_other:
        asker.left_out += left_out
    return tuple(found)


def _seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_seconds
