"""The ``lightning-mist`` command: its subcommands, their arguments, and errors in one line."""

import atexit
import ctypes
import gc
import inspect
import os
import re
import shlex
import sys
import warnings
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import docstring_parser

from lightning_mist.cli.estimate_command import estimate
from lightning_mist.cli.output import COMMAND, answers_alone
from lightning_mist.cli.plan_command import plan
from lightning_mist.cli.profile_command import profile
from lightning_mist.cli.show_command import show
from lightning_mist.cli.simulate_command import simulate
from lightning_mist.errors import MistError
from lightning_mist.plan.search_space import kind_of_limit


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the ``lightning-mist`` command.

    Args:
        arguments: What stands behind the command's name; by default, what the process was started with.

    Raises:
        SystemExit: With code 2 after an error in the arguments, the files, or the plan asked for; with code 1 after one
            of the user's own code.
    """
    # What is alive when the process ends goes with it: looking for cycles among all that takes long.
    atexit.register(gc.freeze)
    _keep_freed_memory()
    words = sys.argv[1:] if arguments is None else list(arguments)
    values = vars(_parser().parse_args(words))
    COMMAND.set(shlex.join(["lightning-mist", *words]))
    name = values.pop("subcommand")
    function = _COMMANDS[name]
    if arguments is None and function is plan:
        # The process ends with the plan, and what a search leaves need not be looked through for cycles before.
        gc.disable()
    with warnings.catch_warnings():
        # Lightning 2.6 asks for the leaves of a tree in a way that torch 2.13 deprecates; nobody here can mend it.
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
        _run(name, function, values)


_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
"""Parameters of ``mallopt`` in glibc's ``malloc.h``."""


def _keep_freed_memory() -> None:
    """Let glibc keep what arrays of up to 8 MiB leave, up to 32 MiB at the end of its memory.

    By default it gives them back to the system, which hands them out again page by page, each filled with zeros: large
    searches wait for that. Other libraries have nothing to be set, and what a user has set stays.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None and not {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"} & os.environ.keys():
        mallopt(_MMAP_THRESHOLD, 8 << 20)
        mallopt(_TRIM_THRESHOLD, 32 << 20)


def _run(name: str, function: Callable[..., None], values: Mapping[str, Any]) -> None:
    """Run a command; its errors end the process in one line."""
    try:
        with answers_alone():
            _call(function, values)
    except (MistError, ValueError, OSError) as error:
        print(f"lightning-mist {name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from error
    except MemoryError as error:
        said = f"this takes more memory than this machine has ({error}): ask for less, such as fewer devices or layers"
        print(f"lightning-mist {name}: error: {' '.join(said.split())}", file=sys.stderr)
        raise SystemExit(2) from error
    except Exception as error:
        from lightning_mist.model.child_process import RemoteTraceback

        if not isinstance(error.__cause__, RemoteTraceback):
            raise
        # The user's own code failed, in a process of its own: where is said once, and not how the error came here.
        print(str(error.__cause__).strip(), file=sys.stderr)
        print(f"lightning-mist {name}: error: running the model: {type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(1) from error


def _call(function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Call a function with what was said on the command line."""
    hints = get_type_hints(function)
    positional, named = [], {}
    for name, parameter in inspect.signature(function).parameters.items():
        value = _call(hints[name], values) if is_dataclass(hints[name]) else values[name]
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            positional.append(value)
        else:
            named[name] = value
    return function(*positional, **named)


_COMMANDS: dict[str, Callable[..., None]] = {
    "plan": plan,
    "show": show,
    "simulate": simulate,
    "estimate": estimate,
    "profile": profile,
}


