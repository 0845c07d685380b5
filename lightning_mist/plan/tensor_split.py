"""How tensor parallelism splits the parameters of a module: found by ``model``, obeyed by ``runtime``.

A dimension is a product of *factors*, slowest first, of which exactly one is shared out: rank ``r`` of ``t`` holds
entries ``[r n / t, (r + 1) n / t)`` of that factor of size ``n``, and all entries of the others. ``((3, False), (32,
True))`` is a fused query-key-value projection of 3 x 32 rows, of which rank 0 of 2 holds rows 0-15, 32-47, 64-79.

*Pieces* of different sizes may lie side by side, each shared out by itself: with (32, 8, 8), a fused projection with
fewer key heads than query heads, rank 0 of 2 holds rows 0-15, 32-35, 40-43.
"""

from dataclasses import dataclass
from itertools import accumulate
from math import prod

from lightning_mist.errors import PlanError

Factors = tuple[tuple[int, bool], ...]
"""Sizes of the factors of one dimension, slowest first, and whether each is shared out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSplit:
    """How one parameter is shared out.

    Attributes:
        factors: The factors of that dimension for one unsplit parameter; exactly one is shared out.
        pieces: Sizes of what lies side by side along a dimension of one factor, where they differ.
    """

    name: str
    dim: int
    factors: Factors
    pieces: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if sum(is_shared for _, is_shared in self.factors) != 1:
            raise PlanError(f"{self.name}: factors {self.factors}: exactly one factor of a dimension is shared out")
        if self.pieces and (min(self.pieces) < 1 or self.factors != ((sum(self.pieces), True),)):
            raise PlanError(
                f"{self.name}: pieces {self.pieces} of a dimension of factors {self.factors}: give sizes of at least 1 "
                "that make up its only factor"
            )

    @property
    def size(self) -> int:
        """Size of the whole dimension."""
        return prod(size for size, _ in self.factors)

    def ranges(self, rank: int, degree: int) -> tuple[tuple[int, int], ...]:
        """Which entries of the dimension a rank holds, in order, as ``(offset, length)``."""
        pieces = self.pieces
        if not pieces:
            index = [is_shared for _, is_shared in self.factors].index(True)
            outer = prod(size for size, _ in self.factors[:index])
            pieces = (self.size // outer,) * outer
        starts = accumulate((0, *pieces[:-1]))
        return tuple(
            (start + rank * (size // degree), size // degree) for start, size in zip(starts, pieces, strict=True)
        )

    def local_shape(self, shape: tuple[int, ...], degree: int) -> tuple[int, ...]:
        """The shape of one rank's part of a parameter of ``shape``."""
        sizes = list(shape)
        sizes[self.dim] //= degree
        return tuple(sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSplit:
    """Where hidden states enter a block and which of their dimensions is the sequence.

    Attributes:
        leaf: Index of the tensor among the leaves of the block's ``(args, kwargs)``.
    """

    position: int
    leaf: int
    dim: int


MOST_STRIPES = 8
"""Stripes of a sequence, in each of which every context-parallel rank has a chunk: the rank with the most of causal
attention then does ``(1 - 1 / c) / 8`` more than an equal part of ``c``, in as many calls."""


def stripes_of(length: int, degree: int) -> int:
    """Into how many equal stripes a sequence is cut, each of which so many ranks share; 1 if it does not come apart."""
    return next((count for count in (MOST_STRIPES, 4, 2) if length % (count * degree) == 0), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSplit:
    """How a module is split over ``degree`` tensor-parallel ranks, checked against the unsplit module.

    Attributes:
        parameters: The parameters that are shared out, in the module's order; all others are held whole by every rank.
        sequence: For every block how sequence parallelism enters it; empty if it cannot be had.
        notes: What stays whole and why, in words for the user.
    """

    degree: int
    parameters: tuple[ParameterSplit, ...]
    sequence: tuple[SequenceSplit, ...] = ()
    notes: tuple[str, ...] = ()

    def of(self, name: str) -> ParameterSplit | None:
        """How a parameter is shared out, None if it is held whole."""
        return next((split for split in self.parameters if split.name == name), None)
