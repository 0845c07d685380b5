"""Which plans the planner chooses: a hash of each, to tell whether a change to the planner changes plans.

OMP_NUM_THREADS=1 python -m benchmarks.planner.plan_hashes --name before
python -m benchmarks.planner.plan_hashes --dry-run --against benchmarks/records/plan-hashes-before_...json

What is asked is what :mod:`.search_times` asks, every question of a new planner and again of one that has answered the
others; questions with few rows for each device, where tensor parallelism and other schedules gain; a few about devices
that are unlike; and the example of Mist's paper by the paper's own rules.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.planner.apart import PRECISION, Question, spec_of
from benchmarks.planner.search_times import (
    CASES,
    LESS_MEMORY,
    MIXED,
    MORE_MEMORY,
    PRECISIONS,
    Case,
    asked_of,
    questions_of,
    spaces,
)
from benchmarks.record import Sample, make_record, read_record, write_record
from lightning_mist.hardware import parse_cluster
from lightning_mist.model.presets import PRESETS
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import Plan
from lightning_mist.plan.codec import to_json
from lightning_mist.tuner import Planner, SearchSpace, TuneResult
from tests.tuner import paper_space

THEME = "plan-hashes"
DIGITS = 16
"""Hexadecimal digits of a hash that are kept."""

ROUNDING = 1e-9
"""Share by which numbers differ that are taken to be the same: sums in another order."""

KEY = ("model", "cluster", "batch", "memory", "space")
"""What tells samples apart."""

NUMBERS = ("predicted_step_seconds", "peak_bytes", "bound_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlike:
    """A network on a cluster of unlike devices.

    Attributes:
        spaces: Names of what is searched: what is done within the time limit.
    """

    case: Case
    spaces: tuple[str, ...]


UNLIKE = (
    Unlike(
        case=Case(model="gpt3-2.7b", cluster="1x4xA100-40+1x4xL4", batch=64, length=2048, limit=60.0),
        spaces=("default", "nothing"),
    ),
    Unlike(
        case=Case(model="gpt3-13b", cluster="1x8xA100-40+1x8xL4", batch=256, length=2048, limit=60.0),
        spaces=("nothing",),
    ),
)

COMMANDED = (
    Case(model="gpt3-1.3b", cluster="1x4xL4", batch=4, length=2048, limit=60.0),
    Case(model="gpt3-2.7b", cluster="1x8xL4", batch=4, length=2048, limit=60.0),
    Case(model="gpt3-7b", cluster="1x8xL4", batch=8, length=2048, limit=60.0),
    Case(model="gpt3-7b", cluster="1x8xA100-40", batch=4, length=2048, limit=60.0),
    Case(model="llama-7b", cluster="1x8xH100", batch=4, length=4096, limit=60.0),
    Case(model="gpt3-13b", cluster="2x8xA100-80", batch=8, length=2048, limit=60.0),
    Case(model="gpt3-13b", cluster="2x8xA100-80", batch=16, length=2048, limit=60.0),
    Case(model="gpt3-13b", cluster="2x8xA100-80", batch=32, length=2048, limit=60.0),
    MIXED[0],
)
"""What is asked in the command's own precision and space: few rows for each device, where tensor parallelism is worth
up to 58 %, ZB-H1 up to 24 % and interleaved 1F1B up to 6 %; and devices that are unlike."""

PAPER: Mapping[str, Mapping[str, Any]] = {
    "as published": paper_space.PUBLISHED,
    "nothing": {"all_ratios": (paper_space.NOTHING,)},
    "everything": {},
}
"""Limits of the paper's space in which its example is tuned."""


def digest(document: Any) -> str:
    """A hash of what JSON can say."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:DIGITS]


def plan_hash(plan: Plan) -> str:
    """A hash of what a plan decides, and not of what was predicted of it or of versions of software."""
    document = json.loads(to_json(plan))
    del document["predicted"]
    fingerprint = document["fingerprint"].items()
    document["fingerprint"] = {name: value for name, value in fingerprint if not name.startswith("version.")}
    return digest(document)


def described(case: Case) -> ModelSpec:
    """The network of a case."""
    rows = case.batch // parse_cluster(case.cluster).world_size
    return spec_of(PRESETS[case.model], case.model, case.cluster, rows=rows, sequence_length=case.length)


def ask(planner: Planner, question: Question, search: SearchSpace) -> TuneResult:
    """What a planner answers."""
    return planner.tune(global_batch_size=question.global_batch_size, memory_limit=question.memory_limit, search=search)


def sample_of(model: str, cluster: str, question: Question, memory: float, space: str, found: TuneResult) -> Sample:
    """What is kept of an answer; ``memory`` is the share of the devices' memory that may be used."""
    return {
        "model": model,
        "cluster": cluster,
        "batch": question.global_batch_size,
        "memory": memory,
        "space": space,
        "plan": plan_hash(found.plan),
        "schedule": found.plan.schedule,
        "stages": found.plan.num_stages,
        "microbatches": found.plan.num_microbatches,
        "predicted_step_seconds": found.predicted.step_seconds,
        "peak_bytes": max(stage.peak_bytes for stage in found.predicted.stages),
        "bound_seconds": found.bound,
        "status": found.status,
    }


