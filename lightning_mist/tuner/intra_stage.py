"""The frontier of each stage: for every layer range and number of devices, the choices that are worth considering.

For a slot (stage ``i`` of ``S`` with ``G`` microbatches) every feasible combination of layers, devices, recomputed
layers and ZeRO stage is evaluated; of those with the same layers and devices only the non-dominated ones in (steady
time, boundary time) go on. Memory does not appear after this: what does not fit is not a choice.

If all layers are alike a stage that is neither first nor last costs the same wherever it lies, so it is evaluated once
and its start is left open.

Array axes
    K  choices
"""

from dataclasses import dataclass, replace

import numpy as np

from lightning_mist.cost import StageCandidates, StageCostModel, StageCosts, StageSlot
from lightning_mist.cost.compile import BoolArray, FloatArray, IntArray
from lightning_mist.cost.phases import Phase, stage_phases
from lightning_mist.cost.regions import parameter_regions
from lightning_mist.model.spec import ModelSpec
from lightning_mist.tuner.pareto import non_dominated
from lightning_mist.tuner.space import Space

ANYWHERE = -1
"""Start of a choice whose costs do not depend on where it lies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotChoices:
    """What one stage may be.

    Attributes:
        start_K: First layer, or :data:`ANYWHERE`.
        layers_K: Number of layers.
        devices_K: Number of devices.
        steady_K: Steady seconds.
        boundary_K: Boundary seconds.
        peak_K: Peak bytes.
        checkpointed_K: Recomputed layers.
        zero_stage_K: 0 or 1.
    """

    start_K: IntArray
    layers_K: IntArray
    devices_K: IntArray
    steady_K: FloatArray
    boundary_K: FloatArray
    peak_K: FloatArray
    checkpointed_K: IntArray
    zero_stage_K: IntArray

    def __len__(self) -> int:
        """Number of choices."""
        return len(self.start_K)

    def take(self, index: IntArray | BoolArray) -> "SlotChoices":
        """The choices at some indices, or where a mask is true."""
        return SlotChoices(**{name: getattr(self, name)[index] for name in self.__slots__})

    @classmethod
    def joined(cls, parts: list["SlotChoices"]) -> "SlotChoices":
        """The choices of all parts."""
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__})


def layers_are_alike(spec: ModelSpec) -> bool:
    """Whether a stage that is neither first nor last costs the same wherever it lies."""
    if len(set(spec.kinds)) > 1 or len(set(spec.boundaries)) > 1:
        return False
    inside: list[list[tuple[int, bool]]] = [[] for _ in range(spec.num_layers)]
    for parameter, regions in zip(spec.parameters, parameter_regions(spec), strict=True):
        for region in regions:
            if 1 <= region <= spec.num_layers:
                if len(regions) > 1:
                    return False
                inside[region - 1].append((parameter.bytes, parameter.trainable))
    return all(sorted(layer) == sorted(inside[0]) for layer in inside)


class IntraStage:
    """Makes frontiers; keeps those that several pipelines share.

    Args:
        model: The cost model.
        space: The search space.
        memory_limit: Bytes that a device may use.
    """

    def __init__(self, model: StageCostModel, space: Space, memory_limit: float) -> None:
        self.model, self.space, self.memory_limit = model, space, memory_limit
        self.evaluated = 0
        self._alike = layers_are_alike(model.spec)
        self._kept: dict[tuple[str, int, int, tuple[Phase, ...], bool], SlotChoices] = {}

    def frontier(self, stage_index: int, num_stages: int, num_microbatches: int) -> SlotChoices:
        """The choices of one slot that fit and are not dominated."""
        longest = self.space.num_layers - num_stages + 1
        parts = []
        for devices in self.space.degrees(num_microbatches):
            slot = self.slot(stage_index, num_stages, num_microbatches, devices)
            choices = self._frontier(slot)
            parts.append(choices.take(choices.layers_K <= longest) if num_stages > 1 else choices)
        return SlotChoices.joined(parts)

    def slot(self, stage_index: int, num_stages: int, num_microbatches: int, devices: int) -> StageSlot:
        """A slot with a number of devices."""
        return StageSlot(
            stage_index=stage_index,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            data_parallel_degree=devices,
            rows=self.space.rows(num_microbatches, devices),
            batch_rows=self.space.batch_rows,
            schedule=self.space.search.schedule,
        )

    def _frontier(self, slot: StageSlot) -> SlotChoices:
        role = self._role(slot)
        if not self._alike or role == "only":
            return self._select(self.choices(slot))
        phases = stage_phases(slot.stage_index, slot.num_stages, slot.num_microbatches, slot.schedule)
        # Between nodes a transfer costs more; all else of a slot shows in its situations.
        inside = slot.num_stages <= self.model.cluster.devices_per_node
        key = (role, slot.num_microbatches, slot.data_parallel_degree, phases, inside)
        if key not in self._kept:
            self._kept[key] = self._select(self.choices(slot, longest=self.space.num_layers - 1))
        return self._kept[key]

    def _select(self, choices: SlotChoices) -> SlotChoices:
        fitting = choices.take(choices.peak_K <= self.memory_limit)
        group_K = fitting.start_K * (self.space.num_layers + 1) + fitting.layers_K
        return fitting.take(non_dominated(group_K, fitting.steady_K, fitting.boundary_K))

    @staticmethod
    def _role(slot: StageSlot) -> str:
        if slot.num_stages == 1:
            return "only"
        if slot.stage_index == 0:
            return "first"
        return "last" if slot.stage_index == slot.num_stages - 1 else "middle"

    def choices(self, slot: StageSlot, *, longest: int | None = None) -> SlotChoices:
        """Everything that a slot may be, whether it fits or not.

        Args:
            slot: The slot.
            longest: The most layers; by default as many as leave one for every other stage.
        """
        role, count = self._role(slot), self.space.num_layers
        longest = count - slot.num_stages + 1 if longest is None else longest
        start_K, layers_K = self._ranges(role, slot, longest)
        candidates = self._candidates(slot, start_K, layers_K)
        self.evaluated += len(candidates)
        costs: StageCosts = self.model.evaluate(slot, candidates)
        is_open = self._alike and role == "middle"
        return SlotChoices(
            start_K=np.full(len(candidates), ANYWHERE) if is_open else candidates.start_K,
            layers_K=candidates.end_K - candidates.start_K,
            devices_K=np.full(len(candidates), slot.data_parallel_degree),
            steady_K=costs.steady_K,
            boundary_K=costs.boundary_K,
            peak_K=costs.peak_K,
            checkpointed_K=candidates.checkpointed_K,
            zero_stage_K=candidates.zero_stage_K,
        )

    def _ranges(self, role: str, slot: StageSlot, longest: int) -> tuple[IntArray, IntArray]:
        """First layer and number of layers of every range that the slot may cover."""
        count = self.space.num_layers
        lengths = np.arange(1, longest + 1)
        if role == "only":
            return np.array([0]), np.array([count])
        if role == "first":
            return np.zeros_like(lengths), lengths
        if role == "last":
            return count - lengths, lengths
        if self._alike:
            # Neither at layer 0 nor at the end; a range that long leaves no room for the others and is filtered later.
            lengths = lengths[lengths <= count - 2]
            return np.ones_like(lengths), lengths
        first, end = slot.stage_index, count - (slot.num_stages - slot.stage_index - 1)
        pairs = np.array([(start, stop - start) for start in range(first, end) for stop in range(start + 1, end + 1)])
        return pairs[:, 0], pairs[:, 1]

    def _candidates(self, slot: StageSlot, start_K: IntArray, layers_K: IntArray) -> StageCandidates:
        """Ranges times recomputed layers times ZeRO stages."""
        allowed = self.space.search.zero_stages
        # On one device there is nothing to shard.
        zeros = np.array(sorted(set(allowed)) if slot.data_parallel_degree > 1 else [0])
        options_K = layers_K + 1 if self.space.checkpointing else np.ones_like(layers_K)
        index = np.repeat(np.arange(len(layers_K)), options_K)
        checkpointed = np.arange(len(index)) - np.repeat(np.cumsum(options_K) - options_K, options_K)
        index, checkpointed = np.tile(index, len(zeros)), np.tile(checkpointed, len(zeros))
        return StageCandidates(
            start_K=start_K[index],
            end_K=start_K[index] + layers_K[index],
            checkpointed_K=checkpointed,
            zero_stage_K=np.repeat(zeros, len(index) // len(zeros)),
        )


def with_peaks_as_seconds(choices: SlotChoices) -> SlotChoices:
    """The same choices with their peak bytes in place of their steady time, to ask for the least memory."""
    return replace(choices, steady_K=choices.peak_K)