class _Parser(ArgumentParser):
    """Says what is wrong in one line, in the words of the command line, and not all that could be right."""

    def __init__(self, **options: Any) -> None:
        """Options are not shortened, so that a misspelt one is told."""
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what is not known where it stands, and before what is missing: behind a command the command does."""
        given = list(sys.argv[1:] if args is None else args)
        options = given[: given.index("--")] if "--" in given else given
        if self._subparsers is None:
            named = [item.partition("=")[0] for item in options if re.match("--?[A-Za-z]", item)]
            self._refuse([item for item in named if item not in self._option_string_actions])
        found, rest = super().parse_known_args(given, namespace)
        self._refuse(rest)
        return found, rest

    def _refuse(self, unknown: Sequence[str]) -> None:
        if unknown:
            near = get_close_matches(unknown[0], self._option_string_actions, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")

    def error(self, message: str) -> NoReturn:
        """End the process with one line."""
        text = " ".join(message.split()).removeprefix("argument ")
        print(f"{self.prog}: error: {text}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


_WRITTEN: dict[Any, tuple[str, str, Callable[[str], Any]]] = {
    int: ("a whole number", r"-?(0|[1-9][0-9]{0,17})", int),
    float: ("a number", r"-?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]{1,2})?", float),
    bool: ("true or false", r"(?i:true|false)", lambda text: text.lower() == "true"),
    str: ("a value", r"(?s:.*\S.*)", str),
}
"""How values are written, in words and as a pattern, and what makes one of a text, by type."""

_MOST_SHOWN = 40


def _reader(hint: Any, default: object) -> tuple[str, Callable[[str], Any]]:
    """How an option of a type is written, and what makes its value: of several between commas, perhaps in brackets."""
    one, is_several, is_optional = kind_of_limit(hint)
    make: Callable[[str], Any] = str
    if get_origin(one) is Literal:
        words = get_args(one)
        kind, pattern = f"one of {', '.join(map(repr, words))}", "|".join(words)
    else:
        kind, pattern, make = _WRITTEN[one]

    def read(text: str) -> Any:
        if text == "null" and is_optional:
            return None
        if text == "" == default:
            return text
        parts = [text]
        if is_several:
            if re.fullmatch(r"\s*(\[\s*\]|\(\s*\))\s*", text):
                return ()
            parts = [part.strip() for part in re.sub(r"^\[(.*)\]$|^\((.*)\)$", r"\1\2", text.strip()).split(",")]
            parts = [re.sub(r"""^(['"])(.*)\1$""", r"\2", part) for part in parts] if make is str else parts
        if not all(re.fullmatch(pattern, part) for part in parts):
            shown = f"{text[:_MOST_SHOWN]!r}..." if len(text) > _MOST_SHOWN else text if text.isalnum() else repr(text)
            raise ArgumentTypeError(f"{kind} is needed in place of {shown}")
        return tuple(map(make, parts)) if is_several else make(text)

    return f"{kind}{', or several between commas' if is_several else ''}", read


@cache
def _parser() -> ArgumentParser:
    parser = _Parser(prog="lightning-mist", description="Plan how to train a network, and look at plans.")
    commands = parser.add_subparsers(dest="subcommand", required=True, metavar=f"{{{','.join(_COMMANDS)}}}")
    for name, function in _COMMANDS.items():
        words = docstring_parser.parse(function.__doc__ or "").short_description
        _add_arguments(commands.add_parser(name, help=words, description=words), function)
    return parser


def _add_arguments(command: ArgumentParser, function: Callable[..., Any]) -> None:
    """Take a function's parameters as arguments, with its docstring's words: positional-only ones by position.

    In place of a parameter that is a dataclass come its fields.
    """
    help_of = {item.arg_name: item.description for item in docstring_parser.parse(function.__doc__ or "").params}
    hints = get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if is_dataclass(hints[name]):
            _add_arguments(command, hints[name])
            continue
        words, option = str(help_of[name]).replace("%", "%%"), f"--{name.replace('_', '-')}"
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            command.add_argument(name, help=words)
        elif parameter.default is False:
            command.add_argument(option, action="store_true", help=words)
        else:
            required = parameter.default is inspect.Parameter.empty
            default = None if required else parameter.default
            kind, read = _reader(hints[name], default)
            usual = "null" if default is None else repr(default) if default == "" else default
            said = f"{words} ({kind}; {'required' if required else f'default: {usual}'})"
            command.add_argument(option, type=read, required=required, default=default, help=said)
