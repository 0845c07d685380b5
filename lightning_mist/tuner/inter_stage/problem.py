"""The inter-stage problem as data, what an answer to it is, and where the stages of pipelines may lie.

Stages of one part of a cluster of unlike devices are neighbours, and parts follow each other in a settled order. What a
stage costs depends on how many stages are behind it, on its part, and on whether those next to it lie in others. For
each such place (:class:`StagePlace`) the shortest pipeline that has it stands for all: it leaves most to the stage.

Of a choice only its steady time ``t`` and ``t + d``, with its boundary time ``d``, enter the step (see
:mod:`lightning_mist.tuner.inter_stage.exact_solver`), and more of either never helps. So for the dynamic program a
choice counts only if no other with the same layers at the same place on as many devices of the same part is at least as
good in both (:class:`SlotOptions`, :class:`EndOptions`).

Array axes
    K  choices of a slot, or options: choices with the same layers and devices at different places
    L  layers of the suffix of the network that begins with the stage; one entry if the place does not matter
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_mist.cost import step_seconds
from lightning_mist.cost.inputs import ArrayRecord, BoolArray, FloatArray, IntArray
from lightning_mist.tuner.candidates import ANY_SEAMS, BEHIND, EVERY_PART, FRONT, SlotChoices, non_dominated
from lightning_mist.tuner.space import ANYWHERE, places_behind

PRECISION = 1e-9
"""Relative difference of objectives below which two answers count as equal, far below what costs are known to."""


class Pipeline(NamedTuple):
    """Numbers of stages and microbatches, and the parts of the cluster in the order in which a batch passes them.

    The only stage of a pipeline has all parts; then none are named.
    """

    num_stages: int
    num_microbatches: int
    parts: tuple[int, ...]


class PipelineGroup(NamedTuple):
    """Pipelines whose stages cost the same, but for how many are behind them.

    Attributes:
        parts: As of a :class:`Pipeline`.
        counts: Their numbers of stages, ascending.
    """

    num_microbatches: int
    parts: tuple[int, ...]
    counts: tuple[int, ...]

    def pipeline(self, num_stages: int) -> Pipeline:
        """The pipeline with a number of stages."""
        return Pipeline(num_stages, self.num_microbatches, self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class InterStageProblem:
    """Choose one of its choices for every slot, so that layers and devices are used up, in the least step seconds.

    Attributes:
        num_layers: Layers to deal out, in order.
        num_devices: Devices to deal out, of every part of the cluster.
        slots: The choices of every stage. A stage takes devices of one part; a choice of
            :data:`~lightning_mist.tuner.candidates.intra_stage.EVERY_PART` takes all devices there are, so that it can
            only be the only stage.
        order: The parts in the order in which stages pass them: those of one part are neighbours.
    """

    num_layers: int
    num_devices: tuple[int, ...]
    num_microbatches: int
    slots: tuple[SlotChoices, ...]
    order: tuple[int, ...] = (0,)

    def steady(self, chosen: tuple[int, ...]) -> FloatArray:
        """Steady seconds of the chosen choices."""
        return np.array([slot.steady_K[index] for slot, index in zip(self.slots, chosen, strict=True)])

    def boundary(self, chosen: tuple[int, ...]) -> FloatArray:
        """Boundary seconds of the chosen choices."""
        return np.array([slot.boundary_K[index] for slot, index in zip(self.slots, chosen, strict=True)])

    def objective(self, chosen: tuple[int, ...]) -> float:
        """Step seconds of one choice per slot."""
        return step_seconds(self.steady(chosen), self.boundary(chosen), self.num_microbatches)

    def uses_all(self) -> BoolArray:
        """Which choices of the only stage use layers and devices up."""
        (slot,) = self.slots
        inside_K = slot.part_K == (0 if len(self.num_devices) == 1 else EVERY_PART)
        uses_K: BoolArray = (slot.layers_K == self.num_layers) & (slot.devices_K == sum(self.num_devices)) & inside_K
        return uses_K

    def alone(self) -> "Family":
        """This problem, of several stages, as a family of its own."""
        return Family(
            num_layers=self.num_layers,
            num_devices=self.num_devices,
            num_microbatches=self.num_microbatches,
            tails=self.slots[:0:-1],
            heads={len(self.slots): self.slots[0]},
            order=self.order,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Pipelines of several stages that differ in their number of stages only.

    What a stage other than the first may be depends on how many stages are behind it, and not on how many are in front:
    the fewer are behind, the fewer microbatches it has in flight.

    Attributes:
        num_layers: Layers to deal out, in order.
        num_devices: Devices to deal out, of every part of the cluster.
        tails: The choices of a stage by the number of stages behind it, for all stages but first ones.
        heads: The choices of the first stage by the number of stages, which is at least 2.
        order: The parts in the order in which stages pass them: those of one part are neighbours.
    """

    num_layers: int
    num_devices: tuple[int, ...]
    num_microbatches: int
    tails: tuple[SlotChoices, ...]
    heads: Mapping[int, SlotChoices]
    order: tuple[int, ...] = (0,)

    @classmethod
    def of(
        cls,
        num_layers: int,
        num_devices: tuple[int, ...],
        num_microbatches: int,
        counts: Sequence[int],
        choices_of: Callable[[int, int], SlotChoices],
        order: tuple[int, ...] = (0,),
    ) -> "Family":
        """The pipelines of some numbers of stages with the choices of their stages.

        What may lie behind a first stage is asked for in the shortest pipeline that has it, which leaves it the most
        layers and devices; longer ones rule out by themselves what leaves too few.

        Args:
            num_devices: Devices to deal out, of every part of the cluster.
            choices_of: The choices of a stage, by it and the number of stages.
        """
        tails: list[SlotChoices] = []
        for place in places_behind(counts):
            slot = choices_of(*place)
            if not len(slot):
                break
            tails.append(slot)
        heads = {count: choices_of(0, count) for count in counts if count <= len(tails) + 1}
        return cls(
            num_layers=num_layers,
            num_devices=num_devices,
            num_microbatches=num_microbatches,
            tails=tuple(tails),
            heads={count: slot for count, slot in heads.items() if len(slot)},
            order=order,
        )

    def problem(self, num_stages: int) -> InterStageProblem:
        """The problem of the pipelines with a number of stages."""
        return InterStageProblem(
            num_layers=self.num_layers,
            num_devices=self.num_devices,
            num_microbatches=self.num_microbatches,
            slots=(self.heads[num_stages], *reversed(self.tails[: num_stages - 1])),
            order=self.order,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer to an :class:`InterStageProblem`.

    Attributes:
        chosen: Index of the choice of every slot; empty if no answer was found.
        objective: Its step seconds, infinite if there is none.
        bound: No answer takes fewer seconds; infinite if there cannot be one.
        lower_bottleneck: Choices of the best answer of those whose slowest stage takes less; empty if not asked for.
    """

    chosen: tuple[int, ...]
    objective: float
    bound: float
    lower_bottleneck: tuple[int, ...] = ()

    @property
    def gap(self) -> float:
        """The share of its step seconds by which an answer could be better at most; 0 if there can be none."""
        if not self.chosen:
            return 0.0 if np.isinf(self.bound) and self.bound > 0 else float(np.inf)
        return max(0.0, 1 - self.bound / self.objective) if self.objective > 0 else 0.0

    @property
    def is_proven(self) -> bool:
        """Whether nothing is better, but for rounding."""
        return self.gap <= PRECISION


@dataclass(frozen=True, slots=True, kw_only=True)
class Incumbent:
    """The best answer so far to the problem of one pipeline."""

    problem: InterStageProblem
    answer: Answer


class StagePlace(NamedTuple):
    """A stage of a pipeline.

    Attributes:
        seams: Which of the stages next to it lie in other parts, as of choices.
        pipeline: The part of every stage.
    """

    stage_index: int
    num_stages: int
    seams: int
    pipeline: tuple[int, ...]

    @property
    def part(self) -> int:
        """The part in which it lies."""
        return self.pipeline[self.stage_index]


def heads_of(order: tuple[int, ...], num_stages: int) -> Iterator[StagePlace]:
    """Every place of the first of so many stages."""
    for seams in (0, BEHIND):
        behind = _behind(order, 0, seams, num_stages - 1)
        if behind is not None:
            yield StagePlace(0, num_stages, seams, (order[0], *behind))


def tails_of(order: tuple[int, ...], num_behind: int, counts: Sequence[int]) -> Iterator[StagePlace]:
    """Every place of a stage that has so many behind it and others in front of it.

    Args:
        counts: The numbers of stages of the pipelines.
    """
    for number, part in enumerate(order):
        for seams in range(FRONT + BEHIND + 1):
            behind = _behind(order, number, seams, num_behind)
            front = (*order[:number],) if seams & FRONT else (*order[:number], part)
            if behind is None or (seams & FRONT and not number):
                continue
            stage_index = max(len(front), min(counts) - 1 - num_behind)
            if stage_index + 1 + num_behind <= max(counts):
                pipeline = (front[0],) * (stage_index - len(front)) + (*front, part, *behind)
                yield StagePlace(stage_index, len(pipeline), seams, pipeline)


def _behind(order: tuple[int, ...], number: int, seams: int, num_behind: int) -> tuple[int, ...] | None:
    """The parts of the stages behind one of the part with a number; ``None`` if it cannot lie there."""
    is_next_other = bool(seams & BEHIND)
    own = () if is_next_other or not num_behind else (order[number],)
    behind = (*own, *order[number + 1 :])
    if len(behind) > num_behind or (is_next_other and number == len(order) - 1):
        return None
    return behind + behind[-1:] * (num_behind - len(behind))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotOptions(ArrayRecord):
    """Choices by what they use up; infinite where an option has none.

    Attributes:
        seams_K: For what stages next to it each is priced, as of choices.
        rank_K: How many options use up the same at the same seams and are faster everywhere.
        steady_KL: Steady seconds.
        reach_KL: Steady and boundary seconds together.
        index_KL: Index of the choice in its slot, -1 where there is none.
        least_K: Least steady seconds of each option.
    """

    part_K: IntArray
    seams_K: IntArray
    devices_K: IntArray
    layers_K: IntArray
    rank_K: IntArray
    steady_KL: FloatArray
    reach_KL: FloatArray
    index_KL: IntArray
    least_K: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOptions(ArrayRecord):
    """Choices whose place is known: of a first or last stage.

    Attributes:
        steady_K: Steady seconds.
        reach_K: Steady and boundary seconds together.
        index_K: Index of the choice in its slot.
    """

    part_K: IntArray
    devices_K: IntArray
    layers_K: IntArray
    steady_K: FloatArray
    reach_K: FloatArray
    index_K: IntArray


def end_options(
    slot: SlotChoices, num_layers: int, num_devices: tuple[int, ...], order: tuple[int, ...], *, is_first: bool
) -> EndOptions:
    """The choices of the first or the last stage that count.

    Args:
        order: The parts in the order in which stages pass them.
        is_first: Whether it is the first stage, which starts with the network, or the last, which ends with it.
    """
    start_K = 0 if is_first else num_layers - slot.layers_K
    inside_K = ((slot.start_K == ANYWHERE) | (slot.start_K == start_K)) & (slot.part_K == order[0 if is_first else -1])
    if len(order) > 1:
        # A stage with all devices of its part has the next one in another.
        beside_K = np.where(
            slot.devices_K == num_devices[order[0 if is_first else -1]], BEHIND if is_first else FRONT, 0
        )
        inside_K &= (slot.seams_K == ANY_SEAMS) | (slot.seams_K == beside_K)
    index_K = _that_count(slot, num_layers, num_devices, inside_K, start_K)
    return EndOptions(
        part_K=slot.part_K[index_K],
        devices_K=slot.devices_K[index_K],
        layers_K=slot.layers_K[index_K],
        steady_K=slot.steady_K[index_K],
        reach_K=slot.steady_K[index_K] + slot.boundary_K[index_K],
        index_K=index_K,
    )


def slot_options(slot: SlotChoices, num_layers: int, num_devices: tuple[int, ...]) -> SlotOptions:
    """The choices of a stage between others that count."""
    index_K = _that_count(slot, num_layers, num_devices, np.ones(len(slot), dtype=bool), slot.start_K)
    row_K = np.where(slot.start_K[index_K] == ANYWHERE, 0, num_layers - slot.start_K[index_K])
    num_rows = 1
    if (slot.start_K[index_K] != ANYWHERE).any():
        num_rows = num_layers + 1
        index_K, row_K = _spread(slot, index_K, row_K, num_rows)
    kind_K = _kinds(slot, index_K, num_layers)
    order_K = np.lexsort((slot.steady_K[index_K], row_K, kind_K))
    index_K, row_K, kind_K = index_K[order_K], row_K[order_K], kind_K[order_K]
    # The rank of each among those of its kind at its place, by rising steady time.
    place_K = kind_K * num_rows + row_K
    rank_K = np.arange(len(place_K)) - np.searchsorted(place_K, place_K)
    depth = 1 + int(rank_K.max(initial=0))
    _, first_J, option_K = np.unique(kind_K * depth + rank_K, return_index=True, return_inverse=True)
    index_KL = np.full((len(first_J), num_rows), -1, dtype=np.int64)
    index_KL[option_K.reshape(-1), row_K] = index_K
    steady_KL = np.where(index_KL >= 0, _at(slot.steady_K, index_KL), np.inf)
    return SlotOptions(
        part_K=slot.part_K[index_K[first_J]],
        seams_K=slot.seams_K[index_K[first_J]],
        devices_K=slot.devices_K[index_K[first_J]],
        layers_K=slot.layers_K[index_K[first_J]],
        rank_K=rank_K[first_J],
        steady_KL=steady_KL,
        reach_KL=np.where(index_KL >= 0, _at(slot.steady_K + slot.boundary_K, index_KL), np.inf),
        index_KL=index_KL,
        least_K=steady_KL.min(axis=1),
    )


def _at(values_K: FloatArray, index_KL: IntArray) -> FloatArray:
    found: FloatArray = values_K[index_KL] if len(values_K) else np.empty(index_KL.shape)
    return found


def _kinds(slot: SlotChoices, index_K: IntArray, num_layers: int) -> IntArray:
    """A number for the part, seams, devices and layers of some choices."""
    most = int(slot.devices_K.max(initial=0)) + 1
    place_K = slot.part_K[index_K] * (ANY_SEAMS + 1) + slot.seams_K[index_K]
    kind_K: IntArray = (place_K * most + slot.devices_K[index_K]) * (num_layers + 1)
    return kind_K + slot.layers_K[index_K]


def _that_count(
    slot: SlotChoices,
    num_layers: int,
    num_devices: tuple[int, ...],
    inside_K: BoolArray,
    start_K: IntArray | int,
) -> IntArray:
    """Indices of choices that can be part of an answer and are not worse than others, by rising steady time."""
    limit_K = np.array([*num_devices, -1])[slot.part_K]  # The last one is that of every part.
    inside_K = inside_K & (slot.part_K != EVERY_PART) & (slot.devices_K <= limit_K) & (slot.layers_K <= num_layers)
    index_K = np.flatnonzero(inside_K)
    place_K = np.broadcast_to(np.asarray(start_K), inside_K.shape)[index_K] + 1
    group_K = _kinds(slot, index_K, num_layers) * (num_layers + 2) + place_K
    steady_K = slot.steady_K[index_K]
    kept_K: IntArray = index_K[non_dominated(group_K, steady_K, steady_K + slot.boundary_K[index_K])]
    return kept_K


def _spread(slot: SlotChoices, index_K: IntArray, row_K: IntArray, num_rows: int) -> tuple[IntArray, IntArray]:
    """Choices that may lie anywhere at every place, beside those whose place is known."""
    is_open_K = slot.start_K[index_K] == ANYWHERE
    open_K = index_K[is_open_K]
    spread_K, rows = np.repeat(open_K, num_rows), np.tile(np.arange(num_rows), len(open_K))
    return np.concatenate([index_K[~is_open_K], spread_K]), np.concatenate([row_K[~is_open_K], rows])
