"""What people would choose, under the same cost model and the same limits: the plans that a found one has to beat.

Each baseline is at its best: everything that its own tool leaves to the user is tried, and that includes how many
layers are recomputed, and how small microbatches are. A comparison with recomputation where none is needed would say
nothing.

``DDP``
    Data parallelism as torch's DistributedDataParallel does it: every device has everything, each batch is one
    microbatch, nothing is recomputed. ``DDP, tuned`` also cuts batches into microbatches and recomputes layers.
``FSDP``
    torch's FullyShardedDataParallel: one stage under ZeRO-3 (full shard) or ZeRO-2 (shard gradients and optimizer).
``ZeRO-Offload``
    One stage under ZeRO-2 or ZeRO-3 whose optimizer state, or optimizer state and gradients, are in host memory (Ren et
    al., 2021). The update itself is priced on the device, through which the state passes.
``ZeRO-Infinity``
    One stage under ZeRO-3 whose parameters and optimizer state are in host memory, with or without gradients, and
    if all layers are recomputed with or without what these keep (Rajbhandari et al., 2021).
``Megatron-LM``
    Stages of equally many layers, all with the same degrees of data and tensor parallelism, with or without sequence
    parallelism, under ZeRO-0 or ZeRO-1 (its distributed optimizer), in one piece or in interleaved chunks (Narayanan et
    al., 2021; Korthikanti et al., 2022). Three times: with no layer recomputed, with all, and with as many of every
    stage as are best.
``Aceso``
    Stages of their own sizes and arrangements of devices, with their own recomputed layers; nothing is sharded or
    offloaded (Liu et al., 2024).
``Mist paper's space``
    The published space of Zhu et al., 2025 (:mod:`lightning_mist.explain.published_space`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from lightning_mist.cost import MixedCostModel, profiles_of
from lightning_mist.cost.time import copy_rates
from lightning_mist.errors import InfeasibleError, ProfileError
from lightning_mist.explain.published_space import ZERO_STAGES, Asked, has_published, published_plan
from lightning_mist.explain.techniques import DEFERRED_UPDATE
from lightning_mist.hardware import HardwareProfile, MixedCluster
from lightning_mist.hardware.catalog import with_stack
from lightning_mist.model.spec import LayerSpec, ModelSpec
from lightning_mist.plan import OFFLOADED, OffloadRatios, Plan, SearchSpace
from lightning_mist.tuner.infeasible import UndecidedError
from lightning_mist.tuner.planner import Planner
from lightning_mist.tuner.search import mixed_stages
from lightning_mist.tuner.select import Shortage, UniformPlans, fastest_uniform
from lightning_mist.units import format_bytes

_GRID = SearchSpace(equal_stages=True, zero_stages=(0, 1), offload=(), schedules=("1f1b", "interleaved-1f1b"))
_ALONE = replace(_GRID, num_stages=(1,), tensor_parallel_degrees=(1,))
"""Equal stages, and one whose ranks all compute on other rows."""

_OPTIMIZER = (OffloadRatios(optimizer=1.0), OffloadRatios(optimizer=1.0, gradients=1.0))
_WITH_PARAMETERS = tuple(replace(item, parameters=1.0) for item in _OPTIMIZER)

FAMILIES: tuple[tuple[str, UniformPlans], ...] = (
    ("DDP", UniformPlans(search=replace(_ALONE, zero_stages=(0,), checkpointing=False, num_microbatches=(1,)))),
    ("DDP, tuned", UniformPlans(search=replace(_ALONE, zero_stages=(0,)))),
    ("FSDP", UniformPlans(search=replace(_ALONE, zero_stages=(2, 3)))),
    ("ZeRO-Offload", UniformPlans(search=replace(_ALONE, zero_stages=(2, 3)), offloads=_OPTIMIZER)),
    (
        "ZeRO-Infinity",
        UniformPlans(
            search=replace(_ALONE, zero_stages=(3,)),
            offloads=_WITH_PARAMETERS,
            offloads_if_all_recomputed=tuple(replace(item, activations=1.0) for item in _WITH_PARAMETERS),
        ),
    ),
    ("Megatron-LM, nothing recomputed", UniformPlans(search=replace(_GRID, checkpointing=False))),
    ("Megatron-LM, all recomputed", UniformPlans(search=replace(_GRID, checkpointed_shares=(1.0,)))),
    ("Megatron-LM, tuned", UniformPlans(search=_GRID)),
)
"""Baselines whose stages are all alike."""

FUSED = ("Megatron-LM, nothing recomputed", "Megatron-LM, all recomputed", "Megatron-LM, tuned")
"""Those of them that run fused kernels (TransformerEngine's); the others are eager torch, as this runtime."""

_ALL_RECOMPUTED = replace(_GRID, checkpointed_shares=(1.0,))
_LEAST_OF_ACESO = UniformPlans(search=replace(_ALL_RECOMPUTED, zero_stages=(0,)))
"""Plans of Aceso's that need little memory."""

_LEAST_OF_MIST = UniformPlans(
    search=replace(_ALL_RECOMPUTED, zero_stages=ZERO_STAGES),
    offloads=(OffloadRatios(parameters=1.0, gradients=1.0, optimizer=1.0, activations=1.0),),
)
"""Plans of the published space that need little memory."""

_LEAST_WITHOUT_OFFLOAD = replace(_LEAST_OF_MIST, offloads=(OffloadRatios(),))
"""The same where nothing can be offloaded."""

REST = "all others"
"""In the place of a name: every baseline that is not named."""

WITH_AUTOCAST = ("DDP", "DDP, tuned")
"""Baselines whose tool keeps weights in 32 bits and casts them for use; those of all others keep weights in 16 bits,
and masters in 32 (FSDP2's mixed precision, DeepSpeed, Megatron-LM, on which Aceso and Mist are built)."""

MIST = "Mist paper's space"

UNDIVIDED = "no number of microbatches or stages that it allows divides this batch"
"""Why there is no plan where memory is not the reason."""

UNDECIDED = "not decided in time: none was found, and whether one fits is not known"
"""Why there is no plan where the search for one was stopped."""

CUT_SHORT = "the best found in the time that there was"
"""What to know of a plan whose search was stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The best plan that a person or a tool would choose.

    Attributes:
        plan: The plan with its prediction; None if there is none that fits.
        reason: Why there is none; empty if there is one.
        note: What to know of the search for it.
        stack: Whose kernels it is priced with, if not with those of the plan that it is compared with.
        precision: What its tool computes in, for people, if that is another precision than the plan's.
    """

    name: str
    plan: Plan | None
    reason: str = ""
    note: str = ""
    stack: str = ""
    precision: str = ""


def baselines_with(
    planner: Planner,
    *,
    global_batch_size: int,
    memory_limit: int | None = None,
    host_memory_limit: int | None = None,
    search: SearchSpace | None = None,
    tell: Callable[[str], None] | None = None,
    others: Mapping[str, Planner] = MappingProxyType({}),
) -> tuple[Baseline, ...]:
    """The best plan of every baseline; see the module.

    Args:
        planner: Of the network and the machine that all are compared on.
        global_batch_size: Rows that one Lightning batch brings over all devices.
        memory_limit: Bytes that a plan may use of each device; the same default as for a search.
        host_memory_limit: Bytes of host memory of each node that offloading may take.
        search: Limits, of which those of tensor parallelism, the offload ratios and the seconds of solving count.
        tell: Is told what is being looked at.
        others: Planners of the same network in another precision, by the names of the baselines whose tools use it;
            under :data:`REST` that of all others.

    Raises:
        PlanError: If the batch does not come in equal parts from the devices.
        ProfileError: If the profile lacks what the cost model needs.
    """
    given, say = search or SearchSpace(), tell or _silent
    asked = Asked(
        global_batch_size=global_batch_size,
        memory_limit=memory_limit,
        host_memory_limit=host_memory_limit,
        search=replace(
            SearchSpace(),
            tensor_parallel_degrees=given.tensor_parallel_degrees,
            context_parallel_degrees=(),  # none of these tools searches it
            data_parallel_size=given.data_parallel_size,
            offload=OFFLOADED,
            offload_ratios=given.offload_ratios,
            solver_seconds=given.solver_seconds,
        ),
    )
    result = []
    refused = _why_no_offload(planner)
    for name, family in FAMILIES:
        say(f"comparing with {name}")
        if refused and family.is_offloaded:
            result.append(Baseline(name=name, plan=None, reason=refused))
            continue
        own = others.get(name, others.get(REST, planner))
        result.append(_told(_of_family(own, asked, name, family), own, planner))
    say("comparing with Aceso")
    rest = others.get(REST, planner)
    result.append(_told(_aceso(rest, asked), rest, planner))
    say("comparing with the Mist paper's space")
    if refused:
        asked, least = replace(asked, search=replace(asked.search, offload=())), _LEAST_WITHOUT_OFFLOAD
    else:
        least = _LEAST_OF_MIST
    if isinstance(planner.cluster, MixedCluster):
        result.append(Baseline(name=MIST, plan=None, reason="not for unlike devices: all its stages have the same"))
    else:
        result.append(_told(_published(rest, asked, least), rest, planner))
    return tuple(result)


def _of_family(own: Planner, asked: Asked, name: str, family: UniformPlans) -> Baseline:
    """The best plan of a family, with the kernels of its tool."""
    fused = _fused(own) if name in FUSED else None
    plan, shortage = _uniform(fused or own, asked, family)
    stack = "" if fused is None else "fused"
    return Baseline(name=name, plan=plan, reason="" if plan else _why(shortage), stack=stack)


def _fused(planner: Planner) -> Planner | None:
    """A planner of the same with fused kernels; none where they are not known, or the planner's own."""
    profile = planner.profile
    if not isinstance(profile, HardwareProfile) or profile.stack != "eager" or planner.cluster.kind != "cuda":
        return None
    if not profile.source.startswith("catalog") or planner.spec.seconds:
        return None
    return Planner(planner.spec, planner.cluster, profile=with_stack(profile, "fused"))


def _told(found: Baseline, own: Planner, planner: Planner) -> Baseline:
    """A baseline that says its precision, if that is not the plan's."""
    text = own.spec.precision_text
    return found if text == planner.spec.precision_text else replace(found, precision=text)


def _uniform(planner: Planner, asked: Asked, family: UniformPlans) -> tuple[Plan | None, Shortage | None]:
    """The best plan of stages that are all alike, or what is missing for one."""
    batch, limits = asked.global_batch_size, (asked.memory_limit, asked.host_memory_limit)
    loaders = asked.search.data_parallel_size
    every, allowed = planner.space(batch, asked.search), family.search.tensor_parallel_degrees
    degrees = tuple(sorted({degree for degree, _ in every.tensor if allowed is None or degree in allowed}))
    if not degrees or (family.search.checkpointed_shares is not None and not every.checkpointing):
        return None, None
    space = planner.space(batch, replace(family.search, tensor_parallel_degrees=degrees, data_parallel_size=loaders))
    model = planner.model
    if isinstance(model, MixedCostModel):
        return fastest_uniform(mixed_stages(model, space, *limits), family)
    return fastest_uniform(planner.stages(space, *limits), family)


def _aceso(planner: Planner, asked: Asked) -> Baseline:
    """The best plan that Aceso could choose."""
    search = replace(asked.search, zero_stages=(0,), sequence_parallel=False, offload=(), schedules=("1f1b",))
    try:
        found = planner.tune(
            global_batch_size=asked.global_batch_size,
            memory_limit=asked.memory_limit,
            host_memory_limit=asked.host_memory_limit,
            search=search,
        )
    except UndecidedError:
        return Baseline(name="Aceso", plan=None, reason=UNDECIDED)
    except InfeasibleError:
        return _unfit(planner, asked, "Aceso", _LEAST_OF_ACESO)
    return Baseline(name="Aceso", plan=found.plan, note=_NOTES.get(found.status, ""))


_NOTES = {"time limit": CUT_SHORT}


def _published(planner: Planner, asked: Asked, least: UniformPlans) -> Baseline:
    """The best plan of the published space."""
    if not has_published(planner, asked):
        return Baseline(name=MIST, plan=None, reason=UNDIVIDED)
    published = published_plan(planner, asked)
    if published.plan is not None:
        return Baseline(name=MIST, plan=published.plan, note="" if published.is_best else CUT_SHORT)
    if not published.is_best:
        return Baseline(name=MIST, plan=None, reason=UNDECIDED)
    return _unfit(planner, asked, MIST, least)


def _unfit(planner: Planner, asked: Asked, name: str, least: UniformPlans) -> Baseline:
    """A baseline that does not fit, whose stages may differ: with the least that stages need that are alike."""
    _, shortage = _uniform(planner, asked, least)
    if shortage is None:  # Stages that are alike do not divide the batch, but others did.
        reason = "does not fit; with stages that are alike nothing divides the batch"
    else:
        reason = f"{_why(shortage)}, with stages that are alike"
    return Baseline(name=name, plan=None, reason=reason)


def _why(short: Shortage | None) -> str:
    """Why there is no plan."""
    if short is None:
        return UNDIVIDED
    needed, limit = format_bytes(short.needed_bytes), format_bytes(short.limit_bytes)
    return f"does not fit: needs {needed} of {limit} per device{' in host memory' if short.is_host else ''}"


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


def _silent(text: str) -> None:
    """Nobody listens."""


def baseline_notes(spec: ModelSpec) -> tuple[str, ...]:
    """What to know of the baselines of a network, for people."""
    attention = "Megatron-LM's selective recomputation repeats attention's scores"
    if any(_is_fused(layer) for layer in spec.layers):
        selective = f"{attention}: the fused attention of these layers keeps none, so it is the same as none recomputed"
    else:
        selective = f"{attention}: these layers have no fused attention, and parts of layers are not recomputed here"
    offload = (
        "ZeRO-Offload and ZeRO-Infinity: the update runs on the device, through which the state passes; "
        f"{DEFERRED_UPDATE}"
    )
    named = (
        "DDP takes each batch whole and recomputes nothing, and, tuned, chooses microbatches and recomputed layers; "
        "FSDP is ZeRO-2 or ZeRO-3; the stages of Megatron-LM are all alike, with ZeRO-0 or ZeRO-1"
    )
    stacks = (
        "Megatron-LM is priced with fused kernels where the machine is the catalog's, the others with those of torch "
        "as this runtime runs it"
    )
    return (named, selective, offload, stacks)


def _is_fused(layer: LayerSpec) -> bool:
    return any(item.kind in ("attention", "causal_attention") for item in layer.forward_work)
