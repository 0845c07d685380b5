"""What one microbatch does inside a stage: the events of its parts, stacked.

Events of a network are templates of its parts (:mod:`lightning_mist.model.events`): what a part allocates, and when it
lets go of what it was given. Stacked in the order of a stage they say what each of its forwards and backwards allocates
and frees, part by part. What comes from beyond the stage's ends is not there: received tensors belong to the walk over
the schedule. What would be freed beyond its ends is listed, for the walk to free: outputs when they have been sent,
the rest when the stage is left.

Parts are regions: 0 is the head, ``1 .. L`` the layers, ``L + 1`` the tail. Stages after the first run the head too,
as far as the batch alone determines it (masks, tables).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from lightning_mist.cost.replay_rank import bytes_at
from lightning_mist.cost.replay_tape import Chunk, Label, Slots
from lightning_mist.errors import PlanError
from lightning_mist.model.events import Allocation, LayerEvents, Moment, PartEvents, Release
from lightning_mist.model.polynomial import values_at
from lightning_mist.model.spec import LayerSpec, ModelSpec

WAYS = (True, False)
"""Whether a backward is the first of its batch, which makes the gradients of parameters; the others add to them."""


class Made(NamedTuple):
    """The gradient of a parameter in a backward.

    Attributes:
        event: How many events of the part's backward have passed when it has been accumulated.
        name: The parameter's canonical name.
        slot: Where it is.
    """

    event: int
    name: str
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRun:
    """The events of one part in one direction.

    Attributes:
        chunk: The events.
        made: Gradients of parameters, in order; where they are added to others they are freed in the chunk.
    """

    chunk: Chunk
    made: tuple[Made, ...] = ()


class WeightGradient(NamedTuple):
    """The gradient of a weight that is made apart from those of inputs.

    Attributes:
        name: The weight's canonical name.
        nbytes: Bytes of the gradient.
        operands: Slots of what it is made of: inputs of products with the weight, and gradients of these products.
        received: Whether what the stage received is among them.
        arriving: Whether the gradient that came from the next stage is.
    """

    name: str
    nbytes: int
    operands: tuple[int, ...]
    received: bool
    arriving: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTemplate:
    """What one microbatch does inside a stage.

    Attributes:
        slots: Its allocations.
        parts: Its regions in the order of forward, without the head of stages after the first.
        forward: Events of each region's forward; for stages after the first also of region 0.
        backward: By whether gradients of parameters are made: events of each region's backward.
        outputs: For each tensor that leaves the stage the slot that is freed once it has been sent; ``None`` if it is
            no allocation of the stage, or is kept for its backward anyway.
        left: Slots that are freed when the forward has ended.
        inputs: As ``backward`` where gradients of weights are made apart: what is kept for these is not freed.
        weights: By whether gradients of the others are made: the weights, in the order in which they are reached.
        returned: By whether gradients are made: for each tensor that enters the stage and wants a gradient the slot of
            this gradient; ``None`` if it is none of the stage's.
        ended: The same: slots that are freed when the backward has ended.
        kept: Slots that nothing in the step frees: what the step returned.
    """

    slots: Slots
    parts: tuple[int, ...]
    forward: Mapping[int, PartRun]
    backward: Mapping[bool, Mapping[int, PartRun]]
    inputs: Mapping[bool, Mapping[int, PartRun]]
    weights: Mapping[bool, tuple[WeightGradient, ...]]
    outputs: tuple[int | None, ...]
    left: tuple[int, ...]
    returned: Mapping[bool, tuple[int | None, ...]]
    ended: Mapping[bool, tuple[int, ...]]
    kept: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """Which part of a network a stage is.

    Attributes:
        first, end: Its half-open range of layers.
        checkpointed: How many of its first layers are recomputed.
        rows: Rows of a microbatch.
    """

    first: int
    end: int
    checkpointed: int
    rows: int


class _Born(NamedTuple):
    """An allocation in its place.

    Attributes:
        slot: Its slot.
        part: The region.
        backward: Whether its backward makes it.
        allocation: The template.
        number: Its index in the template's list.
        nbytes: Its size.
    """

    slot: int
    part: int
    backward: bool
    allocation: Allocation
    number: int
    nbytes: int


_END = 1 << 30
"""A position behind all operators of a part."""

_Place = tuple[int, bool, int]
"""Region, whether its backward, position."""


def layer_events(spec: ModelSpec, part: int) -> LayerEvents:
    """Events of a region.

    Raises:
        PlanError: If the network was described without them.
    """
    found = _layer(spec, part)
    if found.events is None:
        raise PlanError(
            f"{spec.name}: the {found.kind} has no list of allocations: only a traced network can be replayed; "
            "trace the module, or ask for the closed form"
        )
    return found.events


def _layer(spec: ModelSpec, part: int) -> LayerSpec:
    if part == 0:
        return spec.head
    return spec.tail if part == spec.num_layers + 1 else spec.layers[spec.kinds[part - 1]]


class _Stack:
    """Puts together a stage.

    Args:
        spec: The network, or one tensor-parallel rank's part of it.
        shape: The stage.
    """

    def __init__(self, spec: ModelSpec, shape: StageShape) -> None:
        self.spec, self.shape = spec, shape
        count = spec.num_layers
        self._is_first, self._is_last = shape.first == 0, shape.end == count
        layers = range(shape.first + 1, shape.end + 1)
        self.parts = (*[0] * self._is_first, *layers, *[count + 1] * (self._is_last and count > 0))
        self.inside = frozenset(self.parts)
        self._names = {
            (module, attribute): use.name for use in spec.module_map.parameters for module, attribute, _ in use.slots
        }
        self.born: list[_Born] = []
        self._labels: list[Label] = []
        self._bytes: list[int] = []

    def way(self, part: int, *, first: bool) -> PartEvents:
        """How a region runs."""
        shape, last = self.shape, self.spec.num_layers + 1
        if part in (0, last):
            # The head keeps for recomputed layers what they are called with; they come first, so one is enough.
            near = shape.checkpointed if part == 0 else shape.checkpointed == shape.end - shape.first
            recomputed = near > 0
        else:
            recomputed = part <= shape.first + shape.checkpointed
        return layer_events(self.spec, part).way(recomputed=recomputed, first=first)

    def add(self, part: int, *, backward: bool, first: bool) -> None:
        """Give slots to what a region allocates."""
        events = self.way(part, first=first)
        found = list(enumerate(events.backward if backward else events.forward))
        if part == 0 and not self._is_first:
            found = [(n, item) for n, item in found if item.role == "shared" and not backward]
        sizes = values_at([item.size for _, item in found], self.shape.rows, self.spec.sequence_length or 1)
        for (number, item), nbytes in zip(found, sizes, strict=True):
            slot = len(self.born)
            self.born.append(_Born(slot, part, backward, item, number, nbytes))
            self._bytes.append(nbytes)
            self._labels.append(self._label(part, item, backward))

    def canonical(self, part: int, name: str) -> str:
        """The canonical name of a parameter that a region knows as ``name``."""
        blocks = self.spec.module_map.blocks
        whole = f"{blocks[part - 1]}.{name}" if 0 < part <= len(blocks) else name
        module, _, attribute = whole.rpartition(".")
        return self._names.get((module, attribute), whole)

    def _label(self, part: int, item: Allocation, backward: bool) -> Label:
        term, name, region = "working_bytes", "temporary", part - 1
        if item.parameter:
            term, name = "gradient_bytes", f"gradient of {self.canonical(part, item.parameter)}"
        elif not backward and item.role != "temporary":
            term, name = "activation_bytes", "activation"
        elif backward:
            name = "gradient" if item.role == "gradient" else "temporary of backward"
        blocks = self.spec.module_map.blocks
        module = item.module
        if 0 < part <= len(blocks):
            module = f"{blocks[part - 1]}.{module}" if module else blocks[part - 1]
        return Label(term, name, region, module, item.operator, item.line, item.dtype)

    def slots(self) -> Slots:
        """All slots."""
        return Slots(bytes_A=np.array(self._bytes, dtype=np.int64), labels=tuple(self._labels))

    def death(self, item: _Born, *, first: bool) -> _Place | None:
        """Where an allocation dies when the backward that follows is a first or a later one; ``None`` if nowhere."""
        events = self.way(item.part, first=first)
        column = events.backward if item.backward else events.forward
        allocation = column[item.number] if item.number < len(column) else item.allocation
        if allocation.slot is not None:
            target = item.part + (-1 if item.backward else 1)
            if item.part == 0 and not self._is_first:
                target = self.parts[0]
            found = self._release(target, allocation.slot, backward=item.backward, first=first)
            if found is not None:
                return found
        return None if allocation.dies is None else self._absolute(allocation.dies, item.part)

    def _release(self, target: int, slot: int, *, backward: bool, first: bool) -> _Place | None:
        """Where the region that is given a tensor lets go of it."""
        if target not in self.inside:
            return (target, backward, 0)
        found = self.given(target, backward=backward, first=first).get(slot)
        return None if found is None else self._absolute(found.dies, target)

    def given(self, part: int, *, backward: bool, first: bool) -> dict[int, Release]:
        """What a region does to the tensors that it is given, by their index."""
        events = self.way(part, first=first)
        return {release.slot: release for release in (events.arriving if backward else events.entering)}

    def wanted(self, item: _Born, *, first: bool) -> tuple[str, ...]:
        """The parameters whose gradients are made of an allocation, by their canonical names."""
        names = [self.canonical(item.part, name) for name in item.allocation.weights]
        target = item.part + (-1 if item.backward else 1)
        if item.allocation.slot is not None and target in self.inside:
            release = self.given(target, backward=item.backward, first=first).get(item.allocation.slot)
            names += [] if release is None else [self.canonical(target, name) for name in release.weights]
        return tuple(names)

    def _absolute(self, moment: Moment, part: int) -> _Place:
        base = {"own": part, "head": 0, "tail": self.spec.num_layers + 1}[moment.anchor]
        target, backward = base + moment.part, moment.direction == "backward"
        if part == 0 and not self._is_first and target < self.parts[0] and (backward or target > 0):
            # What the first layer lets go of, the stage's first layer does; the head has no backward here.
            return self.parts[0], backward, moment.position if target > 0 else _END
        return target, backward, moment.position


def stack(spec: ModelSpec, shape: StageShape, *, tied: frozenset[str] = frozenset()) -> StageTemplate:
    """What one microbatch does inside a stage.

    Args:
        spec: The network, or one tensor-parallel rank's part of it.
        shape: Which part of it the stage is.
        tied: Parameters that several regions of the stage use: gradients of all but the first are not freed in the
            later backwards' events, since they wait for the first region's.

    Raises:
        PlanError: If the network was described without events.
    """
    found = _Stack(spec, shape)
    forwards = found.parts if shape.first == 0 else (0, *found.parts)
    for part in forwards:
        found.add(part, backward=False, first=True)
    marks = {}
    for first in WAYS:
        begin = len(found.born)
        for part in reversed(found.parts):
            found.add(part, backward=True, first=first)
        marks[first] = (begin, len(found.born))
    return _Laid(found, forwards, marks, tied).template()


class _Laid:
    """Lays the allocations of a stage out in time."""

    def __init__(
        self, found: _Stack, forwards: Sequence[int], marks: Mapping[bool, tuple[int, int]], tied: frozenset[str]
    ) -> None:
        self._found, self._forwards, self._tied = found, forwards, tied
        first = marks[True][0]
        self._forward_born = found.born[:first]
        self._backward_born = {way: found.born[low:high] for way, (low, high) in marks.items()}
        self._left: list[_Born] = []
        self._kept: list[int] = []

    def template(self) -> StageTemplate:
        """The template."""
        found, parts = self._found, self._found.parts
        forward = self._forward()
        backward, ended, leaving, inputs, weights = {}, {}, {}, {}, {}
        for way in WAYS:
            backward[way], ended[way], leaving[way] = self._backward(way, MappingProxyType({}))
            operands = self._operands(way)
            inputs[way] = self._backward(way, operands)[0]
            weights[way] = self._weights(way, operands)
        spec, shape = found.spec, found.shape
        outputs, left = _match(_crossing(spec, shape.end, shape.rows), self._left)
        returned = {}
        for way in WAYS:
            sizes = _crossing(spec, shape.first, shape.rows, gradients=True)
            returned[way], rest = _match(sizes, leaving[way])
            ended[way] = (*ended[way], *rest)
        return StageTemplate(
            slots=found.slots(),
            parts=parts,
            forward=forward,
            backward=backward,
            inputs=inputs,
            weights=weights,
            outputs=outputs,
            left=left,
            returned=returned,
            ended=ended,
            kept=tuple(self._kept),
        )

    def _forward(self) -> dict[int, PartRun]:
        """Events of every region's forward."""
        at: dict[int, _Entries] = {part: {} for part in self._forwards}
        for item in self._forward_born:
            _entry(at[item.part], item.allocation.born.position)[1].append(item.slot)
            place = self._found.death(item, first=True)
            if place is None:
                self._kept.append(item.slot)
                continue
            part, backward, position = place
            if not backward and part in at:
                _entry(at[part], position)[0].append(item.slot)
            elif part not in self._found.inside:
                self._left.append(item)
        return {part: PartRun(chunk=_chunk(entries)[0]) for part, entries in at.items()}

    def _operands(self, way: bool) -> dict[int, tuple[str, ...]]:
        """By slot the weights whose gradients are made of it."""
        born = (*self._forward_born, *self._backward_born[way])
        found = {item.slot: self._found.wanted(item, first=way) for item in born}
        return {slot: names for slot, names in found.items() if names}

    def _weights(self, way: bool, operands: Mapping[int, tuple[str, ...]]) -> tuple[WeightGradient, ...]:
        """The weights whose gradients can be made apart."""
        parts = self._found.parts
        given = {
            backward: {
                self._found.canonical(part, name)
                for release in self._found.given(part, backward=backward, first=way).values()
                for name in release.weights
            }
            for backward, part in ((False, parts[0]), (True, parts[-1]))
        }
        is_deferred = {name for names in operands.values() for name in names}
        result = {}
        for item in self._backward_born[way]:
            name = self._found.canonical(item.part, item.allocation.parameter) if item.allocation.parameter else ""
            if name in is_deferred and name not in result:
                result[name] = WeightGradient(
                    name=name,
                    nbytes=item.nbytes,
                    operands=tuple(slot for slot, names in operands.items() if name in names),
                    received=name in given[False],
                    arriving=name in given[True],
                )
        return tuple(result.values())

    def _backward(
        self, way: bool, operands: Mapping[int, tuple[str, ...]]
    ) -> tuple[dict[int, PartRun], tuple[int, ...], list[_Born]]:
        """Events of every region's backward, what is freed at the end, and what leaves the stage.

        Args:
            way: Whether gradients of parameters are made.
            operands: By slot the weights whose gradients are made of it later, and not here.
        """
        later = {name for names in operands.values() for name in names}
        inside = self._found.inside
        at: dict[int, _Entries] = {part: {} for part in self._found.parts}
        ended: list[int] = []
        leaving: list[_Born] = []
        for item in self._forward_born:
            place = self._found.death(item, first=way)
            if place is not None and place[1] and place[0] in inside and item.slot not in operands:
                _entry(at[place[0]], place[2])[0].append(item.slot)
        owned: dict[int, str] = {}
        for item in self._backward_born[way]:
            place = self._found.death(item, first=way)
            name = self._found.canonical(item.part, item.allocation.parameter) if item.allocation.parameter else ""
            if name and name in later:
                continue
            _entry(at[item.part], item.allocation.born.position)[1].append(item.slot)
            if name:
                owned[item.slot] = name
            if item.slot in operands or (name and (name in self._tied or way)):
                continue
            if place is None:
                ended.append(item.slot)
            elif place[0] in inside:
                _entry(at[place[0]], place[2])[0].append(item.slot)
            else:
                leaving.append(item)
        runs = {}
        for part, entries in at.items():
            chunk, made = _chunk(entries, owned)
            runs[part] = PartRun(chunk=chunk, made=made)
        return runs, tuple(ended), leaving


