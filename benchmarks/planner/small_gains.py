"""What a search misses that looks for gains of a hundredth only, and how much sooner it is over.

OMP_NUM_THREADS=1 python -m benchmarks.planner.small_gains
OMP_NUM_THREADS=1 python -m benchmarks.planner.small_gains --precisions bf16-true --dry-run

Among more pipelines on unlike devices than :data:`~lightning_mist.tuner.search.search_state.MANY` searches look for
gains of ``LEAST_GAIN`` only, and for pipelines in several copies less often. The largest question of
:mod:`.search_times` is asked as it is, and as if there never were so many.
"""

import argparse
from dataclasses import replace
from math import inf
from time import perf_counter

from benchmarks.planner.search_times import MIXED, PRECISIONS, Case, asked_of, spaces
from benchmarks.record import Sample, make_record, write_record
from lightning_mist.hardware import parse_cluster
from lightning_mist.tuner import Planner, TuneResult
from lightning_mist.tuner.search import search_state
from lightning_mist.tuner.search.replicas import most_saved
from lightning_mist.tuner.space import usable_bytes

THEME = "planner-small-gains"
SOLVER_SECONDS = 600.0
"""Seconds that each search may take, so that none is cut short."""


def compared(case: Case, precision: str, many: float = search_state.MANY) -> Sample:
    """One question, asked both ways.

    Args:
        many: Pipelines above which small gains are not looked for.
    """
    spec, search = asked_of(case, spaces()["default"], PRECISIONS[precision])
    search, cluster = replace(search, solver_seconds=SOLVER_SECONDS), parse_cluster(case.cluster)
    found: list[tuple[TuneResult, float]] = []
    usual = search_state.MANY
    try:
        for most in (many, inf):
            search_state.MANY, planner, began = most, Planner(spec, cluster), perf_counter()  # type: ignore[assignment]
            found.append((planner.tune(global_batch_size=case.batch, search=search), perf_counter() - began))
    finally:
        search_state.MANY = usual
    saved = most_saved(spec, planner.space(case.batch, search))
    sample: Sample = {
        "model": case.model,
        "cluster": case.cluster,
        "batch": case.batch,
        "precision": precision,
        "pipelines": found[0][0].stats.pipelines,
        "batches_share": saved / min(usable_bytes(part, None) for part in cluster.parts),
    }
    for name, (result, seconds) in zip(("", "exact_"), found, strict=True):
        sample |= {
            f"{name}search_seconds": seconds,
            f"{name}status": result.status,
            f"{name}gap": result.gap,
            f"{name}predicted_step_seconds": result.predicted.step_seconds,
        }
    return sample


def main() -> None:
    """Ask and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=list(PRECISIONS))
    parser.add_argument("--dry-run", action="store_true", help="write no record")
    options = parser.parse_args()
    samples = []
    for precision in options.precisions:
        samples.append(compared(MIXED[-1], precision))
        print(samples[-1], flush=True)
    notes = (
        "One search each, in one process; predicted steps are those of the clock. Exact: as if no number of pipelines "
        "were too many. Batches: the share of a device's memory that pipelines in several copies may save at most."
    )
    if not options.dry_run:
        print(write_record(make_record(THEME, samples, notes=notes)))


if __name__ == "__main__":
    main()
