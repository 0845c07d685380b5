"""The stage program: what a stage does in a pass, row by row. Lists of actions and seconds of passes are read here.

A pass goes through the *units* of a stage: its head, layers and tail, forward in their order, backward in reverse. A
*row* is the computation of one unit with the unit actions that are issued in front of it, and so are under way beside
it. They are named by how far their unit is from the one that computes: in the row of layer 5, ``UNSHARD +1`` of
``FORWARD`` starts to fetch the parameters of layer 6, and ``STORE_ACTIVATIONS -1`` to move away what layer 4 keeps.
Rows in front of the first unit and behind the last compute nothing: what is issued there hides behind nothing. An
action *starts* something; what needs its result waits for it. Rows of three layers with everything sharded::

    0UNSHARD:0 | 0UNSHARD:1 0F0:0 | 0RESHARD:0 0UNSHARD:2 0F0:1 | 0F0:2
    0B0:2 | 0REDUCE:2 0RESHARD:2 0UNSHARD:0 0B0:1 | 0REDUCE:1 0RESHARD:1 0B0:0 | 0REDUCE:0 0RESHARD:0

**Parameters.** While a unit computes, its own and those of the next one in the rank's whole list are there and no
others, so a unit stays where the next pass begins with it.

**Gradients** that ranks share out are reduced behind every backward. Those that are added up in host memory are fetched
beside their backward and leave behind it, or, where ranks reduce them, when those of the next unit are on their way.
Where backward is split all this happens behind the weights' half, which needs no parameters.

**Activations** leave when their unit's forward has ended and are freed when that of the next has; in backward they
arrive beside the unit above.

**The update** is unit by unit where it moves anything. What the next unit needs is fetched into a second buffer beside
it. It may be *deferred* into the first forward of the next batch, where a unit is updated beside the one in front of
it, before its parameters are given out. By itself and deferred, of two layers::

    0LOAD_O:0 | 0LOAD_O:1 0UPDATE:0 0STORE_O:0 | 0UPDATE:1 0STORE_O:1
    0LOAD_O:0 | 0LOAD_O:1 0UPDATE:0 0STORE_O:0 | 0UPDATE:1 0STORE_O:1 0F0:0 | 0F0:1

What must hold in any such list :mod:`lightning_mist.schedule.unit_checks` says, which does not know these tables.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from itertools import chain, pairwise
from typing import TypeAlias, TypeVar

from lightning_mist.schedule.action import INPUT_BACKWARDS, Action
from lightning_mist.schedule.action import ActionKind as A

NUM_BUFFERS = 2
"""Buffers on the device for each kind of state: for what is used, and for what is fetched ahead or written back."""

Key: TypeAlias = tuple[int, int]
"""Stage and unit."""

_T = TypeVar("_T", int, Key)


class Channel(IntEnum):
    """What actions keep busy, in the order of :data:`lightning_mist.hardware.profile.CHANNELS`."""

    COMPUTE = 0
    NETWORK = 1
    TO_DEVICE = 2
    TO_HOST = 3


class When(Enum):
    """In which passes of a batch something has to be done."""

    ALWAYS = "in all"
    EDGE = "in the first forward, or in the last backward"
    MIDDLE = "in the others"


@dataclass(frozen=True, slots=True)
class Load:
    """What an action has to do.

    Attributes:
        name: As of :class:`lightning_mist.cost.time.offload_loads.Loads`; ``kept`` is ``saved``, or ``checkpoint`` of
            layers that are recomputed.
        counts: Beside which computation it counts: that of so many rows behind the one in which it is issued.
        is_waited: Whether computing waits for it where a rank does it alone and gives it to others (ZeRO-3).
        is_resident: Whether the two outermost units of a pass need it not, as they stay from the pass before.
    """

    channel: Channel
    name: str
    when: When = When.ALWAYS
    counts: int = 0
    is_waited: bool = False
    is_resident: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """One unit action of a row.

    Attributes:
        kinds: Its kind; or that of each kind of state that moves.
        offset: Of which unit it is, counted in the order of the pass: +1 computes in the next row.
        of: The units that have it, by name as of :func:`_units_having`.
        loads: What it has to do.
        skips: Whether the row is counted from the nearest unit that has it, since others take no room.
    """

    kinds: tuple[A, ...]
    offset: int
    of: str
    loads: tuple[Load, ...] = ()
    skips: bool = False

    def row(self, members: Sequence[int], index: int, count: int) -> int:
        """The row in which the action of one of the units that have it is issued.

        Args:
            members: Places of these units among those of the pass.
            count: How many units the pass has.
        """
        step = (1 if self.offset > 0 else -1) * self.skips
        other = index - step
        nearest = -1 if other < 0 else members[other] if other < len(members) else count
        return nearest - (self.offset - step)


_C, _N, _D, _U = Channel
_LOAD_STATE = (A.LOAD_OPTIMIZER_STATE, A.LOAD_PARAMETERS, A.LOAD_GRADIENTS)
_STORE_STATE = (A.STORE_OPTIMIZER_STATE, A.STORE_PARAMETERS)
_FROZEN = Load(_D, "frozen_in", When.EDGE, is_waited=True)
_PARAMETERS = Load(_D, "parameters_in", is_waited=True, is_resident=True)

UPDATE = (
    Entry(_LOAD_STATE, +1, "moved", (Load(_D, "state_in", When.EDGE),), skips=True),
    Entry((A.UPDATE,), 0, "updated", (Load(_C, "update", When.EDGE),)),
    Entry((A.GATHER_PARAMETERS,), 0, "given", (Load(_N, "gather", When.EDGE),)),
    Entry(_STORE_STATE, 0, "moved", (Load(_U, "state_out", When.EDGE, counts=1),)),
)
"""Rows of the update by itself."""

FORWARD = (
    Entry((A.RESHARD,), -1, "sharded"),
    *(replace(entry, offset=entry.offset + 1) for entry in UPDATE),
    Entry((A.UNSHARD,), +1, "sharded", (Load(_N, "unshard"), _FROZEN, replace(_PARAMETERS, when=When.MIDDLE))),
    Entry((A.STORE_ACTIVATIONS,), -1, "kept", (Load(_U, "kept_out"),)),
    Entry((A.DROP_ACTIVATIONS,), -2, "kept"),
    Entry((A.FORWARD,), 0, "all", (Load(_C, "forward"),)),
)
"""Rows of a forward; those of the update are there in the first of a batch, if the one before has put it off."""

BACKWARD = (
    Entry((A.REDUCE_GRADIENTS,), -1, "reduced", (Load(_N, "scatter"), Load(_N, "reduce", When.EDGE))),
    Entry((A.RESHARD,), -1, "sharded"),
    Entry((A.UNSHARD,), +1, "sharded", (Load(_N, "unshard"), _PARAMETERS)),
    # Nobody waits for gradients until the unit after the next needs their room: they count beside their own unit's
    # backward, in whichever row they leave, and those of the last unit not at all.
    Entry((A.STORE_GRADIENTS,), -1, "summed alone", (Load(_U, "gradients_out", counts=-1),)),
    Entry((A.STORE_GRADIENTS,), -2, "summed by ranks", skips=True),
    Entry((A.LOAD_GRADIENTS,), 0, "fetched", (Load(_D, "gradients_in"),)),
    Entry((A.LOAD_ACTIVATIONS,), +1, "kept", (Load(_D, "kept_in"),)),
    Entry((A.BACKWARD,), 0, "all", (Load(_C, "backward"), Load(_C, "again"))),
)
"""Rows of a backward, whose next unit is the one below; of its first half, which has no gradients to move, too."""

_WEIGHTS = (
    Entry((A.LOAD_GRADIENTS,), 0, "fetched"),
    Entry((A.REDUCE_GRADIENTS,), 0, "reduced"),
    Entry((A.STORE_GRADIENTS,), 0, "summed alone"),
    Entry((A.STORE_GRADIENTS,), -1, "summed by ranks", skips=True),
)
"""Rows behind the weights' half of a backward, which makes the gradients of all units at once."""

