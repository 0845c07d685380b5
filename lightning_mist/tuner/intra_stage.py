"""The frontier of each stage: for every layer range and number of devices, the choices that are worth considering.

For a slot (stage ``i`` of ``S`` with ``G`` microbatches) every feasible combination of layers, devices, their
arrangement, recomputed layers and ZeRO stage is evaluated; of those with the same layers and devices only the
non-dominated ones in (steady time, boundary time) go on. Memory does not appear after this: what does not fit is not a
choice.

Stages that are neither first nor last and hold the same kinds of layers in the same order cost the same wherever they
lie, so each such window is evaluated once. If all layers are alike the start of these stages is left open altogether.

Array axes
    K  choices or candidates
    O  kinds of state, in the order of ``OFFLOADED``
    W  windows: runs of layers
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace

import numpy as np

from lightning_mist.cost import CostModel, StageCandidates, StageSlot
from lightning_mist.cost.compile import BoolArray, FloatArray, IntArray
from lightning_mist.cost.needs import StageNeeds
from lightning_mist.cost.phases import Phase, stage_phases
from lightning_mist.cost.regions import parameter_regions
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import OffloadRatios, Plan
from lightning_mist.tuner.pareto import Order, non_dominated, sort_points
from lightning_mist.tuner.space import OFFLOADED, Shape, Space, common_unit

ANYWHERE = -1
"""Start of a choice whose costs do not depend on where it lies."""

EVERY_PART = -1
"""Part of a choice that takes all devices of all parts of a cluster, as the only stage of a plan may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotChoices:
    """What one stage may be.

    Attributes:
        start_K: First layer, or :data:`ANYWHERE`.
        layers_K: Number of layers.
        devices_K: Number of devices.
        part_K: Part of the cluster that they lie in, 0 if it has one, or :data:`EVERY_PART`.
        steady_K: Steady seconds.
        boundary_K: Boundary seconds.
        peak_K: Peak bytes.
        checkpointed_K: Recomputed layers.
        zero_stage_K: 0 to 3.
        tensor_K: Tensor-parallel degree.
        sequence_K: 1 if tensor-parallel devices are sequence-parallel too, else 0.
        offload_KO: What part of parameters, gradients, optimizer state and activations is in host memory.
    """

    start_K: IntArray
    layers_K: IntArray
    devices_K: IntArray
    part_K: IntArray
    steady_K: FloatArray
    boundary_K: FloatArray
    peak_K: FloatArray
    checkpointed_K: IntArray
    zero_stage_K: IntArray
    tensor_K: IntArray
    sequence_K: IntArray
    offload_KO: FloatArray

    def __len__(self) -> int:
        """Number of choices."""
        return len(self.start_K)

    def shape(self, index: int) -> Shape:
        """How the devices of one choice are arranged."""
        tensor = int(self.tensor_K[index])
        return Shape(int(self.devices_K[index]) // tensor, tensor, bool(self.sequence_K[index]))

    def offload(self, index: int) -> OffloadRatios:
        """What one choice keeps in host memory."""
        return OffloadRatios(**dict(zip(OFFLOADED, self.offload_KO[index].tolist(), strict=True)))

    def take(self, index: IntArray | BoolArray) -> "SlotChoices":
        """The choices at some indices, or where a mask is true."""
        return SlotChoices(**{name: getattr(self, name)[index] for name in self.__slots__})

    @classmethod
    def none(cls) -> "SlotChoices":
        """No choices."""
        floats = ("steady_K", "boundary_K", "peak_K")
        empty = {name: np.empty(0, dtype=float if name in floats else np.int64) for name in cls.__slots__}
        return cls(**{**empty, "offload_KO": np.empty((0, len(OFFLOADED)))})

    @classmethod
    def joined(cls, parts: list["SlotChoices"]) -> "SlotChoices":
        """The choices of all parts."""
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__})


