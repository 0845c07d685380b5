"""Step times that others published, replayed with the project's own prices.

    python -m benchmarks.accuracy.published_runs [--runs runs.json] [--source WORD] [--out DIRECTORY]

Every row of the file is in the record: with the seconds that the project prices its plan at on the catalog's machine
and the verdict on its memory, or with what it would take to say it. Parameters are priced as the run's program shares
them out, evenly, and beside it as this project's runtime does. Seconds are compared, never utilisations, whose
conventions differ. One half of the rows, chosen by a hash of their ids, is there to look at while prices are made
("fit"), the other half judges them ("held out"). Rows that are priced as something near them say as what.
"""

import argparse
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, median

from benchmarks.accuracy.published_replay import Replay, replay
from benchmarks.accuracy.published_rows import UnpredictableError
from benchmarks.accuracy.published_run_rows import RUNS, PublishedRun, read_runs
from benchmarks.record import RECORDS, Sample, make_record, write_record
from lightning_mist.errors import MistError

HALVES = ("held out", "fit")
FEWEST = 3
"""Rows that a kind of run, or the ranks inside a source, need to be worth a line."""

METRICS = {"allocated": "allocated", "reserved": "reserved", "of the device": "device_total"}
"""What rows say that their peak is of (torch's statistics, or all that a device has in use), and what is compared."""


def sample_of(run: PublishedRun, replayed: Callable[[], Replay]) -> Sample:
    """A row of the record."""
    sample: Sample = {
        "id": run.id,
        "source": run.source,
        "half": run.half,
        "kinds": "; ".join(run.kinds),
        "measured_seconds": run.seconds,
        "ran": run.seconds is not None,
    }
    try:
        found = replayed()
    except (MistError, UnpredictableError) as error:
        return {**sample, "unpredicted": str(error)}
    worst = found.estimate.worst
    sample |= {
        "priced_as": "; ".join(found.stand_ins),
        "predicted_seconds": found.seconds,
        "own_sharing_seconds": found.own_seconds,
        "verdict": found.verdict,
        "predicted_allocated_bytes": worst.allocated.p50,
        "predicted_reserved_bytes": worst.reserved.p50,
        "predicted_device_bytes": worst.device_total.p50,
    }
    if run.seconds is not None:
        sample["error"] = found.seconds / run.seconds - 1
    metric = next((name for name in METRICS if run.memory_metric.startswith(name)), None)
    if run.memory_bytes is not None and metric is not None:
        predicted = getattr(worst, METRICS[metric]).p50
        sample |= {"memory_metric": metric, "measured_memory_bytes": run.memory_bytes}
        sample["memory_error"] = predicted / run.memory_bytes - 1
    return sample


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's, of pairs of which none is infinite; equal values share their ranks."""
    first, second = (_ranks([pair[side] for pair in pairs]) for side in (0, 1))
    middle = (len(pairs) - 1) / 2
    both = sum((a - middle) * (b - middle) for a, b in zip(first, second, strict=True))
    spread = sum((a - middle) ** 2 for a in first) * sum((b - middle) ** 2 for b in second)
    return both / spread**0.5 if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def summary(samples: Sequence[Sample]) -> str:
    """Errors of either half, biases by kind, ranks inside sources, wrong verdicts, and what cannot be said."""
    lines: list[str] = []
    for half in HALVES:
        lines += _errors(half, [item for item in samples if item["half"] == half])
    return "\n".join([*lines, *_verdicts(samples), *_unsaid(samples)])


