"""Why a plan: what binds, what each technique buys, what else there was, and what a better machine would buy.

All of it is computed, by searches in other spaces and for other machines until the seconds for that are over.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from time import thread_time

from lightning_mist.cost import predict_with, profiles_of
from lightning_mist.cost.interleaved_memory import plan_memory
from lightning_mist.errors import InfeasibleError, MistError, PlanError
from lightning_mist.explain.explanation import (
    Explanation,
    Finding,
    Kind,
    OtherPlan,
    TechniqueValue,
    Version,
    WhatIf,
    differences,
    kind_of,
)
from lightning_mist.explain.findings import batch_finding, findings_of, is_hardly
from lightning_mist.explain.what_if import Machine, better_machines
from lightning_mist.plan import Plan, SearchSpace
from lightning_mist.plan.changes import TECHNIQUES, Ground, Technique, microbatch_counts, with_microbatches
from lightning_mist.tuner.infeasible import UndecidedError
from lightning_mist.tuner.planner import Planner
from lightning_mist.tuner.select import LEAST_SHARE, TuneResult
from lightning_mist.units import format_seconds

# Asking for plans until time is up: as they are, the best of a search space, and on other machines.


@dataclass(slots=True, kw_only=True)
class Asker:
    """Asks for plans until time is up, and remembers them.

    Attributes:
        slowest: Seconds of a search from scratch.
        longest: Seconds of the longest search so far for the machine at hand.
        other: The last machine that needed another planner, and that planner.
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
    unsearched: list[str] = field(default_factory=list)

    @property
    def ground(self) -> Ground:
        """What changes of plans keep to."""
        return Ground(cuts_batches=not self.planner.spec.module_map.excludes("microbatches"), search=self.search)

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
            moves = any(stage.offload.any for stage in plan.stages)
            held = [memory.host_bytes for memory in plan_memory(model.memory, plan)] if moves else []
        except MistError as error:
            return Version(plan=None, reason=str(error))
        peaks = [stage.peak_bytes for stage in known.prediction.stages]
        return Version(
            plan=known,
            missing_bytes=_missing(peaks, on.limits(plan)),
            missing_host_bytes=_missing(held, on.host_limits(plan)) if moves else 0,
        )

    def best(self, what: str, search: SearchSpace) -> Version | None:
        """The best plan of a search space for the machine at hand; None if there is no time to search for it."""
        if not self._has_time(what, self.longest):
            return None
        began = thread_time()
        found = self._ask(what, search, self.machine)
        self.longest = max(self.longest, thread_time() - began)
        return found

    def best_on(self, machine: Machine) -> Version | None:
        """The best plan for another machine; None if there is no time to search for it."""
        needs = self.slowest if machine.is_other else 0.0
        return self._ask(machine.change, self.search, machine) if self._has_time(machine.change, needs) else None

    def _has_time(self, what: str, seconds: float) -> bool:
        if not self.is_searching:
            return False
        if self.deadline - thread_time() > seconds:
            return True
        self.unsearched.append(what)
        return False

    def _ask(self, what: str, search: SearchSpace, machine: Machine) -> Version | None:
        left = self.deadline - thread_time()
        try:
            result = self.planner_of(machine).tune(
                global_batch_size=self.global_batch_size,
                memory_limit=machine.memory_limit,
                host_memory_limit=machine.host_memory_limit,
                search=replace(search, solver_seconds=min(search.solver_seconds, left)),
            )
        except UndecidedError:
            self.unsearched.append(what)
            return None
        except InfeasibleError as error:
            return Version(plan=None, reason=str(error))
        except MistError as error:
            self.left_out.append(f"{what}: {error}")
            return None
        if machine is self.machine:
            self.found += [result.plan, *(item.plan for item in result.alternatives)]
        return Version(plan=result.plan, proven=result.is_proven)