TABLES = {
    A.FORWARD: FORWARD,
    A.BACKWARD: BACKWARD,
    A.BACKWARD_INPUT: BACKWARD,
    A.BACKWARD_WEIGHT: _WEIGHTS,
    A.UPDATE: UPDATE,
}
"""Rows of passes, by what they compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageUnits:
    """The units of a stage, and which of them have what.

    Attributes:
        order: All in the order of forward.
        reduced: Those of them whose gradients are reduced in every microbatch.
        sharded: Those of them whose parameters are fetched, from other ranks or from host memory.
        activations: Those of them of which something that they keep for backward is offloaded to host memory meanwhile.
        gradients: Those of them whose gradients are added up in host memory.
        is_averaged: Whether ranks average these behind the last backward.
    """

    order: tuple[int, ...]
    reduced: frozenset[int] = frozenset()
    sharded: frozenset[int] = frozenset()
    activations: frozenset[int] = frozenset()
    gradients: frozenset[int] = frozenset()
    is_averaged: bool = False

    @property
    def is_expanded(self) -> bool:
        """Whether anything comes between the units, the optimizer's update left aside."""
        return bool(self.reduced or self.sharded or self.activations or self.gradients)


@dataclass(frozen=True, slots=True)
class _Pass:
    """One action of a rank's list: its units in its order, and which have what; nothing if it is not expanded."""

    action: Action
    order: tuple[int, ...]
    having: Mapping[str, Collection[int]]

    @property
    def fetched(self) -> list[int]:
        """The units whose parameters have to be there, one after another."""
        return [unit for unit in self.order if unit in self.having["sharded"]]

    def lines(self, begin: Sequence[Action], changes: Iterator[Sequence[Action]]) -> list[Action]:
        """Its lines, in the order of rows and of the table.

        Args:
            begin: What of parameters is fetched right before the first computation that needs it.
            changes: What is freed and fetched behind each.
        """
        action, fetched = self.action, self.fetched
        is_whole = not self.having or action.kind is A.BACKWARD_WEIGHT
        rows = {row: [action] * (is_whole and row == -2) for row in range(-2, len(self.order) + 2)}
        behind = {self.order.index(unit) + 1: next(changes) for unit in fetched}
        for entry in TABLES.get(action.kind, ()):
            if entry.of == "sharded":
                for row, found in behind.items():
                    rows[row] += [line for line in found if line.kind in entry.kinds]
            elif entry.of in self.having:
                microbatch = action.microbatch if entry.of in ("all", "kept") else None
                kind = action.kind if entry.of == "all" else entry.kinds[0]
                for row, unit in _issued(entry, self.order, self.having):
                    rows[row].append(Action(action.stage, kind, microbatch, unit))
        if fetched:
            rows[self.order.index(fetched[0])][-1:-1] = begin
        return list(chain.from_iterable(rows.values()))


