"""The frontier of each stage: for every layer range and number of devices, the choices that are worth considering.

For a slot (stage ``i`` of ``S`` with ``G`` microbatches) every feasible combination of layers, devices, their
arrangement, recomputed layers and ZeRO stage is evaluated; of those with the same layers and devices only the
non-dominated ones in ``t`` (steady time) and ``t + d`` (with boundary time) go on. Memory does not appear after this:
what does not fit is not a choice.

A choice that another of its place beats in ``t`` and in ``t + d`` is never needed. Let the other be faster by
``x = t - t' >= 0``, so that ``d' <= d + x``. In

    step = (G - 1) max_i t_i + sum_i t_i + max(0, max_i (d_i - sum_{j < i} t_j))

the first term does not grow, the second falls by ``x``, and no term of the third grows by more than ``x``: that of the
stage itself by ``d' - d``, those of stages behind it by ``x``, those before it not at all.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from lightning_mist.cost import CostModel, StageSlot
from lightning_mist.cost.inputs import BoolArray
from lightning_mist.cost.memory import Moments, device_moments
from lightning_mist.plan import Plan
from lightning_mist.tuner.candidates.candidate_tables import (
    ROOM,
    Request,
    Stage,
    Table,
    covers,
    either,
    make_tables,
)
from lightning_mist.tuner.candidates.choices import SlotChoices, within
from lightning_mist.tuner.candidates.offload_search import OffloadSearch, RatioGrid
from lightning_mist.tuner.space import (
    LayerRanges,
    Role,
    Shape,
    Space,
    common_unit,
    fixed_range,
    layer_classes,
    layer_ranges_of,
    role_of,
)

TableKey = tuple[Role, int, tuple[int, int] | None, Hashable]
"""Role, number of microbatches, stage where its layers are settled (else -1), and where the pipeline passes from one
part of the cluster to another."""

FrontierKey = tuple[TableKey, int, int]
"""What tells frontiers apart: the table, the stages behind as far as they count, a number for the moments."""

Frontier = tuple[float, BoolArray | None, SlotChoices]
"""Choices, the bottleneck up to which they hold, and of which numbers of devices and layers."""

Place = tuple[int, int, tuple[int, ...]]
"""A stage, the number of stages, and the parts of the cluster in which these lie, if it has unlike ones."""

Wish = tuple[int, int, tuple[int, ...], BoolArray | None]
"""A :data:`Place`, and of which numbers of devices and layers choices are of interest; of all if ``None``."""


class IntraStage:
    """Makes frontiers; keeps those that several pipelines share.

    Args:
        memory_limit: Bytes that a device may use.
        host_limit: Bytes of host memory that it may use for what it offloads.
        elsewhere: The search spaces of other parts of the cluster, if it has unlike ones.
        like: Another that differs in the bytes alone: what does not depend on them is shared.

    Attributes:
        evaluated: Candidates whose seconds were computed.
    """

    def __init__(
        self,
        model: CostModel,
        space: Space,
        memory_limit: float,
        *,
        host_limit: float = np.inf,
        elsewhere: tuple[Space, ...] = (),
        like: "IntraStage | None" = None,
    ) -> None:
        self.model, self.space, self._elsewhere = model, space, elsewhere
        self.memory_limit, self.host_limit = memory_limit, host_limit
        self.evaluated = 0
        self._classes = layer_classes(model.spec)
        self._tables: dict[TableKey, Table] = {} if like is None else like._tables
        self._ranges: dict[Role, LayerRanges] = {}
        # Frontiers and the bottleneck up to which they hold, by how many stages and which moments they are for; those
        # that may offload, and those with all state resident.
        self._frontiers: tuple[dict[FrontierKey, Frontier], dict[FrontierKey, Frontier]] = {}, {}
        # What tells the frontiers of a place from others, with its moments; numbers of these.
        self._keys: dict[tuple[Place, int], tuple[FrontierKey, Moments]] = {}
        self._numbers: dict[Moments, int] = {}
        self._searches = tuple(
            OffloadSearch(
                model=model,
                grid=RatioGrid.of(space.search, ratios),
                memory_limit=memory_limit,
                host_limit=host_limit,
            )
            for ratios in (space.offload_ratios, ())
        )

    def limits(self, plan: Plan) -> tuple[float, ...]:
        """Bytes that the devices of every stage of a plan may use."""
        return (self.memory_limit,) * plan.num_stages

    def host_limits(self, plan: Plan) -> tuple[float, ...]:
        """Bytes of host memory that each device of every stage of a plan may use."""
        return (self.host_limit,) * plan.num_stages

    def frontiers(
        self,
        asked: Sequence[Wish],
        num_microbatches: int,
        slowest: float = np.inf,
        *,
        resident: bool = False,
        deadline: float = np.inf,
    ) -> list[SlotChoices]:
        """The choices of slots that fit and are not dominated; of several at once this is faster.

        Args:
            slowest: The most seconds per microbatch.
            resident: Whether all state stays on the device.
            deadline: Value of ``thread_time()`` from which on nothing more is evaluated.

        Raises:
            TimeIsUpError: If it comes before they are.
        """
        resident |= not self.space.offload_ratios
        self._prepare(asked, num_microbatches, slowest, resident=resident, deadline=deadline)
        keys = (self._frontier_key(item[:3], num_microbatches)[0] for item in asked)
        found = (self._frontiers[resident][key][2] for key in keys)
        return [self.inside(item[:3], choices, slowest, item[3]) for item, choices in zip(asked, found, strict=True)]

    def inside(
        self, place: Place, found: SlotChoices, slowest: float = np.inf, among_NL: BoolArray | None = None
    ) -> SlotChoices:
        """Those of some choices that a slot may be where it lies, and that are of interest."""
        most = self.space.world_size if self._elsewhere else self.space.world_size - place[1] + 1
        kept_K = within(found, *place[:2], self.space.num_layers, most) & (found.steady_K <= slowest)
        if among_NL is not None:
            kept_K &= among_NL[found.devices_K, found.layers_K]
        return found if kept_K.all() else found.take(kept_K)

    def _prepare(
        self, asked: Iterable[Wish], num_microbatches: int, slowest: float, *, resident: bool, deadline: float
    ) -> None:
        """Work out what frontiers of several slots need at once, up to ``slowest`` steady seconds."""
        frontiers = self._frontiers[resident]
        every: dict[FrontierKey, tuple[Place, Stage]] = {}
        for item in asked:
            key, moments = self._frontier_key(item[:3], num_microbatches)
            # What is kept has to be enough for all places that share it.
            among_NL = either(item[3], every[key][1].among_NL) if key in every else item[3]
            every[key] = item[:3], Stage(moments=moments, behind=key[1], among_NL=among_NL)
        wanted: dict[TableKey, dict[FrontierKey, tuple[Place, Stage]]] = {}
        for key, found in every.items():
            bottleneck, known_NL, _ = frontiers.get(key, (-np.inf, None, None))
            if bottleneck * ROOM < slowest or not covers(known_NL, found[1].among_NL):
                wanted.setdefault(key[0], {})[key] = found
        places = {
            key: (next(place for place, _ in some.values()), either(*(stage.among_NL for _, stage in some.values())))
            for key, some in wanted.items()
        }
        self._make_tables(places, num_microbatches, slowest)
        shared = [(self._tables[key], [stage for _, stage in some.values()]) for key, some in wanted.items()]
        search = replace(self._searches[resident], deadline=deadline)
        found_of_tables, evaluated = search.frontiers(shared, slowest)
        self.evaluated += evaluated
        for some, of_table in zip(wanted.values(), found_of_tables, strict=True):
            for (key, (_, stage)), choices in zip(some.items(), of_table, strict=True):
                frontiers[key] = slowest, stage.among_NL, choices

    def _frontier_key(self, place: Place, num_microbatches: int) -> tuple[FrontierKey, Moments]:
        """What tells the frontiers of a slot from others, and its moments."""
        found = self._keys.get((place, num_microbatches))
        if found is None:
            stage_index, num_stages, pipeline = place
            moments = device_moments(stage_index, num_stages, num_microbatches, self.space.schedule)
            # More microbatches than there are do not pass a stage before the first of them comes back.
            behind = min(num_stages - 1 - stage_index, num_microbatches - 1)
            number = self._numbers.setdefault(moments, len(self._numbers))
            found = (self._key(stage_index, num_stages, num_microbatches, pipeline), behind, number), moments
            self._keys[place, num_microbatches] = found
        return found

    def everything(self, slot: StageSlot) -> Table:
        """Everything that stages with the role of a slot may be."""
        request = [slot], self._ranges_of(slot.stage_index, slot.num_stages), None
        (table,), evaluated = make_tables(self.model, self.space, [request], np.inf)
        self.evaluated += evaluated
        return table

    def slot(
        self,
        stage_index: int,
        num_stages: int,
        num_microbatches: int,
        shape: Shape,
        pipeline: tuple[int, ...] = (),
    ) -> StageSlot:
        """A slot with an arrangement of devices."""
        space = self.space
        replicas = common_unit(item.least_replicas(num_microbatches) for item in (space, *self._elsewhere))
        replicas = space.replicas([shape.data]) if num_stages == 1 else replicas
        return StageSlot(
            stage_index=stage_index,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            data_parallel_degree=shape.data,
            rows=space.rows(num_microbatches, shape.data),
            batch_rows=space.batch_rows(replicas),
            replicas=replicas,
            schedule=space.schedule,
            tensor_parallel_degree=shape.tensor,
            sequence_parallel=shape.sequence,
            method=shape.method,
            shard_group=shape.shard or None,
            parts=pipeline,
        )

    def _key(self, stage_index: int, num_stages: int, num_microbatches: int, pipeline: tuple[int, ...]) -> TableKey:
        slot = self.slot(stage_index, num_stages, num_microbatches, Shape(1), pipeline)
        # What a stage costs depends on the number of stages only through the moments.
        settled = self.space.layer_range(stage_index, num_stages)
        return role_of(stage_index, num_stages), num_microbatches, settled, slot.seams

    def _make_tables(
        self, asked: Mapping[TableKey, tuple[Place, BoolArray | None]], num_microbatches: int, bottleneck: float
    ) -> None:
        """The tables of some stages up to a bottleneck time, as far as they do not exist."""
        missing: dict[TableKey, Request] = {}
        for key, ((stage_index, num_stages, pipeline), among_NL) in asked.items():
            known = self._tables.get(key)
            if known is not None and known.bottleneck * ROOM >= bottleneck and covers(known.among_NL, among_NL):
                continue
            # What depends on the stages behind is counted when they are known.
            slots = [
                replace(self.slot(stage_index, num_stages, num_microbatches, shape, pipeline), behind=0)
                for shape in self.space.shapes_at(stage_index, num_stages, num_microbatches)
                if self._elsewhere or (shape.devices == self.space.world_size) == (num_stages == 1)
            ]
            missing[key] = slots, self._ranges_of(stage_index, num_stages), among_NL
        tables, evaluated = make_tables(self.model, self.space, [*missing.values()], bottleneck)
        self.evaluated += evaluated
        self._tables |= dict(zip(missing, tables, strict=True))

    def _ranges_of(self, stage_index: int, num_stages: int) -> LayerRanges:
        settled = self.space.layer_range(stage_index, num_stages)
        if settled is not None:
            return fixed_range(*settled)
        role = role_of(stage_index, num_stages)
        if role not in self._ranges:
            self._ranges[role] = layer_ranges_of(role, self.space.num_layers, self._classes)
        return self._ranges[role]
