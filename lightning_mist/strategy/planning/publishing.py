"""What planning shows and where its plan goes."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_mist.plan import ModuleMap, Plan, render, save, split_notes
from lightning_mist.schedule.stage_units import ratio_notes
from lightning_mist.units import format_seconds

if TYPE_CHECKING:
    from lightning_mist.estimate import MemoryEstimate
    from lightning_mist.strategy.planning.planning_state import Planner
    from lightning_mist.tuner import TuneResult


def publish(
    planner: "Planner", found: ModuleMap, plan: Plan, made: "TuneResult | None", estimate: "MemoryEstimate | None"
) -> Path | None:
    """Show the plan on rank 0, and say where it will be written if it was made here; every rank asks."""
    path = plan_file(planner.trainer, planner.request.plan_path)
    if not planner.strategy.is_global_zero:
        return None
    progress = planner.progress
    if plan.is_plain:
        if plan.predicted is not None:
            is_fastest = made is not None and made.plan.is_plain
            what = "plain data parallelism is the fastest plan that was found: " if is_fastest else ""
            progress.tell(f"{what}{format_seconds(plan.predicted.step_seconds)} per step predicted")
        progress.details(render(plan))
    else:
        progress.show(render(plan))
    moved = (note for group in range(plan.num_groups) for note in ratio_notes(plan, found, group))
    for note in (*split_notes(plan, found), *dict.fromkeys(moved)):
        progress.say(note)
    if estimate is not None:
        progress.tell(estimate.headline())
    if made is not None:
        for note in made.explain():
            progress.say(note)
    if planner.request.plan != "auto" or plan.predicted is None:
        return None  # it was given, or there was nothing to plan
    if path is not None:
        progress.say(f"the plan goes to {path}")
    return path


def plan_file(trainer: Any, asked: str | None) -> Path | None:
    """Where a plan that was made here is written; every rank asks at once.

    Nowhere if Lightning itself leaves no files: in the logger's directory, if there is a logger that has one.
    """
    if asked is not None:
        return Path(asked)
    if not trainer.loggers:
        return None
    directory = trainer.log_dir
    return None if directory is None else Path(directory) / "mist_plan.json"


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan that was made here, once loggers have made their directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save(plan, path)