def lines_of(
    actions: Sequence[Action], units: Mapping[int, StageUnits], update: Sequence[Sequence[Action]] = ()
) -> tuple[tuple[Action, ...], ...]:
    """What each action of a rank's list consists of: what the runtime executes.

    Args:
        units: Units of those of its stages that are expanded, by stage.
        update: Rows of the update of the batch before, if it happens in the first forwards of this one.

    Returns:
        For each action its lines: the action itself where nothing is expanded; else the computation of every unit and
        what comes between, behind the last one also what makes room for the next action. One batch begins and ends
        with everything sharded.
    """
    trained = {action.stage for action in actions if action.kind in INPUT_BACKWARDS}
    makers = [action for action in actions if action.kind in (A.BACKWARD, A.BACKWARD_WEIGHT)]
    first = {action.stage: action for action in reversed(makers)}
    last = {action.stage: action for action in makers}
    updated = {action.stage for row in update for action in row}
    passes: list[_Pass] = []
    for action in actions:
        stage, of_stage = action.stage, units.get(action.stage)
        begins = action.kind is A.FORWARD and stage in updated
        updated -= {stage} if begins else set()
        if action.kind not in TABLES or of_stage is None or not (of_stage.is_expanded or begins):
            passes.append(_Pass(action, (), {}))
            continue
        order = of_stage.order if action.kind is A.FORWARD else of_stage.order[::-1]
        is_first, is_last = action == first.get(stage), action == last.get(stage)
        having = _units_having(of_stage, action.kind, is_trained=stage in trained, is_first=is_first, is_last=is_last)
        passes.append(_Pass(action, order, having))
    changes = iter(_changes([(item.action.stage, unit) for item in passes for unit in item.fetched]))
    begin = next(changes)
    lines: list[list[Action]] = []
    for item in passes:
        lines.append(item.lines(begin, changes))
        begin = () if item.fetched else begin
    return tuple(tuple(part) for part in (_with_update(lines, update) if update else lines))


