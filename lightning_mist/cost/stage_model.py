"""What stages cost: candidates in, arrays of seconds and bytes out.

Steady time ``t`` of a stage: forward and backward of one microbatch, one more forward of every recomputed layer, and
the transfers that it waits for (:mod:`lightning_mist.cost.time.communication`); from ZeRO-2 on also the reduction of
its gradients, under ZeRO-3 the unsharding of its parameters (:mod:`lightning_mist.cost.time.pass_seconds`), with
context parallelism the exchange of keys and values (:mod:`lightning_mist.cost.time.communication`), with offload the
copies from and to the host (:mod:`lightning_mist.cost.time.offload_seconds`), each as far as it does not hide in
computation; what the runtime's own Python takes, where that was measured. A pipeline with as many microbatches in
flight as it has stages passes one of them around the loop of all stages in ``sum t_i`` and two transfers per boundary,
so each stage is charged with receiving its input and the gradient of its output. On a CPU it is also charged with
sending, which uses the same cores.

Boundary time ``d``: averaging gradients over the data-parallel ranks, under hybrid sharding also those of owners over
groups (:func:`~lightning_mist.cost.time.replicate_seconds`), summing those of tied parameters, the optimizer's step
with all other passes over gradients (:mod:`lightning_mist.cost.time.optimizer_step`), and under ZeRO-1 and ZeRO-2
giving out the updated parameters. On a device the reduction runs beside the last backward, and what cannot hide there
counts; on a CPU both use the same cores, so all of it counts.

Array axes
    K  candidates
    R  regions
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

import numpy as np

from lightning_mist.cost.inputs import FloatArray, Placed, StageCandidates, StageRegions, StageSlot
from lightning_mist.cost.memory import MemoryModel
from lightning_mist.cost.time import (
    EXCHANGED,
    UNSHARDED,
    Beside,
    ChannelRows,
    CopyPlace,
    CopySeconds,
    CopyStages,
    RegionSeconds,
    RowSums,
    SeamEnd,
    StageSeconds,
    channel_rows,
    computation_factor,
    context_seconds,
    copy_rates,
    copy_seconds,
    corrected_regions,
    corrected_terms,
    cut_key,
    cut_seconds,
    interference_of,
    overhead_seconds,
    reductions,
    region_seconds,
    replicate_seconds,
    shard_nodes,
    shared_seconds,
    split_seconds,
    tied_seconds,
    unit_loads,
    unit_seconds,
    update_seconds,
)
from lightning_mist.hardware import Cluster, HardwareProfile, factor_of
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import AS_IT_IS, Plan, Predicted, StageMethod, ZeroStage

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


Variant: TypeAlias = tuple[int, bool, StageMethod]
"""What a stage's ranks do of a network: tensor-parallel degree, sequence parallelism, and how they compute it."""


@dataclass(frozen=True, slots=True)
class _Rank:
    """What one rank of a stage costs under one degree of tensor parallelism, cached by what it depends on."""

    spec: ModelSpec
    memory: MemoryModel
    seconds: dict[float, RegionSeconds] = field(default_factory=dict)
    beside: dict[tuple[float, int, int], Beside] = field(default_factory=dict)
    cuts: dict[Hashable, tuple[FloatArray, FloatArray]] = field(default_factory=dict)


def _cached(known: dict[_Key, _Value], key: _Key, find: Callable[[], _Value]) -> _Value:
    if key not in known:
        known[key] = find()
    return known[key]


