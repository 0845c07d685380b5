"""Plan files that a run is given and that are damaged, or another run's: each is refused, or trains as DDP does."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.faults.small_fits import LAYERS, PLANS, RANKS
from benchmarks.faults.spoiling import WRONG, Files, broken, places, with_value, without
from lightning_mist.plan import Plan, Predicted, PredictedStage, StepWork
from lightning_mist.plan.codec import to_json

HUGE = (0, -1, 3, 7, 2**31, 2**63 - 1, 10**12)
"""What every count is replaced with."""

FINGERPRINT = (
    ("world_size", "2"),
    ("batch_rows", "4"),
    ("num_layers", "2"),
    ("layer_kinds", "2A"),
    ("precision", "32-true"),
    ("version.torch", "2.0"),
)


def documents() -> dict[str, Any]:
    """Plans of every kind as what their files hold, with and without a prediction."""
    stage = PredictedStage(
        steady_seconds=0.1, boundary_seconds=0.0, forward_seconds=0.04, backward_seconds=0.06, peak_bytes=4096
    )
    work = StepWork(model_flops=1e6, peak_flops_per_second=1e9, peak_source="made up", roofline_seconds=0.01)
    found: dict[str, Any] = {}
    for name, plan in PLANS.items():
        found[name] = json.loads(to_json(plan))
        predicted = Predicted(step_seconds=0.3, stages=(stage,) * len(plan.stages), work=work)
        found[f"{name}, predicted"] = json.loads(to_json(replace(plan, predicted=predicted, fingerprint=FINGERPRINT)))
    return found


def plan_texts(chance: random.Random, count: int) -> Iterator[tuple[str, str]]:
    """Contents of plan files and what is wrong with each: so many of every value that is wrong, and all else."""
    every, names = documents(), tuple(documents())
    wrong: list[tuple[str, Any]] = []
    for document in every.values():
        for path, value in places(document):
            if path and value is not None:
                wrong += [("a value", with_value(document, path, other)) for other in WRONG[type(value)]]
                wrong.append(("a key that is missing", without(document, path)))
            if type(value) is int:
                wrong += [("a count", with_value(document, path, other)) for other in HUGE]
            if isinstance(value, dict):
                name = chance.choice(("stage", "", "Layers", "zero", "x y"))
                wrong.append(("a key too many", with_value(document, (*path, name), 1)))
            if isinstance(value, list) and value:
                wrong += [
                    ("a list", with_value(document, path, other))
                    for other in ([], value + value, value[::-1], value[1:])
                ]
    for family in dict.fromkeys(name for name, _ in wrong):
        members = [(name, document) for name, document in wrong if name == family]
        for name, document in chance.sample(members, min(count, len(members))):
            yield name, json.dumps(document)
    for _ in range(count // 2):
        document = every[chance.choice(names)]
        for _ in range(chance.randint(2, 5)):
            path, value = chance.choice([(p, v) for p, v in places(document) if p and v is not None])
            other = chance.choice([v for p, v in places(every[chance.choice(names)]) if type(v) is type(value)])
            document = with_value(document, path, other)
        yield "values of several plans", json.dumps(document)
    for text in broken(json.dumps(every["pp2, predicted"]), chance):
        yield "a text that is no plan", text


def other_plans() -> Iterator[tuple[str, Plan]]:
    """Plans of other machines, networks and batches."""
    for plan in PLANS.values():
        for world in (1, 3, 4, 8, 64):
            yield "a plan for other devices", _for_devices(plan, world)
        for layers in (0, 1, LAYERS + 1, 24):
            if layers >= plan.num_stages or plan.num_stages == 1:
                yield "a plan for another network", _for_layers(plan, layers)
        for factor in (2, 3):
            stages = tuple(replace(stage, microbatch_size=factor * stage.microbatch_size) for stage in plan.stages)
            yield (
                "a plan for other batches",
                replace(plan, stages=stages, global_batch_size=factor * plan.global_batch_size),
            )


def _for_devices(plan: Plan, world: int) -> Plan:
    stage = plan.stages[0]
    mesh = replace(
        stage.mesh,
        devices=tuple(range(world)),
        data_parallel_degree=world,
        tensor_parallel_degree=1,
    )
    whole = replace(stage, layers=(0, plan.num_layers), mesh=mesh)
    size = whole.microbatch_size * world * plan.num_microbatches
    return replace(plan, stages=(whole,), global_batch_size=size)


def _for_layers(plan: Plan, layers: int) -> Plan:
    ends = [round(layers * (index + 1) / plan.num_stages) for index in range(plan.num_stages)]
    ranges = zip([0, *ends[:-1]], ends, strict=True)
    stages = tuple(
        replace(stage, layers=found, checkpointing=replace(stage.checkpointing, layers=0))
        for stage, found in zip(plan.stages, ranges, strict=True)
    )
    return replace(plan, stages=stages)


def plan_files(folder: Path, chance: random.Random, count: int) -> Iterator[tuple[str, str]]:
    """What is wrong, and the path of a file for ``MistStrategy(plan=...)``."""
    files = Files(folder)
    for family, text in plan_texts(chance, count):
        yield family, files(text, ".json")
    for family, plan in other_plans():
        if plan.world_size != RANKS or family != "a plan for other devices":
            yield family, files(to_json(plan), ".json")
    for path in (*files.every_kind(".json"), str(folder / "none.json"), "", str(folder), "auto ", "AUTO"):
        yield "a path that is no plan's", path
