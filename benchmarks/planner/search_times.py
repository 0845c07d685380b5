"""How long the planner searches the whole space, how much memory it takes, and how long it takes when asked again.

OMP_NUM_THREADS=1 python -m benchmarks.planner.search_times

The network is described by its sizes before; imports are done. Each run is a new process: one search from nothing, then
the same network with another memory limit, then with another batch.
"""

import argparse
import statistics
from dataclasses import dataclass

from benchmarks.planner.apart import PRECISION, Question, Session, ask_apart, spec_of
from benchmarks.record import Sample, make_record, write_record
from lightning_mist.hardware import parse_cluster
from lightning_mist.model.presets import PRESETS
from lightning_mist.tuner import SearchSpace
from lightning_mist.tuner.budget import USABLE_MEMORY
from lightning_mist.tuner.search_space import OFFLOADED

REPLAN_LIMIT_SECONDS = 0.3
PEAK_LIMIT_BYTES = int(0.6 * 2**30)
OTHER_MEMORY = 0.9
"""Share of the devices' memory that the second question allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A network on a cluster.

    Attributes:
        model: A preset.
        cluster: In words.
        batch: Rows over all devices.
        length: Tokens per row.
        limit: Seconds that a search may take.
    """

    model: str
    cluster: str
    batch: int
    length: int
    limit: float


CASES = (
    Case(model="gpt3-1.3b", cluster="1x2xL4", batch=32, length=2048, limit=2.0),
    Case(model="gpt3-2.7b", cluster="1x4xL4", batch=64, length=2048, limit=2.0),
    Case(model="gpt3-7b", cluster="1x8xL4", batch=128, length=2048, limit=3.0),
    Case(model="gpt3-13b", cluster="2x8xL4", batch=256, length=2048, limit=4.0),
    Case(model="gpt3-22b", cluster="4x8xL4", batch=512, length=2048, limit=5.0),
    Case(model="llama-70b", cluster="64x8xH100", batch=2048, length=4096, limit=20.0),
)


def session_of(case: Case, *, offload: bool = False) -> Session:
    """One process with all questions of a case; with offload of all kinds of state the first of them only."""
    cluster = parse_cluster(case.cluster)
    rows = case.batch // cluster.world_size
    spec = spec_of(PRESETS[case.model], case.model, case.cluster, rows=rows, sequence_length=case.length)
    # A limit is about all that a device has in use, of which the planner leaves a share for what it does not predict.
    limits = [int(share * cluster.device.memory_bytes) for share in (1.0, OTHER_MEMORY)]
    questions = (
        Question(global_batch_size=case.batch, memory_limit=limits[0]),
        Question(global_batch_size=case.batch, memory_limit=limits[1]),
        Question(global_batch_size=2 * case.batch, memory_limit=limits[0]),
    )
    if offload:
        return ask_apart(spec, case.cluster, questions[:1], SearchSpace(offload=OFFLOADED))
    return ask_apart(spec, case.cluster, questions)


def sample_of(case: Case, sessions: list[Session], *, offload: bool = False) -> Sample:
    """Medians over the runs of a case; what must not differ from run to run is taken from the first."""
    first = sessions[0].replies[0]

    def median(place: int) -> float | None:
        asked = [session.replies[place].seconds for session in sessions if place < len(session.replies)]
        return statistics.median(asked) if asked else None

    return {
        "model": case.model,
        "cluster": case.cluster,
        "batch": case.batch,
        "offload": "searched" if offload else "none",
        "search_seconds": median(0),
        "search_limit_seconds": case.limit,
        "other_memory_seconds": median(1),
        "other_batch_seconds": median(2),
        "replan_limit_seconds": REPLAN_LIMIT_SECONDS,
        "rise_bytes": max(session.rise_bytes for session in sessions),
        "process_peak_bytes": max(session.peak_bytes for session in sessions),
        "peak_limit_bytes": PEAK_LIMIT_BYTES,
        "candidates": first.candidates,
        "status": first.status,
        "gap": first.gap,
        "stages": first.stages,
        "predicted_step_seconds": first.step_seconds,
    }


def main() -> None:
    """Run the cases and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=[case.model for case in CASES], help="only these")
    parser.add_argument("--dry-run", action="store_true", help="write no record")
    options = parser.parse_args()
    samples = []
    for case in CASES:
        if case.model in options.models:
            samples.append(sample_of(case, [session_of(case) for _ in range(options.repeats)]))
            print(samples[-1], flush=True)
            if case is not CASES[-1]:
                samples.append(sample_of(case, [session_of(case, offload=True)], offload=True))
                print(samples[-1], flush=True)
    notes = (
        f"Medians of {options.repeats} processes, greatest memory of them; {PRECISION}, 2048 tokens per row (4096 of "
        f"llama-70b), AdamW, all devices' memory allowed, of which the planner uses {USABLE_MEMORY:.0%}; asked again "
        f"with {OTHER_MEMORY:.0%} of the memory and with twice the batch. Rise: resident memory above that before the "
        "search; process peak: with Python and all imports. The gap is proven, of the closed form. With "
        "offload one process each, asked once."
    )
    if not options.dry_run:
        print(write_record(make_record("planner-search", samples, notes=notes)))


if __name__ == "__main__":
    main()