def of_case(case: Case, name: str, search: SearchSpace) -> Iterator[Sample]:
    """Samples of all questions of a case."""
    spec, cluster, questions = described(case), parse_cluster(case.cluster), questions_of(case)
    asked_before = Planner(spec, cluster)
    for question in questions:
        ask(asked_before, question, search)
    for question, memory in zip(questions, (1.0, LESS_MEMORY, MORE_MEMORY, 1.0), strict=True):
        sample = sample_of(
            case.model, case.cluster, question, memory, name, ask(Planner(spec, cluster), question, search)
        )
        again = plan_hash(ask(asked_before, question, search).plan)
        yield {**sample, "same_if_asked_again": again == sample["plan"]}


def of_unlike(item: Unlike, name: str, search: SearchSpace) -> Sample:
    """The sample of devices that are unlike."""
    question = Question(global_batch_size=item.case.batch)
    found = ask(Planner(described(item.case), parse_cluster(item.case.cluster)), question, search)
    return sample_of(item.case.model, item.case.cluster, question, 1.0, name, found)


def of_command(case: Case) -> Sample:
    """The sample of a case as the command asks it."""
    spec, search = asked_of(case, spaces()["default"], PRECISIONS["masters"])
    question = Question(global_batch_size=case.batch)
    found = ask(Planner(spec, parse_cluster(case.cluster)), question, search)
    return sample_of(case.model, case.cluster, question, 1.0, "default, masters", found)


def of_paper(name: str) -> Sample:
    """The sample of the paper's example by its own rules, which predict no bytes that compare with ours."""
    found = paper_space.tuned(**PAPER[name])
    return {
        "model": "gpt3-1.3b by the paper's rules",
        "cluster": f"1x{paper_space.DEVICES}xL4",
        "batch": paper_space.BATCH,
        "memory": paper_space.USABLE_SHARE,
        "space": name,
        "plan": digest([found.microbatches, found.stages]),
        "schedule": "1f1b",
        "stages": len(found.stages),
        "microbatches": found.microbatches,
        "predicted_step_seconds": found.seconds,
        "peak_bytes": None,
        "bound_seconds": found.bound,
        "status": "optimal" if found.seconds <= found.bound * (1 + ROUNDING) else "bounded",
    }


def samples(models: Sequence[str], names: Sequence[str]) -> Iterator[Sample]:
    """All samples of some models and spaces; the paper's example always."""
    for case in CASES:
        for name in names if case.model in models else ():
            yield from of_case(case, name, spaces()[name])
    for item in UNLIKE:
        for name in names if item.case.model in models else ():
            if name in item.spaces:
                yield of_unlike(item, name, spaces()[name])
    yield from (of_command(case) for case in COMMANDED if case.model in models and "default" in names)
    yield from map(of_paper, PAPER)


def differences(before: Sequence[Sample], after: Sequence[Sample]) -> list[str]:
    """What differs between two tables, a line for each sample; questions that only the first has are left out."""
    known = {tuple(item[name] for name in KEY): item for item in before}
    found = []
    for item in after:
        key = tuple(item[name] for name in KEY)
        words = _changes(known[key], item) if key in known else ["is new"]
        if words:
            found.append(f"{' '.join(map(str, key))}: {', '.join(words)}")
    return found


def _changes(before: Sample, after: Sample) -> list[str]:
    words = [
        f"{name} {before[name]} -> {after[name]}"
        for name in ("plan", "schedule", "stages", "microbatches", "status", "same_if_asked_again")
        if before.get(name) != after.get(name)
    ]
    for name in NUMBERS:
        old, new = before[name], after[name]
        if isinstance(old, (int, float)) and isinstance(new, (int, float)):
            change = (new - old) / old
            words += [f"{name} {change:+.3%} ({old:.6g} -> {new:.6g})"] if abs(change) > ROUNDING else []
        elif old != new:
            words.append(f"{name} {old} -> {new}")
    return words


def main() -> int:
    """Tune, write the record, and say what differs from another one; 1 if anything does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = [*dict.fromkeys(case.model for case in (*CASES, *COMMANDED))]
    parser.add_argument("--models", nargs="+", default=models, help="only these")
    parser.add_argument("--spaces", nargs="+", default=list(spaces()), choices=list(spaces()), help="only these")
    parser.add_argument("--name", help="what the record's name has behind its theme, such as before")
    parser.add_argument("--against", metavar="RECORD", type=Path, help="a record to compare with")
    parser.add_argument("--dry-run", action="store_true", help="write no record")
    options = parser.parse_args()
    before = options.against and read_record(options.against)
    found = []
    for sample in samples(options.models, options.spaces):
        found.append(sample)
        print(sample, flush=True)
    notes = (
        f"{PRECISION}, 2048 tokens per row (4096 of llama-70b), AdamW. Memory: the share of the devices' that may be "
        "used, of which the planner takes its own share. Plan: of what it decides, without predictions. Each of a new "
        "planner; asked again: of one that has answered all questions of its model and space."
    )
    if not options.dry_run:
        print(write_record(make_record(f"{THEME}-{options.name}" if options.name else THEME, found, notes=notes)))
    if not before:
        return 0
    lines = differences(before.samples, found)
    print(
        f"{len(found) - len(lines)} of {len(found)} as in {options.against.name} ({before.commit[:12]})",
        *lines,
        sep="\n",
    )
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
