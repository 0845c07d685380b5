"""Tables and sentences for people, as text of a width."""

from io import StringIO

from rich.console import Console
from rich.table import Table

_BROKEN = {"microbatch": "micro-\nbatch", "checkpointed": "check-\npointed"}
"""Long headings in two lines, for narrow tables."""


class TextConsole(Console):
    """A console whose output is kept as text; what is printed is taken literally, without markup.

    Args:
        width: Columns of text at most.
        color: Whether to add ANSI escapes.
    """

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