def layer_classes(spec: ModelSpec) -> tuple[int, ...]:
    """A number for every layer, equal for layers that cost the same and hand on the same."""
    sizes: list[list[tuple[int, bool]]] = [[] for _ in range(spec.num_layers)]
    alone = set()
    for parameter, regions in zip(spec.parameters, parameter_regions(spec), strict=True):
        for region in regions:
            if 1 <= region <= spec.num_layers:
                sizes[region - 1].append((parameter.bytes, parameter.trainable))
                if len(regions) > 1:
                    alone.add(region - 1)  # It shares a parameter with another part, so its place matters.
    # What the last layer hands on stays inside its stage.
    handed_on = [*spec.boundaries, ()]
    known: dict[Hashable, int] = {}
    result = []
    for index, kind in enumerate(spec.kinds):
        key = (kind, tuple(sorted(sizes[index])), index if index in alone else -1)
        passed = handed_on[index] if index < spec.num_layers - 1 else handed_on[max(0, index - 1)]
        result.append(known.setdefault((key, passed), len(known)))
    return tuple(result)


@dataclass(slots=True, kw_only=True)
class _Prepared:
    """Candidates with their seconds, sorted, and where else each window of layers occurs.

    Attributes:
        candidates: The candidates by rising steady time, each window once.
        window_K: Number of the window of each.
        starts: For every window the first layers at which it occurs, or :data:`ANYWHERE` alone.
        steady_K: Steady seconds.
        boundary_K: Boundary seconds.
        order: The candidates by window, steady and boundary time.
        needs: What the memory of the first candidates is made of, as many as have been asked for.
        evaluated: How many these are.
    """

    candidates: StageCandidates
    window_K: IntArray
    starts: tuple[IntArray, ...]
    steady_K: FloatArray
    boundary_K: FloatArray
    order: Order
    needs: StageNeeds | None = None
    evaluated: int = 0


def _phases(slot: StageSlot) -> tuple[Phase, ...]:
    return stage_phases(slot.stage_index, slot.num_stages, slot.num_microbatches, slot.schedule)


def _as_choices(
    slot: StageSlot, prepared: _Prepared, num_layers: int, peak_K: FloatArray, kept: IntArray
) -> SlotChoices:
    """Some candidates as choices, each at every place where the slot may have it."""
    candidates = prepared.candidates
    lengths = candidates.end_K - candidates.start_K
    after = slot.num_stages - slot.stage_index - 1
    places = [prepared.starts[window] for window in prepared.window_K[kept]]
    start_K = np.concatenate([*places, np.empty(0, dtype=np.int64)]).astype(np.int64)
    index_K = np.repeat(kept, [len(place) for place in places])
    earliest, latest_K = slot.stage_index, num_layers - after - lengths[index_K]
    inside = (start_K == ANYWHERE) | ((start_K >= earliest) & (start_K <= latest_K))
    # An open start has room somewhere if every other stage can have a layer.
    inside &= lengths[index_K] <= max(num_layers - slot.num_stages + 1, 0 if num_layers else 1)
    start_K, index_K = start_K[inside], index_K[inside]
    return SlotChoices(
        start_K=start_K,
        layers_K=lengths[index_K],
        devices_K=np.full(len(index_K), slot.data_parallel_degree * slot.tensor_parallel_degree),
        part_K=np.zeros(len(index_K), dtype=np.int64),
        steady_K=prepared.steady_K[index_K],
        boundary_K=prepared.boundary_K[index_K],
        peak_K=peak_K[index_K],
        checkpointed_K=candidates.checkpointed_K[index_K],
        zero_stage_K=candidates.zero_stage_K[index_K],
        tensor_K=np.full(len(index_K), slot.tensor_parallel_degree),
        sequence_K=np.full(len(index_K), int(slot.sequence_parallel)),
        offload_KO=np.zeros((len(index_K), len(OFFLOADED))),
    )


