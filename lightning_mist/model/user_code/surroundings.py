"""What a step changes beside the module it belongs to: noticed while the step is tried, and put back.

Counters on classes, globals, closures, the trainer and its callbacks, arrays, random generators and iterators.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any

from lightning_mist.attributes import container, is_a, package_of
from lightning_mist.model.user_code.contents import MOST_BYTES, Contents, Replayed, held_iterators, is_code
from lightning_mist.model.user_code.reach import NameSpace, Reach

_Place = tuple[int, str]  # number of a space and a name in it


def _is_state(value: Any) -> bool:
    """Whether a value is no code, nor what this package answers with meanwhile, such as a recorder of ``log``."""
    is_ours = is_a(value, MethodType) and package_of(value) == __name__.partition(".")[0]
    return not (is_code(value) or is_ours)


class Snapshot:
    """Everything that a step can reach, at one time."""

    def __init__(self, reach: Reach, *, is_start: bool) -> None:
        self._reach = reach
        self._contents = Contents(with_tensors=is_start, largest=MOST_BYTES)
        self.values: dict[_Place, Any] = {}
        self.frozen: dict[_Place, Any] = {}
        for number, space in enumerate(reach.spaces):
            for name, value in reach.named(space):
                if _is_state(value):
                    self.values[number, name] = value
                    self.frozen[number, name] = self._contents.freeze(value)

    def differs(self, later: "Snapshot") -> Iterator[_Place]:
        """Places whose values are others in a later snapshot."""
        for place in {**self.frozen, **later.frozen}:
            if self.frozen.get(place) != later.frozen.get(place):
                yield place

    def restore(self) -> None:
        """Put everything back as it was."""
        for number, space in enumerate(self._reach.spaces):
            now = {name: value for name, value in self._reach.named(space) if _is_state(value)}
            for name in now.keys() - {name for of, name in self.values if of == number}:
                space.remove(name)
        for (number, name), value in self.values.items():
            space = self._reach.spaces[number]
            held = space.values()
            if name not in held or held[name] is not value:
                space.put(name, value)
        self._contents.restore()


class Surroundings:
    """What a step that is tried finds beside its arguments; afterwards all of it is as before.

    Tell it before and after every run. Runs are let go on one from another until :meth:`settle`: what differs after the
    second from what was after the first is state, and not a cache that the first filled. Later runs all begin alike.

    Attributes:
        is_steady: Whether runs are known to change nothing, so that nothing need be put back between them.
    """

    def __init__(self, reach: Reach) -> None:
        self.reach = reach
        self._iterators: list[tuple[Callable[[Any], object], Replayed]] = []
        self._start: Snapshot | None = None
        self._after: list[Snapshot] = []
        self.is_steady, self._is_settled = False, False

    def hold(self) -> None:
        """Remember everything as it is now."""
        for space in self.reach.spaces:
            self._hold_iterators(space)
        self._start = Snapshot(self.reach, is_start=True)

    def release(self) -> None:
        """Put everything back as it was; iterators give again what runs have taken from them."""
        assert self._start is not None
        self._start.restore()
        for put, iterator in self._iterators:
            put(iterator.release())
        self._start, self._iterators = None, []

    def begin_run(self) -> None:
        """A run of the step begins."""
        assert self._start is not None
        if self._is_settled and not self.is_steady:
            # Not before: backward may still need what the run before has seen.
            self._start.restore()

    def end_run(self) -> None:
        """A run of the step has ended, well or not."""
        if not self._is_settled:
            self._after.append(Snapshot(self.reach, is_start=False))

    def settle(self) -> tuple[tuple[str, NameSpace], ...]:
        """What the runs so far have changed beside the module; from here on every run begins as the first."""
        assert self._start is not None
        changed: tuple[tuple[str, NameSpace], ...] = ()
        if self._after:
            first = self._after[-2] if len(self._after) > 1 else self._start
            places = [self._named(place) for place in first.differs(self._after[-1])]
            changed = tuple((name, space) for name, space in places if not space.is_module)
            self.is_steady = not any(True for _ in self._start.differs(self._after[-1]))
        self._after, self._is_settled = [], True
        self._start.restore()
        return changed

    def _named(self, place: _Place) -> tuple[str, NameSpace]:
        number, name = place
        return name, self.reach.spaces[number]

    def _hold_iterators(self, space: NameSpace) -> None:
        values = dict(self.reach.named(space))
        for holder, key in list(held_iterators(values, iter(values))):
            kind = container(holder)
            replayed = Replayed(kind.__getitem__(holder, key))
            put = partial(space.put, key) if holder is values else partial(kind.__setitem__, holder, key)
            put(replayed)
            self._iterators.append((put, replayed))
