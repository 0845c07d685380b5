"""The fastest plan whose stages are all alike: as many layers each, one arrangement of devices, one set of savings.

This is what people choose by hand. With one stage it is data parallelism with or without sharding; with several it is
the grid of tensor, data and pipeline parallelism of Megatron-LM (Narayanan et al., 2021), whose stages may be dealt out
in chunks (interleaved 1F1B). Everything that a family leaves open is tried: numbers of stages and microbatches,
arrangements, recomputed layers, ZeRO stages, offload.

As in the search for a plan, settings are compared by the closed form of the step first, and the best are run on the
clock. Chunks have no closed form; they are tried in the order of a bound of their seconds, until it is no better than
the best on the clock. They keep at least as much in memory as the same layers in one piece, so that as many layers are
recomputed as these need, or more.

Array axes
    S  stages
    K  settings that all stages share
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations

import numpy as np

from lightning_mist.cost import (
    CostModel,
    MixedCostModel,
    StageCandidates,
    StageSlot,
    least_seconds,
    predict_with,
    seconds_with,
    step_seconds_of,
)
from lightning_mist.cost.inputs import BoolArray, FloatArray, IntArray, OffloadCandidates
from lightning_mist.cost.interleaved_memory import plans_peaks
from lightning_mist.cost.memory import StageNeeds, host_bytes, stage_phases
from lightning_mist.plan import Checkpointing, OffloadRatios, Plan, StagePlan, ZeroStage
from lightning_mist.plan.layout import rank_layout
from lightning_mist.tuner.clocked import CLOCKED
from lightning_mist.tuner.families import Grid, GridCosts, KnownGrids, Limits, Setting, Shortage, Uniform, UniformFamily
from lightning_mist.tuner.grid_floors import GridFloors
from lightning_mist.tuner.intra_stage import IntraStage, layer_classes
from lightning_mist.tuner.mixed import mixed_layout
from lightning_mist.tuner.space import Shape, Space, divisors

TRIED = 24
"""The most settings with chunks that are run on the clock, the best by the bound of their seconds."""


class UniformSearch:
    """Finds the fastest plan of families; keeps what several families share.

    Args:
        model: The cost model.
        space: The network's batch, devices, and how its layers can be split.
        limits: What a plan may use.
        kept: Where what does not depend on the limits is kept; by default for this object alone.
    """

    def __init__(self, model: CostModel, space: Space, limits: Limits, *, kept: KnownGrids | None = None) -> None:
        self.model, self.space, self.limits = model, space, limits
        self._classes = layer_classes(model.spec)
        self._kept = KnownGrids() if kept is None else kept
        self._floors = GridFloors(model, space, self._kept.least)

    def best(self, family: UniformFamily, *, below: float = np.inf) -> Uniform:
        """The fastest plan of a family that fits.

        Args:
            family: The family.
            below: Plans that do not take fewer seconds are of no interest.
        """
        settings: list[Setting] = []
        chunked: list[Setting] = []
        device: Shortage | None = None
        host: Shortage | None = None
        for grid in self._grids(family):
            if self._floors.of(grid) >= below or not self._may_gain(grid, family, below):
                continue
            costs = self._costs(grid, family)
            device_S, host_S = self.limits.stages(grid)
            on_device_K = _within(costs.peak_SK, device_S)
            fits_K = np.logical_and(on_device_K, _within(costs.host_SK, host_S))
            device = _least(device, costs.least(costs.peak_SK, device_S))
            host = _least(host, costs.least(costs.host_SK[:, on_device_K], host_S))
            settings += _closed(grid, family, costs, fits_K) if family.has_whole else ()
            if family.has_chunks and not grid.parts:
                chunked += self._chunked(grid, family, costs, fits_K)
        settings.sort(key=lambda item: item.seconds)
        plans = [self._plan(item) for item in settings[:CLOCKED]]
        best = min(plans, key=self._seconds, default=None)
        best = self._with_chunks(family, chunked, best, below)
        if best is not None:
            best = replace(best, predicted=predict_with(self.model, best)) if self._seconds(best) < below else None
        return Uniform(plan=best, device=device, host=host)

    def _seconds(self, plan: Plan) -> float:
        """Seconds of a plan on the clock."""
        return seconds_with(self.model, plan)

    def _grids(self, family: UniformFamily) -> Iterator[Grid]:
        space = self.space
        if family.recomputes == "all" and not space.checkpointing:
            return
        counts = [count for count in divisors(space.world_size) if count <= space.max_stages]
        # A stage alone has any number of layers, several have as many each.
        counts = [count for count in counts if count == 1 or (family.has_stages and space.num_layers % count == 0)]
        parts = divisors(space.batch_rows) if family.cuts_batches and space.cuts_batches else (1,)
        allowed, asked = set(space.microbatch_counts()), space.search.num_stages
        counts = [count for count in counts if asked is None or count in asked]
        kinds = [kind for kind in space.tensor if kind[0] == 1 or family.splits_layers]
        for num_stages in counts:
            for tensor, sequence in kinds:
                data, rest = divmod(space.world_size // num_stages, tensor)
                for part in parts if rest == 0 and data else ():
                    shape, count = Shape(data, tensor, sequence), part * num_stages * tensor
                    if count not in allowed or shape not in space.shapes(count):
                        continue
                    if not family.has_whole and (num_stages == 1 or count % num_stages):
                        continue
                    for places in self._places(num_stages, tensor):
                        yield Grid(num_stages=num_stages, num_microbatches=count, shape=shape, parts=places)

    def _places(self, num_stages: int, tensor: int) -> Iterator[tuple[int, ...]]:
        """In which parts of a cluster stages may lie, the parts in every order."""
        if not isinstance(self.model, MixedCostModel) or num_stages == 1:
            yield ()
            return
        parts, devices = self.model.cluster.parts, self.space.world_size // num_stages
        if any(part.world_size % devices or part.devices_per_node % tensor for part in parts):
            return
        counts = [part.world_size // devices for part in parts]
        for order in permutations(range(len(parts))):
            yield tuple(part for part in order for _ in range(counts[part]))

    def _may_gain(self, grid: Grid, family: UniformFamily, below: float) -> bool:
        """Whether any setting may gain in chunks and fit on its first stage, which has most microbatches in flight."""
        if family.has_whole or grid.parts or np.isinf(below):
            return True
        key, options, kept = self._key(grid, family), self._options(grid, family), self._kept

        def end(index: int) -> tuple[CostModel, StageSlot, StageCandidates]:
            return self.model, self._slot(grid, index), self._candidates(grid, index, family, options)

        if key not in kept.peaks:
            kept.peaks[key] = kept.ends.peaks(*end(0))
        fits_K = kept.peaks[key] <= self.limits.stages(grid)[0][0]
        if not fits_K.any() or self._floors.of(grid, int(options[0][fits_K].min())) >= below:
            return False
        if key not in kept.floors:
            kept.floors[key] = np.maximum(*(kept.ends.busy(*end(index)) for index in (0, grid.num_stages - 1)))
        return bool(kept.floors[key][fits_K].min() < below)

    def _costs(self, grid: Grid, family: UniformFamily) -> GridCosts:
        """What all settings of a grid that a family has cost."""
        key = self._key(grid, family)
        if key not in self._kept.costs:
            self._kept.costs[key] = self._evaluate(grid, family)
        costs, count = self._kept.costs[key], self.space.num_layers // grid.num_stages
        if family.recomputes == "best":
            return costs
        return costs.take(costs.checkpointed_K == (count if family.recomputes == "all" else 0))

    def _key(self, grid: Grid, family: UniformFamily) -> Hashable:
        return grid, family.zero_stages, family.every_offload

    def _evaluate(self, grid: Grid, family: UniformFamily) -> GridCosts:
        """What all settings of a grid cost, with any number of recomputed layers.

        Stages with the same layers in the same role are looked at once.
        """
        count = self.space.num_layers // grid.num_stages
        options = checkpointed_K, zero_K, offload_K = self._options(grid, family)
        known: dict[Hashable, tuple[FloatArray, ...]] = {}
        needed: dict[Hashable, StageNeeds] = {}
        each: tuple[list[FloatArray], ...] = ([], [], [], [], [], [])
        for index in range(grid.num_stages):
            slot, first = self._slot(grid, index), index * count
            candidates = self._candidates(grid, index, family, options)
            # The layer before tells what is received.
            near = grid.parts[max(0, index - 1) : index + 2]
            role = (index == 0, index == grid.num_stages - 1, self._classes[max(0, first - 1) : first + count], near)
            memory = self.model.memory(slot)
            if role not in known:
                seconds = self.model.seconds(slot, candidates)
                without_K = seconds.steady_K - seconds.transfer_K
                known[role] = (seconds.steady_K, seconds.boundary_K, without_K, seconds.accumulate_K)
                needed[role] = memory.needs(slot, candidates)
            needs, phases = needed[role], stage_phases(index, grid.num_stages, grid.num_microbatches, "1f1b")
            bytes_K = needs.peaks(phases), host_bytes(memory, slot, candidates, needs, phases)
            for found, values_K in zip(each, (*known[role], *bytes_K), strict=True):
                found.append(values_K)
        steady_SK, boundary_SK, busy_SK, accumulate_SK, peak_SK, host_SK = (np.stack(found) for found in each)
        return GridCosts(
            checkpointed_K=checkpointed_K,
            zero_K=zero_K,
            offload_K=offload_K,
            seconds_K=step_seconds_of(steady_SK, boundary_SK, grid.num_microbatches),
            busy_SK=busy_SK,
            accumulate_SK=accumulate_SK,
            peak_SK=peak_SK,
            host_SK=host_SK,
        )

    def _options(self, grid: Grid, family: UniformFamily) -> tuple[IntArray, IntArray, IntArray]:
        """Recomputed layers, ZeRO stages and kinds of offload, every combination."""
        count = self.space.num_layers // grid.num_stages
        layers = np.arange(count + 1) if self.space.checkpointing else np.array([0])
        zeros = np.array(sorted(set(family.zero_stages)) if grid.shape.data > 1 else [0])
        found = np.meshgrid(layers, zeros, np.arange(len(family.every_offload)), indexing="ij")
        checkpointed_K, zero_K, offload_K = (item.reshape(-1) for item in found)
        kept_K = (offload_K < len(family.offloads)) | (checkpointed_K == count)
        return checkpointed_K[kept_K], zero_K[kept_K], offload_K[kept_K]

    def _candidates(
        self, grid: Grid, index: int, family: UniformFamily, options: tuple[IntArray, IntArray, IntArray]
    ) -> StageCandidates:
        """A stage of a grid with every setting."""
        (checkpointed_K, zero_K, offload_K), count = options, self.space.num_layers // grid.num_stages
        moves = any(item.any for item in family.every_offload)
        return StageCandidates(
            start_K=np.full(len(zero_K), index * count),
            end_K=np.full(len(zero_K), (index + 1) * count),
            checkpointed_K=checkpointed_K,
            zero_stage_K=zero_K,
            offload=_offload([family.every_offload[index] for index in offload_K]) if moves else None,
        )

    def _slot(self, grid: Grid, index: int) -> StageSlot:
        space, shape = self.space, grid.shape
        return StageSlot(
            stage_index=index,
            num_stages=grid.num_stages,
            num_microbatches=grid.num_microbatches,
            data_parallel_degree=shape.data,
            rows=space.rows(grid.num_microbatches, shape.data),
            batch_rows=space.batch_rows,
            replicas=shape.data,
            tensor_parallel_degree=shape.tensor,
            sequence_parallel=shape.sequence,
            parts=grid.parts,
        )

    def _chunked(self, grid: Grid, family: UniformFamily, costs: GridCosts, fits_K: BoolArray) -> Iterator[Setting]:
        """The same stages in chunks, with as few recomputed layers as let them fit in one piece."""
        layers, rest = divmod(self.space.num_layers, grid.num_stages)
        if grid.num_stages < 2 or rest or grid.num_microbatches % grid.num_stages:
            return
        for zero, offload in dict.fromkeys(zip(costs.zero_K.tolist(), costs.offload_K.tolist(), strict=True)):
            if family.every_offload[offload].any:
                continue
            same_K = fits_K & (costs.zero_K == zero) & (costs.offload_K == offload)
            for chunks in self.space.search.chunks if same_K.any() else ():
                at_K = np.flatnonzero(same_K & (costs.checkpointed_K % chunks == 0))
                if layers % chunks or not len(at_K):
                    continue
                index = int(at_K[costs.checkpointed_K[at_K].argmin()])
                yield Setting(
                    seconds=costs.bound(index, grid.num_microbatches, chunks),
                    grid=grid,
                    checkpointed=int(costs.checkpointed_K[index]),
                    zero_stage=zero,
                    offload=family.every_offload[offload],
                    chunks=chunks,
                )

    def _with_chunks(
        self, family: UniformFamily, chunked: Sequence[Setting], best: Plan | None, below: float
    ) -> Plan | None:
        """The best plan, or a faster one with chunks."""
        least = below if best is None else min(below, self._seconds(best))
        near = [item for item in sorted(chunked, key=lambda item: item.seconds)[:TRIED] if item.seconds < least]
        fitting = list(self._fitted(family, near if np.isinf(least) else self._faster(near, least)))
        floors = least_seconds(self.model, [plan for _, plan in fitting])
        for (bound, plan), floor in zip(fitting, floors, strict=True):
            if bound >= least:
                break
            if floor < least and self._seconds(plan) < least:
                best, least = plan, self._seconds(plan)
        return best

    def _faster(self, settings: Sequence[Setting], least: float) -> list[Setting]:
        """Those that take less than so many seconds; recomputing more to fit they take longer."""
        plans = [self._plan(item) for item in settings]
        found = zip(settings, plans, least_seconds(self.model, plans), strict=True)
        return [item for item, plan, floor in found if floor < least and self._seconds(plan) < least]

    def _fitted(self, family: UniformFamily, settings: Sequence[Setting]) -> Iterator[tuple[float, Plan]]:
        """The bound of each setting that fits and its plan, with as many more recomputed layers as it needs to fit."""
        is_open, asked = self.space.checkpointing and family.recomputes == "best", []
        for setting in settings:
            most = self.space.num_layers // setting.grid.num_stages if is_open else setting.checkpointed
            more_M, plan = np.arange(setting.checkpointed, most + 1, setting.chunks), self._plan(setting)
            asked.append((plan, np.tile(more_M // setting.chunks, (plan.num_stages, 1))))
        found = plans_peaks(self.model.memory, asked)
        for setting, (_, counts_SM), peaks in zip(settings, asked, found, strict=True):
            # There are chunks on equal devices only, and they are not offloaded.
            fits_M = np.all(peaks.device_SM <= self.limits.device_bytes[0], axis=0)
            if fits_M.any():
                count = int(counts_SM[0, fits_M.argmax()]) * setting.chunks
                yield setting.seconds, self._plan(replace(setting, checkpointed=count))

    def _layout(self, grid: Grid) -> tuple[tuple[int, ...], ...]:
        degrees = [(grid.shape.data, grid.shape.tensor)] * grid.num_stages
        if isinstance(self.model, MixedCostModel) and grid.parts:
            return mixed_layout(self.model.cluster, degrees, grid.parts)
        return rank_layout(degrees, self.space.devices_per_node)

    def _plan(self, setting: Setting) -> Plan:
        space, grid = self.space, setting.grid
        layout = self._layout(grid)
        count = space.num_layers // (grid.num_stages * setting.chunks)
        return Plan(
            global_batch_size=space.batch_rows * space.world_size,
            num_microbatches=grid.num_microbatches,
            stages=tuple(
                StagePlan(
                    layers=(index * count, (index + 1) * count),
                    mesh=grid.shape.mesh(layout[index % grid.num_stages]),
                    microbatch_size=space.rows(grid.num_microbatches, grid.shape.data),
                    zero_stage=ZeroStage(setting.zero_stage),
                    checkpointing=Checkpointing(layers=setting.checkpointed // setting.chunks),
                    offload=setting.offload,
                )
                for index in range(grid.num_stages * setting.chunks)
            ),
            schedule="1f1b" if setting.chunks == 1 else "interleaved-1f1b",
        )


def _closed(grid: Grid, family: UniformFamily, costs: GridCosts, fits_K: BoolArray) -> Iterator[Setting]:
    """The best settings of a grid by the closed form, of which not more than so many are ever run on the clock."""
    seconds_K = np.where(fits_K, costs.seconds_K, np.inf)
    for index in np.argsort(seconds_K, kind="stable")[:CLOCKED].tolist():
        if np.isfinite(seconds_K[index]):
            yield Setting(
                seconds=float(seconds_K[index]),
                grid=grid,
                checkpointed=int(costs.checkpointed_K[index]),
                zero_stage=int(costs.zero_K[index]),
                offload=family.every_offload[int(costs.offload_K[index])],
            )


def _within(uses_SK: FloatArray, limit_S: FloatArray) -> BoolArray:
    """Which settings use no more than their limits on any stage."""
    within_K: BoolArray = np.all(uses_SK <= limit_S[:, None], axis=0)
    return within_K


def _least(known: Shortage | None, found: Shortage | None) -> Shortage | None:
    """The lesser of two shortages."""
    return min((item for item in (known, found) if item is not None), key=lambda item: item.missing, default=None)


def _offload(ratios: Sequence[OffloadRatios]) -> OffloadCandidates:
    return OffloadCandidates(
        parameters_K=np.array([item.parameters for item in ratios]),
        gradients_K=np.array([item.gradients for item in ratios]),
        optimizer_K=np.array([item.optimizer for item in ratios]),
        activations_K=np.array([item.activations for item in ratios]),
    )


def even_chunks(stages: IntraStage, *, below: float) -> Plan | None:
    """The fastest plan with equal stages in interleaved chunks, of a search for any plan.

    Args:
        stages: Knows the search space and the limits.
        below: Plans that do not take fewer seconds are of no interest.

    Returns:
        The plan with its prediction; None if none is faster, or the search does not leave layers open.
    """
    search = stages.space.search
    is_pinned = search.layer_cuts is not None or search.checkpointed_shares is not None
    if is_pinned or "interleaved-1f1b" not in search.schedules:
        return None
    family = UniformFamily(
        zero_stages=search.zero_stages, has_stages=True, splits_layers=True, has_chunks=True, has_whole=False
    )
    limits = Limits(device_bytes=(stages.memory_limit,), host_bytes=(np.inf,))
    return UniformSearch(stages.model, stages.space, limits, kept=stages.grids).best(family, below=below).plan