_Entries = dict[int, tuple[list[int], list[int]]]
"""By position: the slots that die there, and those that are born."""


def _entry(entries: _Entries, position: int) -> tuple[list[int], list[int]]:
    return entries.setdefault(position, ([], []))


def _chunk(entries: _Entries, owned: Mapping[int, str] = MappingProxyType({})) -> tuple[Chunk, tuple[Made, ...]]:
    """Events in order, what dies at a position before what is born there; and gradients of parameters, by slot."""
    events: list[int] = []
    made: list[Made] = []
    mortal = {slot for dead, _ in entries.values() for slot in dead}
    for position in sorted(entries):
        dead, born = entries[position]
        events += [-(slot + 1) for slot in dead]
        # A gradient that is added to another is freed then; one that stays has been accumulated once it is there.
        made += [Made(len(events), owned[slot], slot) for slot in dead if slot in owned]
        events += [slot + 1 for slot in born]
        made += [Made(len(events), owned[slot], slot) for slot in born if slot in owned and slot not in mortal]
    return Chunk.of(events), tuple(made)


def _crossing(spec: ModelSpec, cut: int, rows: int, *, gradients: bool = False) -> tuple[int, ...]:
    """Bytes of the tensors that cross a cut, or of those that want a gradient."""
    if not 0 < cut < spec.num_layers:
        return ()
    tensors = [tensor for tensor in spec.boundaries[cut - 1] if tensor.requires_grad or not gradients]
    return tuple(bytes_at(tensor.bytes, rows, spec.sequence_length or 1) for tensor in tensors)


def _match(sizes: Sequence[int], candidates: Sequence[_Born]) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
    """For each size the last candidate of that size, and the candidates that remain."""
    left = list(candidates)
    found: list[int | None] = []
    for size in sizes:
        fitting = [item for item in left if item.nbytes == size]
        handed = [item for item in fitting if item.allocation.slot is not None] or fitting
        if handed:
            left.remove(handed[-1])
        found.append(handed[-1].slot if handed else None)
    return tuple(found), tuple(item.slot for item in left)
