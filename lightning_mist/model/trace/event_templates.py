"""Events of a part from a counted step: its allocations, with deaths told relative to it."""

from collections.abc import Sequence
from functools import cached_property

from lightning_mist.model.spec import (
    Allocation,
    Anchor,
    Direction,
    LayerEvents,
    Moment,
    PartEvents,
    Polynomial,
    Release,
    Role,
)
from lightning_mist.model.trace.block_kinds import Example
from lightning_mist.model.trace.counted_step import StepCount
from lightning_mist.model.trace.ledger import Storage
from lightning_mist.model.trace.modes import Way, Ways

_Place = tuple[int, Direction, int]  # part, direction and position of a moment


def selective_events(
    ways: Ways, examples: Sequence[Example], *, is_fake: bool
) -> list[tuple[PartEvents, PartEvents] | None]:
    """The events of parts where layers are recomputed by operator, in a first backward and a later one."""
    steps = [_Steps(ways, way, is_fake) for way in ways.selective or ()]
    return [(steps[0].part_events(item), steps[1].part_events(item)) if steps else None for item in examples]


def layer_events(ways: Ways, examples: Sequence[Example], *, is_fake: bool) -> tuple[LayerEvents, ...]:
    """The events of parts in the four ways to run them; fakes tell which tensors only the batch shapes."""
    steps = [
        _Steps(ways, way, is_fake) for way in (ways.first, ways.later, ways.recomputed_first, ways.recomputed_later)
    ]
    found = [[step.part_events(example) for step in steps] for example in examples]
    return tuple(
        LayerEvents(first=first, later=later, recomputed_first=again, recomputed_later=again_later)
        for first, later, again, again_later in found
    )


