"""What Lightning's command line says of options of the strategy that it does not take: one sentence, once.

Its parser tells how each type failed that ``--trainer.strategy`` may have, below the usage of every option there is,
and what a constructor refuses it lets through with its traceback. Here the parser of our options says what is wrong
with them, and the one around it nothing else. Where nothing is wrong, all is as ever.
"""

import re
import sys
from difflib import get_close_matches
from typing import Any, NoReturn

_KNOWN_BY = {"correct_profile": "the strategy", "zero_stages": "search"}
"""An option that no other class has than ours, and whose it is."""

_said: list[str] = []


def shorten_errors(parser: Any) -> None:
    """Let a class of parsers, Lightning's, speak so of our options."""
    if hasattr(parser, "_usual_error"):
        return
    parser._usual_error, construct = parser.error, parser.instantiate_classes

    def error(self: Any, message: str, ex: Exception | None = None) -> NoReturn:
        flat = " ".join(message.split())
        said = next((said for said in reversed(_said) if said in flat), None)
        if self.exit_on_error and said is not None:
            _end(self, said)
        self._usual_error(message if self.exit_on_error or said is not None else _explained(self, message), ex)
        raise AssertionError  # it ends the process, or raises

    def instantiate_classes(self: Any, config: Any, **more: Any) -> Any:
        try:
            return construct(self, config, **more)
        except (TypeError, ValueError) as error:
            # It is told in one line each why no type could be made: the constructors' words, and those on mere types.
            causes = [words for words in re.findall(r"^ *- (.*)", str(error), re.M) if words[:9] != "Expected "]
            if self.exit_on_error and causes and re.search(r"class_path='lightning_mist\.[Mm]ist", str(error)):
                _end(self, f"trainer.strategy: {causes[-1]}")
            raise

    parser.error, parser.instantiate_classes = error, instantiate_classes


def _end(parser: Any, said: str) -> None:
    told = getattr(sys.modules.get("lightning_utilities.core.rank_zero"), "rank_zero_only", None)
    parser.exit(2, f"error: {said}\n" if getattr(told, "rank", 0) == 0 else None)


def _explained(parser: Any, message: str) -> str:
    """What a parser of our options says in place of a message of its own; of other classes' the message."""
    options = [action.dest for action in parser._actions]
    named = re.search(r"""['"](\w+)['".]|--(\w+)""", message)
    whose = next((words for name, words in _KNOWN_BY.items() if name in options), None)
    if named is None or whose is None:
        return message
    if (name := named[1] or named[2]) in options:
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
