"""Short vectors of lattices of whole numbers."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any


def reduced(matrix: Sequence[Sequence[int]]) -> list[list[int]]:
    """A basis of short vectors of the lattice that rows span (Cohen, A Course in Computational Algebraic Number Theory,
    algorithm 2.6.3)."""
    rows = [list(row) for row in matrix]
    near: list[list[Fraction]] = []
    norms: list[Fraction] = []

    def dot(one: Sequence[Any], other: Sequence[Any]) -> Any:
        return sum(a * b for a, b in zip(one, other, strict=True))

    def orthogonalise() -> list[list[Fraction]]:
        stars: list[list[Fraction]] = []
        near.clear()
        norms.clear()
        for row in rows:
            star, line = [Fraction(item) for item in row], []
            for before, norm in zip(stars, norms, strict=True):
                factor = dot(row, before) / norm
                line.append(factor)
                star = [a - factor * b for a, b in zip(star, before, strict=True)]
            near.append(line)
            stars.append(star)
            norms.append(dot(star, star))
        return stars

    orthogonalise()
    at = 1
    while at < len(rows):
        for other in reversed(range(at)):
            times = round(near[at][other])
            if times:
                rows[at] = [a - times * b for a, b in zip(rows[at], rows[other], strict=True)]
                for place in range(other):
                    near[at][place] -= times * near[other][place]
                near[at][other] -= times
        if norms[at] >= (Fraction(3, 4) - near[at][at - 1] ** 2) * norms[at - 1]:
            at += 1
        else:
            rows[at - 1], rows[at] = rows[at], rows[at - 1]
            orthogonalise()
            at = max(at - 1, 1)
    return rows