def _errors(half: str, samples: Sequence[Sample]) -> list[str]:
    scored = [item for item in samples if "error" in item]
    if not scored:
        return [f"{half}: none of {len(samples)} rows has a prediction to compare"]
    found = [_error(item) for item in scored]
    plain = [_error(item) for item in scored if not item["priced_as"]]
    lines = [
        f"{half}: {len(scored)} of {len(samples)} rows compared, median error {median(map(abs, found)):.1%}, mean "
        f"{mean(map(abs, found)):.1%}, within 10 %: {mean(abs(error) <= 0.1 for error in found):.0%}, bias "
        f"{mean(found):+.1%}; {len(plain)} of them priced as what they are"
        + (f", median error {median(map(abs, plain)):.1%}" if plain else "")
    ]
    dealt = [_error(item, "own_sharing_seconds") / _error(item, "measured_seconds") - 1 for item in scored]
    lines.append(f"{half}, shared out as this runtime does: median error {median(map(abs, dealt)):.1%}")
    for kind in sorted({kind for item in scored for kind in str(item["kinds"]).split("; ")}):
        errors = [_error(item) for item in scored if kind in str(item["kinds"]).split("; ")]
        if len(errors) >= FEWEST:
            lines.append(f"{half}, {kind}: bias {mean(errors):+.1%}, median {median(errors):+.1%} ({len(errors)} rows)")
    for source in sorted({str(item["source"]) for item in scored}):
        own = [item for item in scored if item["source"] == source]
        if len(own) >= FEWEST:
            errors = [_error(item) for item in own]
            ranks = rank_correlation([(_error(i, "predicted_seconds"), _error(i, "measured_seconds")) for i in own])
            lines.append(
                f"{half}, {source}: median error {median(map(abs, errors)):.1%}, bias {mean(errors):+.1%}, rank "
                f"correlation {ranks:.3f} ({len(own)} rows)"
            )
    return lines


def _error(sample: Sample, name: str = "error") -> float:
    """A figure of a row, by default how far off its seconds are."""
    return float(str(sample[name]))


def _verdicts(samples: Sequence[Sample]) -> list[str]:
    known = [item for item in samples if "verdict" in item]
    wrong = {
        "ran, called impossible": [item for item in known if item["ran"] and item["verdict"] == "does not fit"],
        "ran out of memory, called fitting": [item for item in known if not item["ran"] and item["verdict"] == "fits"],
    }
    lines = []
    for what, items in wrong.items():
        count = sum(bool(item["ran"]) == what.startswith("ran,") for item in known)
        names = ", ".join(str(item["id"]) for item in items)
        lines.append(f"{what}: {len(items)} of {count}" + (f" ({names})" if names else ""))
    unsure = [item for item in known if item["verdict"] == "not certain"]
    ran = sum(bool(item["ran"]) for item in unsure)
    lines.append(f"not certain, as what is priced keeps more or less: {ran} that ran, {len(unsure) - ran} that did not")
    peaks = [item for item in samples if "memory_error" in item]
    for metric, is_plain in product(METRICS, (True, False)):
        own = [item for item in peaks if item["memory_metric"] == metric and bool(item["priced_as"]) != is_plain]
        errors = [_error(item, "memory_error") for item in own]
        if errors:
            what = "what they are" if is_plain else "something near"
            lines.append(
                f"peaks {metric}, of runs priced as {what}: {len(errors)} rows, median error "
                f"{median(map(abs, errors)):.1%}, within 5 %: {mean(abs(error) <= 0.05 for error in errors):.0%}, "
                f"worst {max(errors, key=abs):+.1%}"
            )
    return lines


def _unsaid(samples: Sequence[Sample]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for item in samples:
        if "unpredicted" in item:
            reasons.setdefault(str(item["unpredicted"]), []).append(str(item["id"]))
    return [f"not said, {reason}: {len(ids)} rows ({', '.join(ids)})" for reason, ids in sorted(reasons.items())]


def main() -> None:
    """Replay every row, print and record it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=RUNS, help="what was published")
    parser.add_argument("--source", default="", help="only sources with this in their name; nothing is recorded")
    parser.add_argument("--out", type=Path, default=RECORDS, help="folder of the record")
    options = parser.parse_args()
    runs, sizes = read_runs(options.runs)
    samples = []
    for run in runs:
        if options.source not in run.source:
            continue
        samples.append(sample_of(run, lambda run=run: replay(run, sizes[run.model])))  # type: ignore[misc]
        print(_line(samples[-1]), flush=True)
    text = summary(samples)
    print(text)
    if not options.source:
        print(write_record(make_record("published-runs", samples, notes=text), options.out))


def _line(sample: Sample) -> str:
    if "unpredicted" in sample:
        return f"{sample['id']}: {sample['unpredicted']}"
    error = f" {_error(sample):+.1%}" if "error" in sample else ""
    memory = f", peak {_error(sample, 'memory_error'):+.1%}" if "memory_error" in sample else ""
    return f"{sample['id']}: {_error(sample, 'predicted_seconds'):.3f} s{error}, {sample['verdict']}{memory}"


if __name__ == "__main__":
    main()
