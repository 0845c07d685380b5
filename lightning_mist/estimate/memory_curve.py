"""Bytes of every stage over one step: what the memory model says of each action, at the time when it runs.

The memory model takes the maximum over moments (:mod:`lightning_mist.cost.memory.moments`). Here they are laid out in
time instead, so the maximum over a curve is the peak that was predicted. While a device waits it holds the parameters,
gradients, saved activations and buffers of transfers of the moment that follows, and no working set.

Array axes
    E  pieces of a curve, in order
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

import numpy as np

from lightning_mist.cost.inputs import FloatArray, IntArray
from lightning_mist.cost.interleaved_memory import updates_of
from lightning_mist.cost.memory import TERMS, Moment, StageNeeds, moments_in_order, needs_of, parts_of, terms_at
from lightning_mist.errors import PlanError
from lightning_mist.plan import Plan
from lightning_mist.schedule import Action, ActionKind, Schedule, Simulation, Span, arrived_sends
from lightning_mist.schedule.action import COMPUTATIONS

Terms = Mapping[str, float]
"""Bytes by term."""

_UPDATES = {
    "gradient reduction": ActionKind.REDUCE_GRADIENTS,
    "tied gradients": ActionKind.REDUCE_TIED,
    "optimizer step": ActionKind.OPTIMIZER_STEP,
    "parameter gathering": ActionKind.GATHER_PARAMETERS,
}
"""What comes after the last backward, in order."""


BETWEEN = 0.2
"""The last part of a unit's time that is told with what it leaves: when in it there is most is not known."""


class UnitBytes(NamedTuple):
    """A unit of a forward or backward: what stays of the working set between units, and the most while it runs."""

    name: str
    seconds: float
    there: float
    most: float


class Pieces(NamedTuple):
    """A part of a curve by units: begins, pieces of the curve, names of units (or nothing), and bytes as of units."""

    times_E: FloatArray
    index_E: IntArray
    names: tuple[str, ...]
    there_E: FloatArray
    most_E: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryCurve:
    """Bytes of the most loaded device of a group over one step; each piece lasts until the next begins.

    Attributes:
        group: The group of devices, whose first stage has the same index.
        times_E: When each piece begins, in seconds since the step's start.
        names: What each piece is: an action as text, ``"waiting"``, or what comes after the last backward.
        terms: Bytes by term, as ``(name, array)`` in the order of
            :data:`~lightning_mist.cost.memory.memory_model.TERMS`.
        units: For the names of pieces that compute what is there in each of their units, as they come, if that is
            known.
    """

    group: int
    times_E: FloatArray
    end: float
    names: tuple[str, ...]
    terms: tuple[tuple[str, FloatArray], ...]
    units: Mapping[str, tuple[UnitBytes, ...]] = field(default_factory=dict)

    @property
    def total_E(self) -> FloatArray:
        """Bytes of all terms."""
        total_E: FloatArray = np.sum([values_E for _, values_E in self.terms], axis=0)
        return total_E

    @property
    def peak_index(self) -> int:
        """The piece with the most bytes, the first of several."""
        return int(self.total_E.argmax())

    def time_of(self, index: int) -> tuple[float, float]:
        """When a piece begins and ends."""
        ends_E = np.append(self.times_E[1:], self.end)
        return float(self.times_E[index]), float(ends_E[index])

    def pair(self) -> tuple[int, int] | None:
        """The backward with most bytes of those whose units are known, and before it the forward of its microbatch."""
        total_E, known = self.total_E, [at for at, name in enumerate(self.names) if self.units.get(name)]
        actions = {at: Action.parse(self.names[at]) for at in known}
        backwards = [at for at in known if actions[at].kind is ActionKind.BACKWARD]
        if not backwards:
            return None
        last = max(backwards, key=lambda at: float(total_E[at]))
        forward = replace(actions[last], kind=ActionKind.FORWARD)
        return next(at for at in known if actions[at] == forward), last

    def within(self, start: float, end: float) -> Pieces:
        """A part of it, what is computed unit by unit."""
        first = max(0, int(np.searchsorted(self.times_E, start, side="right")) - 1)
        last = max(first + 1, int(np.searchsorted(self.times_E, end, side="left")))
        working_E = dict(self.terms)["working_bytes"]
        found: list[tuple[float, int, str, float, float]] = []
        for index in range(first, last):
            (at, stop), working = self.time_of(index), float(working_E[index])
            units = self.units.get(self.names[index]) or (UnitBytes("", 1.0, 0.0, working),)
            stretch = (stop - at) / sum(unit.seconds for unit in units)
            # Where torch's own module runs there is more, gradients in buckets, all the time.
            more = working - max(unit.most for unit in units)
            for unit, behind in zip(units, (*units[1:], None), strict=True):
                found.append((at, index, unit.name, unit.there + more, unit.most + more))
                at += unit.seconds * stretch
                if behind is not None:
                    left = at - BETWEEN * unit.seconds * stretch
                    found.append((left, index, "", min(unit.there, behind.there) + more, behind.there + more))
        found = [piece for piece in found if piece[0] < end] or found[:1]
        times, index_E, names, there_E, most_E = zip(*found, strict=True)
        return Pieces(np.maximum(times, start), np.array(index_E), names, np.array(there_E), np.array(most_E))

    @property
    def peak_bytes(self) -> int:
        """The most bytes, each term rounded as predictions are."""
        return self.bytes_of(self.peak_index)

    def bytes_of(self, index: int) -> int:
        """The most bytes in a piece, each term rounded."""
        return sum(round(float(values_E[index])) for _, values_E in self.terms)


