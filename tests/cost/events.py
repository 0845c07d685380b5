"""Hand-written allocations for the synthetic networks of :mod:`tests.specs`, small enough to add up by head."""

from dataclasses import replace

from lightning_mist.model.spec.allocation_events import Allocation, LayerEvents, PartEvents, Release, StepPoint
from lightning_mist.model.spec.polynomial import Polynomial
from lightning_mist.plan import LiveTensor

WIDTH = 1000
"""Bytes per row of what a layer hands on."""


def _size(rows=0, fixed=0):
    return Polynomial(((0, 0), (1, 0)), (fixed, rows))


def _moment(direction, position, part=0, anchor="own"):
    return StepPoint(part=part, anchor=anchor, direction=direction, position=position)


def _made(size, born, dies, role, **more):
    return Allocation(size=size, born=born, dies=dies, role=role, operator="aten.mm.default", dtype="float32", **more)


def layer_way(parameters, *, recomputed=False, first=True):
    """A layer: saves 9 widths and hands on one; makes a gradient of each parameter, given as name and bytes.

    Forward, by position: 1 a temporary of 2 widths until 3; 2 saves 9 widths; 3 its output. Backward: (recomputed: 1
    the 9 widths again;) 2 a temporary of 3 widths until 4; 3 gradients of parameters, until 4 if they are added to
    others; 4 the gradient of its input. What it saved dies at 4, what it was given at 5. What it saved and the
    temporary of backward are what the gradient of "weight" is made of.
    """
    later = None if first else _moment("backward", 4)
    saved = _moment("backward", 4)
    of = {"weights": ("weight",)}
    kept = [] if recomputed else [_made(_size(9 * WIDTH), _moment("forward", 2), saved, "activation", **of)]
    passing = [_made(_size(9 * WIDTH), _moment("forward", 2), _moment("forward", 3), "temporary")] if recomputed else []
    again = [_made(_size(9 * WIDTH), _moment("backward", 1), saved, "temporary", **of)] if recomputed else []
    return PartEvents(
        forward=(
            _made(
                _size(2 * WIDTH), _moment("forward", 1), _moment("forward", 3), "temporary", module="mlp", line="m.py:3"
            ),
            *kept,
            *passing,
            _made(_size(WIDTH), _moment("forward", 3), _moment("backward", 5, 1), "activation", slot=0),
        ),
        backward=(
            *again,
            _made(_size(3 * WIDTH), _moment("backward", 2), _moment("backward", 4), "temporary", **of),
            *(
                _made(_size(fixed=size), _moment("backward", 3), later, "gradient", parameter=name)
                for name, size in parameters
            ),
            _made(_size(WIDTH), _moment("backward", 4), _moment("backward", 5, -1), "gradient", slot=0),
        ),
        forward_positions=3,
        backward_positions=4,
        entering=(Release(slot=0, dies=_moment("backward", 5)),),
        arriving=(Release(slot=0, dies=_moment("backward", 5)),),
    )


def head_way(parameters, *, first=True):
    """The head: a mask of 100 bytes a row that all layers keep, and an output of one width."""
    later = None if first else _moment("backward", 2)
    return PartEvents(
        forward=(
            _made(_size(100), _moment("forward", 1), _moment("backward", 6, 1), "shared"),
            _made(_size(WIDTH), _moment("forward", 2), _moment("backward", 5, 1), "activation", slot=0),
        ),
        backward=tuple(
            _made(_size(fixed=size), _moment("backward", 1), later, "gradient", parameter=name)
            for name, size in parameters
        ),
        forward_positions=2,
        backward_positions=1,
        arriving=(Release(slot=0, dies=_moment("backward", 2)),),
    )


def tail_way(parameters, *, first=True):
    """The tail: 20 widths of scores until its backward makes the gradient of its input, and a loss of 4 bytes."""
    later = None if first else _moment("backward", 2)
    return PartEvents(
        forward=(
            _made(_size(20 * WIDTH), _moment("forward", 1), _moment("backward", 2), "activation"),
            _made(_size(fixed=4), _moment("forward", 2), None, "activation"),
        ),
        backward=(
            *(
                _made(_size(fixed=size), _moment("backward", 1), later, "gradient", parameter=name)
                for name, size in parameters
            ),
            _made(_size(WIDTH), _moment("backward", 1), _moment("backward", 5, -1), "gradient", slot=0),
        ),
        forward_positions=2,
        backward_positions=1,
        entering=(Release(slot=0, dies=_moment("backward", 2), weights=("head.weight",)),),
    )


def _ways(make, parameters):
    return LayerEvents(
        first=make(parameters),
        later=make(parameters, first=False),
        recomputed_first=make(parameters),
        recomputed_later=make(parameters, first=False),
    )


def with_events(network, *, tied=False):
    """A network of :func:`tests.specs.spec` with a list of allocations.

    Args:
        network: The network, of one kind of layer.
        tied: Whether the tail's projection is the head's embedding.
    """
    sizes = {item.name: item.bytes for item in network.parameters}
    block = network.module_map.blocks[0]
    inner = [(name, sizes[f"{block}.{name}"]) for name in ("weight", "bias")]
    layer = LayerEvents(
        first=layer_way(inner),
        later=layer_way(inner, first=False),
        recomputed_first=layer_way(inner, recomputed=True),
        recomputed_later=layer_way(inner, recomputed=True, first=False),
    )
    head = [("wte.weight", sizes["wte.weight"])]
    tail = [("head.weight", sizes["wte.weight" if tied else "head.weight"])]
    cut = (LiveTensor(key="hidden", shape=(4, 250), dtype="float32", requires_grad=True, batch_dim=0),)
    return replace(
        network,
        module_map=replace(network.module_map, cuts=(cut,) * (network.num_layers - 1)),
        head=replace(network.head, events=_ways(head_way, head)),
        tail=replace(network.tail, events=_ways(tail_way, tail)),
        layers=tuple(replace(item, events=layer) for item in network.layers),
    )
