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
from lightning_mist.cost.compile import BoolArray
from lightning_mist.cost.phases import Phase, stage_phases
from lightning_mist.plan import Plan
from lightning_mist.tuner.choices import ANYWHERE, EVERY_PART, SlotChoices, with_peaks_as_seconds
from lightning_mist.tuner.families import KnownGrids
from lightning_mist.tuner.moved import Mover
from lightning_mist.tuner.moved_known import Knowledge
from lightning_mist.tuner.moved_ratios import Ratios
from lightning_mist.tuner.pieces import PieceKey, Pieces, piece_key
from lightning_mist.tuner.placed_runs import AllRuns
from lightning_mist.tuner.space import Shape, Space, common_unit
from lightning_mist.tuner.tables import ROOM, Table, Wanted, make_tables, with_stages_behind, within
from lightning_mist.tuner.unmoved import Unmoved, unmoved
from lightning_mist.tuner.windows import Role, Windows, fixed_window, layer_classes, role_of, windows_of

__all__ = ["ANYWHERE", "EVERY_PART", "IntraStage", "SlotChoices", "layer_classes", "with_peaks_as_seconds"]

TableKey = tuple[Role, int, int, Hashable]
"""Role, number of microbatches, stage where its layers are settled (else -1), and where the pipeline passes from one
part of the cluster to another."""

AHEAD = 1.05
"""Multiple of a pace up to which candidates are looked at: what may be near the best is asked for next."""

_FrontierKey = tuple[TableKey, int, tuple[Phase, ...]]
"""What tells frontiers apart: the table, the stages behind as far as they count, the situations."""

_Place = tuple[int, int, tuple[int, ...]]
"""A stage, the number of stages, and the parts of the cluster in which these lie, if it has unlike ones."""


