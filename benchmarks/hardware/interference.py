"""How well few coefficients predict channels that run together: own calibration, a quick one, and from other machines.

python -m benchmarks.hardware.interference SAMPLES.json ... [--without FAMILY ...]

For files of samples (see ``interference_data``), one for each machine:

* ``own``: the coefficients fitted to a third of the machine's samples, scored on the others;
* ``quick``: fitted to few samples, chosen by what ran together and not by how long it took, with what the other
  machines say as the prior; scored on all the others;
* ``left_out``: what the other machines say of this one, by its two properties that need nothing measured together;
* ``serial`` and ``free``: the sum and the largest of the loads, to compare with;
* ``machine``: its kind, and how many samples were left out, by reason;
* ``causes``: what is fitted to all machines, the constants of ``lightning_mist.hardware.catalog.interference_kinds``.

Published tables of further machines take part in the training, and are left out with their family. The two properties
themselves were chosen with all of these machines in view. Errors are mean
absolute relative ones, of all samples with several loads but those that are left out, which are counted by reason.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from benchmarks.hardware.interference_data import Machine, families, read_samples, table_machines
from benchmarks.record import Sample, Value, make_record, write_record
from lightning_mist.hardware.catalog.interference_kinds import Causes, interference_of_kind
from lightning_mist.hardware.measure.device_bench import (
    fit_interference,
    predicted_seconds,
    relative_errors,
    vector_of,
)
from lightning_mist.hardware.profile.interference_model import COEFFICIENTS, Interference

COUNTS = (6, 12, 18, 25, 50, 100)
"""Sizes of quick calibrations."""

THINNED = 5
"""Every so many samples of a machine are used where several machines are fitted at once, for speed."""

TABLE_WEIGHT = 0.5
"""Squares of a family known by tables only count so much of those of a measured one."""

RIDGE = 0.05
"""Weight of keeping causes near the middle, in relative error: only what no machine tells is moved by it."""

BASE_MIDDLE, CAUSE_MIDDLE = 0.4, 0.5
"""The middles: the one coefficient for all pairs that is best for three machines is about 0.4."""

_CAUSES = ("staged_compute", "staged_copies", "staged_network", "shared_copies", "shared_network")


def fit_causes(machines: Sequence[Machine]) -> Causes:
    """The causes that explain machines best, every family counting the same."""
    thin = [(machine, machine.times.pick(np.arange(0, len(machine.groups), THINNED))) for machine in machines]
    members = {family: [m.family for m in machines].count(family) for family in families(machines)}
    middle = np.array([BASE_MIDDLE] * len(COEFFICIENTS) + [CAUSE_MIDDLE] * len(_CAUSES))

    def residuals(values: NDArray[np.float64]) -> NDArray[np.float64]:
        causes = causes_of(values)
        parts = [RIDGE * (values - middle)]
        for machine, times in thin:
            kind = interference_of_kind(staged=machine.staged, shared=machine.shared, causes=causes)
            weight = (TABLE_WEIGHT if machine.is_table else 1.0) / members[machine.family]
            parts.append(relative_errors(times, kind) * np.sqrt(weight / len(times.seconds)))
        return np.concatenate(parts)

    return causes_of(least_squares(residuals, middle, bounds=(0.0, 1.0)).x)


def causes_of(values: NDArray[np.float64]) -> Causes:
    """Causes from a vector."""
    cut = [float(value) for value in np.clip(values, 0.0, 1.0)]
    base = tuple(cut[: len(COEFFICIENTS)])
    return Causes(base=base, **dict(zip(_CAUSES, cut[len(COEFFICIENTS) :], strict=True)))


def training(machines: Sequence[Machine], left_out: str | None) -> list[Machine]:
    """Machines to learn from: measured ones, and tables of families that are not measured; none of one family."""
    measured = {machine.family for machine in machines if not machine.is_table}
    return [
        machine
        for machine in machines
        if machine.family != left_out and not (machine.is_table and machine.family in measured)
    ]


def chosen(machine: Machine, count: int) -> NDArray[np.int64]:
    """Samples for a quick calibration, by loads alone.

    The sets of channels take turns, pairs first. Of each set the first sample is the one with the most equal loads;
    every further one differs the most from those that are chosen, in the parts that its loads have of their sum. Among
    equals, groups of a shape that was seldom chosen come first, then longer samples.
    """
    active = machine.times.loads > 0
    across = machine.times.across_nodes & active[1]
    keys = [(bool(far), *map(bool, on)) for far, on in zip(across, active.T, strict=True)]
    order = sorted(set(keys), key=lambda key: (sum(key[1:]), key))
    free = {key: [index for index, other in enumerate(keys) if other == key] for key in order}
    taken: dict[tuple[bool, ...], list[int]] = {key: [] for key in order}
    picked: list[int] = []
    while len(picked) < count and any(free.values()):
        for key in order:
            if free[key] and len(picked) < count:
                best = most_different(machine, free[key], taken[key], picked)
                free[key].remove(best)
                taken[key].append(best)
                picked.append(best)
    return np.array(picked, dtype=np.int64)


def most_different(machine: Machine, free: Sequence[int], taken: Sequence[int], picked: Sequence[int]) -> int:
    """Of free samples of one set of channels, the one that differs the most from those taken of the set."""
    loads = machine.times.loads
    parts = loads / loads.sum(axis=0)
    shapes = [machine.groups[index] for index in picked]

    def score(index: int) -> tuple[float, int, float]:
        near = [float(np.abs(parts[:, index] - parts[:, other]).max()) for other in taken]
        apart = min(near) if near else -float(parts[:, index].max())
        return round(apart, 1), -shapes.count(machine.groups[index]), float(loads[:, index].max())

    return max(free, key=score)


def errors(machine: Machine, predicted: NDArray[np.float64], without: NDArray[np.int64]) -> Sample:
    """Mean errors of all predicted times but some: of all, by number of channels, by kind of group."""
    rest = np.setdiff1d(np.arange(len(machine.groups)), without)
    error = np.abs(predicted / machine.times.seconds - 1.0)[rest]
    ways, across = machine.ways[rest], machine.times.across_nodes[rest]
    found: Sample = {"error": float(error.mean()), "scored": len(rest)}
    masks = {f"{count}_channels": ways == count for count in (2, 3, 4)} | {"inside": ~across, "across": across}
    return found | {f"{name}_error": float(error[mask].mean()) for name, mask in masks.items() if mask.any()}


def coefficients(interference: Interference) -> Sample:
    """The numbers of a machine."""
    return {name: float(value) for name, value in zip(COEFFICIENTS, vector_of(interference), strict=True)}


def evaluate(machine: Machine, prior: Interference) -> list[Sample]:
    """Rows of one machine; the prior is what the others say."""
    times, everything = machine.times, np.arange(len(machine.groups))
    nothing = everything[:0]
    reasons = {f"left_out_{reason}": count for reason, count in machine.left_out.items()}
    kind: Sample = {"staged": machine.staged, "shared": machine.shared, "is_table": machine.is_table, **reasons}

    def scored(name: str, interference: Interference, without: NDArray[np.int64], **more: int) -> Sample:
        predicted = predicted_seconds(times, interference)
        return row(name, **more, **errors(machine, predicted, without), **coefficients(interference))

    def row(name: str, **more: Value) -> Sample:
        return {"kind": name, "machine": machine.name, **more}

    rows = [
        row("machine", samples=len(times.seconds), **kind),
        row("serial", **errors(machine, times.loads.sum(axis=0), nothing)),
        row("free", **errors(machine, times.loads.max(axis=0), nothing)),
        scored("left_out", prior, nothing),
    ]
    if machine.is_table:
        return rows
    third = everything[::3]
    rows.append(scored("own", fit_interference(times.pick(third), prior, machine.name), third))
    for count in COUNTS:
        few = chosen(machine, count)
        rows.append(scored("quick", fit_interference(times.pick(few), prior, machine.name), few, count=count))
    return rows


def prior_spread(rows: Sequence[Sample]) -> Sample:
    """How far measured machines' own coefficients lie from what the others say of them."""
    found = {(row["kind"], row["machine"]): row for row in rows if row["kind"] in ("own", "left_out")}
    apart = [
        float(row[name]) - float(found["left_out", machine][name])  # type: ignore[arg-type]
        for (kind, machine), row in found.items()
        if kind == "own"
        for name in COEFFICIENTS
        if "across" not in name or "across_error" in row
    ]
    return {"kind": "prior_spread", "root_mean_square": float(np.sqrt(np.mean(np.square(apart)))), "scored": len(apart)}


def main() -> None:
    """Evaluate all machines and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples", nargs="*", type=Path, help="files of samples, a machine each")
    parser.add_argument("--without", nargs="*", default=[], help="families whose tables are not learned from")
    parser.add_argument("--dry", action="store_true", help="write no record")
    options = parser.parse_args()
    tables = [machine for machine in table_machines() if machine.family not in options.without]
    machines = [*map(read_samples, options.samples), *tables]
    used = training(machines, None)
    rows: list[Sample] = []
    for machine in used:
        causes = fit_causes(training(machines, machine.family))
        prior = interference_of_kind(staged=machine.staged, shared=machine.shared, causes=causes)
        rows.extend(evaluate(machine, prior))
    rows.append(prior_spread(rows))
    causes = fit_causes(used)
    base = dict(zip(COEFFICIENTS, causes.base, strict=True))
    rows.append({"kind": "causes", **base, **{name: getattr(causes, name) for name in _CAUSES}})
    for row in rows:
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})
    if not options.dry:
        notes = "Samples: github.com/Dazz993/Mist at d69e530, timings of its bandwidth profiles. Error: mean |p/m - 1|."
        print(write_record(make_record("interference", rows, notes=notes)), file=sys.stderr)


if __name__ == "__main__":
    main()
