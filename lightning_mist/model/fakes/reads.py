"""Reads of a tensor's values into Python, and what a run without values answers them."""

from dataclasses import dataclass
from typing import Any

import torch

from lightning_mist.model.child_process import BUDGET
from lightning_mist.plan.calls import user_line


@dataclass(frozen=True, slots=True)
class Read:
    """A value of a tensor that was read into Python."""

    function: str  # the torch function, for example ``".item()"``
    line: str
    region: int  # position of the block entered last
    is_inner: bool
    source: str  # what the value depends on: ``"parameters"`` or ``"random numbers"``
    value: Any


class Guesses:
    """Counts the numbers that had to be guessed, by the line that read them."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], tuple[int, int, int]] = {}
        """By line and block: reads, rounds of operators and reads, operators that had run at the last read."""

    @property
    def reads(self) -> tuple[tuple[str, int], ...]:
        """How often each line read a number, in the order of the first reads."""
        found: dict[str, int] = {}
        for (line, _), (reads, _, _) in self._counts.items():
            found[line] = found.get(line, 0) + reads
        return tuple(found.items())

    def note(self, operators: int, block: int = 0) -> str:
        """Count a read by the user's line that is running; why the line can only be a loop, if so, else nothing."""
        line = user_line()
        reads, rounds, before = self._counts.get((line, block), (0, 0, -1))
        reads, rounds = reads + 1, rounds + (before != operators)
        self._counts[line, block] = reads, rounds, operators
        most = BUDGET.rounds if operators > BUDGET.operators else BUDGET.most_rounds
        if reads <= BUDGET.most_reads and rounds <= most:
            return ""
        return (
            f"the step has read values into Python {reads} times at {line}: a loop that ends by a value has no fixed "
            "cost, and no end without values; let it end after a number of rounds"
        )


def too_many(operators: int) -> str:
    """Why a run without values that has come so far has no end, if so, else nothing."""
    if operators <= BUDGET.most_operators:
        return ""
    return f"the step has run {operators} operators without an end; the last is at {user_line()}"


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
