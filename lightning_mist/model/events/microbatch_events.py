"""What one microbatch does inside a stage: the events of its parts, stacked.

Events of a network are templates of its parts (:mod:`lightning_mist.model.spec.allocation_events`): what a part
allocates, and when it lets go of what it was given. Stacked in the order of a stage they say what each of its forwards
and backwards allocates and frees, part by part. What comes from beyond the stage's ends is not there: received tensors
belong to the walk over the schedule. What would be freed beyond its ends is listed, for the walk to free: outputs when
they have been sent, the rest when the stage is left.

Parts are regions: 0 is the head, ``1 .. L`` the layers, ``L + 1`` the tail. Stages after the first run the head too,
as far as the batch alone determines it (masks, tables).

What one rank allocates and frees is written action by action on a tape, which is read as arrays.

Array axes
    E  events, in order: ``+(i + 1)`` allocates ``i``, ``-(i + 1)`` frees it
    K  allocations: of a microbatch by slot, of a tape by identity
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_mist.errors import PlanError
from lightning_mist.model.spec import (
    Allocation,
    LayerEvents,
    LayerSpec,
    ModelSpec,
    PartEvents,
    Release,
    StepPoint,
    TensorSpec,
    bytes_at,
    values_at,
)
from lightning_mist.plan.mesh import itemsize

IntArray = npt.NDArray[np.int64]


class Label(NamedTuple):
    """What an allocation is and where it comes from.

    Attributes:
        term: One of :data:`~lightning_mist.cost.memory.memory_model.TERMS`.
        name: In words, or the parameter's canonical name.
        part: Region of the network that made it: -1 the head, ``k`` layer ``k``, the number of layers for the tail;
            ``None`` where the runtime did.
        module: Qualified name of the module that made it; empty where the runtime did.
        operator: The operator that made it, for example ``"aten.mm.default"``.
        line: The line of the user's code, as ``"file.py:123"``.
    """

    term: str
    name: str = ""
    part: int | None = None
    module: str = ""
    operator: str = ""
    line: str = ""
    dtype: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slots:
    """Allocations that always come together: those of one microbatch in one stage."""

    bytes_K: IntArray
    labels: tuple[Label, ...]


# The allocations of a stage's parts in their places: which there are, where they are born and where they die.


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """Which part of a network a stage is.

    Attributes:
        first, end: Its half-open range of layers.
    """

    first: int
    end: int
    checkpointed: int  # how many of its first layers are recomputed
    rows: int


class Born(NamedTuple):
    """An allocation in its place."""

    slot: int
    part: int
    backward: bool  # whether its backward makes it
    allocation: Allocation
    number: int  # its index in the template's list
    nbytes: int


Place = tuple[int, bool, int]
"""Region, whether its backward, position."""


def region_events(spec: ModelSpec, part: int) -> LayerEvents:
    """Events of a region; a :class:`PlanError` if the network was described without them."""
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


WAYS = (True, False)
"""Whether a backward is the first of its batch, which makes the gradients of parameters; the others add to them."""


class Made(NamedTuple):
    """The gradient of a parameter in a backward."""

    event: int  # how many events of the part's backward have passed when it has been accumulated
    name: str
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRun:
    """The events of one part in one direction.

    Attributes:
        events_E: Of slots.
        made: Gradients of parameters, in order; where they are added to others they are freed by these events.
    """

    events_E: IntArray
    made: tuple[Made, ...] = ()


class WeightGradient(NamedTuple):
    """The gradient of a weight that is made apart from those of inputs.

    Attributes:
        made_bytes: It in the type of the product, of which it is cast to the weight's: the same where that is one.
        operands: Slots of what it is made of: inputs of products with the weight, and gradients of these products.
    """

    name: str
    nbytes: int
    made_bytes: int
    operands: tuple[int, ...]
    received: bool  # whether what the stage received is among them


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTemplate:
    """What one microbatch does inside a stage.

    Attributes:
        born: Its allocations, of which only sizes depend on the number of rows, by slot; what it is sent comes behind.
        parts: Its regions in the order of forward, without the head of stages after the first.
        forward: Events of each region's forward; for stages after the first also of region 0.
        backward: By whether gradients of parameters are made: events of each region's backward.
        outputs: For each tensor that leaves the stage the slot that is freed once it has been sent; ``None`` if it is
            no allocation of the stage, or is kept for its backward anyway.
        arriving: For each tensor that leaves the stage and wants a gradient the slot of this gradient, which the walk
            allocates when it is to be received.
        left: Slots that are freed when the forward has ended.
        inputs: As ``backward`` where gradients of weights are made apart: what is kept for these is not freed.
        weights: By whether gradients of the others are made: the weights, in the order in which they are reached.
        returned: By whether gradients are made: for each tensor that enters the stage and wants a gradient the slot of
            this gradient; ``None`` if it is none of the stage's.
        ended: The same: slots that are freed when the backward has ended.
        kept: Slots that nothing in the step frees: what the step returned.
    """

    slots: Slots
    born: tuple[Born, ...]
    parts: tuple[int, ...]
    forward: Mapping[int, PartRun]
    backward: Mapping[bool, Mapping[int, PartRun]]
    inputs: Mapping[bool, Mapping[int, PartRun]]
    weights: Mapping[bool, tuple[WeightGradient, ...]]
    outputs: tuple[int | None, ...]
    arriving: tuple[int, ...]
    left: tuple[int, ...]
    returned: Mapping[bool, tuple[int | None, ...]]
    ended: Mapping[bool, tuple[int, ...]]
    kept: tuple[int, ...]


class _Entries:
    """What dies and what is born where in one part, in any order."""

    def __init__(self) -> None:
        self._moments: list[int] = []  # twice the position, and one more for births
        self._events: list[int] = []
        self._casts: dict[int, int] = {}

    def add(self, position: int, slot: int, *, is_born: bool) -> None:
        self._moments.append(2 * position + is_born)
        self._events.append(slot + 1 if is_born else -(slot + 1))

    def cast(self, position: int, slot: int) -> None:
        """Note that a gradient is cast before what dies there does, and not freed by these events."""
        self._casts[slot] = 2 * position

    def run(self, owned: Mapping[int, str] = MappingProxyType({})) -> PartRun:
        """Events in order, what dies at a position before what is born there; and gradients of parameters, by slot."""
        moment_E = np.array(self._moments, dtype=np.int64)
        order_E = np.argsort(moment_E, kind="stable")
        events_E = np.array(self._events, dtype=np.int64)[order_E]
        if not owned:
            return PartRun(events_E=events_E)
        moment_E = moment_E[order_E]
        passed_E = np.searchsorted(moment_E, moment_E, side="right")
        events = zip(events_E.tolist(), passed_E.tolist(), strict=True)
        mortal = {-event - 1 for event in self._events if event < 0} | self._casts.keys()
        # A gradient that is added to another is freed then; one that stays has been accumulated once it is there.
        made = [
            Made(passed, owned[slot], slot)
            for event, passed in events
            if (slot := abs(event) - 1) in owned and (event < 0 or slot not in mortal)
        ]
        made += [Made(int(np.searchsorted(moment_E, at)), owned[slot], slot) for slot, at in self._casts.items()]
        return PartRun(events_E=events_E, made=tuple(sorted(made, key=attrgetter("event"))))


class Stack:
    """A stage of a network, or of one tensor-parallel rank's part of it, put together; see :func:`stack`."""

    def __init__(
        self, spec: ModelSpec, shape: StageShape, tied: frozenset[str], ways: Sequence[bool], *, casts: bool = False
    ) -> None:
        self.spec, self.shape, self._tied, self._casts = spec, shape, tied, casts
        count = spec.num_layers
        self._is_first = shape.first == 0
        layers = range(shape.first + 1, shape.end + 1)
        self.parts = (*[0] * self._is_first, *layers, *[count + 1] * (shape.end == count > 0))
        self.inside = frozenset(self.parts)
        self._names = {
            (module, attribute): use.name for use in spec.module_map.parameters for module, attribute, _ in use.slots
        }
        self._modules = {
            module[:end]
            for module, _ in self._names
            for end in (len(module), *(at for at, letter in enumerate(module) if letter == "."))
        }
        self.born: list[Born] = []
        self.arriving: dict[int, int | None] = {}
        self._ways: dict[tuple[int, bool], PartEvents] = {}
        self._given: dict[tuple[int, bool, bool], dict[int, Release]] = {}
        self._arriving_labels: dict[int, Label] = {}
        self._bytes: list[int] = []
        self._forwards = self.parts if self._is_first else (0, *self.parts)
        self._forward_born = self._add(self._forwards, backward=False, first=True)
        self._backward_born = {way: self._add(self.parts[::-1], backward=True, first=way) for way in ways}
        self._left: list[Born] = []
        self._kept: list[int] = []

    def way(self, part: int, *, first: bool) -> PartEvents:
        """How a region runs."""
        if (found := self._ways.get((part, first))) is not None:
            return found
        shape, last = self.shape, self.spec.num_layers + 1
        if part in (0, last):
            # The head keeps for recomputed layers what they are called with; they come first, so one is enough.
            near = shape.checkpointed if part == 0 else shape.checkpointed == shape.end - shape.first
            recomputed = near > 0
        else:
            recomputed = part <= shape.first + shape.checkpointed
        self._ways[part, first] = region_events(self.spec, part).way(recomputed=recomputed, first=first)
        return self._ways[part, first]

    def _add(self, parts: Sequence[int], *, backward: bool, first: bool) -> list[Born]:
        """Give slots to what regions allocate."""
        begin = len(self.born)
        for part in parts:
            events = self.way(part, first=first)
            found = list(enumerate(events.backward if backward else events.forward))
            if part == 0 and not self._is_first:
                found = [(n, item) for n, item in found if item.role == "shared" and not backward]
            sizes = values_at([item.size for _, item in found], self.shape.rows, self.spec.sequence_length or 1)
            for (number, item), nbytes in zip(found, sizes, strict=True):
                self.born.append(Born(len(self._bytes), part, backward, item, number, nbytes))
                self._bytes.append(nbytes)
        return self.born[begin:]

    def add_arriving(self, tensor: TensorSpec, handed: int | None) -> None:
        """Give a slot to a gradient from the next stage, handed on by the last region under index ``handed``."""
        self.arriving[len(self._bytes)] = handed
        self._arriving_labels[len(self._bytes)] = Label("transfer_bytes", "received gradient", dtype=tensor.dtype)
        self._bytes.append(bytes_at(tensor.bytes, self.shape.rows, self.spec.sequence_length or 1))

    def dtype(self, slot: int) -> str:
        """Of what is in a slot."""
        return self.born[slot].allocation.dtype if slot < len(self.born) else self._arriving_labels[slot].dtype

    def let_go(self, slot: int, *, first: bool) -> Release | None:
        """What the last region does to the gradient that arrives in a slot."""
        handed = self.arriving[slot]
        return None if handed is None else self.given(self.parts[-1], backward=True, first=first).get(handed)

    def canonical(self, part: int, name: str) -> str:
        """The canonical name of a parameter that a region knows as ``name``."""
        blocks = self.spec.module_map.blocks
        names = [f"{blocks[part - 1]}.{name}", name] if 0 < part <= len(blocks) else [name]
        # What runs between a block and the next one belongs to the block's region and goes by its whole name.
        slots = [(whole.rpartition(".")[0], whole.rpartition(".")[2]) for whole in names]
        return next((self._names[slot] for slot in slots if slot in self._names), names[0])

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
        if 0 < part <= len(blocks) and module not in self._modules:
            module = f"{blocks[part - 1]}.{module}" if module else blocks[part - 1]
        return Label(term, name, region, module, item.operator, item.line, item.dtype)

    def slots(self) -> Slots:
        """All slots."""
        labels = {item.slot: self._label(item.part, item.allocation, item.backward) for item in self.born}
        labels |= self._arriving_labels
        return Slots(
            bytes_K=np.array(self._bytes, dtype=np.int64),
            labels=tuple(labels[slot] for slot in range(len(self._bytes))),
        )

    def death(self, item: Born, *, first: bool) -> Place | None:
        """Where an allocation dies when the backward that follows is a first or a later one; ``None`` if nowhere."""
        allocation = self._as_in(item, first=first)
        if allocation.dies is None:
            return None
        place = self.absolute(allocation.dies, item.part)
        if allocation.slot is not None and place[0] != item.part:
            found = self._release(place[0], allocation.slot, backward=item.backward, first=first)
            return place if found is None else found
        return place

    def _as_in(self, item: Born, *, first: bool) -> Allocation:
        """The allocation as it is where gradients of parameters are made, or are there already."""
        events = self.way(item.part, first=first)
        column = events.backward if item.backward else events.forward
        return column[item.number] if item.number < len(column) else item.allocation

    def _release(self, target: int, slot: int, *, backward: bool, first: bool) -> Place | None:
        """Where the region that is given a tensor lets go of it."""
        if target not in self.inside:
            return (target, backward, 0)
        found = self.given(target, backward=backward, first=first).get(slot)
        return None if found is None else self.absolute(found.dies, target)

    def given(self, part: int, *, backward: bool, first: bool) -> dict[int, Release]:
        """What a region does to the tensors that it is given, by their index."""
        key = part, backward, first
        if key not in self._given:
            events = self.way(part, first=first)
            self._given[key] = {item.slot: item for item in (events.arriving if backward else events.entering)}
        return self._given[key]

    def wanted(self, item: Born, *, first: bool) -> tuple[str, ...]:
        """The parameters whose gradients are made of an allocation, by their canonical names."""
        allocation = self._as_in(item, first=first)
        names = [self.canonical(item.part, name) for name in allocation.weights]
        target = item.part if allocation.dies is None else self.absolute(allocation.dies, item.part)[0]
        if allocation.slot is not None and target != item.part and target in self.inside:
            release = self.given(target, backward=item.backward, first=first).get(allocation.slot)
            names += [] if release is None else [self.canonical(target, name) for name in release.weights]
        return tuple(names)

    def absolute(self, moment: StepPoint, part: int) -> Place:
        """Where a moment is that a region tells."""
        base = {"own": part, "head": 0, "tail": self.spec.num_layers + 1}[moment.anchor]
        target, backward = base + moment.part, moment.direction == "backward"
        if part == 0 and not self._is_first and 0 < target < self.parts[0]:
            # What the first layer lets go of, the stage's first layer does.
            return self.parts[0], backward, moment.position
        return target, backward, moment.position

    def template(self) -> StageTemplate:
        """All that is known of it."""
        spec, shape = self.spec, self.shape
        forward = self._forward()
        leaves = _crossing(spec, shape.end)
        outputs, left = _match(self._sizes(leaves), self._left)
        handed = {item.slot: item.allocation.slot for item in self._left}
        for tensor, output in zip(leaves, outputs, strict=True):
            if tensor.requires_grad:
                self.add_arriving(tensor, None if output is None else handed[output])
        backward, ended, leaving, inputs, weights = {}, {}, {}, {}, {}
        for way in self._backward_born:
            backward[way], ended[way], leaving[way] = self._backward(way, MappingProxyType({}))
            operands = self._operands(way)
            inputs[way] = self._backward(way, operands)[0]
            weights[way] = self._weights(way, operands)
        enters = self._sizes([tensor for tensor in _crossing(spec, shape.first) if tensor.requires_grad])
        returned = {}
        for way, items in leaving.items():
            returned[way], rest = _match(enters, items)
            ended[way] = (*ended[way], *rest)
        return StageTemplate(
            slots=self.slots(),
            born=tuple(self.born),
            parts=self.parts,
            forward=forward,
            backward=backward,
            inputs=inputs,
            weights=weights,
            outputs=outputs,
            arriving=tuple(self.arriving),
            left=left,
            returned=returned,
            ended=ended,
            kept=tuple(self._kept),
        )

    def _sizes(self, tensors: Sequence[TensorSpec]) -> tuple[int, ...]:
        spec, rows = self.spec, self.shape.rows
        return tuple(bytes_at(tensor.bytes, rows, spec.sequence_length or 1) for tensor in tensors)

    def _forward(self) -> dict[int, PartRun]:
        at = {part: _Entries() for part in self._forwards}
        for item in self._forward_born:
            at[item.part].add(item.allocation.born.position, item.slot, is_born=True)
            place = self.death(item, first=True)
            if place is None:
                self._kept.append(item.slot)
                continue
            part, backward, position = place
            if not backward and part in at:
                at[part].add(position, item.slot, is_born=False)
            elif part not in self.inside:
                self._left.append(item)
        return {part: entries.run() for part, entries in at.items()}

    def _operands(self, way: bool) -> dict[int, tuple[str, ...]]:
        """By slot the weights whose gradients are made of it."""
        born = (*self._forward_born, *self._backward_born[way])
        found = {item.slot: self.wanted(item, first=way) for item in born}
        for slot in self.arriving:
            release = self.let_go(slot, first=way)
            names = () if release is None else release.weights
            found[slot] = tuple(self.canonical(self.parts[-1], name) for name in names)
        return {slot: names for slot, names in found.items() if names}

    def _weights(self, way: bool, operands: Mapping[int, tuple[str, ...]]) -> tuple[WeightGradient, ...]:
        part = self.parts[0]
        received = {self.canonical(part, name) for name in self.way(part, first=way).reading}
        slots: dict[str, list[int]] = {name: [] for name in received}
        for slot, names in operands.items():
            for name in dict.fromkeys(names):
                slots.setdefault(name, []).append(slot)
        result = {}
        for item in self._backward_born[way]:
            name = self.canonical(item.part, item.allocation.parameter) if item.allocation.parameter else ""
            if name in slots and name not in result:
                own = itemsize(item.allocation.dtype)
                of = min((itemsize(self.dtype(slot)) for slot in slots[name]), default=own)
                result[name] = WeightGradient(
                    name=name,
                    nbytes=item.nbytes,
                    made_bytes=item.nbytes * min(own, of) // own,
                    operands=tuple(slots[name]),
                    received=self.parts[0] > 0 and name in received,
                )
        return tuple(result.values())

    def _backward(
        self, way: bool, operands: Mapping[int, tuple[str, ...]]
    ) -> tuple[dict[int, PartRun], tuple[int, ...], list[Born]]:
        """Events of every region's backward without later made ``operands``, what its end frees, and what leaves."""
        later = set().union(*operands.values())
        at = {part: _Entries() for part in self.parts}
        ended = self._given_up(way, operands, at)
        leaving: list[Born] = []
        owned: dict[int, str] = {}
        for item in self._backward_born[way]:
            place = self.death(item, first=way)
            name = self.canonical(item.part, item.allocation.parameter) if item.allocation.parameter else ""
            if name and name in later:
                continue
            at[item.part].add(item.allocation.born.position, item.slot, is_born=True)
            if name:
                owned[item.slot] = name
            if item.slot in operands or (name and (name in self._tied or way)):
                continue
            if name and self._casts:
                if place is not None and place[0] in self.inside:
                    at[place[0]].cast(place[2], item.slot)
                continue
            if place is None:
                ended.append(item.slot)
            elif place[0] in self.inside:
                at[place[0]].add(place[2], item.slot, is_born=False)
            else:
                leaving.append(item)
        return {part: entries.run(owned) for part, entries in at.items()}, tuple(ended), leaving

    def _given_up(self, way: bool, operands: Mapping[int, tuple[str, ...]], at: Mapping[int, _Entries]) -> list[int]:
        """Enter into a backward where it frees what was there before it; what it leaves to its end."""
        ended = []
        for item in self._forward_born:
            place = self.death(item, first=way)
            if place is not None and place[1] and place[0] in self.inside and item.slot not in operands:
                at[place[0]].add(place[2], item.slot, is_born=False)
        for slot in (slot for slot in self.arriving if slot not in operands):
            release = self.let_go(slot, first=way)
            place = None if release is None else self.absolute(release.dies, self.parts[-1])
            if place is not None and place[0] in self.inside:
                at[place[0]].add(place[2], slot, is_born=False)
            else:
                ended.append(slot)
        return ended


