"""Running a recorded step again: on other batches, call by call."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_mist.runtime.cutting.arguments import is_writing, leaves_in, rebuilt
from lightning_mist.runtime.cutting.tape import Entry, Fixed, Number, Tape, made_by
from lightning_mist.runtime.cutting.traced_numbers import BATCH, Ref, number_of, refs_of


class UncuttableError(Exception):
    """Why a batch stays whole."""


class Values:
    """The tensors of a step for one batch.

    Args:
        leaves: The tensors of the batch; calls may write into them.
    """

    def __init__(self, leaves: Sequence[Tensor], rows: int) -> None:
        self.rows = rows
        self._tensors = {Ref(BATCH, index): leaf for index, leaf in enumerate(leaves)}

    def __getitem__(self, ref: Ref) -> Tensor:
        return self._tensors[ref]

    def __setitem__(self, ref: Ref, tensor: Tensor) -> None:
        self._tensors[ref] = tensor

    def __contains__(self, ref: Ref) -> bool:
        return ref in self._tensors

    def number(self, origin: Any) -> Any:
        """A number read from these tensors."""
        return number_of(origin, self.__getitem__, self.rows)

    def leaf(self, leaf: Any) -> Any:
        """What stands for a leaf of an entry's arguments."""
        if isinstance(leaf, Ref):
            return self[leaf]
        if isinstance(leaf, Fixed):
            return leaf.tensor
        return self.number(leaf.origin) if isinstance(leaf, Number) else leaf


@contextmanager
def as_recorded(entry: Entry, device: torch.device) -> Iterator[None]:
    """Inside, automatic casts are as they were when the call was taken down, and gradients off where they were off."""
    enabled, dtype = entry.autocast
    with ExitStack() as stack:
        if not entry.has_grad:
            stack.enter_context(torch.no_grad())
        if enabled != torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, dtype=dtype, enabled=enabled))
        yield


def run_entry(
    entry: Entry,
    values: Values,
    device: torch.device,
    change: Callable[[tuple[Any, ...], Any], Any] | None = None,
) -> list[Tensor]:
    """Run one call; the tensors that it makes, which :attr:`values` then has too.

    Args:
        change: Gives another value for an argument, from its path and value.
    """

    def argument(path: tuple[Any, ...], leaf: Any) -> Any:
        value = values.leaf(leaf)
        return value if change is None else change(path, value)

    args, kwargs = rebuilt((entry.args, entry.kwargs), argument)
    with as_recorded(entry, device):
        made = made_by(entry.name, args, entry.function(*args, **kwargs))
    if len(made) != entry.outputs:
        raise ReplayError(f"{entry.name} at {entry.line} made {len(made)} tensors in place of {entry.outputs}")
    for leaf, tensor in enumerate(made):
        values[Ref(entry.index, leaf)] = tensor
    return made


class ReplayError(Exception):
    """The recorded calls do not run on another batch."""


def sources(entry: Entry) -> set[Ref]:
    """The tensors that a call uses."""
    found = set()
    for _, leaf in leaves_in((entry.args, entry.kwargs)):
        if isinstance(leaf, Ref):
            found.add(leaf)
        elif isinstance(leaf, Number):
            found.update(refs_of(leaf.origin))
    return found


def ancestors(tape: Tape, wanted: Sequence[Ref]) -> list[Entry]:
    """The calls that make some tensors, in their order."""
    needed: set[int] = set()
    left = list(wanted)
    while left:
        ref = left.pop()
        if ref.entry == BATCH or ref.entry in needed:
            continue
        needed.add(ref.entry)
        left.extend(sources(tape.entries[ref.entry]))
    return [tape.entries[index] for index in sorted(needed)]


class Slice:
    """Works out some tensors that depend on the batch alone, for any batch."""

    def __init__(self, entries: Sequence[Entry], device: torch.device) -> None:
        self.entries, self.device = tuple(entries), device
        self._writes = any(is_writing(entry.name) for entry in self.entries)

    def run(self, leaves: Sequence[Tensor], rows: int) -> Values:
        """The tensors for a batch."""
        values = Values([leaf.clone() for leaf in leaves] if self._writes else leaves, rows)
        with torch.no_grad():
            for entry in self.entries:
                run_entry(entry, values, self.device)
        return values