def memory_curves(plan: Plan, simulation: Simulation) -> tuple[MemoryCurve, ...]:
    """Bytes over one step, for each group of devices.

    Args:
        simulation: The plan's schedule on a clock; see :func:`~lightning_mist.schedule.simulate_plan`.

    Raises:
        PlanError: If the prediction does not say what the memory of stages is made of.
    """
    if plan.predicted is None or not all(stage.needs for stage in plan.predicted.stages):
        raise PlanError(
            "the plan does not say what the memory of its stages is made of (predicted.stages[..].needs): a curve "
            "over the step needs that; plan again with this version of `lightning-mist plan`"
        )
    needs = [needs_of(stage.needs) for stage in plan.predicted.stages]
    lists: Schedule = tuple(tuple(span.action for span in line) for line in simulation.spans)
    return tuple(
        _curve(plan, group, {stage: needs[stage] for stage in plan.chunks(group)}, line, arrivals, simulation.makespan)
        for group, (line, arrivals) in enumerate(zip(simulation.spans, arrived_sends(lists), strict=True))
    )


def _curve(
    plan: Plan,
    group: int,
    needs: Mapping[int, StageNeeds],
    spans: Sequence[Span],
    arrivals: Mapping[Action, Sequence[Action]],
    end: float,
) -> MemoryCurve:
    actions = [span.action for span in spans]
    at = {span.action: span for span in spans}
    updates = [(name, _numbers(terms)) for name, terms in updates_of(list(needs.values()))]
    pieces: list[tuple[float, str, Terms]] = []
    last = 0.0
    parts_K = parts_of(list(needs.values()))

    @cache
    def terms_of(moment: Moment) -> Terms:
        return _numbers(terms_at(moment, parts_K))

    for action, waiting, computing in moments_in_order(actions, arrivals):
        span = at[action]
        pieces.append((last, "waiting", terms_of(waiting)))
        pieces.append((span.start, str(action), terms_of(computing)))
        last = span.end
    # What changes over a batch and stays until its end: gradients, as the optimizer finds them.
    at_end = dict(updates).get("optimizer step", pieces[-1][2])
    kept = {"gradient_bytes": at_end.get("gradient_bytes", 0.0)}
    spent = {span.action.kind: span for span in spans if span.action.kind not in COMPUTATIONS}
    for name, terms in sorted(updates, key=lambda item: list(_UPDATES).index(item[0])):
        # What this plan does not do takes no time, but the memory model counts it all the same.
        done = spent.get(_UPDATES[name])
        start, stop = (last, last) if done is None else (max(last, done.start), done.end)
        pieces += [(last, "waiting", kept), (start, name, terms)]
        last = stop
    pieces.append((last, "waiting", kept))
    return replace(_assembled(group, pieces, needs[group].always, end), units=_units(plan, actions))


def _units(plan: Plan, actions: Sequence[Action]) -> dict[str, tuple[UnitBytes, ...]]:
    """What is there in each unit of forwards and whole backwards, as they come."""
    known = {}
    for index, (stage, predicted) in enumerate(zip(plan.stages, plan.prediction.stages, strict=True)):
        names = ["head"] * (index == 0) + list(map(str, range(*stage.layers)))
        names += ["tail"] * (index == plan.num_stages - 1)
        for kind, rows in predicted.units:
            values = zip(names, rows[::3], rows[1::3], rows[2::3], strict=False)
            known[index, kind] = tuple(UnitBytes(*row) for row in values)
    found = {}
    for action in actions:
        kind = f"bytes.{'first ' * (action.microbatch == 0)}backward"
        if action.kind is ActionKind.FORWARD:
            found[str(action)] = known.get((action.stage, "bytes.forward"), ())
        elif action.kind is ActionKind.BACKWARD:
            found[str(action)] = known.get((action.stage, kind), ())[::-1]
    return found


def _numbers(terms: Mapping[str, object]) -> dict[str, float]:
    return {name: float(np.asarray(value).reshape(-1)[0]) for name, value in terms.items()}


def _assembled(
    group: int, pieces: Sequence[tuple[float, str, Terms]], always: Mapping[str, object], end: float
) -> MemoryCurve:
    """A curve of its pieces, without those that last no time and hold no more than the next."""
    base = _numbers(always)
    shown = [
        piece
        for piece, behind in zip(pieces, [*pieces[1:], (end, "", {})], strict=True)
        if piece[1] != "waiting" or behind[0] > piece[0]
    ]
    terms = tuple(
        (name, np.array([base.get(name, 0.0) + piece[2].get(name, 0.0) for piece in shown])) for name in TERMS
    )
    return MemoryCurve(
        group=group,
        times_E=np.array([piece[0] for piece in shown]),
        end=end,
        names=tuple(piece[1] for piece in shown),
        terms=terms,
    )
