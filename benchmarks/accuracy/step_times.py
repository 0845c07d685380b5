"""Step times of many plans of several networks: predicted before any of them runs, then measured by running them.

For every network one pair of gloo processes profiles the machine and the network as the strategy does at a first fit,
predicts every plan from that, and then trains by each of them, again and again in rounds, through ``Trainer.fit``. An
error is ``(predicted - measured) / measured``, ``measured`` the median over all steps of all rounds from the end of one
batch to the end of the next. Spearman's rank correlation and Kendall's (pairs in the right order less pairs in the
wrong one) say whether plans are ordered rightly, which is what choosing needs; pairs that differ by less than the
spread of one plan's own rounds are ordered by chance.

    python -m benchmarks.accuracy.step_times
"""

import argparse
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.accuracy.networks import MAKERS
from benchmarks.accuracy.step_times_run import CHOSEN, PROCESSES
from benchmarks.launch import run_module
from benchmarks.record import Sample, make_record, write_record

CLEAR = 0.05
"""Plans whose measured times differ by more than this share are clearly apart: rounds of one plan differ by less."""

TIMEOUT_SECONDS = 1800.0

KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""Has glibc's allocator keep what it once had. By default it hands large blocks back and asks for them again, as what
the process did before has taught it: one and the same plan of the network ``residual`` then took 0 to 8,000 page faults
in a step, and 0.130 to 0.157 s."""


def sample_of(network: str, found: dict[str, Any]) -> Sample:
    """One row: a plan of a network."""
    rounds = [statistics.median(steps) for steps in found["rounds"]]
    every = [seconds for steps in found["rounds"] for seconds in steps]
    measured, predicted = statistics.median(every), found["predicted_step_seconds"]
    return {
        "network": network,
        "plan": found["plan"],
        "predicted_step_seconds": predicted,
        "measured_step_seconds": measured,
        "time_error": (predicted - measured) / measured,
        "least_round_seconds": min(rounds),
        "largest_round_seconds": max(rounds),
        "steps": len(every),
        "spread": statistics.median(abs(seconds - measured) for seconds in every) / measured,
        # Seconds of every step, rounds apart.
        "all_steps": "; ".join(" ".join(f"{seconds:.5f}" for seconds in steps) for steps in found["rounds"]),
    }


def kendall(first: Sequence[float], second: Sequence[float]) -> float:
    """Share of pairs in the same order minus share of those in the opposite one."""
    pairs = list(itertools.combinations(range(len(first)), 2))
    signs = [(first[i] - first[j]) * (second[i] - second[j]) for i, j in pairs]
    return (sum(sign > 0 for sign in signs) - sum(sign < 0 for sign in signs)) / len(pairs)


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Correlation of ranks; equal values share the mean of theirs."""
    return statistics.correlation(_ranks(first), _ranks(second))


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(other < value for other in values) + sum(other == value for other in values) / 2 for value in values]


def clear_pairs(predicted: Sequence[float], measured: Sequence[float]) -> tuple[int, int]:
    """Pairs whose measured times are clearly apart: how many are ordered rightly, and how many there are."""
    pairs = [
        (i, j)
        for i, j in itertools.combinations(range(len(measured)), 2)
        if abs(measured[i] - measured[j]) > CLEAR * min(measured[i], measured[j])
    ]
    return sum((predicted[i] - predicted[j]) * (measured[i] - measured[j]) > 0 for i, j in pairs), len(pairs)


def summary(samples: Sequence[Sample]) -> str:
    """Errors and order over all plans, and of every network's, in sentences."""
    networks = list(dict.fromkeys(str(sample["network"]) for sample in samples))
    lines = [_line(f"{len(samples)} plans of {len(networks)} networks", samples)]
    for network in networks:
        own = [sample for sample in samples if sample["network"] == network]
        lines.append(f"{_line(f'{network}, {len(own)} plans', own)} {_choice(own)}")
    return "\n\n".join(lines)


def _columns(samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    predicted, measured = (
        [float(sample[f"{what}_step_seconds"] or 0.0) for sample in samples] for what in ("predicted", "measured")
    )
    return predicted, measured


def _line(what: str, samples: Sequence[Sample]) -> str:
    predicted, measured = _columns(samples)
    signed = [float(sample["time_error"] or 0.0) for sample in samples]
    errors = [abs(error) for error in signed]
    right, count = clear_pairs(predicted, measured)
    return (
        f"{what}: mean absolute error {statistics.mean(errors):.1%} (largest {max(errors):.1%}, with its sign "
        f"{statistics.mean(signed):+.1%} on average); rank correlation "
        f"{spearman(predicted, measured):.3f} (Spearman), {kendall(predicted, measured):.2f} (Kendall); of {count} "
        f"pairs more than {CLEAR:.0%} apart {right / max(1, count):.1%} ordered rightly."
    )


def _choice(samples: Sequence[Sample]) -> str:
    """How near the fastest the planner's choice is, and the one of the listed plans that was predicted to be."""
    _, measured = _columns(samples)
    best = min(measured)
    own = next(float(sample["measured_step_seconds"] or 0.0) for sample in samples if sample["plan"] == CHOSEN)
    first = min(samples, key=lambda sample: float(sample["predicted_step_seconds"] or 0.0))
    listed = float(first["measured_step_seconds"] or 0.0)
    return (
        f"The planner's choice took {own / best - 1:.1%} more than the fastest, the plan predicted to be the fastest "
        f"({first['plan']}) {listed / best - 1:.1%}."
    )


def main() -> None:
    """Predict and run, network by network, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", choices=sorted(MAKERS), default=list(MAKERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    samples: list[Sample] = []
    planning: list[str] = []
    for network in options.networks:
        arguments = ["--network", network, "--rounds", str(options.rounds), "--steps", str(options.steps)]
        module = "benchmarks.accuracy.step_times_run"
        found = run_module(
            module, arguments, processes=PROCESSES, timeout_seconds=TIMEOUT_SECONDS, environment=KEEPS_MEMORY
        )
        samples += [sample_of(network, plan) for plan in found["plans"]]
        planning.append(f"{found['planning_seconds']:.0f} s ({network})")
        print(summary(samples), planning[-1], flush=True)
    kept = ", ".join(f"{name}={value}" for name, value in KEEPS_MEMORY.items())
    notes = (
        f"{summary(samples)}\n\nFrom the first batch to a plan, measuring included: {', '.join(planning)}. All of it "
        f"with {kept}."
    )
    print(write_record(make_record("gloo-accuracy", samples, notes=notes)))


if __name__ == "__main__":
    main()
