"""Random inter-stage problems, and answers by trying everything."""

import itertools
from dataclasses import replace

import numpy as np

from lightning_mist.tuner.candidates import ANY_SEAMS, EVERY_PART, SlotChoices
from lightning_mist.tuner.inter_stage.problem import Family, InterStageProblem
from lightning_mist.tuner.space.applied_space import ANYWHERE
from tests.tuner.plans import is_feasible


def slot(start, layers, devices, steady, boundary, part=None, seams=ANY_SEAMS):
    """Choices from sequences; bytes and savings do not matter to the problem."""
    whole, times = (np.asarray(item, dtype=np.int64) for item in (layers, devices)), (steady, boundary)
    made = SlotChoices.anywhere(*whole, *(np.asarray(item, dtype=np.float64) for item in times)).placed(0, seams)
    found = {"start_K": start} if part is None else {"start_K": start, "part_K": part}
    return replace(made, **{name: np.asarray(item, dtype=np.int64) for name, item in found.items()})


def random_problem(seed):
    """Up to 4 stages on 1 to 3 parts; starts are open, fixed, or so few choices that nothing may fit."""
    rng = np.random.default_rng(seed)
    num_stages = int(rng.integers(1, 5))
    num_layers = int(rng.integers(num_stages, 8))
    num_parts = int(rng.choice([1, 2, 3], p=[0.6, 0.25, 0.15]))
    num_devices = random_devices(rng, num_stages, num_parts)
    kinds = [(c, part) for part, of in enumerate(num_devices) for c in (1, 2, 3) if c <= of]
    if num_stages == 1:
        kinds = [(sum(num_devices), 0 if num_parts == 1 else EVERY_PART)]
    scale = 10.0 ** rng.integers(-6, 3)
    # Boundary times from negligible to far longer than the whole pipeline.
    weight = 10.0 ** rng.uniform(-2, 1.5)
    is_open, kept = bool(rng.integers(2)), rng.choice([0.15, 0.5, 1.0])
    slots = []
    for stage in range(num_stages):
        first, last = stage == 0, stage == num_stages - 1
        rows = []
        for length in range(1, num_layers - num_stages + 2):
            if first and last:
                length = num_layers  # noqa: PLW2901
            starts = [0] if first else [num_layers - length] if last else [ANYWHERE] if is_open else range(num_layers)
            for start in starts:
                for (count, part), of_seams in itertools.product(kinds, range(2)):
                    base = (length + rng.random()) / count * (1 + (start if start > 0 else 0) * 0.3) * (1 + abs(part))
                    seams = (int(rng.integers(4)) if of_seams else ANY_SEAMS) if min(num_parts, num_stages) > 1 else 0
                    rows.append((start, length, count, base * scale, weight * base * rng.random() * scale, part, seams))
        rows = [row for row in rows if rng.random() < kept] or rows[:1]
        slots.append(slot(*map(np.array, zip(*rows, strict=True))))
    return InterStageProblem(
        num_layers=num_layers,
        num_devices=num_devices,
        num_microbatches=int(rng.choice([1, 2, 5, 40])),
        slots=tuple(slots),
        order=tuple(rng.permutation(num_parts).tolist()),
    )


def random_devices(rng, num_stages, num_parts):
    """Devices of every part, at least one in each and in all at least as many as stages."""
    least = max(num_stages, num_parts)
    extra = rng.multinomial(int(rng.integers(least, 7)) - num_parts, [1 / num_parts] * num_parts)
    return tuple(int(more) + 1 for more in extra)


def small_seeds(count):
    """Seeds of problems with few enough combinations to try them all."""
    seeds, seed = [], 0
    while len(seeds) < count:
        if np.prod([float(len(item)) for item in random_problem(seed).slots]) <= 5000:
            seeds.append(seed)
        seed += 1
    return seeds


def brute_force(problem, value=None):
    """The least objective (or other value) over every combination of choices, infinite if none is feasible."""
    value = InterStageProblem.objective if value is None else value
    best = np.inf
    for chosen in itertools.product(*(range(len(item)) for item in problem.slots)):
        if is_feasible(problem, chosen):
            best = min(best, value(problem, chosen))
    return best


def random_family(seed, *, alternates=False):
    """Pipelines of 2 to 4 stages that share what lies behind their first stages; starts are open or fixed, or both."""
    rng = np.random.default_rng(seed)
    most = int(rng.integers(2, 5))
    num_layers, num_parts = int(rng.integers(most, 8)), int(rng.choice([1, 2]))
    num_devices = random_devices(rng, most, num_parts)
    kinds = [(c, part) for part, of in enumerate(num_devices) for c in (1, 2) if c <= of]
    is_open, scale = bool(rng.integers(2)), 10.0 ** rng.integers(-4, 2)

    def choices(role, behind):
        rows = []
        for length in range(1, num_layers):
            starts = {"first": [0], "last": [num_layers - length]}.get(role)
            for start in starts or (
                [ANYWHERE] if is_open ^ (alternates and behind == 2) else range(1, num_layers - length)
            ):
                for count, part in kinds:
                    base = (length + rng.random() + 0.2 * behind) / count * (1 + part)
                    rows.append((start, length, count, base * scale, 2 * base * rng.random() * scale, part))
        rows = [row for row in rows if rng.random() < 0.5] or rows[:1]
        return slot(*zip(*rows, strict=True)) if rows else slot([], [], [], [], [], [])

    return Family(
        num_layers=num_layers,
        num_devices=num_devices,
        num_microbatches=int(rng.choice([1, 3, 20])),
        tails=tuple(choices("middle" if behind else "last", behind) for behind in range(most - 1)),
        heads={count: choices("first", count - 1) for count in range(2, most + 1)},
        order=tuple(rng.permutation(num_parts).tolist()),
    )
