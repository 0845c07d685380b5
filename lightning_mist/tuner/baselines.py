"""What a person would choose, under the same cost model: the plans that a found one has to beat.

Every baseline may choose how many layers it recomputes, except the two that are named for it: a comparison with
recomputation where none is needed would say nothing.

Array axes
    S  stages
    K  settings that all stages share
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from lightning_mist.cost import StageCandidates, predict_with, step_seconds_of
from lightning_mist.cost.compile import IntArray
from lightning_mist.hardware import Cluster, HardwareProfile
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import Checkpointing, Plan, StagePlan, ZeroStage
from lightning_mist.plan.layout import rank_layout
from lightning_mist.tuner import space as search_space
from lightning_mist.tuner.intra_stage import IntraStage
from lightning_mist.tuner.space import SearchSpace, Shape
from lightning_mist.tuner.tune import stages_of
from lightning_mist.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """One plan that a person would choose.

    Attributes:
        name: What it is.
        plan: The plan with its prediction; None if there is none that fits.
        reason: Why there is none; empty if there is one.
    """

    name: str
    plan: Plan | None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """Plans among which a baseline is the fastest that fits.

    Attributes:
        name: Name of the baseline.
        stages: Numbers of stages.
        checkpointed: The most and the least layers of a stage that may be recomputed, as fractions of its layers.
        zero_stages: ZeRO stages.
        cuts_batches: Whether one batch of a device may be cut into several microbatches.
        splits_layers: Whether all stages have several devices that share every layer, or none has.
    """

    name: str
    stages: tuple[int, ...]
    checkpointed: tuple[float, float]
    zero_stages: tuple[int, ...]
    cuts_batches: bool
    splits_layers: bool = False


def baselines(
    spec: ModelSpec,
    cluster: Cluster,
    *,
    profile: HardwareProfile | None = None,
    global_batch_size: int,
    memory_limit: int | None = None,
    search: SearchSpace | None = None,
) -> tuple[Baseline, ...]:
    """Data parallelism plain, with everything recomputed, at its best, and with everything sharded; and the best grid.

    A grid has stages of as many layers as possible alike, all with the same degrees of data and tensor parallelism, as
    Megatron-LM runs it (Narayanan et al., 2021).

    Args:
        spec: The network.
        cluster: The devices.
        profile: How fast they are; by default from the catalog.
        global_batch_size: Rows that one Lightning batch brings over all devices.
        memory_limit: Bytes that a plan may use of each device; the same default as for a search.
        search: Limits, of which the schedule and those of tensor parallelism count.

    Raises:
        PlanError: If the batch does not come in equal parts from the devices.
        ProfileError: If the profile lacks what the cost model needs.
    """
    space = search_space.apply(
        search or SearchSpace(),
        spec,
        cluster.world_size,
        global_batch_size,
        devices_per_node=cluster.devices_per_node,
    )
    intra = stages_of(space, spec, cluster, profile, memory_limit)
    even = tuple(count for count in search_space.divisors(cluster.world_size) if 1 < count <= space.max_stages)
    return tuple(_best(intra, family) for family in _families(even))


def _families(even: tuple[int, ...]) -> tuple[_Family, ...]:
    """What people would choose from, where pipelines may have these numbers of equal stages."""
    return (
        _Family(name="data parallel", stages=(1,), checkpointed=(0, 0), zero_stages=(0,), cuts_batches=False),
        _Family(
            name="data parallel, all layers recomputed",
            stages=(1,),
            checkpointed=(1, 1),
            zero_stages=(0,),
            cuts_batches=False,
        ),
        _Family(
            name="data parallel, best recomputation and ZeRO stage",
            stages=(1,),
            checkpointed=(0, 1),
            zero_stages=(0, 1),
            cuts_batches=True,
        ),
        _Family(
            name="data parallel, everything sharded",
            stages=(1,),
            checkpointed=(0, 1),
            zero_stages=(3,),
            cuts_batches=True,
        ),
        _Family(name="even pipeline", stages=even, checkpointed=(0, 1), zero_stages=(0, 1), cuts_batches=True),
        _Family(
            name="even grid of tensor, data and pipeline parallelism",
            stages=(1, *even),
            checkpointed=(0, 1),
            zero_stages=(0, 1),
            cuts_batches=True,
            splits_layers=True,
        ),
    )


def _best(intra: IntraStage, family: _Family) -> Baseline:
    """The fastest plan of a family that fits."""
    best, seconds, least = None, np.inf, np.inf
    for num_stages, num_microbatches, shape in _pipelines(intra, family):
        found, found_seconds, found_peak = _settings(intra, family, num_stages, num_microbatches, shape)
        least = min(least, found_peak)
        if found is not None and found_seconds < seconds:
            best, seconds = found, found_seconds
    if best is not None:
        return Baseline(name=family.name, plan=replace(best, predicted=predict_with(intra.model, best)))
    if np.isinf(least):
        return Baseline(name=family.name, plan=None, reason="the module or the batch does not allow any")
    reason = f"needs at least {format_bytes(least)} of {format_bytes(intra.memory_limit)} per device"
    return Baseline(name=family.name, plan=None, reason=reason)


def _pipelines(intra: IntraStage, family: _Family) -> Iterator[tuple[int, int, Shape]]:
    """Numbers of stages and microbatches, and how the devices of every stage are arranged."""
    space = intra.space
    if family.checkpointed[0] > 0 and not space.checkpointing:
        return
    for num_stages in family.stages:
        parts = search_space.divisors(space.batch_rows) if family.cuts_batches and space.cuts_batches else (1,)
        kinds = [kind for kind in space.tensor if (kind[0] > 1) == family.splits_layers]
        for tensor, sequence in kinds:
            data, rest = divmod(space.world_size // num_stages, tensor)
            for part in parts if rest == 0 else ():
                yield num_stages, part * num_stages * tensor, Shape(data, tensor, sequence)


def _settings(
    intra: IntraStage, family: _Family, num_stages: int, num_microbatches: int, shape: Shape
) -> tuple[Plan | None, float, float]:
    """The fastest setting that fits, its seconds, and the least peak of any setting."""
    space = intra.space
    edges = [round(index * space.num_layers / num_stages) for index in range(num_stages + 1)]
    counts = [end - start for start, end in pairwise(edges)]
    recomputed, zero_K = _options(intra, family, max(counts), shape.data)
    steady, boundary, peaks, kept = [], [], [], []
    for index, (start, count) in enumerate(zip(edges, counts, strict=False)):
        checkpointed_K = np.minimum(recomputed, count)
        candidates = StageCandidates(
            start_K=np.full(len(zero_K), start),
            end_K=np.full(len(zero_K), start + count),
            checkpointed_K=checkpointed_K,
            zero_stage_K=zero_K,
        )
        slot = replace(intra.slot(index, num_stages, num_microbatches, shape), replicas=shape.data)
        costs = intra.model.evaluate(slot, candidates)
        steady.append(costs.steady_K)
        boundary.append(costs.boundary_K)
        peaks.append(intra.model.memory(slot).peaks(slot, candidates))
        kept.append(checkpointed_K)
    seconds_K = step_seconds_of(np.stack(steady), np.stack(boundary), num_microbatches)
    peak_K = np.stack(peaks).max(axis=0)
    seconds_K = np.where(peak_K <= intra.memory_limit, seconds_K, np.inf)
    best = int(seconds_K.argmin())
    if np.isinf(seconds_K[best]):
        return None, np.inf, float(peak_K.min())
    checkpointed = [int(item[best]) for item in kept]
    plan = _plan(intra, edges, num_microbatches, shape, checkpointed, int(zero_K[best]))
    return plan, float(seconds_K[best]), float(peak_K.min())


def _options(intra: IntraStage, family: _Family, longest: int, data: int) -> tuple[IntArray, IntArray]:
    """Recomputed layers and ZeRO stages, every combination."""
    low, high = (round(fraction * longest) for fraction in family.checkpointed)
    recomputed = np.arange(low, high + 1) if intra.space.checkpointing else np.array([0])
    zeros = np.array(family.zero_stages) if data > 1 else np.array([0])
    return np.tile(recomputed, len(zeros)), np.repeat(zeros, len(recomputed))


def _plan(
    intra: IntraStage, edges: list[int], num_microbatches: int, shape: Shape, checkpointed: list[int], zero: int
) -> Plan:
    space, num_stages = intra.space, len(checkpointed)
    layout = rank_layout([(shape.data, shape.tensor)] * num_stages, space.devices_per_node)
    return Plan(
        global_batch_size=space.batch_rows * space.world_size,
        num_microbatches=num_microbatches,
        stages=tuple(
            StagePlan(
                layers=(edges[index], edges[index + 1]),
                mesh=shape.mesh(ranks),
                microbatch_size=space.rows(num_microbatches, shape.data),
                zero_stage=ZeroStage(zero),
                checkpointing=Checkpointing(layers=checkpointed[index]),
            )
            for index, ranks in enumerate(layout)
        ),
        schedule=space.schedule,
    )
