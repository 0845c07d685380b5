"""State made of tensors, as plain tensors and back again: whatever describes, sends, moves or copies it walks alike.

State is any nesting of mappings, lists and tuples. A tensor of a class of its own that is made of others, by torch's
``__tensor_flatten__``, is a container too, and its class is asked to make it again (``__tensor_unflatten__``). What has
another class or attributes without being made of others comes and goes with them.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mist.attributes import is_a
from lightning_mist.tensors import rebuild

CLASS = "__tensor_class__"
"""Key of what a tensor of a class of its own is beside the tensors that it is made of."""

Path = tuple[Any, ...]
"""Keys, indices and names that lead to a tensor."""


class Wrapping:
    """What makes plain tensors one of another class, with attributes: all but the values."""

    def __init__(self, tensor: Any) -> None:
        self.cls, self.size, self.stride = type(tensor), tensor.shape, tensor.stride()
        self.is_made_of_others = hasattr(tensor, "__tensor_flatten__")
        self.context = tensor.__tensor_flatten__()[1] if self.is_made_of_others else (dict(vars(tensor)),)

    def around(self, inner: Mapping[str, Any]) -> Tensor:
        """A tensor of the class from those that it is made of, by name."""
        cls: Any = self.cls
        if self.is_made_of_others:
            made: Tensor = cls.__tensor_unflatten__(dict(inner), self.context, self.size, self.stride)
            return made
        with torch._C.DisableTorchFunctionSubclass():
            made = inner["values"].as_subclass(cls)
        made.__dict__.update(*self.context)
        return made


# What stands in a checkpoint directory is read with weights_only, too; the tensors' classes still have to be allowed.
torch.serialization.add_safe_globals([Wrapping])


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is torch's own, without attributes that somebody gave it."""
    return type(tensor) in (Tensor, nn.Parameter) and not vars(tensor)


def plain_leaves(state: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """The tensors of state by their paths; of one that is made of others these, and not itself."""
    items = _items(state)
    if items is not None:
        for key, item in items:
            yield from plain_leaves(item, (*path, key))
    elif is_a(state, Tensor):
        yield path, state


def with_leaves(state: Any, new: Mapping[Path, Any], path: Path = ()) -> Any:
    """State in which something else is at some paths: mappings and lists are changed, the rest is made anew."""
    if path in new:
        return new[path]
    inner = {key: with_leaves(item, new, (*path, key)) for key, item in _items(state) or ()}
    changed = {key: inner[key] for key, item in _items(state) or () if inner[key] is not item}
    if not changed:
        return state
    if is_a(state, Tensor):
        return Wrapping(state).around(inner)
    if is_a(state, tuple):
        return type(state)(*inner.values()) if hasattr(state, "_fields") else type(state)(inner.values())
    for key, item in changed.items():
        state[key] = item
    return state


def _items(state: Any) -> list[tuple[Any, Any]] | None:
    if is_a(state, Mapping):
        return list(state.items())
    if is_a(state, (list, tuple)):
        return list(enumerate(state))
    if is_a(state, Tensor) and hasattr(state, "__tensor_flatten__"):
        return [(name, getattr(state, name)) for name in state.__tensor_flatten__()[0]]
    return None


def inner_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """What :meth:`Wrapping.around` makes a tensor of a class of its own from."""
    return dict(_items(tensor) or [("values", tensor.detach().as_subclass(Tensor))])


def take_apart(state: Any, each: Callable[[Tensor], Any] = lambda tensor: tensor) -> Any:
    """State in fresh containers of plain tensors, what is left of other classes under :data:`CLASS`.

    Args:
        each: Gives something for each plain tensor, and is asked once for one that is there several times.
    """
    known: dict[int, tuple[Tensor, Any]] = {}

    def replace(node: Any) -> Any:
        if not is_a(node, Tensor):
            return None
        if not is_plain(node):
            with torch._C.DisableTorchFunctionSubclass():
                inner = inner_tensors(node)
            return {**{name: rebuild(item, replace) for name, item in inner.items()}, CLASS: Wrapping(node)}
        if id(node) not in known:
            known[id(node)] = node, each(node)  # the tensor too: while it is there no other has its id
        return known[id(node)][1]

    return rebuild(state, replace)


def put_together(state: Any) -> Any:
    """The inverse of :func:`take_apart`, from tensors."""

    def replace(node: Any) -> Any:
        if is_a(node, Mapping) and is_a(node.get(CLASS), Wrapping):
            return node[CLASS].around({key: put_together(item) for key, item in node.items() if key != CLASS})
        return None

    return rebuild(state, replace)


def on_host(state: Any) -> Any:
    """The same in host memory; what is there already is not copied."""
    return put_together(take_apart(state, lambda tensor: tensor.detach().cpu()))
