"""What commands print: results on stdout, progress on stderr."""

import shutil
import sys

from lightning_mist.plan import Plan, render


def terminal_width() -> int:
    """Columns of text that a table may take."""
    return max(80, shutil.get_terminal_size(fallback=(120, 24)).columns)


def show_plan(found: Plan) -> None:
    """Print a plan as a table."""
    print(render(found, width=terminal_width(), color=sys.stdout.isatty()))


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"mist: {text}", file=sys.stderr)
