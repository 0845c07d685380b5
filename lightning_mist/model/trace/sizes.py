"""A step to be counted, and at which sizes: rows and sequence lengths around a real batch."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_mist.model.device import DeviceOperators
from lightning_mist.model.fakes import resize_batch, sequence_length
from lightning_mist.model.spec import BILINEAR, CONSTANT, QUADRATIC, Basis, MisfitError, Point, TensorSpec
from lightning_mist.model.trace.block_kinds import Kinds
from lightning_mist.model.trace.counted_step import Subject, isolated_subject
from lightning_mist.plan import ModuleMap
from lightning_mist.tensors import batch_rows, batch_tensors

Resize = Callable[[Any, int, int | None], Any]
"""``(batch, rows, length)`` to a batch of that size; the length is ``None`` where it is not to be changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A user's step, and all that is needed to run it at several sizes."""

    module: nn.Module
    batch: Any
    module_map: ModuleMap
    call: Callable[[Any], Any]  # runs it on a batch
    context: Callable[[], AbstractContextManager[Any]]  # makes the context of its forward, for example autocast
    resize: Resize | None
    operators: DeviceOperators  # how the device that it will run on computes

    def subject(self, mode: FakeTensorMode | None) -> AbstractContextManager[Subject]:
        """What is run inside; slots of one parameter that different parts use get different substitutes."""
        owners = {(name, at): parts for use in self.module_map.parameters for name, at, parts in use.slots if parts}
        return isolated_subject(
            self.module,
            self.call,
            self.batch,
            blocks=self.module_map.blocks,
            mode=mode,
            owners=owners,
            context=self.context,
        )

    def sized(self, basis: Basis) -> Callable[[Point], Any]:
        """Makes the batch of a size."""
        return partial(sized, self.batch, basis, resize=self.resize)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """What whole runs told of the blocks."""

    kinds: Kinds  # which of them cost the same
    twins: tuple[int | None, ...]  # for every block ``None`` if it runs itself, else which block answers for it
    recompute_failure: str | None  # why they cannot be recomputed, if so
    selective_failure: str | None  # why not by operator, if so
    kept_bytes: int  # bytes of tensors that the module keeps as plain attributes from its first step on
    timeline: list[int]  # bytes alive at every reading of a whole run at the first size

    @property
    def recomputes(self) -> bool:
        """Whether blocks can be recomputed."""
        return self.recompute_failure is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """A step that was counted over one set of sizes."""

    basis: Basis
    blocks: Blocks
    boundaries: tuple[tuple[TensorSpec, ...], ...]  # the tensors that cross each cut


# What depends on the batch alone (masks) is computed for real, and counts are exact at any size: so sizes stay small.
_LONGEST = 512
_LONGEST_REAL = 64
_BATCH_BYTES = 1 << 24
_SCORES = 1 << 20


def _base_rows(batch: Any, rows: int, length: int) -> int:
    """The whole batch if that is cheap; else two, as operators may treat a dimension of size one as a special case."""
    size = sum(t.numel() * t.element_size() for t in batch_tensors(batch))
    return rows if rows > 1 and size <= _BATCH_BYTES and rows * length * length <= _SCORES else 2


def bases(batch: Any, *, real: bool) -> Iterator[Basis]:
    """Sets of sizes to try, the most general first; smaller ones for real numbers."""
    rows, full = batch_rows(batch), sequence_length(batch)
    if rows is None:
        yield Basis(CONSTANT, ((1, full or 1),), None)
        return
    if full is not None and full >= 4:
        longest = min(full, _LONGEST_REAL if real else _LONGEST)
        lengths = (longest, longest // 2, longest // 4)
        b = 2 if real else _base_rows(batch, rows, longest)
        points: tuple[Point, ...] = tuple((r, s) for s in lengths for r in (b, 2 * b))
        yield Basis(BILINEAR, points, (3 * b, 3 * longest // 4))
    b = 2 if real else _base_rows(batch, rows, full or 1)
    yield Basis(QUADRATIC, tuple((b * i, full or 1) for i in (1, 2, 3)), (4 * b, full or 1))
    yield Basis(CONSTANT, ((rows, full or 1),), None)


def divisible(basis: Basis, degree: int) -> Basis:
    """Sizes like others whose lengths a sequence-parallel degree divides, at least two positions for every rank."""
    # Operators treat dimensions of size one as a special case, hence two positions.
    longest = max(length for _, length in basis.sizes)
    if basis.powers != BILINEAR or longest < 6 * degree:
        raise MisfitError(f"lengths up to {longest} tell too little of costs that depend on multiples of {degree}")
    rows = sorted({rows for rows, _ in basis.points})
    least = 2 * degree
    unit = longest // (4 * least) * least
    # Without a fourth multiple the check varies the rows only.
    lengths, check = ((4 * unit, 2 * unit, unit), 3 * unit) if unit else ((3 * least, 2 * least, least), least)
    points: tuple[Point, ...] = tuple((r, s) for s in lengths for r in rows)
    return Basis(BILINEAR, points, (3 * rows[0], check))


def sized(batch: Any, basis: Basis, point: Point, resize: Resize | None) -> Any:
    """The batch at one point of a basis; the batch itself where nothing can be varied."""
    if basis.powers == CONSTANT:
        return batch
    length = point[1] if basis.powers == BILINEAR else None
    return (resize or resize_batch)(batch, point[0], length)
