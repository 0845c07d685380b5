"""The best plan of small networks on unlike devices by predicting every plan; for tests only.

Plans are enumerated by :mod:`tests.tuner.whole_space`, which knows nothing of how the search goes through them. Here
each is made whole, its seconds are those of the closed form with what is predicted of its stages
(:func:`lightning_mist.cost.predictions`), and whether it fits is asked of the check that the product makes of finished
plans. What one stage takes and holds does not depend on what the others save, so that of plans with the same layers
and devices each stage's savings are predicted once, beside the first of the others'.
"""

import itertools
from dataclasses import replace

import numpy as np

from lightning_mist.cost import cost_model, predictions, step_seconds
from lightning_mist.cost.interleaved_memory import plans_peaks
from lightning_mist.hardware import Link, MixedCluster
from lightning_mist.model.spec import with_master_weights
from lightning_mist.plan import OFFLOAD_KINDS, OffloadRatios, Plan, StagePlan, ZeroStage
from lightning_mist.tuner import SearchSpace
from lightning_mist.tuner.search import layout_of
from lightning_mist.tuner.space import Shape
from lightning_mist.tuner.space.applied_space import OFFLOADED
from tests.specs import cluster, profile, spec, with_splits
from tests.tuner.verdicts import verdict_of
from tests.tuner.whole_space import Best, Instance, Options, candidates_of, pipelines, together, undominated

MOST_STAGES = 2_500
"""Stages with savings that an instance may have, of which each is predicted."""

TIMES = ("steady", "boundary")


def verdict_by_predictions(instance):
    """Ask the planner, and predict every plan."""
    return verdict_of(instance, wanted=by_predicting_everything(instance))


def by_predicting_everything(instance):
    """The best plan by the closed form, of all plans there are."""
    model = cost_model(instance.network, instance.rates, instance.machine)
    best, plans, stages = np.inf, 0, 0
    for whole, choices in families(instance):
        options = [_options(instance, model, whole, index, rows) for index, rows in enumerate(choices)]
        stages += sum(item.count for item in options)
        plans += int(np.prod([item.count for item in options]))
        best = min(best, together(options, whole.num_microbatches))
    return Best(seconds=best, peak=np.nan, plans=plans, candidates=stages)


def families(instance):
    """Plans that save nothing, of every number of microbatches, layers and devices, and what each stage may save."""
    layers = instance.network.num_layers
    for count, parts, arrangements in pipelines(instance):
        stages = len(parts)
        rows = {
            (index, kind): candidates_of(instance, stages, index, kind)
            for row in arrangements
            for index, kind in enumerate(row)
        }
        for row, cuts in itertools.product(arrangements, itertools.combinations(range(1, layers), stages - 1)):
            edges = [*itertools.pairwise((0, *cuts, layers))]
            found = [rows[index, kind] for index, kind in enumerate(row)]
            chosen = [every[(every[:, :2] == edge).all(axis=1)] for every, edge in zip(found, edges, strict=True)]
            if all(map(len, chosen)):
                yield whole_plan(instance, count, parts, row, edges), chosen


def whole_plan(instance, count, parts, row, edges):
    """A plan that saves nothing."""
    degrees = [(kind.data, kind.tensor) for kind in row]
    stages = tuple(
        StagePlan(
            layers=edge,
            mesh=Shape(kind.data, kind.tensor, kind.sequence, kind.method, kind.shard).mesh(devices),
            microbatch_size=instance.global_batch_size // (count * kind.data),
            zero_stage=ZeroStage.OPTIMIZER if kind.shard else ZeroStage.NONE,
            **kind.method.settings(0),
        )
        for kind, edge, devices in zip(row, edges, layout_of(instance.machine, degrees, parts), strict=True)
    )
    return Plan(
        global_batch_size=instance.global_batch_size,
        data_parallel_size=None if instance.loaders == instance.machine.world_size else instance.loaders,
        num_microbatches=count,
        stages=stages,
    )


def saving(plan, index, row):
    """A plan of which one stage saves something."""
    recomputed, zero = (int(number) for number in row[2:4])
    stage = replace(
        plan.stages[index],
        zero_stage=ZeroStage(zero),
        checkpointing=replace(plan.stages[index].checkpointing, layers=recomputed),
        offload=OffloadRatios(**dict(zip(OFFLOAD_KINDS, row[4:].tolist(), strict=True))),
    )
    return replace(plan, stages=(*plan.stages[:index], stage, *plan.stages[index + 1 :]))


def _options(instance, model, whole, index, rows):
    """What one stage of a plan may be: of savings that fit the seconds."""
    plans = [saving(whole, index, row) for row in rows]
    found = [plan.stages[index] for plan in predictions(model, plans)]
    fits_K = np.array([fits[index] for fits in stages_that_fit(instance, model, plans)])
    steady_K, boundary_K = (np.array([getattr(item, f"{name}_seconds") for item in found]) for name in TIMES)
    fit_J = np.flatnonzero(fits_K)
    fit_J = fit_J[undominated(steady_K[fit_J], boundary_K[fit_J])]
    return Options(steady_K=steady_K[fit_J], boundary_K=boundary_K[fit_J], peak=0.0, count=len(rows))


