"""Tables and sentences for people, as text of a width; and who may print them."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO

from rich.console import Console
from rich.table import Table

_BROKEN = {"microbatch": "micro-\nbatch", "checkpointed": "check-\npointed"}
"""Long headings in two lines, for narrow tables."""


class TextConsole(Console):
    """A console whose output is kept as text, with ANSI escapes or without; what is printed is taken literally."""

    def __init__(self, width: int, *, color: bool) -> None:
        self._written = StringIO()
        super().__init__(
            file=self._written, width=width, force_terminal=color, markup=False, highlight=False, legacy_windows=False
        )

    @property
    def text(self) -> str:
        """All that was printed, without spaces at the ends of lines."""
        return "\n".join(line.rstrip() for line in self._written.getvalue().splitlines())

    def print_table(self, table: Table) -> None:
        """Print a table, narrowed if it would not fit: first its headings, then the space around cells."""
        if self._natural_width(table) > self.width:
            for column in table.columns:
                heading = str(column.header)
                column.header = _BROKEN.get(heading, heading.replace(" ", "\n"))
                column.overflow = "fold"  # rich would cut words off
        if self._natural_width(table) > self.width:
            table.padding = 0
        self.print(table)

    def _natural_width(self, table: Table) -> int:
        """Columns of text that a table takes if it may."""
        return self.measure(table, options=self.options.update(width=10_000)).maximum


@contextmanager
def printed_aside() -> Iterator[int]:
    """Send what C libraries and child processes print to standard error; gives standard output's own descriptor."""
    for number in (1, 2):
        try:
            os.fstat(number)
        except OSError:  # closed by whoever started this
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    # What C's library holds back it writes to whatever is standard output by then.
    flush = ctypes.CDLL(None).fflush if os.name == "posix" else bool
    flush(None)
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield kept
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)