class IntraStage:
    """Makes frontiers; keeps those that several pipelines share.

    Args:
        model: The cost model.
        space: The search space.
        memory_limit: Bytes that a device may use.
        host_limit: Bytes of host memory that it may use for what it offloads.
        elsewhere: The search spaces of other parts of the cluster, if it has unlike ones.
    """

    def __init__(
        self,
        model: CostModel,
        space: Space,
        memory_limit: float,
        *,
        host_limit: float = np.inf,
        elsewhere: tuple[Space, ...] = (),
    ) -> None:
        self.model, self.space, self._elsewhere = model, space, elsewhere
        self.memory_limit, self.host_limit = memory_limit, host_limit
        self.evaluated = 0
        self._classes = layer_classes(model.spec)
        self._kept: dict[Hashable, _Prepared] = {}

    def limits(self, plan: Plan) -> tuple[float, ...]:
        """Bytes that the devices of every stage of a plan may use."""
        return (self.memory_limit,) * plan.num_stages

    def frontier(
        self,
        stage_index: int,
        num_stages: int,
        num_microbatches: int,
        slowest: float = np.inf,
        *,
        pipeline: tuple[int, ...] = (),
    ) -> SlotChoices:
        """The choices of one slot that fit, take at most ``slowest`` seconds per microbatch and are not dominated.

        Args:
            stage_index: Index of the stage.
            num_stages: Number of stages.
            num_microbatches: Number of microbatches.
            slowest: The most steady seconds.
            pipeline: The part of the cluster in which every stage lies, if it has unlike ones.
        """
        parts = []
        for shape in self.space.shapes(num_microbatches):
            slot = self.slot(stage_index, num_stages, num_microbatches, shape, pipeline)
            prepared = self._prepare(slot)
            count = int(np.searchsorted(prepared.steady_K, slowest, side="right"))
            if not count:
                continue
            peak_K = self._peaks(slot, prepared, count)
            kept = prepared.order.frontier(peak_K <= self.memory_limit)
            parts.append(_as_choices(slot, prepared, self.space.num_layers, peak_K, kept))
        joined = SlotChoices.joined(parts) if parts else SlotChoices.none()
        if len({shape.devices for shape in self.space.shapes(num_microbatches)}) == len(parts):
            return joined  # No arrangement competes with another of the same number of devices.
        return joined.take(non_dominated(self._places(joined), joined.steady_K, joined.boundary_K))

    def _places(self, choices: SlotChoices) -> IntArray:
        """A number for the layers and devices of each choice."""
        lengths = self.space.num_layers + 1
        place_K: IntArray = (choices.devices_K * (lengths + 1) + choices.start_K + 1) * lengths + choices.layers_K
        return place_K

    def choices(self, slot: StageSlot) -> SlotChoices:
        """Everything that a slot may be, whether it fits or not."""
        prepared = self._prepare(slot)
        peak_K = self._peaks(slot, prepared, len(prepared.candidates))
        return _as_choices(slot, prepared, self.space.num_layers, peak_K, np.arange(len(peak_K)))

    def _peaks(self, slot: StageSlot, prepared: _Prepared, count: int) -> FloatArray:
        """Peak bytes of the first candidates."""
        if prepared.needs is None or prepared.evaluated < count:
            # Twice as many as asked for, lest a search that asks for ever more evaluates all of them each time.
            prepared.evaluated = min(2 * count, len(prepared.candidates))
            some = prepared.candidates.take(np.arange(prepared.evaluated))
            prepared.needs = self.model.memory(slot).needs(slot, some)
        return prepared.needs.first(count).peaks(_phases(slot))

    def slot(
        self,
        stage_index: int,
        num_stages: int,
        num_microbatches: int,
        shape: Shape,
        pipeline: tuple[int, ...] = (),
    ) -> StageSlot:
        """A slot with an arrangement of devices."""
        spaces = (self.space, *self._elsewhere)
        replicas = common_unit(space.least_replicas(num_microbatches) for space in spaces)
        replicas = shape.data if num_stages == 1 else replicas
        return StageSlot(
            stage_index=stage_index,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            data_parallel_degree=shape.data,
            rows=self.space.rows(num_microbatches, shape.data),
            batch_rows=self.space.batch_rows,
            replicas=replicas,
            schedule=self.space.schedule,
            tensor_parallel_degree=shape.tensor,
            sequence_parallel=shape.sequence,
            parts=pipeline,
        )

    def _prepare(self, slot: StageSlot) -> _Prepared:
        """Everything about a slot's candidates but how many microbatches are in flight, which slots share."""
        role = self._role(slot)
        # Between nodes a transfer costs more; all else depends on the number of stages only through the situations.
        inside = slot.near_stages <= self.model.cluster.devices_per_node
        shape = Shape(slot.data_parallel_degree, slot.tensor_parallel_degree, slot.sequence_parallel)
        key = (role, slot.num_microbatches, shape, inside, slot.seams)
        if key not in self._kept:
            self._kept[key] = self._evaluate(slot, role)
        return self._kept[key]

    def _evaluate(self, slot: StageSlot, role: str) -> _Prepared:
        start_W, layers_W, starts = self._windows(role)
        candidates, window_K = self._candidates(slot, start_W, layers_W)
        seconds = self.model.seconds(slot, candidates)
        rising_K = np.argsort(seconds.steady_K, kind="stable")
        steady_K, boundary_K = seconds.steady_K[rising_K], seconds.boundary_K[rising_K]
        self.evaluated += len(candidates)
        return _Prepared(
            candidates=candidates.take(rising_K),
            window_K=window_K[rising_K],
            starts=starts,
            steady_K=steady_K,
            boundary_K=boundary_K,
            order=sort_points(window_K[rising_K], steady_K, boundary_K),
        )

    @staticmethod
    def _role(slot: StageSlot) -> str:
        if slot.num_stages == 1:
            return "only"
        if slot.stage_index == 0:
            return "first"
        return "last" if slot.stage_index == slot.num_stages - 1 else "middle"

    def _windows(self, role: str) -> tuple[IntArray, IntArray, tuple[IntArray, ...]]:
        """First layer and number of layers of every window that a role may have, and where else it occurs."""
        count = self.space.num_layers
        lengths = np.arange(1, count)  # Every other stage needs a layer.
        if role == "only":
            start_W, layers_W = np.array([0]), np.array([count])
        elif role == "first":
            start_W, layers_W = np.zeros_like(lengths), lengths
        elif role == "last":
            start_W, layers_W = count - lengths, lengths
        else:
            return self._middle_windows()
        return start_W, layers_W, tuple(start_W[:, None])

    def _middle_windows(self) -> tuple[IntArray, IntArray, tuple[IntArray, ...]]:
        """Windows that touch neither end, those with the same layers once."""
        count, classes = self.space.num_layers, self._classes
        if len(set(classes)) == 1:
            layers_W = np.arange(1, count - 1)
            return np.ones_like(layers_W), layers_W, (np.array([ANYWHERE]),) * len(layers_W)
        places: dict[Hashable, list[int]] = {}
        for start in range(1, count - 1):
            for end in range(start + 1, count):
                # The class of the layer before tells what is received.
                places.setdefault(classes[start - 1 : end], []).append(start)
        start_W = np.array([starts[0] for starts in places.values()], dtype=np.int64)
        layers_W = np.array([len(window) - 1 for window in places], dtype=np.int64)  # type: ignore[arg-type]
        return start_W, layers_W, tuple(np.array(starts) for starts in places.values())

    def _candidates(self, slot: StageSlot, start_W: IntArray, layers_W: IntArray) -> tuple[StageCandidates, IntArray]:
        """Windows times recomputed layers times ZeRO stages, and the window of each."""
        # On one device there is nothing to shard.
        zeros = np.array(sorted(set(self.space.search.zero_stages)) if slot.data_parallel_degree > 1 else [0])
        options_W = layers_W + 1 if self.space.checkpointing else np.ones_like(layers_W)
        window = np.repeat(np.arange(len(layers_W)), options_W)
        checkpointed = np.arange(len(window)) - np.repeat(np.cumsum(options_W) - options_W, options_W)
        window_K = np.tile(window, len(zeros))
        candidates = StageCandidates(
            start_K=start_W[window_K],
            end_K=start_W[window_K] + layers_W[window_K],
            checkpointed_K=np.tile(checkpointed, len(zeros)),
            zero_stage_K=np.repeat(zeros, len(window)),
        )
        return candidates, window_K


def with_peaks_as_seconds(choices: SlotChoices) -> SlotChoices:
    """The same choices with their peak bytes in place of their steady time, to ask for the least memory."""
    return replace(choices, steady_K=choices.peak_K)
