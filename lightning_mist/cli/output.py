"""What commands print: results on stdout, progress on stderr."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import asdict
from textwrap import fill
from time import perf_counter
from typing import TYPE_CHECKING, Any, TextIO

from lightning_mist.console import printed_aside
from lightning_mist.plan import Plan, step_rates, to_json
from lightning_mist.units import format_seconds

if TYPE_CHECKING:
    from lightning_mist.explain import Explanation
    from lightning_mist.tuner import Planner, TuneResult


_OUTPUT: ContextVar[tuple[TextIO, int] | None] = ContextVar("_OUTPUT", default=None)
"""Where a command's answer goes, and how many columns there are; standard output itself is others' meanwhile."""

COMMAND: ContextVar[str] = ContextVar("COMMAND", default="lightning-mist")
"""The command line that is run."""


@contextmanager
def answers_alone() -> Iterator[None]:
    """Let :func:`answer` alone print on standard output.

    What libraries and the user's own code print there, from Python, from C or from processes that they start, goes to
    standard error: programs read the answer.
    """
    is_replaced = sys.stdout is not sys.__stdout__
    print(end="", flush=True)
    with printed_aside() as kept:
        own, sys.stderr = sys.stdout or os.fdopen(1, "w"), sys.stderr or os.fdopen(2, "w")
        stream = own if is_replaced else os.fdopen(kept, "w", encoding=own.encoding, errors=own.errors, closefd=False)
        token = _OUTPUT.set((stream, terminal_width()))
        sys.stdout = sys.stderr
        try:
            yield
        except BrokenPipeError:  # Whoever reads has read enough, as head does.
            os.dup2(os.open(os.devnull, os.O_WRONLY), kept)
            raise SystemExit(1) from None
        finally:
            sys.stdout = own
            _OUTPUT.reset(token)


def answer(text: str = "", end: str = "\n") -> None:
    """Print what was asked for."""
    print(text, end=end, file=_output()[0], flush=True)


def terminal_width() -> int:
    """Columns of text that a table may take."""
    return _output()[1]


def _output() -> tuple[TextIO, int]:
    return _OUTPUT.get() or (sys.stdout, max(80, shutil.get_terminal_size(fallback=(120, 24)).columns))


def display(rendered: Callable[..., str], *what: Any, **more: Any) -> None:
    """Print what a function makes of something, for as many columns as there are."""
    answer(rendered(*what, width=terminal_width(), color=_output()[0].isatty(), **more))


def show_text(text: str) -> None:
    """Print a sentence or more, broken where the terminal ends."""
    answer(fill(text, terminal_width(), break_long_words=False, break_on_hyphens=False))


def print_json(found: Plan, **more: object) -> None:
    """Print a plan, what it achieves by its prediction, and whatever else there is to say, as JSON."""
    rates = None if found.predicted is None else step_rates(found, found.predicted.step_seconds)
    document = {"plan": json.loads(to_json(found)), "rates": None if rates is None else asdict(rates), **more}
    answer(json.dumps(document, indent=1))


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"mist: {text}", file=sys.stderr)


@contextmanager
def told(text: str) -> Iterator[None]:
    """Print what the enclosed block does, and afterwards how long it took."""
    say(text)
    start = perf_counter()
    yield
    say(f"that took {format_seconds(perf_counter() - start)}")


def explanation_of(planner: "Planner", result: "TuneResult", *, seconds: float, **asked: Any) -> "Explanation":
    """The explanation of why a plan was chosen, its progress printed.

    Args:
        seconds: The most seconds to search for other plans; with 0 only what needs no search is said.
    """
    from lightning_mist.explain import explain_plan

    searching = told("searching plans without each technique, of other kinds and for better machines")
    with searching if seconds else nullcontext():
        return explain_plan(planner, result, seconds=seconds, **asked)
