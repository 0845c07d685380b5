"""What a fit will need of every device, said before training allocates anything, and plans that need too much."""

from collections.abc import Callable
from dataclasses import dataclass

from lightning_mist.errors import InfeasibleError, TraceError
from lightning_mist.estimate import Estimator, MemoryEstimate, estimate_plan, estimate_prediction, stage_device
from lightning_mist.hardware import AnyCluster
from lightning_mist.model import ModelSpec
from lightning_mist.plan import ModuleMap, Plan
from lightning_mist.tuner.budget import host_bytes_of_each
from lightning_mist.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What the plan of a fit is held against.

    Attributes:
        cluster: The machine.
        asked: Bytes of each device that training may use, if the user said so.
        host_asked: The same of each node's host memory, for what is offloaded.
    """

    cluster: AnyCluster
    asked: int | None
    host_asked: int | None = None

    @property
    def limit(self) -> int:
        """Bytes of each device that may be used, of the largest if they are unlike."""
        return max(part.device.memory_bytes for part in self.cluster.parts) if self.asked is None else self.asked

    def limits(self, plan: Plan) -> tuple[int, ...]:
        """Bytes of each device of every stage of a plan that may be used."""
        return tuple(stage_device(self.cluster, stage.devices, self.limit)[1] for stage in plan.stages)

    @property
    def binds(self) -> bool:
        """Whether going beyond it ends training: where a limit was given, and on devices with memory of their own."""
        return self.asked is not None or self.host_asked is not None or self.cluster.kind == "cuda"

    def refuse_more_host_memory(self, found: MemoryEstimate) -> None:
        """Refuse a plan of which a stage needs more host memory than its devices may use."""
        limit = host_bytes_of_each(self.cluster, self.host_asked)
        worst = max(found.stages, key=lambda stage: stage.host_bytes)
        if worst.host_bytes > limit:
            raise InfeasibleError(
                f"the plan: stage {worst.stage} needs {format_bytes(worst.host_bytes)} of host memory for each of its "
                f"devices for what it offloads, and {format_bytes(limit)} may be used by each: raise host_memory_limit "
                "(of a node), or offload less"
            )


def estimate_made(spec: ModelSpec, plan: Plan, budget: Budget) -> MemoryEstimate:
    """The estimate of a plan that the planner made within the budget; the stage that needs most is replayed."""
    return estimate_plan(Estimator(spec, budget.cluster, budget.limit), plan, advise=False, replay="worst")


def estimate_given(
    plan: Plan,
    module_map: ModuleMap,
    budget: Budget,
    *,
    believed: bool,
    trace: Callable[[], ModelSpec] | None,
    say: Callable[[str], None],
) -> MemoryEstimate | None:
    """The estimate of a plan that the user gave: from its own prediction, or from a trace where the budget binds.

    Args:
        plan: The plan.
        module_map: The module that it is for.
        budget: What it is held against.
        believed: Whether the plan was made for what is at hand, so that its prediction holds.
        trace: Traces the module; None where that cannot be done.
        say: Prints a line.

    Returns:
        The estimate; None where nothing binds or nothing can be said.

    Raises:
        InfeasibleError: If the plan does not fit.
    """
    if plan.predicted is not None and believed:
        found = estimate_prediction(plan, module_map, budget.cluster, budget.limit)
    elif not budget.binds:
        return None
    else:
        try:
            spec = None if trace is None else trace()
        except TraceError as error:
            spec = None
            say(f"what the plan needs of memory is not known: {error}")
        if spec is None:
            if budget.asked is not None:
                say(f"memory_limit of {format_bytes(budget.asked)} is not checked: nothing predicts what it needs")
            return None
        found = estimate_plan(Estimator(spec, budget.cluster, budget.limit), plan, replay="worst")
    if budget.binds and found.verdict == "does not fit":
        raise InfeasibleError(f"the plan: {found.explain()}\nRaise memory_limit, or let plan='auto' make one for it")
    if budget.binds:
        budget.refuse_more_host_memory(found)
    return found
