"""What people would choose, under the same cost model and the same limits: the plans that a found one has to beat.

Each baseline is a restriction of the search space, and at its best there: everything that its own tool leaves to the
user is tried, how many layers are recomputed and how small microbatches are included. A comparison with recomputation
where none is needed would say nothing.

``DDP``
    Data parallelism as torch's DistributedDataParallel does it: every device has everything, each batch is one
    microbatch, nothing is recomputed. ``DDP, tuned`` also cuts batches into microbatches and recomputes layers.
``FSDP``
    torch's FullyShardedDataParallel: one stage under ZeRO-3 (full shard) or ZeRO-2 (shard gradients and optimizer).
``ZeRO-Offload``
    One stage under ZeRO-2 or ZeRO-3 whose optimizer state and gradients may be in host memory (Ren et al., 2021). The
    update itself is priced on the device, through which the state passes.
``ZeRO-Infinity``
    One stage under ZeRO-3 whose parameters, gradients, optimizer state and activations may be in host memory
    (Rajbhandari et al., 2021).
``Megatron-LM``
    Stages of equally many layers, all with the same degrees of data and tensor parallelism, with or without sequence
    parallelism, under ZeRO-0 or ZeRO-1 (its distributed optimizer), in one piece or in interleaved chunks (Narayanan et
    al., 2021; Korthikanti et al., 2022). Three times: with no layer recomputed, with all, and with as many of each
    stage as are best.
``Aceso``
    Stages of their own sizes and arrangements of devices, with their own recomputed layers; nothing is sharded or
    offloaded (Liu et al., 2024).
``Mist paper's space``
    Stages with the same devices, arranged alike, without sequence parallelism; microbatches of 1, 2 or 4 rows on each
    device, their number a power of two; every stage with its own layers, recomputed layers, ZeRO stage from 1 to 3
    and offload ratios (Zhu et al., 2025). The ratios are those of the grid that the search for a plan uses, and
    stages have any number of layers, where the published tuner keeps within two of an even share.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import thread_time
from types import MappingProxyType
from typing import Any

from lightning_mist.cost import profiles_of
from lightning_mist.cost.time import copy_rates
from lightning_mist.errors import InfeasibleError, ProfileError
from lightning_mist.explain.explanation import differences, kind_of
from lightning_mist.hardware.catalog import with_stack
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import OFFLOADED, Plan, SearchSpace, StepRates, step_rates
from lightning_mist.plan.changes import DEFERRED_UPDATE
from lightning_mist.plan.plan_tables import per_second
from lightning_mist.plan.plan_text import recipe_of
from lightning_mist.tuner.infeasible import UndecidedError
from lightning_mist.tuner.planner import Planner
from lightning_mist.tuner.select import ALIKE
from lightning_mist.tuner.space import divisors
from lightning_mist.units import format_bytes, format_seconds

OURS = "this plan"
"""What the plan itself is called."""

REST = "all others"
"""In the place of a name: every baseline that is not named."""

WITH_AUTOCAST = ("DDP", "DDP, tuned")
"""Baselines whose tool keeps weights in 32 bits and casts them for use; those of all others keep weights in 16 bits,
and masters in 32 (FSDP2's mixed precision, DeepSpeed, Megatron-LM, on which Aceso and Mist are built)."""

UNDIVIDED = "no number of microbatches or stages that it allows divides this batch"
"""Why there is no plan where memory is not the reason."""

UNDECIDED = "not decided in time: none was found, and whether one fits is not known"
"""Why there is no plan where the search for one was stopped."""

CUT_SHORT = "the best found in the time that there was"
"""What to know of a plan whose search was stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """For what plans are asked; of the search space the limits that hold for all of them."""

    global_batch_size: int
    limits: Mapping[str, int | None]
    search: SearchSpace


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """The plans that a tool would choose among.

    Attributes:
        limits: Of its search space, beside those that hold for all.
        is_alike: Whether all stages of a plan have the same devices, arranged alike, whatever else differs.
        is_fused: Whether its tool runs fused kernels (TransformerEngine's); others run eager torch, as this runtime.
    """

    name: str
    limits: Mapping[str, Any]
    is_alike: bool = False
    is_fused: bool = False

    def within(self, planner: Planner, asked: Asked) -> Iterator[SearchSpace]:
        """Its spaces within the limits that hold for all; none where these leave it no degree, or no recomputation."""
        search = replace(asked.search, **self.limits)
        every = planner.space(asked.global_batch_size, asked.search)
        degrees = {degree for degree, _ in every.tensor}
        if degrees.isdisjoint(search.tensor_parallel_degrees or degrees):
            return
        if search.checkpointed_shares is not None and not every.checkpointing:
            return
        if not self.is_alike:
            # Equal stages of one tensor-parallel degree are all arranged alike.
            own = degrees & {*(search.tensor_parallel_degrees or degrees)}
            alike = [replace(search, tensor_parallel_degrees=(degree,)) for degree in sorted(own)]
            yield from alike if search.equal_stages else [search]
            return
        # Few stages are searched soonest, if time is short.
        for devices in reversed(divisors(every.world_size)):
            for degree in sorted(degrees):
                if devices % degree == 0:
                    yield replace(
                        search,
                        devices_per_stage=(devices,),
                        data_parallel_degrees=(devices // degree,),
                        tensor_parallel_degrees=(degree,),
                    )


_GRID: Mapping[str, Any] = {
    "equal_stages": True,
    "zero_stages": (0, 1),
    "offload": (),
    "offload_ratios": (0.0, 1.0),
    "schedules": ("1f1b", "interleaved-1f1b"),
}
_ALONE: Mapping[str, Any] = {**_GRID, "num_stages": (1,), "tensor_parallel_degrees": (1,)}
"""Equal stages, and one whose ranks all compute on other rows."""

_APART: Mapping[str, Any] = {"sequence_parallel": False, "schedules": ("1f1b",)}
"""Stages of their own."""

RIVALS = (
    Rival(name="DDP", limits={**_ALONE, "zero_stages": (0,), "checkpointing": False, "num_microbatches": (1,)}),
    Rival(name="DDP, tuned", limits={**_ALONE, "zero_stages": (0,)}),
    Rival(name="FSDP", limits={**_ALONE, "zero_stages": (2, 3)}),
    Rival(name="ZeRO-Offload", limits={**_ALONE, "zero_stages": (2, 3), "offload": ("optimizer", "gradients")}),
    Rival(name="ZeRO-Infinity", limits={**_ALONE, "zero_stages": (3,), "offload": OFFLOADED}),
    Rival(name="Megatron-LM, nothing recomputed", limits={**_GRID, "checkpointing": False}, is_fused=True),
    Rival(name="Megatron-LM, all recomputed", limits={**_GRID, "checkpointed_shares": (1.0,)}, is_fused=True),
    Rival(name="Megatron-LM, tuned", limits=_GRID, is_fused=True),
    Rival(name="Aceso", limits={**_APART, "zero_stages": (0,), "offload": ()}),
    Rival(
        name="Mist paper's space",
        limits={
            **_APART,
            "num_microbatches": tuple(2**exponent for exponent in range(30)),
            "microbatch_sizes": (1, 2, 4),
            "zero_stages": (1, 2, 3),
        },
        is_alike=True,
    ),
)
"""The baselines, in the order in which they are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPlan:
    """The best plan that a person or a tool would choose, as one line of a comparison.

    Attributes:
        plan: The plan with its prediction; None if there is none that fits.
        reason: Why there is none; empty if there is one.
        note: What to know of the search for it.
        ratio: How many times as long as the plan that all are compared with.
        stack: Whose kernels it is priced with, if not with those of the plan that it is compared with.
        precision: What its tool computes in, for people, if that is another precision than the plan's.
    """

    name: str
    plan: Plan | None
    reason: str = ""
    note: str = ""
    ratio: float | None = None
    stack: str = ""
    precision: str = ""

    @property
    def settings(self) -> str:
        """The plan in one line."""
        return "" if self.plan is None else recipe_of(self.plan)

    @property
    def step_seconds(self) -> float | None:
        """Predicted seconds of its step."""
        return None if self.plan is None else self.plan.prediction.step_seconds

    @property
    def rates(self) -> StepRates | None:
        """What it achieves, over all devices."""
        return None if self.plan is None else step_rates(self.plan, self.plan.prediction.step_seconds)

    @property
    def rows_per_second(self) -> float | None:
        """Rows of all devices."""
        return None if self.rates is None else self.rates.rows_per_second

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of all devices, if rows have tokens."""
        return None if self.rates is None else self.rates.tokens_per_second

    @property
    def peak_bytes(self) -> int | None:
        """What tensors take on the device that needs most."""
        return None if self.plan is None else self.plan.prediction.peak_bytes

    def cells(self, *, in_tokens: bool, digits: int) -> tuple[str, str, str, str]:
        """Its seconds, ratio (in so many digits), tokens or rows per second and peak for people, if it has a plan."""
        if self.plan is None:
            return ("-",) * 4
        rate, said = self.tokens_per_second if in_tokens else self.rows_per_second, self.plan.prediction
        shown = "-" if rate is None else per_second(rate)
        return format_seconds(said.step_seconds), f"{self.ratio:.{digits}f}", shown, format_bytes(said.peak_bytes)

    def noted(self, text: str) -> str:
        """What is said of it, with its note."""
        notes = [note for note in (self.precision and f"in {self.precision}", self.note) if note]
        return f"{text} ({', '.join(notes)})" if notes else text


def baselines(
    planner: Planner,
    *,
    global_batch_size: int,
    memory_limit: int | None = None,
    host_memory_limit: int | None = None,
    search: SearchSpace | None = None,
    tell: Callable[[str], None] = lambda text: None,
    others: Mapping[str, Planner] = MappingProxyType({}),
) -> tuple[ComparedPlan, ...]:
    """The best plan of every baseline; see the module.

    Args:
        global_batch_size: Rows that one Lightning batch brings over all devices.
        memory_limit: Bytes that a plan may use of each device; the same default as for a search.
        host_memory_limit: Bytes of host memory of each node that offloading may take.
        search: Limits, of which those of tensor parallelism, the offload ratios and the seconds of solving count.
        others: Planners of the same network in another precision, by the names of the baselines whose tools use it;
            under :data:`REST` that of all others.

    Raises:
        PlanError: If the batch does not come in equal parts from the devices.
        ProfileError: If the profile lacks what the cost model needs.
    """
    given, refused = search or SearchSpace(), _why_no_offload(planner)
    asked = Asked(
        global_batch_size=global_batch_size,
        limits={"memory_limit": memory_limit, "host_memory_limit": host_memory_limit},
        search=SearchSpace(
            tensor_parallel_degrees=given.tensor_parallel_degrees,
            context_parallel_degrees=(),  # none of these tools searches it
            data_parallel_size=given.data_parallel_size,
            offload=() if refused else OFFLOADED,
            offload_ratios=given.offload_ratios,
            solver_seconds=given.solver_seconds,
        ),
    )
    result = []
    for rival in RIVALS:
        tell(f"comparing with {rival.name}")
        own = others.get(rival.name, others.get(REST, planner))
        found = _best(own, asked, rival, refused)
        text = own.spec.precision_text
        result.append(found if text == planner.spec.precision_text else replace(found, precision=text))
    return tuple(result)


def _best(planner: Planner, asked: Asked, rival: Rival, refused: str) -> ComparedPlan:
    """The best plan of a baseline, with the kernels of its tool; ``refused`` says why nothing can be offloaded."""
    if refused and rival.limits.get("offload"):
        return ComparedPlan(name=rival.name, plan=None, reason=refused)
    if len(planner.cluster.parts) > 1 and rival.is_alike:
        return ComparedPlan(name=rival.name, plan=None, reason="not for unlike devices: all its stages have the same")
    fused = _fused(planner) if rival.is_fused else None
    found = _searched(fused or planner, asked, rival)
    return found if fused is None else replace(found, stack="fused")


def _searched(planner: Planner, asked: Asked, rival: Rival) -> ComparedPlan:
    """The best plan of its spaces, which are searched while there is time."""
    began, best, is_late, shortages, is_asked = thread_time(), None, False, [], False
    for search in rival.within(planner, asked):
        spent, most = thread_time() - began, asked.search.solver_seconds
        if is_asked and spent >= most:
            is_late = True
            break
        is_asked, left = True, most - spent if spent < most else most
        try:
            space = replace(search, solver_seconds=left)
            found = planner.tune(global_batch_size=asked.global_batch_size, search=space, **asked.limits)
        except UndecidedError:
            is_late = True
            continue
        except InfeasibleError as error:
            shortages += [error.shortage] if error.shortage else []
            continue
        is_late |= found.status == "time limit"
        best = min(filter(None, (best, found.plan)), key=lambda plan: plan.prediction.step_seconds)
    if best is not None:
        return ComparedPlan(name=rival.name, plan=best, note=CUT_SHORT if is_late else "")
    # Where a setting fits on its devices, host memory is what it lacks.
    least = min(shortages, key=lambda item: (not item[0], item[1]), default=None)
    reason = UNDIVIDED if least is None else f"does not fit: {least[2]}"
    return ComparedPlan(name=rival.name, plan=None, reason=UNDECIDED if is_late else reason)


def _fused(planner: Planner) -> Planner | None:
    """A planner of the same with fused kernels; none where they are not known, or the planner's own."""
    profile, *others = profiles_of(planner.model)
    if others or profile.stack != "eager" or planner.cluster.kind != "cuda":
        return None
    if not profile.source.startswith("catalog") or planner.spec.seconds:
        return None
    return Planner(planner.spec, planner.cluster, profile=with_stack(profile, "fused"))


def _why_no_offload(planner: Planner) -> str:
    """Why nothing can be moved to host memory; empty if it can."""
    if planner.cluster.kind != "cuda":
        return "these devices compute in host memory, so there is nothing to move there"
    try:
        for profile, part in zip(profiles_of(planner.model), planner.cluster.parts, strict=True):
            copy_rates(profile, part)
    except ProfileError as error:
        return str(error)
    return ""


def compare_plans(ours: Plan, others: Sequence[ComparedPlan]) -> tuple[ComparedPlan, ...]:
    """A plan beside others; the plan comes first, the others in their order, each with how many times as long it takes.

    Raises:
        ValueError: If the plan has no prediction, or takes no time by it.
    """
    if ours.predicted is None or ours.predicted.step_seconds <= 0:
        raise ValueError("plan.predicted = None or 0 s: only plans whose seconds are predicted can be compared")
    seconds = ours.predicted.step_seconds
    return tuple(
        item if item.step_seconds is None else replace(item, ratio=item.step_seconds / seconds)
        for item in (ComparedPlan(name=OURS, plan=ours), *others)
    )


def faster_notes(items: Sequence[ComparedPlan]) -> tuple[str, ...]:
    """Which of a comparison are faster than the plan itself, the first, for people; nothing if none is.

    The search proves its plan by the closed form of the step, looks for it where it was told to, and prefers what is
    simpler to what gains little.
    """
    notes: dict[Plan, str] = {}
    ours = items[0].plan
    for item in items:
        if item.plan is None or ours is None or item.ratio is None or item.ratio > 1 - ALIKE:
            continue
        kernels = (f"the kernels of another stack ({item.stack})",) if item.stack else ()
        precision = (item.precision,) if item.precision else ()
        what = (*kernels, *precision, *differences(kind_of(ours), kind_of(item.plan))) or (recipe_of(item.plan),)
        less = f"{item.name} takes {1 - item.ratio:.1%} less on the clock: {'; '.join(what)}"
        # Of plans that several come to the first is enough.
        notes.setdefault(item.plan, f"{less}. Its plan is in what --json prints, under compare")
    return tuple(notes.values())


def baseline_notes(spec: ModelSpec) -> tuple[str, ...]:
    """What to know of the baselines of a network, for people."""
    attention = "Megatron-LM's selective recomputation repeats attention's scores"
    kinds = {item.kind for layer in spec.layers for item in layer.forward_work}
    if kinds & {"attention", "causal_attention"}:
        selective = f"{attention}: the fused attention of these layers keeps none, so it is the same as none recomputed"
    else:
        selective = f"{attention}: these layers have no fused attention, and parts of layers are not recomputed here"
    offload = (
        "ZeRO-Offload and ZeRO-Infinity: the update runs on the device, through which the state passes; "
        f"{DEFERRED_UPDATE}"
    )
    named = (
        "DDP takes each batch whole and recomputes nothing, and, tuned, chooses microbatches and recomputed layers; "
        "FSDP is ZeRO-2 or ZeRO-3; the stages of Megatron-LM are all arranged alike, each with ZeRO-0 or ZeRO-1"
    )
    stacks = (
        "Megatron-LM is priced with fused kernels where the machine is the catalog's, the others with those of torch "
        "as this runtime runs it"
    )
    return (named, selective, offload, stacks)
