"""What fake numbers are taken to be where Python reads them, and loops that would never end on such a number."""

import torch

from lightning_mist.plan.calls import user_line

_MOST_READS = 100_000
"""Reads at one line after which it is taken for a loop: ``tolist`` of a batch stays below."""

_MOST_ROUNDS = 2_000
"""Reads at one line, with operators between each and the next, after which it is taken for a loop."""


class Guesses:
    """Counts the numbers that had to be guessed, by the line that read them."""

    def __init__(self) -> None:
        self._reads: dict[str, int] = {}
        self._rounds: dict[str, int] = {}
        self._operators: dict[str, int] = {}

    @property
    def reads(self) -> tuple[tuple[str, int], ...]:
        """How often each line read a number, in the order of the first reads."""
        return tuple(self._reads.items())

    def note(self, operators: int) -> str:
        """Count a read by the line of the user's code that is running.

        Args:
            operators: How many operators ran before it.

        Returns:
            Why the line can only be a loop that waits for another value, if so; nothing otherwise.
        """
        line = user_line()
        self._reads[line] = self._reads.get(line, 0) + 1
        if self._operators.get(line) != operators:
            self._rounds[line] = self._rounds.get(line, 0) + 1
            self._operators[line] = operators
        if self._reads[line] <= _MOST_READS and self._rounds[line] <= _MOST_ROUNDS:
            return ""
        return (
            f"the step has read values into Python {self._reads[line]} times at {line}: a loop that ends by a value "
            "has no fixed cost, and no end without values; let it end after a number of rounds"
        )


def guess(dtype: torch.dtype) -> bool | int | float:
    """What a fake number is taken to be: costs rarely depend on it, logging never."""
    if dtype == torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 1


def describe_guesses(reads: tuple[tuple[str, int], ...]) -> str:
    """What was read where, in words for the user."""
    lines = ", ".join(line for line, _ in reads[:3]) + (f" and {len(reads) - 3} other lines" if len(reads) > 3 else "")
    total = sum(count for _, count in reads)
    return f"the step reads {total} values into Python at {lines}; branches on them were taken as for False or 1"
