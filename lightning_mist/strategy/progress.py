"""What rank 0 says while it plans and after it measured; the other ranks keep silent."""

import sys
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar


class Progress:
    """Lines and a progress bar on standard error.

    Args:
        enabled: Whether this rank speaks.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._console = Console(file=sys.stderr, quiet=not enabled, highlight=False, soft_wrap=True)
        columns = (TextColumn("[bold]mist[/] {task.description}"), BarColumn(), TimeElapsedColumn())
        self._bar = Bar(*columns, console=self._console, transient=True, disable=not enabled)
        self._task: TaskID | None = None
        self._last = ""

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Print one line."""
        self._console.print(f"[bold]mist[/] {escape(text)}")

    def update(self, text: str, fraction: float) -> None:
        """Show how far a longer measurement has come; ``fraction`` lies in [0, 1]."""
        if self._task is None:
            self._task = self._bar.add_task(text, total=1.0)
        self._bar.update(self._task, description=text, completed=fraction)
        if not self._console.is_terminal and text != self._last:
            self.say(f"  {fraction:4.0%} {text}")
        self._last = text

    def show(self, renderable: Any) -> None:
        """Print a table or a text."""
        self._console.print(renderable, markup=False)
