"""What Lightning's command line says of options of the strategy that it does not take: one sentence, once.

Its parser tries every type that ``--trainer.strategy`` may have, each with a parser of its own for the options, and
tells how all of them failed, below the usage of every option there is; what a constructor refuses it lets through with
its traceback. Here a parser of our options says in a sentence what is wrong with them, and the outermost one nothing
else. All this is done where something is wrong already: a parser that finds all in order behaves as Lightning's.
"""

import re
import sys
from difflib import get_close_matches
from typing import Any, NoReturn

_KNOWN_BY = ("correct_profile", "zero_stages")
"""An option of the strategy, and one of its search space, that no other class has."""

_said: list[str] = []


def shorten_errors(parser: Any) -> None:
    """Let a class of parsers, Lightning's, speak so of our options."""
    if "_lightning_mist_error" in vars(parser):
        return
    parser._lightning_mist_error = parser.error
    construct = parser.instantiate_classes

    def error(self: Any, message: str, ex: Exception | None = None) -> NoReturn:
        if self.exit_on_error:
            if (said := _last_of(message)) is not None:
                _end(self, said)
        elif _last_of(message) is None:
            message = _explained(self, message)
        self._lightning_mist_error(message, ex)
        raise AssertionError  # it ends the process, or raises

    def instantiate_classes(self: Any, config: Any, **more: Any) -> Any:
        try:
            return construct(self, config, **more)
        except (TypeError, ValueError):
            given = config.get("trainer.strategy") or config.get(f"{config.get('subcommand')}.trainer.strategy")
            if self.exit_on_error and (said := _refusal(given)) is not None:
                _end(self, f"trainer.strategy: {said}")
            raise

    parser.error, parser.instantiate_classes = error, instantiate_classes


def _end(parser: Any, said: str) -> NoReturn:
    ranks = getattr(sys.modules.get("lightning_utilities.core.rank_zero"), "rank_zero_only", None)
    parser.exit(2, f"error: {said}\n" if getattr(ranks, "rank", 0) == 0 else None)
    raise AssertionError  # it ends the process


def _last_of(message: str) -> str | None:
    """The sentence that a parser of our options ended with, where a parser around it tells of that."""
    flat = " ".join(message.split())
    return next((said for said in reversed(_said) if said in flat), None)


def _explained(parser: Any, message: str) -> str:
    """What a parser of our options says in place of a message of its own; of other classes' the message."""
    options = [action.dest for action in parser._actions]
    named = re.search(r"""['"](\w+)['".]|--(\w+)""", message)
    if named is None or not any(name in options for name in _KNOWN_BY):
        return message
    name, whose = named[1] or named[2], "the strategy" if _KNOWN_BY[0] in options else "search"
    if name in options:
        value = re.search(r"(?:Got|Given) value: (.*)", message)
        # One line for each type that it may have, or one in all.
        causes = re.findall(r"^ *- (.*)", message, re.M) or message.splitlines()[-1:]
        kinds = " or ".join(re.sub(r"<class '(.*?)'>", r"\1", cause).split(". Got value")[0] for cause in causes)
        said = f"{name}{'' if value is None else f' = {value[1]}'}: {kinds}"
    else:
        near = get_close_matches(name, options, n=1, cutoff=0.5)
        said = f"{name}: {whose} has no such option; " + (f"did you mean {near[0]}?" if near else "leave it out")
    _said.append(" ".join(f"trainer.strategy: {said}".split()))
    return _said[-1]


def _refusal(given: Any) -> str | None:
    """What the constructor of our strategy, or of its search space, says of what it was given."""
    import lightning_mist

    options = getattr(given, "init_args", None)
    if getattr(given, "class_path", None) not in ("lightning_mist.MistStrategy", "lightning_mist.mist"):
        return None
    found = {} if options is None else {**vars(options)}
    try:
        search = found.pop("search", None)
        search = getattr(search, "init_args", search)
        lightning_mist.MistStrategy(**found, search=search and lightning_mist.SearchSpace(**vars(search)))
    except (TypeError, ValueError) as error:
        return str(error)
    return None
