"""Memory that a fit may take of every device, and plans and trials of its step that would need more.

Estimates are said before training allocates anything. The user's step runs on real numbers before there is a plan: to
prove that batches may be cut, to time layers, to compare the cut module with the whole. A module that needs a plan to
fit may not fit that way, so planning keeps within the memory that the plan is to keep within, or does less at a time.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from lightning_mist.devices import ops_of
from lightning_mist.errors import InfeasibleError, TraceError
from lightning_mist.hardware import AnyCluster
from lightning_mist.model import ModelSpec
from lightning_mist.plan import ModuleMap, Plan, ZeroStage
from lightning_mist.strategy.ranks import everywhere, of_all_ranks
from lightning_mist.units import format_bytes

if TYPE_CHECKING:
    from lightning_mist.estimate import MemoryEstimate

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What the plan of a fit is held against: bytes of each device and of each host, where the user gave limits."""

    cluster: AnyCluster
    asked: int | None
    host_asked: int | None = None

    @property
    def limit(self) -> int:
        """Bytes of each device that may be used, of the largest if they are unlike."""
        return max(part.device.memory_bytes for part in self.cluster.parts) if self.asked is None else self.asked

    def limits(self, plan: Plan) -> tuple[int, ...]:
        """Bytes of each device of every stage of a plan that may be used."""
        from lightning_mist.estimate import stage_device

        return tuple(stage_device(self.cluster, stage.devices, self.limit)[1] for stage in plan.stages)

    @property
    def binds(self) -> bool:
        """Whether going beyond it ends training: where a limit was given, and on devices with memory of their own."""
        return self.asked is not None or self.host_asked is not None or self.cluster.kind == "cuda"

    def refuse_more_host_memory(self, found: "MemoryEstimate") -> None:
        """Refuse a plan of which a stage needs more host memory than its devices may use."""
        from lightning_mist.tuner.space import host_bytes_of_each

        limit = host_bytes_of_each(self.cluster, self.host_asked)
        worst = max(found.stages, key=lambda stage: stage.host_bytes)
        if worst.host_bytes > limit:
            raise InfeasibleError(
                f"the plan: stage {worst.stage} needs {format_bytes(worst.host_bytes)} of host memory for each of its "
                f"devices for what it offloads, and {format_bytes(limit)} may be used by each: raise host_memory_limit "
                "(of a node), or offload less"
            )


def estimate_given(
    plan: Plan,
    module_map: ModuleMap,
    budget: Budget,
    *,
    believed: bool,
    refused: bool,
    trace: Callable[[], ModelSpec] | None,
    say: Callable[[str], None],
) -> "MemoryEstimate | None":
    """The estimate of a plan that the user gave: from its own prediction, or from a trace where the budget binds.

    Args:
        believed: Whether the plan was made for what is at hand, so that its prediction holds.
        refused: Whether one that does not fit is refused: one that was made here for the same limits, and kept, is not.
        trace: Traces the module; None where that cannot be done.

    Returns:
        None where nothing binds or nothing can be said.

    Raises:
        InfeasibleError: If the plan does not fit.
    """
    from lightning_mist.estimate import Estimator, estimate_plan, estimate_prediction

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
    # A limit of the user's own is kept to; on all that a device has, what may run is tried.
    is_over = not found.is_likely if budget.asked is not None else found.verdict == "does not fit"
    if not (budget.binds and refused):
        return found
    if is_over:
        raise InfeasibleError(f"the plan: {found.explain()}\nRaise memory_limit, or let plan='auto' make one for it")
    budget.refuse_more_host_memory(found)
    return found


SETS = 2
"""Of parameters and their gradients, that comparing gradients takes: measured, 2.1 times the parameters' bytes beside
what a step keeps."""


_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"
"""What torch's allocator on a CPU says, in a RuntimeError (c10/core/impl/alloc_cpu.cpp)."""

