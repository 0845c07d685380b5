"""Running a rank's lists on the clock with their copies: on a lane for each direction, in the executor's order.

The rank computes, exchanges with others, copies to its device and to host memory, each in the order of the list. A
copy, like an exchange, begins when the list has come to its action and its lane is free, and also

* a load into a buffer when what was there has left it, or was used up;
* a store when what it writes back has been computed.

Computing waits for what arrives where it is used, parameters that ranks give out when they are given out; for what
leaves where its memory is given back: activations at ``DROP``, parameters at ``RESHARD``, and state and parameters that
were updated when the next ones leave. At the end of a batch all of these have left.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeAlias

from lightning_mist.plan import ModuleMap, Plan
from lightning_mist.schedule.action import COMPUTATIONS, INPUT_BACKWARDS, TAIL, Action, ActionKind
from lightning_mist.schedule.stage_program import NUM_BUFFERS, lines_of
from lightning_mist.schedule.stage_units import defers_update, expanded_units, plan_units, stage_update

_What: TypeAlias = tuple[str, int, int | None, int | None]
"""Kind of state, stage, unit, and microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One copy: what starts it, its bytes, and when it happens, in seconds."""

    action: Action
    nbytes: float
    start: float
    end: float

    @property
    def is_load(self) -> bool:
        """Whether it is to the device."""
        return not self.action.kind.value.startswith("STORE")


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTimes:
    """When things happen in some batches.

    Attributes:
        copies: The copies that each batch starts, in the order of its list.
        ends: When each batch has been computed.
        computed: When the rank computes, from and to.
    """

    copies: tuple[tuple[Copy, ...], ...]
    ends: tuple[float, ...]
    computed: tuple[tuple[float, float], ...]

    def hidden_bytes(self, batch: int) -> float:
        """Bytes that a batch copies while the rank computes."""
        total, first = 0.0, {True: 0, False: 0}
        for copy in self.copies[batch]:
            # Copies of one direction follow each other, and so does what is computed.
            at = first[copy.is_load]
            while at < len(self.computed) and self.computed[at][1] <= copy.start:
                at += 1
            first[copy.is_load], beside = at, 0.0
            while at < len(self.computed) and self.computed[at][0] < copy.end:
                beside += min(copy.end, self.computed[at][1]) - max(copy.start, self.computed[at][0])
                at += 1
            total += copy.nbytes * beside / (copy.end - copy.start)
        return total


class Costs(NamedTuple):
    """What actions of a rank take; see :func:`run_copies`."""

    seconds: Callable[[Action], float]
    nbytes: Callable[[Action, bool], float]
    rates: tuple[float, float]


def run_pipeline(groups: Sequence[tuple[Sequence[Action], Costs]], batches: int) -> list[float]:
    """When groups of devices have computed each of some batches, with messages between them that take no time.

    Nobody begins a batch before the last group has computed the one before, for whose loss it waits.

    Args:
        groups: For each its expanded list for one batch, and what it takes.
    """
    done: dict[tuple[int, ActionKind, int, int | None], float] = {}
    ends: list[dict[int, float]] = [{} for _ in range(batches)]
    last_stage = max(action.stage for actions, _ in groups for action in actions)
    walks = [
        _walk(group, actions, _Run([actions], *costs), (len(groups) - 1, last_stage), done, ends)
        for group, (actions, costs) in enumerate(groups)
    ]
    while walks:
        walks = [walk for walk in walks if next(walk, True) is None]
    return [max(of_groups.values()) for of_groups in ends]


def _walk(
    group: int,
    actions: Sequence[Action],
    run: "_Run",
    last: tuple[int, int],
    done: dict[tuple[int, ActionKind, int, int | None], float],
    ends: Sequence[dict[int, float]],
) -> Iterator[None]:
    """Run a group through all batches, stopping wherever it waits for what others have not done.

    Args:
        last: The last group and the last stage.
    """
    finals = _finals(actions)
    units = [(a.kind, a.stage, a.microbatch) if a.kind in COMPUTATIONS else None for a in actions]
    end = {computed: position for position, computed in enumerate(units)}
    begin = {computed: len(units) - 1 - position for position, computed in enumerate(reversed(units))}
    for batch, computed_by in enumerate(ends):
        while batch and last[0] not in ends[batch - 1]:
            yield
        run.wait(ends[batch - 1][last[0]] if batch else 0.0)
        for position, (action, computed) in enumerate(zip(actions, units, strict=True)):
            if computed and begin[computed] == position:
                kind, stage, microbatch = computed
                other = {ActionKind.FORWARD: stage - 1, **dict.fromkeys(INPUT_BACKWARDS, stage + 1)}.get(kind, -1)
                if 0 <= other <= last[1]:
                    while (batch, kind, other, microbatch) not in done:
                        yield
                    run.wait(done[batch, kind, other, microbatch])
            run.is_final = position in finals
            run.perform(action)
            if computed and end[computed] == position:
                done[(batch, *computed)] = run.lanes["compute"]
        computed_by[group] = run.lanes["compute"]
        run.wait(*run.leaving.values())
        run.give_back()


def run_copies(
    batches: Sequence[Sequence[Action]],
    seconds: Callable[[Action], float],
    nbytes: Callable[[Action, bool], float],
    rates: tuple[float, float],
) -> CopyTimes:
    """Run batches one after another.

    Args:
        batches: The rank's expanded list of each.
        seconds: What an action computes, or exchanges (``UNSHARD``, ``REDUCE``, ``GATHER``), alone.
        nbytes: What it copies, given whether that is only what this rank updates: of gradients all is needed to add to,
            and when that is done no other. Of ``UNSHARD`` what of the unit is in this rank's host memory. Nothing is no
            copy.
        rates: Bytes per second to the device, and to the host.
    """
    run = _Run(batches, seconds, nbytes, rates)
    found: list[tuple[Copy, ...]] = []
    ends: list[float] = []
    for actions in batches:
        begin = len(run.copies)
        finals = _finals(actions)
        for position, action in enumerate(actions):
            run.is_final = position in finals
            run.perform(action)
        run.wait(*run.leaving.values())
        run.give_back()
        found.append(tuple(run.copies[begin:]))
        ends.append(run.lanes["compute"])
    return CopyTimes(copies=tuple(found), ends=tuple(ends), computed=tuple(run.computed))


class _Run:
    """The lanes; arguments are those of :func:`run_copies`.

    Attributes:
        lanes: When each is free.
        is_final: Whether gradients are complete at the action that is performed.
        leaving: When updated state and parameters have left, of each the last that did.
    """

    def __init__(
        self,
        batches: Sequence[Sequence[Action]],
        seconds: Callable[[Action], float],
        nbytes: Callable[[Action, bool], float],
        rates: tuple[float, float],
    ) -> None:
        self._seconds, self._nbytes, self.is_final = seconds, nbytes, False
        self._rate = {"load": rates[0], "store": rates[1]}
        self.lanes = dict.fromkeys(("compute", "network", "load", "store"), 0.0)
        self.copies: list[Copy] = []
        self.computed: list[tuple[float, float]] = []
        self.leaving: dict[str, float] = {}
        self._arriving: dict[_What, float] = {}
        self._fetched: dict[_What, float] = {}
        self._unsharded: set[_What] = set()
        self._left: dict[_What | tuple[str, int], float] = {}
        self._reduced = 0.0
        self._buffer: dict[_What, tuple[str, int]] = {}
        for kind in ("O", "G"):
            # Units with anything in buffers of this rank, in the order of forward.
            moved = {_what(a) for actions in batches for a in actions if _what(a)[0] == kind and nbytes(a, False) > 0.0}
            ordered = sorted(moved, key=lambda what: (what[1], what[2] == TAIL, what[2]))
            self._buffer.update((what, (kind, index % NUM_BUFFERS)) for index, what in enumerate(ordered))

    def wait(self, *times: float) -> None:
        """Let what is computed from here on wait."""
        self.lanes["compute"] = max(self.lanes["compute"], *times, 0.0)

    def give_back(self) -> None:
        """What was fetched for the update and is not used yet has left, and its memory is given back."""
        self._fetched = {what: count for what, count in self._fetched.items() if what in self._unsharded}

    def perform(self, action: Action) -> None:
        """Run one action."""
        verb, what = action.kind.value.partition("_")[0], _what(action)
        if action.kind in COMPUTATIONS or action.kind is ActionKind.UPDATE:
            self._compute(action)
        elif verb == "LOAD":
            self._arriving[what] = self._copy(action, "load", self._left.get(self._buffer.get(what, what), 0.0))
            if what[0] == "P":
                self._fetched[what] = self._nbytes(action, self.is_final)
        elif action.kind is ActionKind.UNSHARD:
            self._unshard(action, what)
        elif verb == "STORE":
            self._store(action, what)
        elif verb in ("DROP", "RESHARD"):
            self.wait(self._left.pop(what, 0.0))
            self._fetched.pop(what, None)
            self._unsharded.discard(what)
        elif action.kind is ActionKind.REDUCE_GRADIENTS:
            self.wait(self._reduced)
            self._reduced = self._exchange(action)
        elif action.kind is ActionKind.GATHER_PARAMETERS:
            self._arriving[what] = self._exchange(action)

    def _compute(self, action: Action) -> None:
        is_update, key = action.kind is ActionKind.UPDATE, (action.stage, action.unit)
        for kind in ("O", "P", "G") if is_update else ("P", "GATHER"):
            self.wait(self._arriving.pop((kind, *key, None), 0.0))
        if action.kind is not ActionKind.FORWARD:
            self.wait(self._arriving.pop(("A", *key, action.microbatch), 0.0))
        if (duration := self._seconds(action)) > 0.0:
            start = self.lanes["compute"]
            self.lanes["compute"] = start + duration
            self.computed.append((start, start + duration))
        if is_update:
            used = "G", *key, None
            self._left[self._buffer.get(used, used)] = self.lanes["compute"]

    def _unshard(self, action: Action, what: _What) -> None:
        # What was fetched for the update is there still.
        end = self._copy(action, "load", less=self._fetched.get(what, 0.0))
        self._unsharded.add(what)
        if self._seconds(action) > 0.0:
            self.wait(end, self._arriving.pop(what, 0.0))
            end = self._exchange(action)
        self._arriving[what] = max(end, self._arriving.get(what, 0.0))

    def _store(self, action: Action, what: _What) -> None:
        kind, key = what[0], what[1:3]
        if kind == "P":
            self.wait(self.leaving.get("P", 0.0), self._arriving.pop(("GATHER", *key, None), 0.0))
        elif kind == "G":
            self.wait(self._arriving.pop(what, 0.0), self._reduced)
        end = self._copy(action, "store")
        self._left[self._buffer.get(what, what)] = end
        if kind == "O":
            self.wait(self.leaving.get("O", 0.0))
        if kind in ("O", "P"):
            self.leaving[kind] = end

    def _copy(self, action: Action, lane: str, after: float = 0.0, less: float = 0.0) -> float:
        """Start a copy; when it ends."""
        if (count := self._nbytes(action, self.is_final) - less) <= 0.0:
            return 0.0
        start = max(self.lanes["compute"], self.lanes[lane], after)
        self.lanes[lane] = end = start + count / self._rate[lane]
        self.copies.append(Copy(action=action, nbytes=count, start=start, end=end))
        return end

    def _exchange(self, action: Action) -> float:
        start = max(self.lanes["compute"], self.lanes["network"])
        self.lanes["network"] = end = start + self._seconds(action)
        return end


def _finals(actions: Sequence[Action]) -> set[int]:
    """Positions of the last writing back of every unit's gradients, and of fetching them for its update."""
    found, later = set[int](), dict[tuple[ActionKind, int, int | None], int]()
    for position in range(len(actions) - 1, -1, -1):
        action, none = actions[position], len(actions)
        stage, unit = action.stage, action.unit
        if action.kind is ActionKind.LOAD_GRADIENTS:
            stored = later.get((ActionKind.STORE_GRADIENTS, stage, unit), none)
            found |= {position} if later.get((ActionKind.UPDATE, stage, unit), none) < stored else set()
        elif action.kind is ActionKind.STORE_GRADIENTS:
            found |= set() if (action.kind, stage, unit) in later else {position}
        later[action.kind, stage, unit] = position
    return found


def _what(action: Action) -> _What:
    kind = "P" if action.kind in (ActionKind.UNSHARD, ActionKind.RESHARD) else action.kind.value.rpartition("_")[2]
    return kind, action.stage, action.unit, action.microbatch


def batch_lines(plan: Plan, module_map: ModuleMap, group: int, actions: Sequence[Action]) -> tuple[Action, ...]:
    """All that a group of devices does for one batch of many, by units, from its lowered list."""
    units = expanded_units(plan, module_map, plan_units(plan, module_map, group))
    update, defers = stage_update(plan, module_map, group), defers_update(plan, module_map, group)
    lines = lines_of(actions, units, update if defers else ())
    return tuple(chain.from_iterable((*lines, *(() if defers else update))))
