"""Every allocation of a step as data: how large, from when to when, where it comes from.

A step runs through parts: the head, the layers, the tail, forward and then backward in opposite order. In each
direction a part runs a number ``n`` of operators. A :class:`StepPoint` has a *position* among them: 0 is the entry of
the part, ``p`` is when its ``p``-th operator has run, ``n + 1`` is when the part is left. An allocation is alive from
the moment at which it is born until just before the one at which it dies; what dies at a position is freed before what
is born there is allocated.

Events are templates: they say of one kind of layer what each layer of that kind does, wherever it stands. So moments
name parts relative to the part that allocates, and what a part does to a tensor that another part allocated is said by
the part that does it (:class:`Release`): an activation that a layer hands on dies when the *next* part lets go of it,
whatever that part is, and the gradient that it hands down when the part *before* does.
"""

from dataclasses import dataclass
from typing import Literal

from lightning_mist.model.spec.polynomial import Polynomial

Direction = Literal["forward", "backward"]

Anchor = Literal["own", "head", "tail"]
"""What a part is counted from: the part that allocates, the head (part 0), or the tail (the last part)."""

Role = Literal["activation", "gradient", "temporary", "shared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """A point in a step.

    Attributes:
        part: Which part, counted from the anchor: of ``"own"`` 0 is the part that allocates, 1 the one after it in
            forward order; of ``"head"`` 0 is the head and 1 the first layer; of ``"tail"`` 0 is the tail and -1 the
            last layer.
        anchor: What it is counted from. Other than ``"own"`` only for deaths.
        direction: Forward or backward of that part. The backward of a recomputed layer begins with its recomputation.
        position: Operators of that part and direction that have run by then; one more than there are for its end.
    """

    part: int = 0
    anchor: Anchor = "own"
    direction: Direction
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One storage.

    Attributes:
        size: Bytes, in microbatch rows and sequence length.
        born: When it is allocated, always in the part itself.
        dies: When it is freed; ``None`` if it outlives the step (gradients of parameters that were made, tensors that
            the module keeps).
        slot: If it is handed to another part: the index of the tensor among those that enter that part, whose
            :attr:`PartEvents.entering` (forward) or :attr:`PartEvents.arriving` (backward) then says when it dies
            there. ``dies`` holds what was seen in the trace, where the neighbour may have been of another kind.
        role: ``"temporary"`` if it dies in the direction of the part that made it; ``"gradient"`` for a parameter's
            gradient and for what backward hands to the part before; ``"shared"`` for what the batch alone determines
            (masks, tables: every stage makes its own); else ``"activation"``.
        parameter: For the gradient of a parameter its name: within the layer, or in the whole module for head and tail.
        weights: Names of the part's parameters whose gradients are made of it: by which linear operations on them it is
            an input, or the gradient of an output. A zero-bubble schedule keeps it until it makes these.
        module: The module that made it, within the layer or within the whole module; in backward the module whose
            forward it belongs to.
        operator: For example ``"aten.mm.default"``.
        line: ``"file.py:123"``, the line of the user's code that ran it; in backward the line of the forward.
        dtype: Name of the element type, for example ``"bfloat16"``.
    """

    size: Polynomial
    born: StepPoint
    dies: StepPoint | None
    slot: int | None = None
    role: Role
    parameter: str = ""
    weights: tuple[str, ...] = ()
    module: str = ""
    operator: str
    line: str = ""
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """When a part lets go of a tensor that it was given and nobody else holds.

    Attributes:
        slot: Which of the tensors that enter it.
        dies: When; relative to the part that is given the tensor. Another part's moment if it is handed on as it is.
        weights: As :attr:`Allocation.weights`, for parameters of the part that is given the tensor.
    """

    slot: int
    dies: StepPoint
    weights: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartEvents:
    """What one part allocates in one way to run it.

    Attributes:
        forward_positions, backward_positions: Number of operators that run in either direction; -1 if that direction
            never begins (no gradient flows).
        entering: When it lets go of the activations that it is given: tensors among its arguments, in their order.
        arriving: When it lets go of the gradients that it is given: of the tensors that the next part is given, in
            their order; for the last layer in the order of its results.
        reading: Names of its parameters whose gradients are made of activations that it is given, whichever part lets
            go of these.
    """

    forward: tuple[Allocation, ...]
    backward: tuple[Allocation, ...]
    forward_positions: int
    backward_positions: int
    entering: tuple[Release, ...] = ()
    arriving: tuple[Release, ...] = ()
    reading: tuple[str, ...] = ()

    def positions(self, direction: Direction) -> int:
        """Number of operators that run in a direction."""
        return self.forward_positions if direction == "forward" else self.backward_positions


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerEvents:
    """The four ways to run a part.

    Attributes:
        first: Everything is kept; gradients of parameters do not exist yet and are made.
        later: The same when they exist already and are added to.
        recomputed_first, recomputed_later: The same when layers are recomputed in backward. Head and tail are never
            recomputed: theirs is what they do beside layers that are.
    """

    first: PartEvents
    later: PartEvents
    recomputed_first: PartEvents
    recomputed_later: PartEvents

    def way(self, *, recomputed: bool, first: bool) -> PartEvents:
        """Events of the part when it is recomputed or not, in the first backward of a batch or a later one."""
        if recomputed:
            return self.recomputed_first if first else self.recomputed_later
        return self.first if first else self.later
