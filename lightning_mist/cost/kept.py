"""Answers about plans that are kept, the last so many."""

from collections.abc import Callable
from typing import Generic, TypeVar

from lightning_mist.plan import Plan

MOST = 2048
"""Answers that are kept; each takes a few kilobytes."""

_Answer = TypeVar("_Answer")


class Kept(Generic[_Answer]):
    """What was found out about plans; that of the plans that were asked for longest ago is forgotten."""

    def __init__(self) -> None:
        self._answers: dict[Plan, _Answer] = {}

    def of(self, plan: Plan, find: Callable[[Plan], _Answer]) -> _Answer:
        """The answer about a plan.

        Args:
            plan: The plan.
            find: Finds the answer if it is not kept; it is always the same for equal plans.
        """
        answer = self._answers.pop(plan) if plan in self._answers else find(plan)
        self._answers[plan] = answer
        while len(self._answers) > MOST:
            del self._answers[next(iter(self._answers))]
        return answer
