"""Why a plan, as commands say it."""

import sys
from typing import TYPE_CHECKING, Any

from lightning_mist.cli.output import terminal_width, told

if TYPE_CHECKING:
    from lightning_mist.explain import Explanation
    from lightning_mist.tuner import Planner, TuneResult


def explanation_of(planner: "Planner", result: "TuneResult", *, seconds: float, **asked: Any) -> "Explanation":
    """Why a plan was chosen.

    Args:
        seconds: The most seconds to search for other plans; with 0 only what needs no search is said.
    """
    from lightning_mist.explain import explain_plan

    if not seconds:
        return explain_plan(planner, result, seconds=0.0, **asked)
    with told("searching plans without each technique, of other kinds and for better machines"):
        return explain_plan(planner, result, seconds=seconds, **asked)


def show_explanation(explanation: "Explanation", *, full: bool) -> None:
    """Print why a plan was chosen."""
    from lightning_mist.tuner import render_explanation

    print(render_explanation(explanation, full=full, width=terminal_width(), color=sys.stdout.isatty()))
    if not full:
        print("\nmore about this, other plans and better machines: --explain")
