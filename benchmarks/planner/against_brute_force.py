"""The whole planner against trying everything, on random small instances.

OMP_NUM_THREADS=1 python -m benchmarks.planner.against_brute_force
OMP_NUM_THREADS=1 python -m benchmarks.planner.against_brute_force --unlike --instances 300

An instance is a random network, machine, batch, space and memory limit (:mod:`tests.tuner.whole_space`). Every second
planner has been asked other questions before. With ``--unlike`` devices are of two or three kinds, every plan is
predicted as a finished one is, and fits if the check says so that is made of these
(:mod:`tests.tuner.predicted_space`). The program fails if any instance differs.
"""

import argparse
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from time import perf_counter

import numpy as np

from benchmarks.record import Sample, make_record, write_record
from lightning_mist.tuner.inter_stage.exact_solver import PRECISION
from tests.tuner.instances import random_instance
from tests.tuner.predicted_space import unlike_instance, verdict_by_predictions
from tests.tuner.verdicts import Verdict, asked_before, verdict_of


def compared(seed: int) -> tuple[int, str, Verdict]:
    """One instance: its kind, and how the answers compare."""
    instance = random_instance(seed)
    return seed, instance.kind, verdict_of(instance, asked_before(instance) if seed % 2 else None)


def predicted(seed: int) -> tuple[int, str, Verdict]:
    """The same of one on unlike devices, every plan of which is predicted."""
    instance = unlike_instance(seed)
    masters = "with" if instance.network.master_weights else "without"
    kind = f"{len(instance.machine.parts)} kinds of devices, {masters} masters, {instance.kind.split(', ')[1]}"
    return seed, kind, verdict_by_predictions(instance)


def sample_of(kind: str, verdicts: list[Verdict]) -> Sample:
    """What was found of one kind of instances."""
    met = [item for item in verdicts if np.isfinite(item.wanted.seconds)]
    return {
        "kind": kind,
        "instances": len(verdicts),
        "equal": sum(item.difference <= PRECISION for item in verdicts),
        "of these infeasible": len(verdicts) - len(met),
        "proven optimal": sum(item.status == "optimal" for item in met),
        "largest difference": max((item.difference for item in met), default=0.0),
        "stage candidates": sum(item.wanted.candidates for item in verdicts),
        "plans": float(sum(item.wanted.plans for item in verdicts)),
    }


def main() -> int:
    """Compare, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=500)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--unlike", action="store_true", help="unlike devices only, every plan predicted")
    parser.add_argument("--dry-run", action="store_true", help="write no record")
    options = parser.parse_args()
    started, kinds = perf_counter(), defaultdict(list)
    of_seed, how = compared, ""
    if options.unlike:
        of_seed, how = predicted, "Every plan is predicted, and checked to fit, as a finished one. "
    with ProcessPoolExecutor(max_workers=options.processes, mp_context=get_context("spawn")) as pool:
        for seed, kind, verdict in pool.map(of_seed, range(options.instances), chunksize=5):
            kinds[kind].append(verdict)
            if not verdict.difference <= PRECISION:
                print(f"instance {seed} differs: {verdict}", flush=True)
    verdicts = [item for kind in kinds.values() for item in kind]
    samples = [sample_of(kind, kinds[kind]) for kind in sorted(kinds)] + [sample_of("all", verdicts)]
    for sample in samples:
        print(sample)
    notes = (
        f"Compared by the closed form of the step: the planner's least seconds and those of trying everything count as "
        f"equal within {PRECISION:g} of them; where nothing fits both must say so. Plans: ways to choose a candidate "
        f"for every stage. {how}{perf_counter() - started:.0f} seconds with {options.processes} processes."
    )
    theme = "planner-brute-force-unlike" if options.unlike else "planner-brute-force"
    if not options.dry_run:
        print(write_record(make_record(theme, samples, notes=notes)))
    return int(any(item.difference > PRECISION for item in verdicts))


if __name__ == "__main__":
    sys.exit(main())