class PlanCosts(ABC):
    """What the cost models of alike and of unlike devices have in common.

    Attributes:
        terms: Seconds of every stage by term of the plans that were asked about last.
        clocked: Seconds of one step of the plans that ran on the clock last.
        predicted: What was predicted last.
    """

    def __init__(self) -> None:
        self.terms: dict[Plan, list[dict[str, float]]] = {}
        self.clocked: dict[Plan, float] = {}
        self.predicted: dict[Plan, Predicted] = {}

    @abstractmethod
    def memory(self, slot: StageSlot) -> MemoryModel:
        """What stages of a slot's tensor-parallel degree hold, whatever the device.

        Raises:
            PlanError: If the costs of that degree are not known.
        """

    @abstractmethod
    def seconds_of(self, items: Sequence[Placed]) -> tuple[StageSeconds, ...]:
        """Seconds of the candidates of several slots but for exchange with other stages, which is no time.

        What takes long of copies is asked once for those of all.
        """

    @abstractmethod
    def exchanged(self, slot: StageSlot, candidates: StageCandidates) -> tuple[FloatArray, ...]:
        """Seconds of what candidates exchange with other stages, by the terms in ``communication.EXCHANGED``."""

    def seconds(self, slot: StageSlot, candidates: StageCandidates) -> StageSeconds:
        """Seconds of candidates for a slot, by term."""
        (found,) = self.seconds_of([(slot, candidates)])
        return replace(found, **dict(zip(EXCHANGED, self.exchanged(slot, candidates), strict=True)))