def _missing(needed: Sequence[int], limits: Sequence[float]) -> int:
    """Bytes that the stage that lacks most needs beyond what there is."""
    return round(max(0.0, *(need - limit for need, limit in zip(needed, limits, strict=True))))


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
        global_batch_size: Rows that one batch brings over all devices, as in the search for the plan.
        seconds: The most seconds to search for other plans: with 0 only what needs no search is said. A search that
            has begun is stopped by its own limits, so that it may take somewhat longer.

    Raises:
        ValueError: If ``seconds`` is negative.
    """
    if seconds < 0:
        raise ValueError(f"seconds={seconds}: explaining takes some time; give 0 for what needs no search")
    began = thread_time()
    machine = Machine(
        change="",
        cluster=planner.cluster,
        profiles=profiles_of(planner.model),
        memory_limit=memory_limit,
        host_memory_limit=host_memory_limit,
        is_other=False,
    )
    asker = Asker(
        planner=planner,
        machine=machine,
        global_batch_size=global_batch_size,
        search=planner.space(global_batch_size, search).search,
        deadline=began + seconds,
        is_searching=seconds > 0,
        slowest=result.stats.seconds,
        found=[result.plan, *(item.plan for item in result.alternatives)],
    )
    plan = result.plan
    findings = _findings(asker, plan)
    used = [technique for technique in TECHNIQUES if technique.use(plan)]
    values = [_switched_off(asker, technique, plan) for technique in used]
    techniques, what_ifs = _searched(asker, plan, list(zip(used, values, strict=True)))
    others = _others(asker, plan)
    return Explanation(
        plan=plan,
        limits=asker.machine.limits(plan),
        findings=findings,
        techniques=techniques,
        others=others,
        what_ifs=what_ifs,
        left_out=tuple(asker.left_out),
        unsearched=tuple(asker.unsearched),
        more_seconds=len(asker.unsearched) * max(asker.longest, asker.slowest),
        seconds=thread_time() - began,
    )


def _searched(
    asker: Asker, plan: Plan, used: Sequence[tuple[Technique, TechniqueValue]]
) -> tuple[tuple[TechniqueValue, ...], tuple[WhatIf, ...]]:
    """The best plans without each technique and for better machines, by turns, so that time goes to both."""
    if not asker.is_searching:
        return tuple(value for _, value in used), ()
    machines, left_out = better_machines(asker.machine, global_batch_size=asker.global_batch_size, search=asker.search)
    techniques, what_ifs = [], []
    for machine, item in zip_longest(machines, used):
        if machine is not None:
            grows = machine.cluster.world_size != plan.world_size
            same = None if grows else asker.predicted(plan, machine)
            what_ifs.append(WhatIf(change=machine.change, same_plan=same, best=asker.best_on(machine)))
        if item is not None:
            technique, value = item
            space = technique.without(plan, asker.search)
            best = None if space is None else asker.best(f"the best plan without {technique.name}", space)
            techniques.append(replace(value, best_without=best))
    asker.left_out += left_out
    return tuple(techniques), tuple(what_ifs)


def _findings(asker: Asker, plan: Plan) -> tuple[Finding, ...]:
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
    fewer = [count for count in counts if count < plan.num_microbatches]
    more = [count for count in counts if count > plan.num_microbatches]
    versions = [(count, asker.predicted(with_microbatches(plan, count))) for count in (*fewer[-1:], *more[:1])]
    return (*stages, batch_finding(plan, versions))


def _switched_off(asker: Asker, technique: Technique, plan: Plan) -> TechniqueValue:
    try:
        version = asker.predicted(technique.off(plan, asker.ground))
    except PlanError as error:
        version = Version(plan=None, reason=str(error))
    return TechniqueValue(name=technique.name, meaning=technique.meaning, use=technique.use(plan), switched_off=version)


def _others(asker: Asker, plan: Plan) -> tuple[OtherPlan, ...]:
    """The fastest plans of other kinds that were found, after some of them were searched for."""
    for what, search in _other_spaces(asker, plan):
        asker.best(what, search)
    mine, best = kind_of(plan), dict[Kind, Plan]()
    for other in sorted(asker.found, key=lambda other: (other.prediction.step_seconds, kind_of(other))):
        best.setdefault(kind_of(other), other)
    fastest = [
        OtherPlan(plan=other, differences=differences(mine, kind)) for kind, other in best.items() if kind != mine
    ]
    return tuple(fastest[:OTHERS])


def _other_spaces(asker: Asker, plan: Plan) -> Iterable[tuple[str, SearchSpace]]:
    """Search spaces of plans that differ from the one at hand in what it uses none or all of."""
    search, spec = asker.search, asker.planner.spec
    most = min(plan.world_size, max(1, spec.num_layers), search.max_stages or plan.world_size)
    asked = range(1, most + 1) if search.num_stages is None else search.num_stages
    stages = tuple(count for count in asked if count != plan.num_groups and count <= most)
    compared = {other.num_groups for other in asker.found} - {plan.num_groups}
    if stages and not compared and search.layer_cuts is None:  # The search itself compares some.
        yield "the best plan with another number of stages", replace(search, num_stages=stages)
    allowed = search.tensor_parallel_degrees
    degrees = sorted({split.degree for split in spec.splits})
    sharing = tuple(degree for degree in degrees if allowed is None or degree in allowed)
    if sharing and kind_of(plan).tensor == (1,):
        yield "the best plan with tensor parallelism everywhere", replace(search, tensor_parallel_degrees=sharing)
    sharded = tuple(level for level in search.zero_stages if level)
    if sharded and len(sharded) < len(search.zero_stages) and kind_of(plan).zero == (0,) and plan.world_size > 1:
        yield "the best plan with ZeRO wherever there is data parallelism", replace(search, zero_stages=sharded)


_TECHNIQUES = 2
"""How many of the reasons are techniques, at most, where something binds too."""

_FIRST: tuple[str, ...] = ("memory", "pace", "host link", "boundary", "host memory", "batch")
"""Limits in the order in which they say most of a plan."""

_ASIDE = re.compile(r" \([^()]*\)")


def main_reasons(explanation: Explanation, most: int = 3) -> tuple[str, ...]:
    """What its techniques buy that buy most, and what binds first.

    Techniques without which the plan needs more memory than there is come first, those that lack most ahead; then
    those without which it takes longest.
    """
    step = explanation.step_seconds
    gains = [item for item in explanation.techniques if _gain(item, step) > LEAST_SHARE or _lacks(item)]
    gains.sort(key=lambda item: (-_lacks(item), -_gain(item, step)))
    binding = [finding for finding in explanation.findings if finding.binds and not _is_felt_little(finding, step)]
    binding.sort(key=lambda finding: (_FIRST.index(finding.limit), -dict(finding.values).get("step_gain_seconds", 0.0)))
    limits = list(dict.fromkeys(_brief(finding.text) for finding in binding))
    told = [_bought(item, step) for item in gains[: most - min(len(limits), most - _TECHNIQUES)]]
    return (*told, *limits[: most - len(told)])


def _lacks(item: TechniqueValue) -> int:
    """Bytes that the plan lacks without a technique."""
    return item.switched_off.missing_bytes + item.switched_off.missing_host_bytes


def _gain(item: TechniqueValue, step_seconds: float) -> float:
    """How much longer the step is without a technique, as a share; nothing where that is not known."""
    seconds = item.switched_off.seconds
    return 0.0 if seconds is None else seconds / step_seconds - 1


def _bought(item: TechniqueValue, step_seconds: float) -> str:
    off = item.switched_off
    if not off.fits:
        return f"{item.name}: without, {off.lacks} more per device would be needed than there is"
    assert off.seconds is not None
    return f"{item.name}: without, a step takes {format_seconds(off.seconds)} ({_gain(item, step_seconds):+.1%})"


def _is_felt_little(finding: Finding, step_seconds: float) -> bool:
    values = dict(finding.values)
    return "step_gain_seconds" in values and is_hardly(
        values["step_gain_seconds"], values["gain_seconds"], step_seconds
    )


def _brief(text: str) -> str:
    """The first clause of a finding, without asides."""
    return re.split(r"\. |; ", _ASIDE.sub("", text))[0].rstrip(".")
