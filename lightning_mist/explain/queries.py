"""Asking for plans until time is up: as they are, the best of a search space, and on other machines."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import thread_time

from lightning_mist.cost import predict_with
from lightning_mist.cost.interleaved_memory import plan_memory
from lightning_mist.errors import InfeasibleError, MistError
from lightning_mist.explain.explanation import Version
from lightning_mist.explain.what_if import Machine
from lightning_mist.plan import Plan, SearchSpace
from lightning_mist.plan.changes import Ground
from lightning_mist.tuner.infeasible import UndecidedError
from lightning_mist.tuner.planner import Planner


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
    answers: list[tuple[SearchSpace, Version]] = field(default_factory=list)
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
        assert known.predicted is not None
        peaks = [stage.peak_bytes for stage in known.predicted.stages]
        return Version(
            plan=known,
            missing_bytes=_missing(peaks, on.limits(plan)),
            missing_host_bytes=_missing(held, on.host_limits(plan)) if moves else 0,
        )

    def best(self, what: str, search: SearchSpace) -> Version | None:
        """The best plan of a search space for the machine at hand; None if there is no time to search for it."""
        known = self._known(search)
        if known is not None or not self._has_time(what, self.longest):
            return known
        began = thread_time()
        found = self._ask(what, search, self.machine)
        self.longest = max(self.longest, thread_time() - began)
        if found is not None:
            self.answers.append((search, found))
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

    def _known(self, search: SearchSpace) -> Version | None:
        """The best plan of a space that is a part of one whose best plan is known and lies in that part."""
        for asked, version in self.answers:
            if replace(asked, zero_stages=search.zero_stages) != search or not version.proven:
                continue
            levels = set() if version.plan is None else {int(stage.zero_stage) for stage in version.plan.stages}
            if set(search.zero_stages) <= set(asked.zero_stages) and levels <= set(search.zero_stages):
                return version
        return None

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
