"""Events of parts stacked into a whole step on one device: who is alive when."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from lightning_mist.model.spec import Allocation, Direction, Moment, PartEvents, values_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """An allocation in a step."""

    allocation: Allocation
    part: int
    born: int  # number of the first reading at which it is alive, among all of the step
    dies: int  # number of the first one at which it is not any more; that of all readings if it outlives the step


class Clock:
    """Numbers the readings of a step: every part's entry and operators, from head to tail and backward again."""

    def __init__(self, parts: Sequence[PartEvents]) -> None:
        self._parts = parts
        self._starts: dict[tuple[int, Direction], int] = {}
        self.readings = 0
        order: list[tuple[int, Direction]] = [(part, "forward") for part in range(len(parts))]
        order += [(part, "backward") for part in reversed(range(len(parts)))]
        for part, direction in order:
            self._starts[part, direction] = self.readings
            self.readings += parts[part].positions(direction) + 1

    def at(self, part: int, direction: Direction, position: int) -> int:
        """The reading of a position, which may be one past the last."""
        return self._starts[part, direction] + min(position, self._parts[part].positions(direction) + 1)

    def spans(self, direction: Direction) -> list[tuple[int, int]]:
        """By part, the half-open range of its readings."""
        starts = [self._starts[part, direction] for part in range(len(self._parts))]
        return [(start, start + item.positions(direction) + 1) for start, item in zip(starts, self._parts, strict=True)]


def place_step(parts: Sequence[PartEvents]) -> tuple[Placed, ...]:
    """The allocations of a step of these parts, in the order in which they are made."""
    clock = Clock(parts)
    placed = []
    for part, events in enumerate(parts):
        for allocation in (*events.forward, *events.backward):
            born = clock.at(part, allocation.born.direction, allocation.born.position)
            dies = _death(parts, clock, part, allocation)
            placed.append(Placed(allocation=allocation, part=part, born=born, dies=dies))
    return tuple(sorted(placed, key=lambda item: item.born))


def _death(parts: Sequence[PartEvents], clock: Clock, part: int, allocation: Allocation) -> int:
    dies = allocation.dies
    if dies is None:
        return clock.readings
    target = target_part(part, dies, len(parts))
    if allocation.slot is not None:
        is_gradient = allocation.born.direction == "backward"
        releases = parts[target].arriving if is_gradient else parts[target].entering
        for release in releases:
            if release.slot == allocation.slot:
                return clock.at(target + release.dies.part, release.dies.direction, release.dies.position)
    return clock.at(target, dies.direction, dies.position)


def target_part(part: int, moment: Moment, num_parts: int) -> int:
    """Index of the part that a moment is in."""
    start = {"own": part, "head": 0, "tail": num_parts - 1}[moment.anchor]
    return min(max(start + moment.part, 0), num_parts - 1)


def timeline_of(parts: Sequence[PartEvents], rows: int, length: int = 1) -> list[int]:
    """Bytes alive on entry of every part and after every operator of one step of these parts on one device."""
    changes = [0] * (Clock(parts).readings + 1)
    placed = place_step(parts)
    for item, size in zip(placed, values_at([p.allocation.size for p in placed], rows, length), strict=True):
        changes[item.born] += size
        changes[item.dies] -= size
    return list(accumulate(changes))[:-1]
