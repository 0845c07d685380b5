"""How long the planner searches, how much memory it takes, and how long it takes when asked again.

OMP_NUM_THREADS=1 python -m benchmarks.planner.search_times
OMP_NUM_THREADS=1 python -m benchmarks.planner.search_times --models gpt3-13b --offload default --repeats 1 --dry-run
OMP_NUM_THREADS=1 python -m benchmarks.planner.search_times --precisions 16-mixed --clusters mixed --dry-run

The network is described before, as ``lightning-mist plan`` describes it; imports are done. Each run is a new process:
one search from nothing, then the same planner with less memory, with more memory and with a smaller batch. What is
searched is what the command searches by default, the same with nothing offloaded, and with every kind of state, in
every precision that all devices have a rate for.
"""

import argparse
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

from benchmarks.planner.apart import Question, Session, ask_apart, spec_of
from benchmarks.record import Sample, make_record, write_record
from lightning_mist.cli.cluster_input import Precision
from lightning_mist.hardware import parse_cluster
from lightning_mist.model.presets.named_models import PRESETS
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan.search_space import OFFLOADED
from lightning_mist.tuner import SearchSpace
from lightning_mist.tuner.space.usable_memory import USABLE_MEMORY

THEME = "planner-search"
REPLAN_LIMIT_SECONDS = 1.0
PEAK_LIMIT_BYTES = int(0.6 * 2**30)
LESS_MEMORY, MORE_MEMORY = 0.95, 1.05
"""Shares of the devices' memory that later questions allow; more than there is as if there were more."""


PRECISIONS: Mapping[str, Precision] = {
    "masters": Precision(name="bf16-true", master_weights=True),
    "bf16-true": Precision(name="bf16-true", master_weights=False),
    "bf16-mixed": Precision(name="bf16-mixed", master_weights=False),
    "32-true": Precision(name="32-true", master_weights=False),
    "16-mixed": Precision(name="16-mixed", master_weights=False),
}
"""What is computed in; the first is the command's own choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A network on a cluster.

    Attributes:
        model: A preset.
        cluster: In words.
        batch: Rows over all devices.
        length: Tokens per row.
        limit: Seconds that a search may take.
        precisions: Those that are looked at, of :data:`PRECISIONS`.
    """

    model: str
    cluster: str
    batch: int
    length: int
    limit: float
    precisions: tuple[str, ...] = tuple(PRECISIONS)

    @property
    def is_mixed(self) -> bool:
        """Whether its devices are unlike."""
        return len(parse_cluster(self.cluster).parts) > 1


CASES = (
    Case(model="gpt3-1.3b", cluster="1x2xL4", batch=32, length=2048, limit=2.0),
    Case(model="gpt3-2.7b", cluster="1x4xL4", batch=64, length=2048, limit=2.0),
    Case(model="gpt3-7b", cluster="1x8xL4", batch=128, length=2048, limit=3.0),
    Case(model="gpt3-13b", cluster="2x8xL4", batch=256, length=2048, limit=4.0),
    Case(model="gpt3-22b", cluster="4x8xL4", batch=512, length=2048, limit=5.0),
    Case(model="llama-70b", cluster="64x8xH100", batch=2048, length=4096, limit=20.0),
)

MIXED = (
    Case(model="gpt3-7b", cluster="1x8xA100-40+1x8xA10G", batch=256, length=2048, limit=10.0),
    Case(
        model="llama-7b",
        cluster="1x8xA100-80+1x8xV100-32",
        batch=256,
        length=2048,
        limit=10.0,
        precisions=("16-mixed", "32-true"),  # V100s have no rate for bfloat16
    ),
    Case(model="gpt3-1.3b", cluster="1x4xA100-40+1x4xA10G+1x4xL4", batch=96, length=2048, limit=10.0),
    Case(model="gpt3-7b", cluster="32x8xA100-40+32x8xA10G+32x8xL4", batch=3072, length=2048, limit=10.0),
    Case(model="llama-70b", cluster="32x8xH100+32x8xA100-80+32x8xA10G", batch=3072, length=4096, limit=60.0),
)
"""Networks on devices that are unlike."""


def spaces() -> dict[str, SearchSpace]:
    """What is searched, by what may be offloaded; spaces that are the same once, by their first name."""
    default, found = SearchSpace(), dict[str, SearchSpace]()
    if default.offload is None:  # All that devices have hosts for, as those of the catalog do.
        default = replace(default, offload=OFFLOADED)
    for name, space in (
        ("default", default),
        ("nothing", SearchSpace(offload=())),
        ("everything", SearchSpace(offload=OFFLOADED)),
    ):
        if space not in found.values():
            found[name] = space
    return found