def stack(
    spec: ModelSpec,
    shape: StageShape,
    *,
    tied: frozenset[str] = frozenset(),
    casts: bool = False,
    ways: Sequence[bool] = WAYS,
) -> StageTemplate:
    """What one microbatch does inside a stage; a :class:`PlanError` if the network was described without events.

    Gradients of ``tied`` parameters are not freed in later backwards' events: they wait for the first region's.

    Args:
        casts: Whether gradients are added up in a larger type: then whoever casts them frees them.
        ways: Of which of :data:`WAYS` to say it.
    """
    return Stack(spec, shape, tied, ways, casts=casts).template()


def _crossing(spec: ModelSpec, cut: int) -> tuple[TensorSpec, ...]:
    return spec.boundaries[cut - 1] if 0 < cut < spec.num_layers else ()


def _match(sizes: Sequence[int], candidates: Sequence[Born]) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
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


# A tape of what one rank allocates and frees.

_NONE = -1  # no stage, no microbatch


class TapeBlock(NamedTuple):
    """Consecutive identities."""

    first: int
    labels: tuple[Label, ...]
    stage: int  # the stage they belong to; -1 for the whole rank
    microbatch: int  # the microbatch; -1 for none


class Mark(NamedTuple):
    """Where an action begins."""

    event: int  # index of its first event
    action: str  # the action as text, for example ``"2F0"``


