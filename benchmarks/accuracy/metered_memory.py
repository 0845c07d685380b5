"""Predicted peaks against metered ones: every kind of plan on every kind of model, stage by stage.

All ranks run in this process over an in-memory transport, each under a meter that counts the bytes of storages; the
second of two AdamW steps is measured. Plans that are plain data parallelism are run by torch's
``DistributedDataParallel``. A row is a stage of a plan of a model. ``memory_error`` is that of an estimate relative to
what the most loaded rank of the stage was seen to hold; ``search_error`` that of the closed form in which the search
looks at a million stages a second. Estimates replay the plan's own schedule, but for plans whose ranks share rows
(``is_replayed``), of which they are the closed form.

    python -m benchmarks.accuracy.metered_memory
"""

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

import torch
from torch import nn

from benchmarks.parity.plans import LAYOUTS, ROWS, Group, Layout, make_plan
from benchmarks.parity.table import MODELS
from benchmarks.record import Sample, make_record, write_record
from lightning_mist.cost import stage_memory
from lightning_mist.errors import PlanError
from lightning_mist.estimate.replay.rank_replay import replay_plan
from lightning_mist.estimate.stage_estimates import can_replay
from lightning_mist.model import derive_contexts, derive_splits, trace_model
from lightning_mist.model.spec.model_spec import ModelSpec
from lightning_mist.plan import Plan
from tests import zoo
from tests.integration.metered import measure_peaks, measure_plain_peak
from tests.integration.parity import map_of

DEGREES = (2, 4)
"""Tensor-parallel degrees that models are asked for."""

MORE_LAYOUTS: dict[str, Layout] = {
    "one device": Layout(),
    "one device, some recomputed": Layout(groups=(Group(checkpointed=2),), parts=2),
    "one device, all recomputed": Layout(groups=(Group(checkpointed=99),), parts=3),
    "one device, some recomputed by operator": Layout(groups=(Group(checkpointed=2, kind="selective"),), parts=2),
    "one device, all recomputed by operator": Layout(groups=(Group(checkpointed=99, kind="selective"),), parts=3),
    "dp 2, ZeRO 0, whole batches": Layout(groups=(Group(dp=2),), parts=3),
    "dp 3, ZeRO 1, whole batches": Layout(groups=(Group(dp=3, zero=1),)),
    "dp 4, ZeRO 2, all recomputed": Layout(groups=(Group(dp=4, zero=2, checkpointed=99),), parts=3),
    "dp 2, ZeRO 3, whole batches": Layout(groups=(Group(dp=2, zero=3),)),
    "dp 4, ZeRO 3, all recomputed": Layout(groups=(Group(dp=4, zero=3, checkpointed=99),), parts=2),
    "pp 3, uneven": Layout(groups=(Group(), Group(), Group()), uneven=True, parts=2),
    "pp 2, GPipe, dp 2, ZeRO 3, some recomputed": Layout(
        groups=(Group(dp=2, zero=3, checkpointed=1), Group(dp=2, zero=3, checkpointed=1)), schedule="gpipe", parts=2
    ),
    "interleaved, 2 groups of 2 chunks, ZeRO 3": Layout(
        groups=(Group(dp=2, zero=3, checkpointed=1), Group(dp=2, zero=3, checkpointed=1)),
        schedule="interleaved-1f1b",
        chunks=2,
        parts=2,
    ),
    "interleaved, tp 2, sequence": Layout(
        groups=(Group(tp=2, sequence=True), Group(tp=2, sequence=True)), schedule="interleaved-1f1b", chunks=2
    ),
    "zero bubble, pp 2 x dp 2, ZeRO 2": Layout(
        groups=(Group(dp=2, zero=2), Group(dp=2, zero=2)), schedule="zb-h1", parts=2
    ),
    "zero bubble, pp 2 x dp 2, ZeRO 3, some recomputed": Layout(
        groups=(Group(dp=2, zero=3, checkpointed=1), Group(dp=2, zero=3, checkpointed=1)), schedule="zb-h1", parts=2
    ),
}
"""Beside those of the parity table: more schedules under more sharding, whole batches, everything recomputed."""

ALL_LAYOUTS = {**LAYOUTS, **MORE_LAYOUTS}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subject:
    """A model of the zoo with what it is said to cost, and a batch for as many ranks as any plan needs."""

    module: nn.Module
    spec: ModelSpec
    batches: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A model under a plan: bytes of every stage.

    Attributes:
        plan: The plan that was run, if it was.
        phases: When the predicted peaks happen.
        predicted: Peak bytes of each stage as an estimate has them.
        is_replayed: Whether it replays the plan.
        searched: The same as the search predicts it.
        measured: The same as metered.
        refused: Why the plan does not run, empty if it does.
    """

    plan: Plan | None = None
    phases: tuple[str, ...] = ()
    predicted: tuple[int, ...] = ()
    is_replayed: bool = False
    searched: tuple[int, ...] = ()
    measured: tuple[int, ...] = ()
    refused: str = ""

    @property
    def errors(self) -> tuple[float, ...]:
        """Relative error of each stage's estimate; positive where it is too high."""
        return _errors(self.predicted, self.measured)

    @property
    def search_errors(self) -> tuple[float, ...]:
        """The same of what the search predicts."""
        return _errors(self.searched, self.measured)


