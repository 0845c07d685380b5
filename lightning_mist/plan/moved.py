"""Which parameters a ratio of offloading moves: whole ones, of each unit as many as are within its share of bytes."""

from collections.abc import Sequence


def moved_of_unit(sizes: Sequence[float], ratio: float) -> tuple[int, ...]:
    """Which parameters of one unit are moved.

    From the largest to the smallest, the earlier first among equals, a parameter is moved if the bytes moved then still
    are at most ``ratio`` of the unit's. So a unit of one parameter is moved at ratio 1 only.
    """
    if ratio == 0.0:
        return ()
    # Bytes are whole numbers: one part in 10^12 is less than one of them, and more than rounding.
    room, moved = ratio * sum(sizes) * (1 + 1e-12), []
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        if 0 < sizes[index] <= room:
            moved.append(index)
            room -= sizes[index]
    return tuple(moved)
