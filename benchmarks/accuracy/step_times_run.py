"""One network: a plan made by the strategy itself, predictions for many plans, and all of them run again and again.

Started by :mod:`benchmarks.launch`. The processes stay up for all plans; each run is a ``Trainer.fit`` of its own. The
first fit has ``plan="auto"``: what it measured of machine and layers is what all predictions are made from, before any
other plan has run. Rounds follow each other over all plans, so that a disturbance of the machine meets all of them.
"""

import argparse
import gc
import json
import tempfile
import time
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from benchmarks.accuracy.networks import LAYERS, MAKERS, ROWS, make
from benchmarks.plans import SEARCHED, step_time_plans
from lightning_mist import MistStrategy
from lightning_mist.cost import StageCostModel, predict_with
from lightning_mist.errors import PlanError
from lightning_mist.plan import Plan, from_json, to_json

PROCESSES = 2

CHOSEN = "chosen by the planner"

WARM_UP_STEPS = 3
"""Steps of a run that are left out: they make the optimizer's state, meter memory, and fill the allocator again."""


class _Ends(pl.Callback):
    """When every step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.ends[WARM_UP_STEPS - 1 :])]


def _groups() -> list[Any]:
    """All process groups of this process, in the order in which they were made."""
    return list(dist.distributed_c10d._world.pg_map)


def fit(name: str, strategy: Any, steps: int) -> list[float]:
    """Train a new copy of a network for some steps; seconds of each after the warm-up."""
    work, ends = make(name, PROCESSES), _Ends()
    before = _groups() if dist.is_initialized() else None
    with tempfile.TemporaryDirectory() as directory:
        trainer = pl.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=PROCESSES,
            max_steps=WARM_UP_STEPS + steps,
            callbacks=[ends],
            default_root_dir=directory,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            num_sanity_val_steps=0,
        )
        trainer.fit(work.module, work.data)
    if before is not None:
        # The threads of groups that nobody uses any more would take their turns on the cores.
        for group in _groups():
            if group not in before:
                dist.destroy_process_group(group)
    # What a fit leaves in reference cycles would be collected in the steps of the next one.
    del trainer, work
    gc.collect()
    return ends.seconds()


def predictions(name: str, profile_directory: Path) -> tuple[dict[str, Plan], dict[str, float]]:
    """Plans with their predictions, the chosen one first, and how long profiling and planning took; on every rank."""
    strategy: Any = MistStrategy(
        search=SEARCHED, profile_directory=str(profile_directory), self_check=False, correct_profile=False
    )
    fit(name, strategy, 1)
    decision = strategy._decision
    assert decision is not None
    box: list[Any] = [None, {"planning_seconds": decision.planning_seconds}]
    if decision.basis is not None:
        model = StageCostModel(decision.basis.spec, decision.basis.profile, decision.basis.cluster)
        found = {CHOSEN: to_json(replace(decision.plan, fingerprint=()))}
        for label, plan in step_time_plans(LAYERS, ROWS).items():
            try:
                found[label] = to_json(replace(plan, predicted=predict_with(model, plan)))
            except PlanError as error:
                print(f"{name}: no {label}: {error}", flush=True)
        box[0] = found
    dist.broadcast_object_list(box, 0)
    return {label: from_json(text) for label, text in box[0].items()}, box[1]


def main() -> None:
    """Predict, run, write what was found in the first process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=sorted(MAKERS), required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as directory:
        plans, timing = predictions(options.network, Path(directory))
    rounds: dict[str, list[list[float]]] = {label: [] for label in plans}
    for _ in range(options.rounds):
        for label, plan in plans.items():
            given = replace(plan, predicted=None)
            strategy: Any = MistStrategy(plan=given, self_check=False, correct_profile=False)
            rounds[label].append(fit(options.network, strategy, options.steps))
    if dist.get_rank() == 0:
        found = [
            {
                "plan": label,
                "predicted_step_seconds": plan.predicted.step_seconds,
                "rounds": rounds[label],
                "json": json.loads(to_json(plan)),
            }
            for label, plan in plans.items()
            if plan.predicted is not None
        ]
        options.out.write_text(json.dumps({"network": options.network, **timing, "plans": found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