def stages_that_fit(instance, model, plans):
    """Of every plan, which of its stages fit, by the check that is made of finished plans."""
    asked = [(plan, np.array([[stage.checkpointing.layers] for stage in plan.stages])) for plan in plans]
    for plan, peaks in zip(plans, plans_peaks(model.memory, asked), strict=True):
        parts = [_parts_of(instance, stage) for stage in plan.stages]
        device_S = np.array([min(instance.limit(part) for part in own) for own in parts])
        host_S = np.array([min(instance.host_limit(part) for part in own) for own in parts])
        yield (peaks.device_SK[:, 0] <= device_S) & (peaks.host_SK[:, 0] <= host_S)


def _parts_of(instance, stage):
    return {instance.machine.part_of(device) for device in stage.devices}


def closed_form(predicted, num_microbatches):
    """Step seconds of a plan by the closed form, with what is predicted of its stages."""
    times = ([getattr(item, f"{name}_seconds") for item in predicted.stages] for name in TIMES)
    return step_seconds(*times, num_microbatches)


def unlike_instance(seed):
    """A small network with or without masters, two or three kinds of devices, and a memory limit that mostly binds."""
    rng = np.random.default_rng([seed, 53])
    while True:
        found = _instance(rng)
        sizes = [sum(map(len, choices)) for _, choices in families(found)]
        if sizes and sum(sizes) <= MOST_STAGES:
            return _limited(found, rng)


def _instance(rng):
    layers, masters = int(rng.choice([2, 3, 4], p=[0.3, 0.5, 0.2])), rng.random() < 0.6
    widths = tuple(int(4 * 10 ** rng.uniform(2, 5)) for _ in range(2))
    network = spec(
        layers,
        kinds=tuple(int(kind) for kind in rng.integers(0, 1 + int(rng.random() < 0.4), size=layers)),
        widths=widths,
        parameter_bytes=int(400 * 10 ** rng.uniform(0, 3)),
        edge_bytes=int(400 * 10 ** rng.uniform(0, 3)),
        tied=bool(rng.random() < 0.2),
        precision="bf16-true" if masters else "32-true",
    )
    network = with_master_weights(network) if masters else network
    network = with_splits(network, (2, False)) if rng.random() < 0.3 else network
    sizes = [int(size) for size in rng.choice([1, 2, 4], p=[0.4, 0.5, 0.1], size=2 if rng.random() < 0.6 else 3)]
    if len(sizes) == 3:
        sizes = [min(size, 2) for size in sizes]
    link = Link(bytes_per_second=10 ** rng.uniform(7, 10), latency_seconds=1e-5) if rng.random() < 0.7 else None
    machine = MixedCluster(parts=tuple(cluster(size, kind="cuda") for size in sizes), link=link)
    kinds = tuple(name for name in OFFLOADED if rng.random() < 0.5) if rng.random() < 0.7 else ()
    return Instance(
        network=network,
        machine=machine,
        rates=tuple(_rates(rng) for _ in sizes),
        rows=int(rng.choice([1, 2])),
        memory_limit=10**15,
        search=SearchSpace(
            zero_stages=tuple(sorted({int(level) for level in rng.integers(0, 4, size=int(rng.integers(1, 4)))})),
            checkpointing=bool(rng.random() < 0.7),
            offload=kinds,
            offload_ratios=(0.0, 0.5, 1.0) if len(kinds) < 2 else (0.0, float(rng.choice([0.6, 1.0]))),
            schedules=("1f1b",),
        ),
    )


def _rates(rng):
    rates = profile(
        flops_per_second=10 ** rng.uniform(9, 11), link=10 ** rng.uniform(7, 10), latency=10 ** rng.uniform(-6, -4)
    )
    rates = replace(rates, compute=(*rates.compute, replace(rates.compute[0], dtype="bfloat16")))
    copies = {f"{way}_bytes_per_second": 10 ** rng.uniform(6, 10) for way in ("host_to_device", "device_to_host")}
    return replace(rates, **copies)


def _limited(question, rng):
    """The question with a limit between what the least and the most demanding stages need, another for every part."""
    model, peaks = cost_model(question.network, question.rates, question.machine), []
    for whole, choices in families(question):
        for index, rows in enumerate(choices):
            plans = [saving(whole, index, row) for row in rows[:: max(1, len(rows) // 8)]]
            asked = [(plan, np.array([[stage.checkpointing.layers] for stage in plan.stages])) for plan in plans]
            peaks += [found.device_SK[index, 0] for found in plans_peaks(model.memory, asked)]
    peak_K = np.sort(peaks)
    wanted = int(peak_K[int(rng.random() * (len(peak_K) - 1))] * rng.choice([0.8, 1.0, 1.02, 1.3]) / 0.8) + 1
    parts = [
        replace(part, device=replace(part.device, name=f"test {index}", memory_bytes=int(wanted * share) + 1))
        for index, (part, share) in enumerate(
            zip(question.machine.parts, rng.choice([0.5, 1.0, 2.0], size=len(question.machine.parts)), strict=True)
        )
    ]
    most = max(part.device.memory_bytes for part in parts)
    return replace(question, machine=replace(question.machine, parts=tuple(parts)), memory_limit=most)
