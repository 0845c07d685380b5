"""Where the stages of pipelines on unlike devices may lie: in which part, next to which others.

Stages of one part are neighbours, and parts follow each other in a settled order. What a stage costs depends on how
many stages are behind it, on its part, and on whether those next to it lie in others. For each such place the shortest
pipeline that has it stands for all: it leaves most to the stage.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lightning_mist.tuner.candidates import BEHIND, FRONT


class StagePlace(NamedTuple):
    """A stage of a pipeline.

    Attributes:
        seams: Which of the stages next to it lie in other parts, as of choices.
        pipeline: The part of every stage.
    """

    stage_index: int
    num_stages: int
    seams: int
    pipeline: tuple[int, ...]

    @property
    def part(self) -> int:
        """The part in which it lies."""
        return self.pipeline[self.stage_index]


def heads_of(order: tuple[int, ...], num_stages: int) -> Iterator[StagePlace]:
    """Every place of the first of so many stages."""
    for seams in (0, BEHIND):
        behind = _behind(order, 0, seams, num_stages - 1)
        if behind is not None:
            yield StagePlace(0, num_stages, seams, (order[0], *behind))


def tails_of(order: tuple[int, ...], num_behind: int, counts: Sequence[int]) -> Iterator[StagePlace]:
    """Every place of a stage that has so many behind it and others in front of it.

    Args:
        counts: The numbers of stages of the pipelines.
    """
    for number, part in enumerate(order):
        for seams in range(FRONT + BEHIND + 1):
            behind = _behind(order, number, seams, num_behind)
            front = (*order[:number],) if seams & FRONT else (*order[:number], part)
            if behind is None or (seams & FRONT and not number):
                continue
            stage_index = max(len(front), min(counts) - 1 - num_behind)
            if stage_index + 1 + num_behind <= max(counts):
                pipeline = (front[0],) * (stage_index - len(front)) + (*front, part, *behind)
                yield StagePlace(stage_index, len(pipeline), seams, pipeline)


def _behind(order: tuple[int, ...], number: int, seams: int, num_behind: int) -> tuple[int, ...] | None:
    """The parts of the stages behind one of the part with a number; ``None`` if it cannot lie there."""
    is_next_other = bool(seams & BEHIND)
    own = () if is_next_other or not num_behind else (order[number],)
    behind = (*own, *order[number + 1 :])
    if len(behind) > num_behind or (is_next_other and number == len(order) - 1):
        return None
    return behind + behind[-1:] * (num_behind - len(behind))
