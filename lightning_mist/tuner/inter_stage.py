"""The inter-stage problem as a mixed-integer program.

Sets
    i = 0 .. S-1  stages;  c  choices of stage i, each with layers l, devices n, start a, steady time t, boundary time d

Variables
    x[i,c] in {0, 1}   stage i takes choice c
    T >= 0             steady time of the slowest stage
    D >= 0             boundary time that no earlier stage hides

Minimise  (G - 1) T + sum_{i,c} t[i,c] x[i,c] + D

subject to
    one choice         sum_c x[i,c] = 1                                                      for every i
    all layers         sum_{i,c} l[i,c] x[i,c] = L
    all devices        sum_{i, c in part p} n[i,c] x[i,c] = N_p                             for every part p
    slowest            T >= sum_c t[i,c] x[i,c]                                              for every i
    exposed            D >= sum_c d[i,c] x[i,c] - sum_{j<i} sum_c t[j,c] x[j,c]              for every i
    contiguous         sum_c a[i,c] x[i,c] = sum_{j<i} sum_c l[j,c] x[j,c]                   for the i below

The last family is there only for middle stages whose costs depend on where they lie; the first stage starts at 0, and
the last one ends at L by "all layers". Memory does not appear: what does not fit is not a choice.
"""

import numpy as np

from lightning_mist.cost.compile import FloatArray, IntArray
from lightning_mist.tuner.intra_stage import ANYWHERE, EVERY_PART
from lightning_mist.tuner.milp import Program
from lightning_mist.tuner.problem import Answer, InterStageProblem


def solve_program(problem: InterStageProblem, *, time_limit: float, incumbent: Answer | None = None) -> Answer:
    """The best answer according to HiGHS, with the bound that it has proven.

    Args:
        problem: The problem.
        time_limit: Seconds after which the best answer so far is taken.
        incumbent: An answer to begin with. Choices that cannot belong to a better one are left out.
    """
    if any(not len(slot) for slot in problem.slots):
        return Answer(chosen=(), objective=np.inf, bound=np.inf)
    kept = _promising(problem, incumbent)
    slots = tuple(slot.take(index) for slot, index in zip(problem.slots, kept, strict=True))
    if any(not len(slot) for slot in slots):
        return Answer(chosen=(), objective=np.inf, bound=np.inf)
    reduced = InterStageProblem(
        num_layers=problem.num_layers,
        num_devices=problem.num_devices,
        num_microbatches=problem.num_microbatches,
        slots=slots,
    )
    program = Program(scale=max(1e-12, *(float(max(slot.steady_K.max(), slot.boundary_K.max())) for slot in slots)))
    x = [program.add_binaries(slot.steady_K) for slot in slots]
    slowest, exposed = program.add_seconds([problem.num_microbatches - 1.0, 1.0])
    add_one_choice(program, x)
    add_all_layers(program, reduced, x)
    add_all_devices(program, reduced, x)
    add_slowest(program, reduced, x, int(slowest))
    add_exposed(program, reduced, x, int(exposed))
    add_contiguous(program, reduced, x)
    start = None
    if incumbent is not None and incumbent.chosen:
        start = _point(reduced, x, kept, incumbent)
    solution = program.solve(time_limit=time_limit, start=start)
    if not len(solution.values):
        return Answer(chosen=(), objective=np.inf, bound=solution.bound)
    places = [int(solution.values[variables].argmax()) for variables in x]
    chosen = tuple(int(index[place]) for index, place in zip(kept, places, strict=True))
    objective = problem.objective(chosen)
    return Answer(chosen=chosen, objective=objective, bound=min(solution.bound, objective))


def _promising(problem: InterStageProblem, incumbent: Answer | None) -> list[IntArray]:
    """Per stage the choices whose steady time alone does not exceed the incumbent's step.

    A choice of steady time ``t`` costs at least ``(G - 1) t``, its own ``t`` and the least ``t`` of every other stage.
    """
    least = np.array([slot.steady_K.min() for slot in problem.slots])
    limit = np.inf if incumbent is None or not incumbent.chosen else incumbent.objective * (1 + 1e-12)
    return [
        np.flatnonzero(problem.num_microbatches * slot.steady_K + least.sum() - least[stage] <= limit)
        for stage, slot in enumerate(problem.slots)
    ]


def _point(problem: InterStageProblem, x: list[IntArray], kept: list[IntArray], incumbent: Answer) -> FloatArray:
    """The incumbent as values of all variables."""
    values = np.zeros(sum(len(variables) for variables in x) + 2)
    chosen = tuple(int(np.searchsorted(index, choice)) for index, choice in zip(kept, incumbent.chosen, strict=True))
    for variables, place in zip(x, chosen, strict=True):
        values[variables[place]] = 1.0
    steady, boundary = problem.steady(chosen), problem.boundary(chosen)
    values[-2] = steady.max()
    values[-1] = max(0.0, float((boundary - np.concatenate([[0.0], np.cumsum(steady)[:-1]])).max()))
    return values


def add_one_choice(program: Program, x: list[IntArray]) -> None:
    """Every stage takes exactly one choice."""
    for variables in x:
        program.add_row(variables, np.ones(len(variables)), lower=1.0, upper=1.0)


def add_all_layers(program: Program, problem: InterStageProblem, x: list[IntArray]) -> None:
    """The stages' layers add up to the network's."""
    layers = np.concatenate([slot.layers_K for slot in problem.slots]).astype(np.float64)
    program.add_row(np.concatenate(x), layers, lower=problem.num_layers, upper=problem.num_layers)


def add_all_devices(program: Program, problem: InterStageProblem, x: list[IntArray]) -> None:
    """The stages' devices add up to those of every part of the cluster; the only stage may have them all."""
    devices = np.concatenate([slot.devices_K for slot in problem.slots]).astype(np.float64)
    part = np.concatenate([slot.part_K for slot in problem.slots])
    for number, count in enumerate(problem.num_devices):
        taken = np.where(part == number, devices, np.where(part == EVERY_PART, count, 0.0))
        program.add_row(np.concatenate(x), taken, lower=count, upper=count)


def add_slowest(program: Program, problem: InterStageProblem, x: list[IntArray], slowest: int) -> None:
    """T is at least the steady time of every stage."""
    for slot, variables in zip(problem.slots, x, strict=True):
        program.add_row(variables, -slot.steady_K, lower=0.0, seconds=[(slowest, 1.0)])


def add_exposed(program: Program, problem: InterStageProblem, x: list[IntArray], exposed: int) -> None:
    """D is at least what of a stage's boundary time exceeds the steady times of the stages before it."""
    for stage, slot in enumerate(problem.slots):
        variables = np.concatenate(x[: stage + 1])
        hidden = [earlier.steady_K for earlier in problem.slots[:stage]]
        program.add_row(variables, np.concatenate([*hidden, -slot.boundary_K]), lower=0.0, seconds=[(exposed, 1.0)])


def add_contiguous(program: Program, problem: InterStageProblem, x: list[IntArray]) -> None:
    """A stage whose costs depend on its place starts where the stages before it end."""
    for stage in range(1, len(problem.slots) - 1):
        slot = problem.slots[stage]
        if (slot.start_K == ANYWHERE).all():
            continue
        before = [earlier.layers_K.astype(np.float64) for earlier in problem.slots[:stage]]
        coefficients = np.concatenate([*before, -slot.start_K.astype(np.float64)])
        program.add_row(np.concatenate(x[: stage + 1]), coefficients, lower=0.0, upper=0.0)
