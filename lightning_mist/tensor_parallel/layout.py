"""Where the parts of a split tensor lie: arithmetic on factor lists, without tensors.

A layout has one tuple of factors ``(size, is_shared)`` per dimension, slowest first, whose product is the dimension's
size. Exactly one factor of the whole layout is shared out: rank ``r`` of ``t`` holds entries ``[r n / t, (r + 1) n /
t)`` of that factor of size ``n``. Views split factors and join them; a dimension whose part on a rank is no longer an
equal number of evenly spaced blocks cannot be expressed (None), and such an operation needs the whole tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from lightning_mist.plan.tensor_split import Factors

Layout = tuple[Factors, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """The entries of a dimension that a rank holds: of each of ``outer`` equal blocks, the rank's share of ``inner``.

    Attributes:
        outer: Number of blocks.
        inner: Entries of one block over all ranks.
    """

    outer: int
    inner: int


def plain(sizes: Sequence[int]) -> Layout:
    """The layout of whole dimensions, of which none is shared yet."""
    return tuple(((size, False),) for size in sizes)


def shape_of(layout: Layout) -> tuple[int, ...]:
    """The whole shape."""
    return tuple(prod(size for size, _ in factors) for factors in layout)


def local_size(factors: Factors, degree: int) -> int:
    """Entries of a dimension that one rank holds."""
    return prod(size // degree if is_shared else size for size, is_shared in factors)


def local_shape(layout: Layout, degree: int) -> tuple[int, ...]:
    """The shape of one rank's part."""
    return tuple(local_size(factors, degree) for factors in layout)


def is_shared(factors: Factors) -> bool:
    """Whether a dimension is shared out."""
    return any(shared for _, shared in factors)


def shared_dim(layout: Layout) -> int:
    """The dimension that is shared out."""
    return next(dim for dim, factors in enumerate(layout) if is_shared(factors))


def pattern(factors: Factors) -> Pattern:
    """Which entries of a shared dimension a rank holds."""
    position = next(index for index, (_, shared) in enumerate(factors) if shared)
    return Pattern(
        outer=prod(size for size, _ in factors[:position]), inner=prod(size for size, _ in factors[position:])
    )


def replaced(layout: Layout, dim: int, factors: Factors) -> Layout:
    """The layout with other factors in one dimension."""
    return (*layout[:dim], factors, *layout[dim + 1 :])


def _meaningful(factors: Sequence[tuple[int, bool]]) -> Factors:
    kept = tuple((size, shared) for size, shared in factors if size != 1 or shared)
    return kept or ((1, False),)


def resolve(layout: Layout, sizes: Sequence[int]) -> tuple[int, ...]:
    """A shape with its ``-1`` filled in."""
    sizes = list(sizes)
    if -1 in sizes:
        total = prod(shape_of(layout))
        sizes[sizes.index(-1)] = total // max(1, prod(size for size in sizes if size != -1))
    return tuple(sizes)


def view(layout: Layout, sizes: Sequence[int], degree: int) -> Layout | None:
    """The layout after a view of another shape, None if a rank's part cannot be viewed so."""
    left = [(size, shared) for factors in layout for size, shared in factors if size != 1 or shared]
    found: list[Factors] = []
    for size in resolve(layout, sizes):
        factors: list[tuple[int, bool]] = []
        needed = size
        while needed > 1 or (left and left[0] == (1, True) and not factors):
            if not left:
                return None
            first, shared = left[0]
            if needed % first == 0:
                factors.append(left.pop(0))
                needed //= first
            elif first % needed == 0 and not (shared and needed % degree):
                factors.append((needed, shared))
                left[0] = (first // needed, False)
                needed = 1
            else:
                return None
        found.append(_meaningful(factors))
    if any(size != 1 or shared for size, shared in left):
        return None
    return tuple(found)


def cut(factors: Factors, start: int, end: int, degree: int) -> tuple[Factors, int, int] | None:
    """Entries ``[start, end)`` of a shared dimension: their factors, and where they lie in a rank's part.

    None unless whole outer blocks are taken.
    """
    factors = _meaningful(factors)
    size = prod(count for count, _ in factors)
    if (start, end) == (0, size):
        return factors, 0, local_size(factors, degree)
    first, shared = factors[0]
    if shared:
        return None
    inner = size // first
    if start % inner or end % inner:
        return None
    local_inner = local_size(factors[1:], degree)
    count = (end - start) // inner
    rest = factors[1:] if count == 1 else ((count, False), *factors[1:])
    return rest, start // inner * local_inner, end // inner * local_inner


def broadcast(layout: Layout, shape: Sequence[int]) -> Layout:
    """The layout of an operand aligned at the last dimension with a broadcast shape; the shared dimension is kept."""
    offset = len(shape) - len(layout)
    found: list[Factors] = [((size, False),) for size in shape]
    for dim, factors in enumerate(layout):
        if is_shared(factors) or prod(size for size, _ in factors) == shape[offset + dim]:
            found[offset + dim] = factors
    return tuple(found)
