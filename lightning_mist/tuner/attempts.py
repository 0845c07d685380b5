"""Families of pipelines solved one after another, the most promising first, and what comes out remembered."""

from lightning_mist.tuner.bound import solve, solve_family
from lightning_mist.tuner.offload_search import TimeIsUpError
from lightning_mist.tuner.problem import PRECISION, Family, Incumbent
from lightning_mist.tuner.tally import Group, Tally, family_of, single_stage


def search_families(tally: Tally, groups: list[Group], assumed: float) -> None:
    """Solve families until none can have a better answer.

    Args:
        tally: What has been found.
        groups: The pipelines to look at.
        assumed: Seconds that answers are to be better than, as well as than the best found.
    """

    def below() -> float:
        return min(tally.least, assumed)

    def enough() -> float:
        # What was proven of a pipeline before is so but for rounding.
        return below() * (1 - PRECISION)

    lowest = {group: bound for group in groups if (bound := tally.floor(*group, below())) < enough()}
    # Of equal bounds, as earlier searches leave them, that comes first which has the best answer.
    for group in sorted(lowest, key=lambda item: (lowest[item], tally.least_in(*item), item)):
        if lowest[group] >= enough():
            return
        if tally.is_late:
            tally.is_stopped = True
            return
        counts = [count for count in group[0] if tally.lower[count, group[1]] < enough()]
        try:
            attempt(tally, counts, group[1], below())
        except TimeIsUpError:
            tally.is_stopped = True
            return


def attempt(tally: Tally, counts: list[int], num_microbatches: int, below: float) -> None:
    """Solve some pipelines, if they can be better than ``below``, and remember their answers.

    Args:
        tally: What has been found.
        counts: Numbers of stages.
        num_microbatches: Number of microbatches.
        below: Seconds that answers are to be better than.

    Raises:
        TimeIsUpError: If there is no time left to evaluate their stages.
    """
    tally.solved |= {(count, num_microbatches) for count in counts}
    if counts == [1]:
        problem = single_stage(tally.intra, tally.space, num_microbatches, below)
        answer = solve(problem, below=below, deadline=tally.deadline)
        bound = answer.bound
        if answer.chosen:
            tally.note(Incumbent(problem=problem, answer=answer))
    else:
        bound = solve_some(tally, family_of(tally, counts, num_microbatches, below), below)
    # A plan with a stage that was left out of the problem takes at least ``below``.
    for count in counts:
        key = count, num_microbatches
        tally.bounds[key] = max(tally.bounds[key], min(below, bound))


def solve_some(tally: Tally, family: Family, below: float) -> float:
    """Solve a family for plans of fewer seconds than ``below`` and remember them.

    Args:
        tally: What has been found.
        family: The pipelines.
        below: The seconds.

    Returns:
        Seconds that no plan of the family goes below, as far as they are less than ``below``.
    """
    if not family.heads:
        return below
    result = solve_family(family, below=below, deadline=tally.deadline)
    for count, answer in result.answers.items():
        tally.note(Incumbent(problem=family.problem(count), answer=answer))
    return result.bound