class _Steps:
    def __init__(self, ways: Ways, way: Way, is_fake: bool) -> None:
        self._ways, self._run, self._is_fake = ways, way.run, is_fake
        self._last = len(way.run.forward) - 1
        self._imitated = {position + 1 for position, twin in enumerate(ways.twins) if twin is not None}
        self._sizes = dict(zip(map(id, way.run.storages), way.sizes, strict=True))

    @cached_property
    def _places(self) -> list[_Place]:
        """Of every reading; the position of what is gone at it is one more than that of the reading before."""
        return places(self._run)

    def _death(self, storage: Storage) -> _Place | None:
        if storage.died is None:
            return None
        part, direction, position = self._places[storage.died - 1]
        return part, direction, position + 1

    def part_events(self, example: Example) -> PartEvents:
        part = example.part
        mine = [s for s in self._run.storages if s.part == part]
        forward = [s for s in mine if s.cause == "forward"]
        backward = [s for s in mine if s.cause != "forward"]
        return PartEvents(
            forward=tuple(self._allocation(s, example, None) for s in forward),
            backward=tuple(
                self._allocation(s, example, twin)
                for s, twin in zip(backward, self._twins(backward, example.follower), strict=True)
            ),
            forward_positions=len(self._run.forward[part].timeline) - 1,
            backward_positions=len(self._run.backward[part].timeline) - 1,
            entering=self._releases(example, is_gradient=False),
            arriving=self._releases(example, is_gradient=True),
            reading=self._reading(part),
        )

    def _reading(self, part: int) -> tuple[str, ...]:
        """The parameters whose gradients are made of what the part is given."""
        given = (s for s in self._run.storages if any(g.part == part and not g.is_gradient for g in s.given))
        return tuple(sorted({name for storage in given for name in _weights(storage, part)}))

    def _twins(self, backward: Sequence[Storage], follower: int | None) -> Sequence[Storage | None]:
        """For each allocation that of the next part, which is preceded by one of its kind; ``None`` if they differ."""
        others = [s for s in self._run.storages if s.part == follower and s.cause != "forward"]
        if [s.operator for s in others] != [s.operator for s in backward]:
            return [None] * len(backward)
        return others

    def _allocation(self, storage: Storage, example: Example, twin: Storage | None) -> Allocation:
        part, direction, position = self._places[storage.born]
        dies, slot = self._dies(storage, part)
        if dies is not None and slot is None and (dies.part, dies.anchor) == (-1, "own") and twin is not None:
            dies, slot = self._dies(twin, part + 1)
        return Allocation(
            size=self._polynomial(storage),
            born=Moment(direction=direction, position=position),
            dies=dies,
            slot=slot,
            role=self._role(storage, part, dies, direction),
            parameter=_within(storage.parameter, example.block),
            weights=_weights(storage, part) if dies is not None and dies.direction == "backward" else (),
            module=_within(storage.origin.module, example.block),
            operator=storage.operator,
            line=storage.origin.line,
            dtype=storage.dtype,
        )

    def _polynomial(self, storage: Storage) -> Polynomial:
        return self._ways.basis.polynomial(self._sizes[id(storage)])

    def _dies(self, storage: Storage, part: int) -> tuple[Moment | None, int | None]:
        """When a storage dies, relative to the part that made it, and as which of the tensors given to another part."""
        death = self._death(storage)
        if death is None:
            return None, None
        target, direction, position = death
        is_gradient = storage.cause != "forward"
        if target == part:
            return Moment(direction=direction, position=position), None
        slots = {given.part: given.slot for given in reversed(storage.given) if given.is_gradient == is_gradient}
        if is_gradient and part - 1 in self._imitated and part - 1 in slots:
            target, position = part - 1, 0  # whatever the imitation did with it
        offset, anchor = self._anchored(part, target, direction)
        return Moment(part=offset, anchor=anchor, direction=direction, position=position), slots.get(target)

    def _anchored(self, own: int, target: int, direction: Direction) -> tuple[int, Anchor]:
        if abs(target - own) <= 1:
            return target - own, "own"
        # What all layers read dies in the last one's or the tail's forward, or in the first one's backward.
        choices: list[tuple[int, Anchor]] = [(target - self._last, "tail"), (target, "head")]
        if direction == "backward":
            choices.reverse()
        return next((choice for choice in choices if abs(choice[0]) <= 1), (target - own, "own"))

    def _role(self, storage: Storage, part: int, dies: Moment | None, direction: Direction) -> Role:
        if part == 0 and storage.shared and self._is_fake:
            return "shared"
        if storage.parameter or (direction == "backward" and dies is not None and dies.part != 0):
            return "gradient"
        is_own = dies is not None and (dies.part, dies.anchor) == (0, "own")
        return "temporary" if is_own and dies is not None and dies.direction == direction else "activation"

    def _releases(self, example: Example, *, is_gradient: bool) -> tuple[Release, ...]:
        """When the part, or the same kind of part behind it, lets go of what it is given."""
        found: dict[int, Release] = {}
        for part in (example.part, example.follower):
            for storage in self._run.storages if part is not None else ():
                slots = [g.slot for g in storage.given if g.part == part and g.is_gradient == is_gradient]
                death = self._death(storage) if slots else None
                if part is None or death is None or not _lets_go(storage, part, death):
                    continue
                dies = Moment(part=death[0] - part, direction=death[1], position=death[2])
                weights = _weights(storage, part) if death[1] == "backward" else ()
                for slot in slots:
                    found.setdefault(slot, Release(slot=slot, dies=dies, weights=weights))
        return tuple(found[slot] for slot in sorted(found))


def places(run: StepCount) -> list[_Place]:
    """Part, direction and position of every reading of a step."""
    found: dict[int, _Place] = {}
    directions: tuple[tuple[Direction, Sequence[object]], ...] = (("forward", run.forward), ("backward", run.backward))
    for direction, phases in directions:
        for part, phase in enumerate(phases):
            for position in range(len(phase.timeline)):  # type: ignore[attr-defined]
                found[phase.start + position] = part, direction, position  # type: ignore[attr-defined]
    return [found[reading] for reading in range(len(found))]


def _lets_go(storage: Storage, part: int, death: _Place) -> bool:
    """Whether it is a part that lets go of what it was given, and not whoever made it or gets it next."""
    if death[0] == part:
        return True
    # The caller's frame may hold it until the block has returned, which is when the next part has begun.
    is_given_on = any(given.part == death[0] for given in storage.given)
    return death[:2] == (part + 1, "forward") and not is_given_on


def _weights(storage: Storage, part: int) -> tuple[str, ...]:
    return tuple(name for of, name in storage.weights if of == part)


def _within(name: str, block: str) -> str:
    return "" if name == block else name.removeprefix(f"{block}.")