class IntraStage:
    """Makes frontiers; keeps those that several pipelines share.

    Args:
        model: The cost model.
        space: The search space.
        memory_limit: Bytes that a device may use.
        host_limit: Bytes of host memory that it may use for what it offloads.
        elsewhere: The search spaces of other parts of the cluster, if it has unlike ones.
        tables: Where what does not depend on the limits is kept; by default for this object alone.
        grids: The same of stages that are all alike.
        runs: What stages take at least, also of other batches; by default for this object alone.
        pieces: What tables are put together of, likewise.
        knowledge: What is known of candidates that move state, likewise.

    Attributes:
        evaluated: Candidates whose seconds were computed here.
        known: Candidates that were evaluated before.
        runs: What stages take at least.
    """

    def __init__(
        self,
        model: CostModel,
        space: Space,
        memory_limit: float,
        *,
        host_limit: float = np.inf,
        elsewhere: tuple[Space, ...] = (),
        tables: dict[TableKey, Table] | None = None,
        grids: KnownGrids | None = None,
        runs: AllRuns | None = None,
        pieces: Pieces | None = None,
        knowledge: Knowledge | None = None,
    ) -> None:
        self.model, self.space, self._elsewhere = model, space, elsewhere
        self.memory_limit, self.host_limit = memory_limit, host_limit
        self.evaluated = self.known = 0
        self._used: set[TableKey] = set()
        self._pieces, self._met = Pieces() if pieces is None else pieces, set[Hashable]()
        self._classes = layer_classes(model.spec)
        self._tables: dict[TableKey, Table] = {} if tables is None else tables
        self.grids = KnownGrids() if grids is None else grids
        self.runs = AllRuns() if runs is None else runs
        self._windows: dict[Role, Windows] = {}
        # Frontiers and the pace up to which they hold, by how many stages and which situations they are for.
        self._frontiers: dict[_FrontierKey, tuple[float, BoolArray | None, SlotChoices]] = {}

        # Tables with what so many stages behind cost, beside those that they were made of.
        self._behind: dict[tuple[TableKey, int], tuple[Table, Table]] = {}
        self._mover = Mover(
            model=model,
            ratios=Ratios.of(space.search, space.offload_ratios),
            memory_limit=memory_limit,
            host_limit=host_limit,
            knowledge=Knowledge() if knowledge is None else knowledge,
        )

    @property
    def is_warm(self) -> bool:
        """Whether candidates have been evaluated already, for this search or another."""
        return bool(self._tables)

    def try_ratios(self, ratios: Sequence[float], deadline: float = np.inf) -> None:
        """Let frontiers have what moves these parts of state to host memory.

        Args:
            ratios: Fractions in (0, 1].
            deadline: Value of ``perf_counter()`` from which on nothing more is evaluated for it.
        """
        asked, known = Ratios.of(self.space.search, ratios), self._mover.ratios
        self._mover = replace(self._mover, ratios=asked, deadline=deadline)
        if asked.sizes != known.sizes:
            self._frontiers.clear()

    @property
    def both_limits(self) -> tuple[float, float]:
        """Bytes that a device may use, and of host memory."""
        return self.memory_limit, self.host_limit

    def limits(self, plan: Plan) -> tuple[float, ...]:
        """Bytes that the devices of every stage of a plan may use."""
        return (self.memory_limit,) * plan.num_stages

    def host_limits(self, plan: Plan) -> tuple[float, ...]:
        """Bytes of host memory that each device of every stage of a plan may use."""
        return (self.host_limit,) * plan.num_stages

    def frontier(
        self,
        stage_index: int,
        num_stages: int,
        num_microbatches: int,
        slowest: float = np.inf,
        *,
        pipeline: tuple[int, ...] = (),
        among_NL: BoolArray | None = None,
    ) -> SlotChoices:
        """The choices of one slot that fit, take at most ``slowest`` seconds per microbatch and are not dominated.

        Args:
            stage_index: Index of the stage.
            num_stages: Number of stages.
            num_microbatches: Number of microbatches.
            slowest: The most steady seconds.
            pipeline: The part of the cluster in which every stage lies, if it has unlike ones.
            among_NL: Of which numbers of devices and layers choices are of interest; by default of all.
        """
        place = stage_index, num_stages, pipeline
        self.prepare([(*place, among_NL)], num_microbatches, slowest, with_ahead=True)
        _, _, choices = self._frontiers[self._frontier_key(place, num_microbatches)]
        most = self.space.world_size if self._elsewhere else self.space.world_size - num_stages + 1
        inside_K = within(choices, stage_index, num_stages, self.space.num_layers, most)
        return choices.take(inside_K & (choices.steady_K <= slowest))

    def fastest(self, num_microbatches: int, slowest: float = np.inf) -> SlotChoices:
        """The choices of an only stage that are not dominated, without those that move something and are not fastest.

        Args:
            num_microbatches: Number of microbatches.
            slowest: The most steady seconds.
        """
        place: _Place = (0, 1, ())
        key, _, phases = self._frontier_key(place, num_microbatches)
        self._make_tables({key: place}, num_microbatches, slowest)
        table = self._tables[key]
        found = unmoved(self._mover, (table, table), phases, slowest, weight=num_microbatches - 1)
        (choices,) = self._with_moved([found])
        inside_K = within(choices, 0, 1, self.space.num_layers, self.space.world_size)
        return choices.take(inside_K & (choices.steady_K <= slowest))

    def prepare(
        self,
        asked: Iterable[tuple[int, int, tuple[int, ...], BoolArray | None]],
        num_microbatches: int,
        slowest: float = np.inf,
        *,
        with_ahead: bool = False,
    ) -> None:
        """Work out what frontiers of several slots need at once, which is faster than one after another.

        Args:
            asked: Stage, number of stages, pipeline, and numbers of devices and layers, each as of :meth:`frontier`.
            num_microbatches: Number of microbatches.
            slowest: The most steady seconds.
            with_ahead: Whether to count bytes also of stages that may be asked about next.
        """
        wanted: dict[_FrontierKey, tuple[_Place, BoolArray | None]] = {}
        for stage_index, num_stages, pipeline, among_NL in asked:
            place = stage_index, num_stages, pipeline
            key = self._frontier_key(place, num_microbatches)
            pace, known_NL, _ = self._frontiers.get(key, (-np.inf, None, None))
            if pace * ROOM < slowest or not _covers(known_NL, among_NL):
                of_key = wanted.get(key)
                wanted[key] = place, among_NL if of_key is None else _either(of_key[1], among_NL)
        self._make_tables({key[0]: place for key, (place, _) in wanted.items()}, num_microbatches, slowest)
        open_: list[Unmoved] = []
        for key, (place, among_NL) in wanted.items():
            table = self._tables[key[0]]
            counted = self._counted(key[0], table, key[1])
            has_next = with_ahead and key[0][2] < 0
            ahead = self._ahead(place[0], place[1], num_microbatches) if has_next else ()
            open_.append(unmoved(self._mover, (table, counted), key[2], slowest, ahead, among_NL))
        for (key, (_, among_NL)), choices in zip(wanted.items(), self._with_moved(open_), strict=True):
            self._frontiers[key] = slowest, among_NL, choices

    def _frontier_key(self, place: "_Place", num_microbatches: int) -> "_FrontierKey":
        stage_index, num_stages, pipeline = place
        phases = stage_phases(stage_index, num_stages, num_microbatches, self.space.schedule)
        # More microbatches than there are do not pass a stage before the first of them comes back.
        behind = min(num_stages - 1 - stage_index, num_microbatches - 1)
        return self._key(stage_index, num_stages, num_microbatches, pipeline), behind, phases

    def _ahead(self, stage_index: int, num_stages: int, num_microbatches: int) -> tuple[tuple[Phase, ...], ...]:
        """The situations of stages that share a table with one and have more behind them, up to twice as many."""
        if role_of(stage_index, num_stages) not in ("first", "middle"):
            return ()
        most = min(2 * num_stages - stage_index, self.space.max_stages)
        found = (
            stage_phases(stage_index, count, num_microbatches, self.space.schedule)
            for count in range(num_stages + 1, most + 1)
        )
        return tuple(dict.fromkeys(found))

    def _counted(self, key: TableKey, table: Table, behind: int) -> Table:
        """A table that counts the stages behind; kept as long as the table is."""
        if not behind:
            return table
        known, counted = self._behind.get((key, behind), (None, table))
        if known is not table:
            counted = with_stages_behind(table, behind)
            self._behind[key, behind] = table, counted
        return counted

    def _with_moved(self, items: Sequence[Unmoved]) -> list[SlotChoices]:
        """The frontiers of stages, with what they may move."""
        asked = [item.asked for item in items if item.asked is not None]
        if not asked:
            return [item.alone() for item in items]
        moved, evaluated = self._mover.of(asked)
        self.evaluated += evaluated
        return [item.frontier(more) for item, more in zip(items, moved, strict=True)]

    def rough_seconds(self, num_stages: int, num_microbatches: int) -> float:
        """Step seconds of about the best pipeline of equal stages; infinite if there is none that fits.

        It is that of a pipeline whose stages all take what a first stage does that has a fair share of the layers.
        """
        count, rest = divmod(self.space.world_size, num_stages)
        shapes = [shape for shape in self.space.shapes(num_microbatches) if shape.devices == count and not rest]
        if not shapes:
            return float("inf")
        slots = [self.slot(0, num_stages, num_microbatches, shape) for shape in shapes]
        layers = -(-self.space.num_layers // num_stages)
        settled = self.space.cuts(num_stages) is not None
        windows = fixed_window(0, layers) if settled else self._windows_of(0, num_stages)
        # Among the runs of layers of all first stages, so that it need not be evaluated again with them.
        chosen_W, keys = windows.layers_W == layers, self._piece_keys(slots, windows)
        wanted = Wanted(slots=slots, windows=windows, chosen_W=chosen_W, keys=keys)
        (table,), evaluated = make_tables(self.model, self.space, [wanted], np.inf, pieces=self._pieces)
        self.evaluated += evaluated
        phases = stage_phases(0, num_stages, num_microbatches, self.space.schedule)
        fits_K = table.parts.peaks(phases) <= self.memory_limit
        steady = float(table.steady_K[fits_K].min(initial=np.inf))
        return (num_microbatches - 1 + num_stages) * steady

    def choices(self, slot: StageSlot) -> SlotChoices:
        """Everything that a slot may be without offload, whether it fits or not."""
        table = self.everything(slot)
        phases = stage_phases(slot.stage_index, slot.num_stages, slot.num_microbatches, slot.schedule)
        return self.inside(slot, table.choices(np.arange(len(table)), table.parts.peaks(phases)))

    def everything(self, slot: StageSlot) -> Table:
        """Everything that stages with the role of a slot may be."""
        windows = self._windows_of(slot.stage_index, slot.num_stages)
        wanted = Wanted(slots=[slot], windows=windows)
        (table,), evaluated = make_tables(self.model, self.space, [wanted], np.inf)
        self.evaluated += evaluated
        return table

    def inside(self, slot: StageSlot, found: SlotChoices) -> SlotChoices:
        """Those of some choices that a slot may be where it lies."""
        return found.take(within(found, slot.stage_index, slot.num_stages, self.space.num_layers, np.iinfo(int).max))

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

    def _key(self, stage_index: int, num_stages: int, num_microbatches: int, pipeline: tuple[int, ...]) -> TableKey:
        slot = self.slot(stage_index, num_stages, num_microbatches, Shape(1), pipeline)
        # What a stage costs depends on the number of stages only through the situations.
        settled = stage_index if self.space.cuts(num_stages) is not None else -1
        return role_of(stage_index, num_stages), num_microbatches, settled, slot.seams

    def _table(
        self, stage_index: int, num_stages: int, num_microbatches: int, pipeline: tuple[int, ...], pace: float
    ) -> Table:
        """Everything about candidates but how many microbatches are in flight, which slots share."""
        key = self._key(stage_index, num_stages, num_microbatches, pipeline)
        self._make_tables({key: (stage_index, num_stages, pipeline)}, num_microbatches, pace)
        return self._tables[key]

    def _make_tables(self, places: Mapping[TableKey, _Place], num_microbatches: int, pace: float) -> None:
        """The tables of some stages, as far as they do not exist."""
        missing: dict[TableKey, Wanted] = {}
        for key, (stage_index, num_stages, pipeline) in places.items():
            table = self._tables.get(key)
            if table is not None and table.pace * ROOM >= pace:
                if key not in self._used:
                    self._piece_keys(table.slots, table.windows)
                continue
            # What depends on the stages behind is counted when they are known.
            slots = [
                replace(self.slot(stage_index, num_stages, num_microbatches, shape, pipeline), behind=0)
                for shape in self.space.shapes(num_microbatches)
                if self._elsewhere or (shape.devices == self.space.world_size) == (num_stages == 1)
            ]
            windows = self._windows_of(stage_index, num_stages)
            missing[key] = Wanted(slots=slots, windows=windows, keys=self._piece_keys(slots, windows))
        self._used |= set(places)
        if not missing:
            return
        # Of the devices of other parts nothing is known here.
        tables, evaluated = make_tables(
            self.model, self.space, list(missing.values()), pace * AHEAD, alone=not self._elsewhere, pieces=self._pieces
        )
        self.evaluated += evaluated
        self._tables |= dict(zip(missing, tables, strict=True))

    def _piece_keys(self, slots: Sequence[StageSlot], windows: Windows) -> list[PieceKey]:
        """What tells the candidates of some slots from others; counts those that were known before."""
        of_windows = windows.start_W.tobytes(), windows.layers_W.tobytes()
        keys = [piece_key(self.model, slot, self.space, of_windows) for slot in slots]
        for key in keys:
            if key not in self._met:
                self._met.add(key)
                self.known += self._pieces.size(key)
        return keys

    def _windows_of(self, stage_index: int, num_stages: int) -> Windows:
        cuts = self.space.cuts(num_stages)
        if cuts is not None:
            return fixed_window(cuts[stage_index], cuts[stage_index + 1])
        role = role_of(stage_index, num_stages)
        if role not in self._windows:
            self._windows[role] = windows_of(role, self.space.num_layers, self._classes)
        return self._windows[role]


def _either(first_NL: BoolArray | None, second_NL: BoolArray | None) -> BoolArray | None:
    """Numbers of devices and layers of which one or the other is of interest."""
    return None if first_NL is None or second_NL is None else first_NL | second_NL


def _covers(known_NL: BoolArray | None, asked_NL: BoolArray | None) -> bool:
    """Whether what is known of some numbers of devices and layers is enough for what is asked."""
    return known_NL is None or (asked_NL is not None and not (asked_NL & ~known_NL).any())