class EventTape:
    """Takes down what a rank allocates and frees."""

    def __init__(self) -> None:
        self.blocks: list[TapeBlock] = []
        self.marks: list[Mark] = []
        self._events, self._bytes = array("q"), array("q")

    @property
    def length(self) -> int:
        """Number of events so far."""
        return len(self._events)

    def mark(self, action: str) -> None:
        """An action begins."""
        self.marks.append(Mark(self.length, action))

    def reserve(self, slots: Slots, stage: int, microbatch: int) -> int:
        """Identities for a microbatch's slots, none of which is allocated yet; the first of them."""
        first = len(self._bytes)
        self.blocks.append(TapeBlock(first, slots.labels, stage, microbatch))
        self._bytes.frombytes(slots.bytes_K.tobytes())
        return first

    def play(self, events_E: IntArray, first: int) -> None:
        """Events on slots, signed as identities are, that have identities from ``first`` on."""
        self._events.frombytes((events_E + np.sign(events_E) * first).tobytes())

    def malloc(self, nbytes: int, label: Label, stage: int = _NONE, microbatch: int = _NONE) -> int:
        """Allocate; the new identity."""
        identity = len(self._bytes)
        self.blocks.append(TapeBlock(identity, (label,), stage, microbatch))
        self._bytes.append(nbytes)
        self.allocate(identity)
        return identity

    def allocate(self, identity: int) -> None:
        """Allocate an identity that was reserved."""
        self._events.append(identity + 1)

    def free(self, identity: int) -> None:
        """Free."""
        self._events.append(-(identity + 1))

    def events(self) -> IntArray:
        """All events."""
        return np.array(self._events, dtype=np.int64)

    def bytes(self) -> IntArray:
        """Bytes of every identity."""
        return np.array(self._bytes, dtype=np.int64)
