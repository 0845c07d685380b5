"""The allocations of a stage's parts in their places: which there are, where they are born and where they die.

Parts are regions: 0 is the head, ``1 .. L`` the layers, ``L + 1`` the tail. Stages after the first run the head too,
as far as the batch alone determines it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_mist.errors import PlanError
from lightning_mist.model.events.event_tape import Label, Slots
from lightning_mist.model.spec import (
    Allocation,
    LayerEvents,
    LayerSpec,
    ModelSpec,
    Moment,
    PartEvents,
    Release,
    TensorSpec,
    bytes_at,
    values_at,
)


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


class Stack:
    """Puts together a stage of a network, or of one tensor-parallel rank's part of it."""

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

    def way(self, part: int, *, first: bool) -> PartEvents:
        """How a region runs."""
        key = part, first
        if key not in self._ways:
            self._ways[key] = self._way(part, first)
        return self._ways[key]

    def _way(self, part: int, first: bool) -> PartEvents:
        shape, last = self.shape, self.spec.num_layers + 1
        if part in (0, last):
            # The head keeps for recomputed layers what they are called with; they come first, so one is enough.
            near = shape.checkpointed if part == 0 else shape.checkpointed == shape.end - shape.first
            recomputed = near > 0
        else:
            recomputed = part <= shape.first + shape.checkpointed
        return region_events(self.spec, part).way(recomputed=recomputed, first=first)

    def add(self, part: int, *, backward: bool, first: bool) -> None:
        """Give slots to what a region allocates."""
        events = self.way(part, first=first)
        found = list(enumerate(events.backward if backward else events.forward))
        if part == 0 and not self._is_first:
            found = [(n, item) for n, item in found if item.role == "shared" and not backward]
        sizes = values_at([item.size for _, item in found], self.shape.rows, self.spec.sequence_length or 1)
        for (number, item), nbytes in zip(found, sizes, strict=True):
            slot = len(self._bytes)
            self.born.append(Born(slot, part, backward, item, number, nbytes))
            self._bytes.append(nbytes)

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
            bytes_A=np.array(self._bytes, dtype=np.int64),
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

    def absolute(self, moment: Moment, part: int) -> Place:
        """Where a moment is that a region tells."""
        base = {"own": part, "head": 0, "tail": self.spec.num_layers + 1}[moment.anchor]
        target, backward = base + moment.part, moment.direction == "backward"
        if part == 0 and not self._is_first and 0 < target < self.parts[0]:
            # What the first layer lets go of, the stage's first layer does.
            return self.parts[0], backward, moment.position
        return target, backward, moment.position
