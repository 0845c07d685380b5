"""What commands print: results on stdout, progress on stderr."""

import shutil
import sys

from lightning_mist.plan import Plan, render


def show_plan(found: Plan) -> None:
    """Print a plan as a table."""
    width = max(80, shutil.get_terminal_size(fallback=(120, 24)).columns)
    print(render(found, width=width, color=sys.stdout.isatty()))


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"mist: {text}", file=sys.stderr)