def questions_of(case: Case) -> tuple[Question, ...]:
    """All questions of a case, in the order in which they are asked."""
    memory = max(part.device.memory_bytes for part in parse_cluster(case.cluster).parts)
    return (
        Question(global_batch_size=case.batch),
        Question(global_batch_size=case.batch, memory_limit=int(LESS_MEMORY * memory)),
        Question(global_batch_size=case.batch, memory_limit=int(MORE_MEMORY * memory)),
        Question(global_batch_size=case.batch // 2),
    )


def asked_of(case: Case, search: SearchSpace, precision: Precision) -> tuple[ModelSpec, SearchSpace]:
    """The network of a case, and what of a space the command searches for it."""
    rows, masters = case.batch // parse_cluster(case.cluster).world_size, precision.master_weights
    spec = spec_of(
        PRESETS[case.model],
        case.model,
        case.cluster,
        rows=rows,
        sequence_length=case.length,
        precision=precision.name,
        master_weights=masters,
    )
    return spec, search


def session_of(case: Case, search: SearchSpace, precision: Precision) -> Session:
    """One process with all questions of a case."""
    spec, space = asked_of(case, search, precision)
    return ask_apart(spec, case.cluster, questions_of(case), space)


def sample_of(case: Case, precision: str, offload: str, sessions: list[Session]) -> Sample:
    """Medians over the runs of a case; what must not differ from run to run is taken from the first."""
    first = sessions[0].replies[0]

    def median(place: int, name: str = "seconds") -> float:
        return statistics.median(getattr(session.replies[place], name) for session in sessions)

    return {
        "model": case.model,
        "cluster": case.cluster,
        "batch": case.batch,
        "precision": precision,
        "offload": offload,
        "search_seconds": median(0),
        "search_limit_seconds": case.limit,
        "processor_seconds": median(0, "processor_seconds"),
        "less_memory_seconds": median(1),
        "more_memory_seconds": median(2),
        "half_batch_seconds": median(3),
        "replan_limit_seconds": REPLAN_LIMIT_SECONDS,
        "rise_bytes": max(session.replies[0].peak_bytes - session.before_bytes for session in sessions),
        "process_peak_bytes": max(session.replies[0].peak_bytes for session in sessions),
        "peak_limit_bytes": PEAK_LIMIT_BYTES,
        "replan_peak_bytes": max(session.replies[-1].peak_bytes for session in sessions),
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
    cases = (*CASES, *MIXED)
    models = list(dict.fromkeys(case.model for case in cases))
    parser.add_argument("--models", nargs="+", default=models, choices=models, help="only these")
    parser.add_argument("--clusters", choices=("alike", "mixed"), help="only clusters of devices that are")
    parser.add_argument(
        "--precisions", nargs="+", default=list(PRECISIONS), choices=list(PRECISIONS), help="only these"
    )
    parser.add_argument("--offload", nargs="+", default=list(spaces()), choices=list(spaces()), help="only these")
    parser.add_argument("--dry-run", action="store_true", help="write no record")
    options = parser.parse_args()
    samples = []
    for case in cases:
        if case.model not in options.models or options.clusters == ("alike" if case.is_mixed else "mixed"):
            continue
        for precision, name in product(options.precisions, options.offload):
            if precision in case.precisions:
                runs = [session_of(case, spaces()[name], PRECISIONS[precision]) for _ in range(options.repeats)]
                samples.append(sample_of(case, precision, name, runs))
                print(samples[-1], flush=True)
    many = f"Medians of {options.repeats} processes, greatest memory of them"
    notes = (
        f"{many if options.repeats > 1 else 'One process each'}; 2048 tokens per row (4096 of llama-70b), "
        f"AdamW, all devices' memory allowed, of which the planner uses {USABLE_MEMORY:.0%}. Precision: masters is "
        f"bf16-true with fp32 master weights. Offload: what may be; {_defaults()}. "
        f"Processor: what the search computed. Asked again with {LESS_MEMORY:.0%} and {MORE_MEMORY:.0%} of the memory "
        "and with half of the batch. Rise: resident memory above that before the search; process peak: with Python and "
        "all imports; replan peak: after all questions. The gap is proven, of the closed form; where nothing fits, the "
        "search is for the least that any plan needs."
    )
    if not options.dry_run:
        print(write_record(make_record(THEME, samples, notes=notes)))


def _defaults() -> str:
    """What the default space offloads, in words."""
    return f"by default {', '.join(spaces()['default'].offloaded) or 'nothing'}"


if __name__ == "__main__":
    main()
