"""What earlier searches of the same space, under other limits of memory, tell a new one.

What fits under a limit fits under a larger one. So what was proven to take at least so many seconds under a limit takes
at least as many under any smaller one, and an answer whose stages need no more than a new limit is an answer there too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_mist.tuner.problem import Answer, InterStageProblem
from lightning_mist.tuner.search_space import SearchSpace
from lightning_mist.tuner.space import Space

MOST = 6
"""Earlier searches of one space that are kept."""

SPACES = 16
"""Search spaces of which it is kept what searches have left."""

_KEPT = 16
"""Answers of a search that are kept, the best, and the best of every number of stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The answer to one pipeline's problem."""

    problem: InterStageProblem
    answer: Answer

    @property
    def alone(self) -> "Found":
        """The same answer to a problem that has no other choices."""
        picked = zip(self.problem.slots, self.answer.chosen, strict=True)
        problem = replace(self.problem, slots=tuple(slot.take(np.array([index])) for slot, index in picked))
        return Found(problem=problem, answer=replace(self.answer, chosen=(0,) * len(problem.slots)))

    def fits(self, memory_limit: float) -> bool:
        """Whether no stage needs more of its device than a limit."""
        picked = zip(self.problem.slots, self.answer.chosen, strict=True)
        return all(float(slot.peak_K[index]) <= memory_limit for slot, index in picked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What a search left.

    Attributes:
        memory_limit: Bytes that a device could use.
        host_limit: Bytes of host memory that it could use.
        bounds: Seconds that no plan of a pipeline goes below, by numbers of stages and of microbatches.
        found: Its best answers, each to a problem without other choices.
    """

    memory_limit: float
    host_limit: float
    bounds: Mapping[tuple[int, int], float]
    found: tuple[Found, ...]

    @classmethod
    def of(cls, limits: tuple[float, float], bounds: Mapping[tuple[int, int], float], found: Sequence[Found]) -> "Past":
        """What is kept of a search.

        Args:
            limits: Bytes of a device, and of host memory, that could be used.
            bounds: Seconds that no plan of a pipeline goes below.
            found: Its answers.
        """
        best = sorted(found, key=lambda item: item.answer.objective)
        first: dict[int, int] = {}
        for index, item in enumerate(best):
            first.setdefault(len(item.answer.chosen), index)
        kept = {*range(min(_KEPT, len(best))), *first.values()}
        alone = tuple(best[index].alone for index in sorted(kept))
        return cls(memory_limit=limits[0], host_limit=limits[1], bounds=dict(bounds), found=alone)


class Pasts:
    """What searches have left, by search space; that of those asked for longest ago is forgotten."""

    def __init__(self) -> None:
        self._of: dict[Space, list[Past]] = {}

    def __len__(self) -> int:
        """Number of search spaces."""
        return len(self._of)

    def of(self, space: Space) -> tuple[Past, ...]:
        """What earlier searches of a space have left."""
        return tuple(self._of.get(_key(space), ()))

    def add(self, space: Space, past: Past) -> None:
        """Keep what a search has left, unless that is nothing."""
        if not past.bounds:
            return
        kept = [*self._of.pop(_key(space), ()), past]
        self._of[_key(space)] = kept[-MOST:]
        while len(self._of) > SPACES:
            del self._of[next(iter(self._of))]


def _key(space: Space) -> Space:
    """A search space whatever time there is to search it."""
    return replace(space, search=replace(space.search, solver_seconds=SearchSpace().solver_seconds), notes=())


def raised(
    lower: Mapping[tuple[int, int], float], pasts: Sequence[Past], limits: tuple[float, float]
) -> dict[tuple[int, int], float]:
    """Bounds that are no worse than those proven under limits at least as large.

    Args:
        lower: Seconds that no plan of a pipeline goes below.
        pasts: Earlier searches of the same space.
        limits: Bytes of a device, and of host memory, that may be used.
    """
    wider = [past for past in pasts if past.memory_limit >= limits[0] and past.host_limit >= limits[1]]
    return {key: max(bound, *(past.bounds.get(key, 0.0) for past in wider), 0.0) for key, bound in lower.items()}


def known_answers(pasts: Sequence[Past], limits: tuple[float, float]) -> list[Found]:
    """Answers of earlier searches that hold under new limits.

    Args:
        pasts: Earlier searches of the same space.
        limits: Bytes of a device, and of host memory, that may be used.
    """
    found = []
    for past in pasts:
        for item in past.found:
            moves = any(bool(slot.offload_KO.any()) for slot in item.problem.slots)
            if item.fits(limits[0]) and (not moves or past.host_limit <= limits[1]):
                found.append(item)
    return found
