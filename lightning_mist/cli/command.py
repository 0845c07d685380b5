"""The ``lightning-mist`` command: its subcommands, their arguments, and errors in one line."""

import inspect
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, get_type_hints

import docstring_parser
from jsonargparse import ArgumentParser

from lightning_mist.cli.estimate import estimate
from lightning_mist.cli.plan import plan
from lightning_mist.cli.profile import profile
from lightning_mist.cli.show import show
from lightning_mist.cli.simulate import simulate
from lightning_mist.errors import MistError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the ``lightning-mist`` command.

    Args:
        arguments: What stands behind the command's name; by default, what the process was started with.

    Raises:
        SystemExit: With code 2 after an error in the arguments, the files, or the plan asked for; with code 1 after one
            of the user's own code.
    """
    parser = _parser()
    chosen = parser.parse_args(None if arguments is None else list(arguments))
    function = _COMMANDS[chosen.subcommand]
    values = vars(chosen[chosen.subcommand])
    with warnings.catch_warnings():
        # Lightning 2.6 asks for the leaves of a tree in a way that torch 2.13 deprecates; nobody here can mend it.
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
        _run(chosen.subcommand, function, values)


def _run(name: str, function: Callable[..., None], values: Mapping[str, Any]) -> None:
    """Run a command; its errors end the process in one line."""
    try:
        _call(function, values)
    except (MistError, ValueError, OSError) as error:
        print(f"lightning-mist {name}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except Exception as error:
        from lightning_mist.model.apart import RemoteTraceback

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


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="lightning-mist", description="Plan how to train a network, and look at plans.")
    commands = parser.add_subcommands(dest="subcommand", required=True)
    for name, function in _COMMANDS.items():
        command = _command(function)
        commands.add_subcommand(name, command, help=command.description)
    return parser


def _command(function: Callable[..., None]) -> ArgumentParser:
    command = ArgumentParser(description=docstring_parser.parse(function.__doc__ or "").short_description)
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
