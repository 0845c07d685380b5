"""The search loop: every number of stages and of microbatches, in the order of what they take at least.

Pipelines ``(S, G)`` are taken in the order of a cheap lower bound of their step seconds, until it is no better than the
best plan found. Each is solved exactly by the dynamic program (:mod:`lightning_mist.tuner.bound`), and the winner once
more by HiGHS, which starts from that answer. All this is about the closed form of the step
(:mod:`lightning_mist.cost.pipeline`).
"""

from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from lightning_mist.tuner.bound import solve
from lightning_mist.tuner.inter_stage import solve_program
from lightning_mist.tuner.intra_stage import IntraStage
from lightning_mist.tuner.problem import Answer, InterStageProblem
from lightning_mist.tuner.space import Space

CHECK_SECONDS = 5.0
"""The most seconds for which HiGHS checks a proven optimum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The answer to one pipeline's problem."""

    problem: InterStageProblem
    answer: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Answers by number of stages, by pipeline, the winning number of stages, and a bound over all pipelines."""

    best: dict[int, Found]
    found: dict[tuple[int, int], Found]
    winner: int | None
    bound: float
    pipelines: int
    solved: int


def search_pipelines(intra: IntraStage, space: Space, deadline: float) -> Outcome:
    """The best pipeline, proven; and good ones with other numbers of stages."""
    pipelines = space.pipelines()
    best: dict[int, Found] = {}
    tally = _Tally(least=np.inf, bound=np.inf, solved=0)
    lower = {key: _quick_bound(intra, space, *key) for key in pipelines}
    ordered = sorted(pipelines, key=lambda key: (lower[key], key))
    for key in ordered:
        if lower[key] >= tally.least:
            tally.bound = min(tally.bound, lower[key])
            break
        if perf_counter() > deadline and best:
            tally.bound = min(tally.bound, lower[key])
            break
        _attempt(intra, space, key, best, tally, below=tally.least, deadline=deadline)
    if not best:
        return _outcome(best, tally, None, tally.bound, len(pipelines))
    winner = min(best, key=lambda count: (best[count].answer.objective, count))
    checked = solve_program(
        best[winner].problem,
        time_limit=max(0.1, min(CHECK_SECONDS, deadline - perf_counter())),
        incumbent=best[winner].answer,
    )
    if checked.chosen and checked.objective < best[winner].answer.objective:
        best[winner] = Found(problem=best[winner].problem, answer=checked)
        tally.found[winner, best[winner].problem.num_microbatches] = best[winner]
    bound = tally.bound
    for num_stages in compared(space, winner):
        for key in (key for key in ordered if key[0] == num_stages):
            known = best[num_stages].answer.objective if num_stages in best else np.inf
            if perf_counter() < deadline and lower[key] < known:
                _attempt(intra, space, key, best, tally, below=known, deadline=deadline)
    shown = {count: found for count, found in best.items() if count in (winner, *compared(space, winner))}
    return _outcome(shown, tally, winner, bound, len(pipelines))


def _outcome(best: dict[int, Found], tally: "_Tally", winner: int | None, bound: float, pipelines: int) -> Outcome:
    return Outcome(best=best, found=tally.found, winner=winner, bound=bound, pipelines=pipelines, solved=tally.solved)


@dataclass(slots=True, kw_only=True)
class _Tally:
    """Least step seconds found, bound over what was looked at, problems solved, and the last answer of each."""

    least: float
    bound: float
    solved: int
    found: dict[tuple[int, int], Found] = field(default_factory=dict)


def _attempt(
    intra: IntraStage,
    space: Space,
    key: tuple[int, int],
    best: dict[int, Found],
    tally: _Tally,
    *,
    below: float,
    deadline: float,
) -> None:
    """Solve one pipeline, if it can be better than ``below``, and remember its answer."""
    problem = _problem(intra, space, *key, below=below)
    # A plan with a stage that was left out of the problem takes at least ``below``.
    bound = min(below, problem.lower_bound())
    if bound < below:
        answer = solve(problem, below=below, deadline=deadline)
        tally.solved += 1
        bound = min(below, answer.bound)
        if answer.chosen:
            best[key[0]] = tally.found[key] = Found(problem=problem, answer=answer)
            tally.least = min(tally.least, answer.objective)
    tally.bound = min(tally.bound, bound)


def compared(space: Space, winner: int) -> tuple[int, ...]:
    """Numbers of stages to compare the winner with: none, half, one less, one more, twice as many."""
    wanted = {1, winner // 2, winner - 1, winner + 1, 2 * winner} - {winner}
    return tuple(sorted(count for count in wanted if 1 <= count <= space.max_stages))


def _quick_bound(intra: IntraStage, space: Space, num_stages: int, num_microbatches: int) -> float:
    """Step seconds that no plan of a pipeline goes below, whatever memory it needs.

    Every region takes at least its least time over all numbers of devices that a stage may have, and all devices
    together at least its least time times devices.
    """
    most = space.world_size - num_stages + 1
    shapes = [shape for shape in space.shapes(num_microbatches) if shape.devices <= most]
    if num_stages == 1:
        shapes = [shape for shape in shapes if shape.devices == space.world_size]
    seconds = [
        intra.model.region_seconds(space.rows(num_microbatches, shape.data), shape.tensor, shape.sequence)
        for shape in shapes
    ]
    region_NR = np.stack([item.forward_R + item.backward_R for item in seconds])
    devices_N1 = np.array([shape.devices for shape in shapes])[:, None]
    slowest = float((region_NR * devices_N1).min(axis=0).sum()) / space.world_size
    total = float(region_NR.min(axis=0).sum())
    return (num_microbatches - 1) * slowest + max(total, slowest)


def _problem(
    intra: IntraStage, space: Space, num_stages: int, num_microbatches: int, *, below: float
) -> InterStageProblem:
    """The choices of every stage, without those that only plans of at least ``below`` seconds can have.

    A pipeline takes at least ``G`` times the steady time of any of its stages.
    """
    slowest = below / num_microbatches
    return InterStageProblem(
        num_layers=space.num_layers,
        num_devices=(space.world_size,),
        num_microbatches=num_microbatches,
        slots=tuple(intra.frontier(index, num_stages, num_microbatches, slowest) for index in range(num_stages)),
    )