def _errors(predicted: Sequence[int], measured: Sequence[int]) -> tuple[float, ...]:
    return tuple((mine - theirs) / theirs for mine, theirs in zip(predicted, measured, strict=True))


@cache
def subject(name: str, rows: int = ROWS, ranks: int = 8) -> Subject:
    """A model, traced, with batches."""
    torch.manual_seed(7)
    module, make_batch = zoo.make(name)
    batches = tuple(make_batch(rows) for _ in range(ranks))
    call = zoo.step(module)
    module_map = derive_splits(module, call, batches[0], map_of(module, batches[0]), DEGREES)
    module_map = derive_contexts(module, call, batches[0], module_map, DEGREES)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad])
    spec = trace_model(module, batches[0], call=call, module_map=module_map, optimizer=optimizer)
    return Subject(module=module, spec=spec, batches=batches)


def measure(subject: Subject, layout: Layout) -> Cell:
    """Predict and meter one model under one plan."""
    spec = subject.spec
    try:
        plan = make_plan(layout, spec.num_layers)
        searched = stage_memory(spec, plan)
        replays = replay_plan(spec, plan) if can_replay(spec, plan) else None
        if plan.is_plain:
            measured = [measure_plain_peak(subject.module, spec.module_map, plan, subject.batches[0])]
        else:
            measured = measure_peaks(subject.module, spec.module_map, plan, subject.batches[: plan.world_size])
    except PlanError as error:
        return Cell(refused=str(error))
    return Cell(
        plan=plan,
        phases=tuple(item.phase for item in replays or searched),
        predicted=tuple(item.peak_bytes for item in replays or searched),
        is_replayed=replays is not None,
        searched=tuple(item.peak_bytes for item in searched),
        measured=tuple(measured),
    )


def fill(models: Sequence[str], layouts: Sequence[str]) -> Iterator[tuple[str, str, Cell]]:
    """Every model under every plan: model, plan, cell."""
    for model in models:
        for layout in layouts:
            yield model, layout, measure(subject(model), ALL_LAYOUTS[layout])


def samples_of(model: str, layout: str, cell: Cell) -> list[Sample]:
    """A row per group of devices."""
    if cell.plan is None:
        return []
    return [
        {
            "model": model,
            "plan": layout,
            "stage": stage,
            "phase": cell.phases[stage],
            "predicted_peak_bytes": cell.predicted[stage],
            "measured_peak_bytes": cell.measured[stage],
            "is_replayed": cell.is_replayed,
            "memory_error": cell.errors[stage],
            "search_peak_bytes": cell.searched[stage],
            "search_error": cell.search_errors[stage],
        }
        for stage in range(cell.plan.num_groups)
    ]


def summary(errors: Sequence[float]) -> str:
    """Errors in one line."""
    mean, low, high = fmean(map(abs, errors)), min(errors), max(errors)
    return f"{len(errors)} stages: mean absolute error {mean:.2%}, from {low:+.2%} to {high:+.2%}"


def _errors_of(samples: Sequence[Sample], name: str) -> str:
    found = [value for row in samples if isinstance(value := row[name], float)]
    return summary(found) if found else "none"


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill the table and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--plans", nargs="+", default=list(ALL_LAYOUTS), choices=list(ALL_LAYOUTS), metavar="PLAN")
    parser.add_argument("--no-record", action="store_true", help="only print")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
    samples: list[Sample] = []
    reasons: dict[str, list[str]] = {}
    for model, layout, cell in fill(options.models, options.plans):
        if cell.refused:
            reasons.setdefault(cell.refused, []).append(f"{model} under {layout}")
        found = samples_of(model, layout, cell)
        samples += found
        shown = " ".join(f"{row['memory_error']:+.2%} (search {row['search_error']:+.2%})" for row in found)
        print(f"{model}, {layout}: {shown or 'refused'}", flush=True)
    replayed, summed = ([row for row in samples if row["is_replayed"] is kind] for kind in (True, False))
    text = f"Replayed: {_errors_of(replayed, 'memory_error')}. As the search sees them: "
    text += f"{_errors_of(replayed, 'search_error')}. Of what is not replayed: {_errors_of(summed, 'search_error')}."
    print(text)
    if not options.no_record:
        refused = [f"Refused ({', '.join(cells)}): {reason}." for reason, cells in reasons.items()]
        write_record(make_record("metered-memory", samples, notes=" ".join([text, *refused])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
