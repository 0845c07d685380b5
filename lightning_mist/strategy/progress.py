"""What rank 0 says while it plans and after it measured; the other ranks keep silent."""

import sys
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar


class Progress:
    """Lines and a progress bar on standard error; without ``verbose`` only what users must know."""

    def __init__(self, *, enabled: bool, verbose: bool = True) -> None:
        self._is_enabled, self._is_verbose = enabled, verbose
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._last = ""

    @property
    def _console(self) -> Console:
        # Not kept: what refers to a strategy may be pickled, which an open stream cannot be.
        return Console(file=sys.stderr, quiet=not self._is_enabled, highlight=False, soft_wrap=True)

    def __enter__(self) -> "Progress":
        console = self._console
        if self._is_enabled and console.is_terminal:
            columns = (TextColumn("[bold]mist[/] {task.description}"), BarColumn(), TimeElapsedColumn())
            self._bar = Bar(*columns, console=console, transient=True)
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        bar, self._bar, self._task = self._bar, None, None
        if bar is not None:
            bar.stop()

    def tell(self, text: str) -> None:
        """Print one line that users must know."""
        self._print(f"[bold]mist[/] {escape(text)}")

    def say(self, text: str) -> None:
        """Print one line of what is going on and why; without ``verbose`` only where it can be overwritten."""
        if self._is_verbose:
            self.tell(text)
        else:
            self.update(text, 0.0)

    def update(self, text: str, fraction: float) -> None:
        """Show how far a longer measurement has come; ``fraction`` lies in [0, 1]."""
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task(text, total=1.0)
            self._bar.update(self._task, description=text, completed=fraction)
        elif self._is_verbose and text != self._last:
            self.tell(f"  {fraction:4.0%} {text}")
        self._last = text

    def details(self, renderable: Any) -> None:
        """Print a table or a text, if everything is to be said."""
        if self._is_verbose:
            self.show(renderable)

    def conclude(self, line: str, table: Any) -> None:
        """Print a table if everything is to be said, else one line."""
        if self._is_verbose:
            self.show(table)
        else:
            self.tell(line)

    def show(self, renderable: Any) -> None:
        """Print a table or a text."""
        self._print(renderable, markup=False)

    def _print(self, renderable: Any, *, markup: bool = True) -> None:
        console = self._console if self._bar is None else self._bar.console
        console.print(renderable, markup=markup)