class StageCostModel(PlanCosts):
    """Seconds and bytes of stages of one network on one machine; keeps what it has computed.

    Args:
        seams: If the machine is one part of a cluster of unlike devices: what devices of every part do with nodes of
            other parts, and how many a node has.
        memories: What stages hold by tensor and sequence parallelism and method, shared with models of
            other machines.
    """

    def __init__(
        self,
        spec: ModelSpec,
        profile: HardwareProfile,
        cluster: Cluster,
        *,
        seams: Sequence[SeamEnd] = (),
        memories: dict[Variant, MemoryModel] | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.profile, self.cluster, self.seams = spec, profile, cluster, tuple(seams)
        self._machine = profile, cluster
        self._memories = {} if memories is None else memories
        self._ranks: dict[Variant, _Rank] = {}

    @property
    def parts(self) -> tuple["StageCostModel", ...]:
        """The models of the devices of every part: devices that are alike are one."""
        return (self,)

    def models(self, slot: StageSlot) -> tuple["StageCostModel", ...]:
        """The models of the devices that run a slot."""
        return (self,)

    def with_memory(self, cluster: Cluster) -> "StageCostModel":
        """The same on a cluster that differs in the memory of its devices alone; shares what has been computed."""
        found = copy(self)
        found.cluster, found._machine = cluster, (self.profile, cluster)
        return found

    def _rank(self, degree: int, sequence: bool, method: StageMethod = AS_IT_IS) -> _Rank:
        key = (degree, sequence, method)
        if key not in self._ranks:
            spec = self.spec.split(degree, sequence).computing(method)
            if key not in self._memories:
                like = (degree, not sequence, method) if method == AS_IT_IS else (degree, sequence, AS_IT_IS)
                self._memories[key] = MemoryModel(spec, self._memories.get(like))
            self._ranks[key] = _Rank(spec, self._memories[key])
        return self._ranks[key]

    def _of(self, slot: StageSlot) -> _Rank:
        return self._rank(slot.tensor_parallel_degree, slot.sequence_parallel, slot.method)

    def memory(self, slot: StageSlot) -> MemoryModel:
        """What stages of a slot's tensor-parallel degree hold."""
        return self._of(slot).memory

    @property
    def whole(self) -> MemoryModel:
        """What the network holds and does where nothing is split."""
        return self._rank(1, False).memory

    def region_seconds(
        self, rows: float, degree: int = 1, sequence: bool = False, method: StageMethod = AS_IT_IS
    ) -> RegionSeconds:
        """Seconds of every region at a number of rows.

        Args:
            degree: Tensor-parallel ranks, whose exchanges are included.
        """
        rank = self._rank(degree, sequence, method)

        def find() -> RegionSeconds:
            costs, whole = rank.memory.costs(rows), self.whole.costs(rows)
            seconds = (
                region_seconds(self.spec, *self._machine, costs, rows)
                if degree == 1
                else split_seconds((self.spec, rank.spec), *self._machine, (whole, costs), rows, degree)
            )
            return corrected_regions(self.spec, self.profile, seconds)

        return _cached(rank.seconds, rows, find)

    def seconds_of(self, items: Sequence[Placed]) -> tuple[StageSeconds, ...]:
        """Seconds of the candidates of several slots, their copies worked out together."""
        alone = [self._without_copies(slot, candidates) for slot, candidates in items]
        copies = self._copies([stages for _, stages in alone])
        return tuple(self._with_copies(found, copied) for (found, _), copied in zip(alone, copies, strict=True))

    def _with_copies(self, found: StageSeconds, copies: CopySeconds | None) -> StageSeconds:
        """Seconds of candidates as runs have corrected them, with those of copies if there are any."""
        if copies is not None:
            terms = {name: getattr(copies, name) for name in copies.__slots__}
            found = replace(found, **terms | {"reduce_K": np.maximum(found.reduce_K + copies.reduce_K, 0.0)})
        return corrected_terms(self.profile, found)

    def _without_copies(self, slot: StageSlot, candidates: StageCandidates) -> tuple[StageSeconds, CopyStages]:
        """Seconds of candidates as if nothing were offloaded and nothing corrected, and what copies depend on."""
        compute = self.region_seconds(*slot.computed)
        memory, regions = self.memory(slot), StageRegions.of(self.spec, candidates)
        terms = compute.terms(memory.costs(slot.rows), regions)
        held = memory.holdings.of(candidates)
        beside, none_K = self.beside(slot, compute), np.zeros(len(candidates))
        shards = dict.fromkeys(("unshard_K", "again_K", "scatter_K", *UNSHARDED), none_K)
        if slot.shard_degree > 1 and candidates.zero_stage_K.max(initial=0) >= ZeroStage.GRADIENTS:
            shards = shared_seconds(beside, slot, regions, candidates.zero_stage_K)
        forward_ring_K, ring_K = self._ring(slot, compute, regions)
        backward_K = terms["backward_K"] + terms["recompute_K"]
        once = reductions(*self._machine, slot, candidates, held, backward_K, even=memory.holdings.is_even)
        between_K = replicate_seconds(*self._machine, slot, candidates, memory.holdings)
        passes = update_seconds(self._machine, self.spec, slot, candidates, memory.holdings)
        slower = computation_factor(self.spec, self.profile, "backward")
        terms["backward_K"] = terms["backward_K"] + slower * passes.pass_K
        across = shard_nodes(self.cluster, slot) > 1
        stages = CopyStages(
            places=[CopyPlace(memory=memory, slot=slot, loads=beside.sums.loads, across_nodes=across)],
            place_K=np.zeros(len(candidates), dtype=np.int64),
            candidates=candidates,
            update_K=passes.update_K,
            reduce_K=once.whole_K,
            gather_K=once.gather_K,
        )
        overhead = overhead_seconds(self.profile.overheads, slot, candidates, self.spec)
        found = StageSeconds(
            **terms,
            **dict.fromkeys(EXCHANGED, none_K),
            accumulate_K=np.minimum(slower * passes.accumulate_K, terms["backward_K"]),
            **shards,
            ring_K=ring_K,
            forward_ring_K=forward_ring_K,
            copies_K=none_K,
            forward_copies_K=none_K,
            reduce_K=once.exposed_K + between_K,
            update_K=passes.update_K,
            update_copies_K=none_K,
            gather_K=once.gather_K,
            deferred_K=none_K,
            overhead_K=overhead.forward_K + overhead.backward_K,
            forward_overhead_K=overhead.forward_K,
            once_K=overhead.once_K,
        )
        return found, stages

    def channels(self, slot: StageSlot, candidates: StageCandidates) -> ChannelRows:
        """When the channels of a single candidate's devices are busy; nothing where all of them are one (a CPU's).

        Rows as of :func:`~lightning_mist.cost.time.channel_rows`, and in ``"reduce"`` the seconds of averaging
        gradients that hide in the last backward, where nothing is offloaded.
        """
        interference = interference_of(*self._machine)
        if interference is None:
            return {}
        found, stages = self._without_copies(slot, candidates)
        offloads = candidates.offload is not None
        passes = channel_rows(stages, copy_rates(*self._machine) if offloads else None, interference)
        between_K = replicate_seconds(*self._machine, slot, candidates, self.memory(slot).holdings)
        hidden = float((stages.reduce_K - (found.reduce_K - between_K))[0])
        hidden *= factor_of(self.profile.corrections, "communication")
        return passes if offloads or hidden <= 0 else {**passes, "reduce": (hidden,)}

    def exchanged(self, slot: StageSlot, candidates: StageCandidates) -> tuple[FloatArray, ...]:
        """Seconds of what candidates exchange with other stages, as runs have corrected them."""
        factor = factor_of(self.profile.corrections, "communication")
        arrival_K, return_K = self._transfers(slot, candidates, sending=False)
        send_K, back_K = self._transfers(slot, candidates, sending=True)
        tied_K = tied_seconds(*self._machine, slot, self.memory(slot).holdings.of(candidates), self.seams)
        found = arrival_K + return_K + send_K + back_K, arrival_K, return_K, send_K, back_K, tied_K
        return tuple(factor * item_K for item_K in found)

    def beside(self, slot: StageSlot, compute: RegionSeconds) -> Beside:
        """What ZeRO-2 and ZeRO-3 communicate beside computation."""
        rank, holdings = self._of(slot), self.memory(slot).holdings
        ranks = slot.shard_degree, shard_nodes(self.cluster, slot)

        def find() -> Beside:
            unshard_R, reduce_JR = unit_seconds(self.profile, holdings.table, *ranks, even=holdings.is_even)
            loads = unit_loads(compute, unshard_R, reduce_JR)
            return Beside(
                unshard_R=unshard_R,
                reduce_JR=reduce_JR,
                row_R=holdings.table.reduced_row_R,
                is_one_unit=holdings.is_one_unit,
                sums=RowSums(loads, interference_of(*self._machine), ranks[1] > 1),
            )

        return _cached(rank.beside, (slot.whole_rows, *ranks), find)

    def _transfers(
        self, slot: StageSlot, candidates: StageCandidates, *, sending: bool
    ) -> tuple[FloatArray, FloatArray]:
        """What receiving takes, or sending does of the computing cores: of the activation, and of its gradient."""
        if slot.num_stages == 1 or (sending and self.cluster.device.kind == "cuda"):
            return (np.zeros(len(candidates)),) * 2
        activation_seconds, gradient_seconds = self.cuts(slot, sending=sending)
        # An activation is received at the cut where a stage begins, and sent at that where it ends.
        first_K, second_K = (candidates.start_K, candidates.end_K)[:: -1 if sending else 1]
        return activation_seconds[first_K], gradient_seconds[second_K]

    def cuts(self, slot: StageSlot, *, sending: bool = False) -> tuple[FloatArray, FloatArray]:
        """What receiving, or sending, an activation and a gradient takes by the cut that they cross."""
        rank, key = self._of(slot), (sending, cut_key(self.cluster, slot))

        def find() -> tuple[FloatArray, FloatArray]:
            return cut_seconds(*self._machine, slot, rank.memory, sending=sending, seams=self.seams)

        return _cached(rank.cuts, key, find)

    def _ring(self, slot: StageSlot, compute: RegionSeconds, regions: StageRegions) -> tuple[FloatArray, FloatArray]:
        """What sharing rows adds to one forward, and to one microbatch."""
        if slot.context_parallel_degree == 1:
            return (np.zeros(len(regions)),) * 2
        forward_R, backward_R = context_seconds(*self._machine, slot, self.memory(slot), compute)
        return regions.sums(forward_R), regions.sums(forward_R + backward_R) + regions.recomputed_sums(forward_R)

    def _copies(self, stages: Sequence[CopyStages]) -> list[CopySeconds | None]:
        """What copies between device and host do; ``None`` where nothing may be offloaded."""
        asked = [item for item in stages if item.candidates.offload is not None]
        if not asked:
            return [None] * len(stages)
        rates, interference = copy_rates(*self._machine), interference_of(*self._machine)
        every = copy_seconds(CopyStages.everywhere(asked), rates, interference)
        found: list[CopySeconds | None] = []
        begin = 0
        for item in stages:
            end = begin + len(item.candidates) * (item.candidates.offload is not None)
            found.append(None if item.candidates.offload is None else every.take(slice(begin, end)))
            begin = end
        return found
