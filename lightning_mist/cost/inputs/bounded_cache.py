"""Answers that are kept, the last so many."""

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

MOST = 2048
"""Answers that are kept; of plans each takes a few kilobytes."""

PLANS = 128
"""The same of all terms of a plan's stages; of long pipelines each takes dozens of kilobytes."""

_Question = TypeVar("_Question", bound=Hashable)
_Answer = TypeVar("_Answer")


class BoundedCache(Generic[_Question, _Answer]):
    """What was found out, which is never ``None``; the answer to what was asked for longest ago is forgotten."""

    def __init__(self, most: int = MOST) -> None:
        self._answers: dict[_Question, _Answer] = {}
        self._most = most

    def of(self, question: _Question, find: Callable[[_Question], _Answer]) -> _Answer:
        """The answer to a question.

        Args:
            find: Finds the answer if it is not kept; it is always the same for equal questions.
        """
        answer = self._answers.pop(question) if question in self._answers else find(question)
        self._answers[question] = answer
        self._forget()
        return answer

    def of_all(
        self, questions: Sequence[_Question], find: Callable[[list[_Question]], Sequence[_Answer]]
    ) -> list[_Answer]:
        """The answers to several questions.

        Args:
            find: Finds the answers to those together that are not kept, none of them twice.
        """
        places: dict[_Question, int] = {}
        place = [places.setdefault(item, len(places)) for item in questions]
        unique = list(places)
        answers: list[_Answer | None] = [self._answers.get(item) for item in unique]
        missing = [index for index, answer in enumerate(answers) if answer is None]
        found = dict(zip(missing, find([unique[index] for index in missing]), strict=True)) if missing else {}
        every = [found[index] if answer is None else answer for index, answer in enumerate(answers)]
        for item, answer in zip(unique, every, strict=True):
            self._answers.pop(item, None)
            self._answers[item] = answer
        self._forget()
        return [every[index] for index in place]

    def _forget(self) -> None:
        while len(self._answers) > self._most:
            del self._answers[next(iter(self._answers))]