def update_rows(
    units: Sequence[Key], offloaded: Mapping[str, Collection[Key]], *, gathers: bool = False
) -> tuple[tuple[Action, ...], ...]:
    """The optimizer's step, a row for each unit; what the first one needs is in its own.

    Args:
        offloaded: Units that have optimizer state (``"O"``), parameters (``"P"``) and gradients (``"G"``) in host
            memory.
        gathers: Whether what was updated is then given to other ranks, unit by unit.
    """
    moved = {key for of_kind in offloaded.values() for key in of_kind}
    having: dict[str, Collection[Key]] = {"moved": moved, "updated": units, "given": units if gathers else ()}
    rows: list[list[Action]] = [[] for _ in range(len(units) + 1)]
    for entry in UPDATE:
        for row, key in _issued(entry, units, having):
            for kind in entry.kinds:
                state = kind.value.partition("_")[2]
                if not state or key in offloaded.get(state, ()):
                    rows[row + 1].append(Action(key[0], kind, None, key[1]))
    return tuple(tuple(row) for row in ([*rows[0], *rows[1]], *rows[2:])) if units else ()


def _issued(entry: Entry, order: Sequence[_T], having: Mapping[str, Collection[_T]]) -> Iterator[tuple[int, _T]]:
    """In which row of a pass an entry is, and with which unit."""
    members = [at for at, key in enumerate(order) if key in having[entry.of]]
    for index, at in enumerate(members):
        yield entry.row(members, index, len(order)), order[at]


def _units_having(
    units: StageUnits, kind: A, *, is_trained: bool, is_first: bool, is_last: bool
) -> dict[str, Collection[int]]:
    """The units of a stage that have something to do in a pass, by its name in the tables.

    Args:
        is_trained: Whether the stage has backwards; what is only evaluated keeps nothing.
        is_first: Whether it is the first backward of a batch, before which there are no gradients to fetch.
        is_last: Whether it is the last.
    """
    makes, averages = kind is not A.BACKWARD_INPUT, units.is_averaged and is_last
    reduced = units.reduced | units.gradients if averages else units.reduced
    summed = units.gradients if makes else frozenset()
    return {
        "all": units.order,
        "sharded": () if kind is A.BACKWARD_WEIGHT else units.sharded,
        "kept": units.activations if is_trained else (),
        "reduced": reduced if makes else (),
        "fetched": () if is_first else summed,
        "summed alone": () if reduced else summed,
        "summed by ranks": summed & reduced,
    }


def _changes(uses: Sequence[Key]) -> list[tuple[Action, ...]]:
    """What of a rank's parameters is fetched before its first computation, and freed and fetched behind each.

    Args:
        uses: The units that compute with what is fetched, one after another.
    """
    windows: list[tuple[Key, ...]] = [()]
    for key in reversed(uses):
        windows.append((key, *[other for other in windows[-1] if other != key][:1]))
    return [
        (
            *(Action(stage, A.RESHARD, None, unit) for stage, unit in before if (stage, unit) not in after),
            *(Action(stage, A.UNSHARD, None, unit) for stage, unit in after if (stage, unit) not in before),
        )
        for before, after in pairwise([(), *reversed(windows)])
    ]


def _with_update(lines: Sequence[Sequence[Action]], update: Sequence[Sequence[Action]]) -> list[list[Action]]:
    """Put the last batch's update into the first forwards of a list: every unit's where ``FORWARD`` has it.

    That is before its parameters are fetched, or else before the unit in front of it computes.
    """
    pending = {(line.stage, line.unit): row for row in update for line in row if line.kind is A.UPDATE}
    result: list[list[Action]] = []
    for part in lines:
        following = dict(pairwise(line.unit for line in part if line.kind is A.FORWARD))
        expanded: list[Action] = []
        for line in part:
            if line.kind in (A.FORWARD, A.UNSHARD) and line.unit is not None:
                due = [line.unit, following.get(line.unit) if line.kind is A.FORWARD else None]
                while any((line.stage, unit) in pending for unit in due):
                    expanded += pending.pop(next(iter(pending)))
            expanded.append(line)
        result.append(expanded)
    return result
