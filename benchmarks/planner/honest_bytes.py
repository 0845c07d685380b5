"""What default forecasts need by a replay of every allocation, before sums of gradients were counted whole, and since.

OMP_NUM_THREADS=1 python -m benchmarks.planner.honest_bytes
OMP_NUM_THREADS=1 python -m benchmarks.planner.honest_bytes --models gpt3-7b --dry-run

The questions are those of the README, and those of :mod:`.search_times` with master weights, which are the command's
own choice, and on devices that are alike in other precisions too. Plans of before are found by the package as it was
then (:data:`BEFORE`, taken from the repository's history), which is asked in a process of its own. Both are replayed by
the package as it is. Of plans that cannot be replayed the memory model says the bytes.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from benchmarks.planner.search_times import CASES, MIXED, PRECISIONS, Case, asked_of, spaces
from benchmarks.record import ROOT, Sample, make_record, write_record
from lightning_mist.cost import stage_memory
from lightning_mist.estimate.replay import replay_group
from lightning_mist.estimate.stage_estimates import can_replay
from lightning_mist.hardware import Cluster, parse_cluster
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import Plan
from lightning_mist.plan.codec import from_json, to_json
from lightning_mist.tuner import Planner
from lightning_mist.tuner.space import usable_bytes

THEME = "honest-bytes"
BEFORE = "2bcac491"
"""The last commit that counted half of the sums of gradients where anything may be offloaded."""

README = (
    Case(model="gpt3-1.3b", cluster="2x8xL4", batch=128, length=2048, limit=2.0),
    Case(model="llama-7b", cluster="1x8xL4", batch=64, length=2048, limit=3.0),
    Case(model="llama-7b", cluster="1x8xH100", batch=64, length=4096, limit=3.0),
)
"""Questions of the README and of the documents' first page."""

DEVICES = 100
"""Clusters with more are left out: every group of devices is replayed."""

OTHERS = ("bf16-true", "bf16-mixed")
"""Precisions that are looked at beside master weights."""

Question = tuple[Case, str]
"""What is asked, in which precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The group of devices of a plan that needs most of what it may use.

    Attributes:
        by: What says so.
    """

    needed: int
    limit: int
    by: str


def questions(models: Sequence[str]) -> Iterator[Question]:
    """All questions about some models."""
    for case in (*README, *CASES, *MIXED):
        if case.model in models and parse_cluster(case.cluster).world_size <= DEVICES:
            for precision in ("masters", *(OTHERS if case in CASES else ())):
                if precision in case.precisions:
                    yield case, precision


def answer(question: Question) -> tuple[ModelSpec, Plan, float]:
    """The network of a question, the plan that is found for it, and its predicted seconds."""
    case, precision = question
    spec, search = asked_of(case, spaces()["default"], PRECISIONS[precision])
    found = Planner(spec, parse_cluster(case.cluster)).tune(global_batch_size=case.batch, search=search)
    return spec, found.plan, found.predicted.step_seconds


def answers_of_before(models: Sequence[str]) -> list[tuple[Plan, float]]:
    """Plans and seconds by the package as it was."""
    archive = subprocess.run(["git", "archive", BEFORE], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        command = [sys.executable, str(Path(__file__).resolve()), "--answers", "--models", *models]
        asked = subprocess.run(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": folder}, stdout=subprocess.PIPE, check=True
        )
    found = [json.loads(line) for line in asked.stdout.splitlines()]
    return [(from_json(item["plan"]), item["seconds"]) for item in found]


def need_of(spec: ModelSpec, plan: Plan, cluster_text: str) -> Need:
    """What the group of devices needs that is fullest."""
    cluster, memory = parse_cluster(cluster_text), stage_memory(spec, plan)
    replays, found = can_replay(spec, plan), []
    for group in range(plan.num_groups):
        devices = plan.stages[group].devices
        parts = [cluster] if isinstance(cluster, Cluster) else [cluster.parts[cluster.part_of(d)] for d in devices]
        needed = replay_group(spec, plan, group).peak_bytes if replays else memory[group].peak_bytes
        limit = int(min(usable_bytes(part, None) for part in parts))
        found.append(Need(needed=needed, limit=limit, by="replay" if replays else "memory model"))
    return max(found, key=lambda need: need.needed / need.limit)


def sample_of(question: Question, before: tuple[Plan, float]) -> Sample:
    """Both plans of a question."""
    spec, plan, seconds = answer(question)
    was, now = need_of(spec, before[0], question[0].cluster), need_of(spec, plan, question[0].cluster)
    return {
        "model": question[0].model,
        "cluster": question[0].cluster,
        "batch": question[0].batch,
        "precision": question[1],
        "before_step_seconds": before[1],
        "step_seconds": seconds,
        "before_need_bytes": was.needed,
        "need_bytes": now.needed,
        "limit_bytes": now.limit,
        "before_of_limit": was.needed / was.limit,
        "of_limit": now.needed / now.limit,
        "by": now.by if now.by == was.by else f"{now.by}, {was.by} before",
    }


def main() -> None:
    """Ask, replay and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = list(dict.fromkeys(case.model for case in (*README, *CASES, *MIXED)))
    parser.add_argument("--models", nargs="+", default=models, choices=models, help="only these")
    parser.add_argument("--answers", action="store_true", help="print plans, one a line, and do nothing else")
    parser.add_argument("--dry-run", action="store_true", help="write no record")
    options = parser.parse_args()
    if options.answers:
        for question in questions(options.models):
            _, plan, seconds = answer(question)
            print(json.dumps({"plan": to_json(plan), "seconds": seconds}), flush=True)
        return
    samples = []
    for question, before in zip(questions(options.models), answers_of_before(options.models), strict=True):
        samples.append(sample_of(question, before))
        print(samples[-1], flush=True)
    notes = (
        f"Before: plans of the package at {BEFORE}. Needs are those of the fullest group of devices, tensors only, by "
        "a replay of the executed list; limits are what the planner may use there. 2048 tokens per row, 4096 on H100s; "
        "what may be offloaded is the command's default."
    )
    if not options.dry_run:
        print(write_record(make_record(THEME, samples, notes=notes)))


if __name__ == "__main__":
    main()
