"""The ``lightning-mist`` command: its subcommands, their arguments, and errors in one line."""

import atexit
import ctypes
import gc
import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import docstring_parser
from jsonargparse import ArgumentParser

from lightning_mist.cli.estimate_command import estimate
from lightning_mist.cli.output import answers_alone
from lightning_mist.cli.plan_command import plan
from lightning_mist.cli.profile_command import profile
from lightning_mist.cli.show_command import show
from lightning_mist.cli.simulate_command import simulate
from lightning_mist.errors import MistError


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
    parser = _parser()
    chosen = parser.parse_args(_settled(sys.argv[1:] if arguments is None else arguments))
    function = _COMMANDS[chosen.subcommand]
    values = vars(chosen[chosen.subcommand])
    if arguments is None and function is plan:
        # The process ends with the plan, and what a search leaves need not be looked through for cycles before.
        gc.disable()
    with warnings.catch_warnings():
        # Lightning 2.6 asks for the leaves of a tree in a way that torch 2.13 deprecates; nobody here can mend it.
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
        _run(chosen.subcommand, function, values)


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

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """End the process with one line."""
        known = [item for action in self._actions for item in action.option_strings]
        program = self.prog.replace(" [options]", "")
        print(f"{program}: error: {_readable(str(ex or message), known)}; see {program} --help", file=sys.stderr)
        raise SystemExit(2)


_KINDS = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}


def _readable(text: str, known: Sequence[str]) -> str:
    """What a parser says, in the words of the command line."""
    wrong = re.search(r'Parser key "([\w.]+)"', text)
    expected = re.search(r"Expected a <class '(\w+)'>\.? Got value: (\S+)", " ".join(text.split()))
    if wrong and expected:
        kind = _KINDS.get(expected[1], "another value")
        return f"{_option(wrong[1].rpartition('.')[2])}: {kind} is needed in place of {expected[2]}"
    text = re.sub(rf"(?<![\w-])({'|'.join(_COMMANDS)})\.(\w+)", lambda found: _argument(found[1], found[2]), text)
    # Earlier versions of the library say it in other words, and of one that is missing at a time.
    text = re.sub(
        r"^.*?(?:Key|Option) ['\"]([\w-]+)['\"] is required.*", r"the following arguments are required: \1", text
    )
    text = text.replace("Unrecognized arguments", "unrecognized arguments")
    unknown = re.search(r"unrecognized arguments: --([\w-]+)", text)
    near = get_close_matches(unknown[1], [item.lstrip("-") for item in known], n=1) if unknown else []
    return f"{' '.join(text.split()).rstrip('.')}{f'; did you mean --{near[0]}?' if near else ''}"


def _argument(command: str, name: str) -> str:
    """How an argument of a command is written."""
    parameter = inspect.signature(_COMMANDS[command]).parameters.get(name)
    is_placed = parameter is not None and parameter.kind is inspect.Parameter.POSITIONAL_ONLY
    return name if is_placed else _option(name)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _settled(arguments: Sequence[str]) -> list[str]:
    """Arguments whose values are checked as they are written, those that stand for a list with brackets around them.

    YAML, which reads them, has more ways to write a number than anybody means: 0x10 and 016, 1_000, 12:30.
    """
    command = next((item for item in arguments if item in _COMMANDS), None)
    known = {} if command is None else {_option(name): kind for name, *kind in _options_of(_COMMANDS[command])}
    found, waiting = list[str](), None
    for item in arguments:
        option, equals, value = item.partition("=")
        if waiting is not None and not item.startswith("--"):
            found.append(_value(command, waiting, item, *known[waiting]))
        elif equals and option in known:
            found.append(f"{option}={_value(command, option, value, *known[option])}")
        else:
            found.append(item)
        waiting = item if item in known else None
    return found


_WRITTEN = {
    int: ("a whole number", re.compile(r"-?(0|[1-9][0-9]{0,17})")),
    float: ("a number", re.compile(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]{1,2})?")),
}
"""How numbers are written, by type."""

_MOST_SHOWN = 40


def _value(command: str | None, option: str, text: str, hint: Any, default: object) -> str:
    """The value of an option for the parser; ends the process with one line if nobody would write it so."""
    is_list = any(get_origin(item) is tuple for item in (hint, *get_args(hint)))
    kinds = (hint, _item_of(hint), *get_args(hint), *map(_item_of, get_args(hint)))
    kind, pattern = next(filter(None, map(_written, kinds)), ("a value", None))
    parts = [part.strip() for part in text.strip().strip("[]()").split(",")] if is_list else [text]
    is_empty = not text.strip() and default != ""
    if is_empty or (pattern and text != "null" and any(not pattern.fullmatch(part) for part in parts if parts != [""])):
        shown = f"{text[:_MOST_SHOWN]!r}..." if len(text) > _MOST_SHOWN else text if text.isalnum() else repr(text)
        program = f"lightning-mist {command}"
        print(
            f"{program}: error: {option}: {kind} is needed in place of {shown}; see {program} --help", file=sys.stderr
        )
        raise SystemExit(2)
    return text if not is_list or text == "null" or text.startswith(("[", "(")) else f"[{text}]"


def _written(hint: Any) -> tuple[str, re.Pattern[str]] | None:
    """How a number, or one of several words, is written; None of anything else."""
    if get_origin(hint) is not Literal or not all(isinstance(item, str) for item in get_args(hint)):
        return _WRITTEN.get(hint)
    words = "|".join(map(re.escape, get_args(hint)))
    return f"one of {', '.join(map(repr, get_args(hint)))}", re.compile(f"['\"]?({words})['\"]?")


def _item_of(hint: Any) -> Any:
    """What a list is of; nothing for what is no list."""
    return get_args(hint)[0] if get_origin(hint) is tuple else None


def _options_of(function: Any) -> Iterator[tuple[str, Any, object]]:
    """Name, type and default of a function's parameters, and of the fields of those that are dataclasses."""
    hints = get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if is_dataclass(hints[name]):
            yield from _options_of(hints[name])
        elif parameter.default is not False and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY:
            yield name, hints[name], parameter.default


@cache
def _parser() -> ArgumentParser:
    parser = _Parser(prog="lightning-mist", description="Plan how to train a network, and look at plans.")
    commands = parser.add_subcommands(dest="subcommand", required=True)
    for name, function in _COMMANDS.items():
        command = _command(function)
        commands.add_subcommand(name, command, help=command.description)
    return parser


def _command(function: Callable[..., None]) -> ArgumentParser:
    command = _Parser(description=docstring_parser.parse(function.__doc__ or "").short_description)
    _add_arguments(command, function)
    return command


def _add_arguments(command: ArgumentParser, function: Callable[..., Any]) -> None:
    """Take a function's parameters as arguments, with its docstring's words: positional-only ones by position.

    In place of a parameter that is a dataclass come its fields.
    """
    help_of = {item.arg_name: item.description for item in docstring_parser.parse(function.__doc__ or "").params}
    hints = get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        required = parameter.default is inspect.Parameter.empty
        if is_dataclass(hints[name]):
            _add_arguments(command, hints[name])
        elif required and parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            command.add_argument(name, type=hints[name], help=help_of[name])
        elif parameter.default is False:
            command.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=help_of[name])
        else:
            options = {"required": True} if required else {"default": parameter.default}
            command.add_argument(f"--{name.replace('_', '-')}", type=hints[name], help=help_of[name], **options)
