"""The ``lightning-mist`` command: its subcommands, their arguments, and errors in one line."""

import inspect
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

import docstring_parser
from jsonargparse import ArgumentParser

from lightning_mist.cli.estimate import estimate
from lightning_mist.cli.plan import plan
from lightning_mist.cli.show import show
from lightning_mist.errors import MistError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the ``lightning-mist`` command.

    Args:
        arguments: What stands behind the command's name; by default, what the process was started with.

    Raises:
        SystemExit: With code 2 after an error in the arguments, the files, or the plan asked for.
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
        function(*(values[parameter] for parameter in inspect.signature(function).parameters))
    except (MistError, ValueError, OSError) as error:
        print(f"lightning-mist {name}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


_COMMANDS: dict[str, Callable[..., None]] = {"plan": plan, "show": show, "estimate": estimate}


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="lightning-mist", description="Plan how to train a network, and look at plans.")
    commands = parser.add_subcommands(dest="subcommand", required=True)
    for name, function in _COMMANDS.items():
        command = _command(function)
        commands.add_subcommand(name, command, help=command.description)
    return parser


def _command(function: Callable[..., None]) -> ArgumentParser:
    """The arguments of a function, with its docstring's words: positional-only ones by position."""
    described = docstring_parser.parse(function.__doc__ or "")
    help_of = {item.arg_name: item.description for item in described.params}
    command = ArgumentParser(description=described.short_description)
    hints = get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        required = parameter.default is inspect.Parameter.empty
        if required and parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            command.add_argument(name, type=hints[name], help=help_of[name])
        elif parameter.default is False:
            command.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=help_of[name])
        else:
            options = {"required": True} if required else {"default": parameter.default}
            command.add_argument(f"--{name.replace('_', '-')}", type=hints[name], help=help_of[name], **options)
    return command