AMPLE = 0.1
"""Share of the memory that may be used, below which parameters and gradients leave room for whatever a step keeps of
the few rows that it is tried on: that is not counted, which takes half a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What planning may take of each device, in bytes.

    Attributes:
        held: Those of the parameters, without parameters that have no values yet.
        limit: Those that tensors may take.
        step_bytes: Counts what a step of the whole batch allocates at its peak, gradients included; None if unknown.
    """

    held: int
    limit: float
    step_bytes: Callable[[], int | None]

    def is_crowded(self) -> bool:
        """Whether a comparison of gradients may take more than there is."""
        if SETS * self.held <= AMPLE * self.limit:
            return False
        step = self.step_bytes()
        return SETS * self.held + (self.held if step is None else step) > self.limit

    def fitting(self, sizes: Sequence[int]) -> list[int]:
        """Rows of microbatches that can be timed: a step fits beside the parameters; the smallest in any case."""
        step = self.step_bytes()
        if step is None:
            return list(sizes)
        return [size for size in sizes if size == sizes[0] or self.held + step * size / sizes[-1] <= self.limit]


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what it comes from, is that memory has run out."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or _CPU_ALLOCATOR in str(error):
            return True
        error = error.__cause__
    return False


def unless_out_of_memory(work: Callable[[], T], device: torch.device) -> T | None:
    """What work gives; ``None`` if memory ran out, which is free again then."""
    try:
        return work()
    except (TraceError, RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # Outside of the handler: the traceback held what the work had made.
    gc.collect()
    ops_of(device).release_cached()
    return None


def everywhere_unless_out_of_memory(work: Callable[[], T], device: torch.device) -> T | None:
    """What work on all ranks at once gives here; ``None`` on all if memory ran out on any.

    Raises:
        Exception: This rank's own error, or a :class:`TraceError` with that of another.
    """
    found = everywhere(lambda: unless_out_of_memory(work, device))
    return found if all(of_all_ranks(found is not None)) else None


def _whole_bytes(module: nn.Module) -> int:
    """All parameters and buffers of a module, each once."""
    tensors = {id(tensor): tensor for tensor in [*module.parameters(), *module.buffers()]}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def whole_module_bytes(plan: Plan, module: nn.Module) -> tuple[int, ...]:
    """For each stage, what its devices hold while the whole module is there for evaluation, activations left out.

    That is all parameters and buffers, and the gradients and optimizer state of the stage's own parameters. Empty if
    the plan has no prediction.
    """
    if plan.predicted is None:
        return ()
    whole = _whole_bytes(module)
    terms = [dict(stage.breakdown) for stage in plan.predicted.stages]
    return tuple(
        whole + round(term.get("optimizer_bytes", 0.0)) + round(term.get("parameter_bytes", 0.0)) for term in terms
    )


def lack_for_whole(plan: Plan, module: nn.Module, limits: Sequence[int]) -> str | None:
    """Why the whole module cannot be on every device for a validation during fit, if so; the stage that lacks most."""
    first = plan.stages[0]
    is_whole = first.mesh.tensor_parallel_degree == 1 and first.zero_stage < ZeroStage.PARAMETERS
    if plan.num_stages == 1 and is_whole:
        return None  # every rank has the whole module anyway
    needs = whole_module_bytes(plan, module)
    lacks = [need - limit for need, limit in zip(needs, limits, strict=True)] if needs else [0]
    if max(lacks) <= 0:
        return None
    stage = lacks.index(max(lacks))
    return (
        "validation during fit makes the module whole on every device, which takes "
        f"{format_bytes(needs[stage])} on stage {stage} of {plan.num_stages}, activations not counted; "
        f"memory_limit is {format_bytes(limits[stage])} per device"
    )


def refuse_whole(lack: str | None, reason: str | None) -> None:
    """Refuse to make the module whole for a reason where that does not fit; None is no reason, and lacks nothing.

    Raises:
        InfeasibleError: Naming both, and ways out.
    """
    if lack is not None and reason is not None:
        raise InfeasibleError(
            f"{lack}. It is made whole because {reason}. Set limit_val_batches=0 and validate in a run of its own, "
            "change that, or raise memory_limit"
        )


def refuse_whole_alone(module: nn.Module, limit: int | None, reason: str, *, has_plan: bool) -> None:
    """Refuse to make the module whole for an evaluation outside of a fit where that does not fit.

    Args:
        limit: Bytes of each device, if known.
        has_plan: Whether there is a plan that could share it out.

    Raises:
        InfeasibleError: Naming both, and ways out.
    """
    whole = _whole_bytes(module)
    if limit is None or whole <= limit:
        return
    way = "change that" if has_plan else "give the plan of a fit, MistStrategy(plan=...), that shares it out"
    raise InfeasibleError(
        f"parameters and buffers of the module take {format_bytes(whole)}, and memory_limit is {format_bytes(limit)} "
        f"per device. Every device would get the whole module because {reason}. {way[0].upper()}{way[1:]}, or raise "
        "memory_limit"
    )
