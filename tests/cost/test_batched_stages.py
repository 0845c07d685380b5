"""Asking about the stages of one plan or of many at once gives what asking about each gives."""

import dataclasses

import numpy as np
import pytest

from lightning_mist.cost import MixedCostModel, StageCostModel, predict_with, predictions, seconds_with
from lightning_mist.cost.batched_stages import needs_of_stages, seconds_of_stages, terms_of_plans
from lightning_mist.cost.inputs.candidates import (
    OffloadCandidates,
    StageCandidates,
    StageSlot,
    placed_slots_of,
    slots_of,
)
from lightning_mist.cost.memory import moments_of, need_terms
from lightning_mist.cost.plan_clock import terms_of
from lightning_mist.cost.time import EXCHANGED, StageSeconds
from lightning_mist.hardware import MixedCluster, StepOverheads
from tests.cost.memory.breakdown import breakdown
from tests.specs import cluster, profile, spec, with_splits
from tests.tuner.plans import pipeline

NETWORK = spec(8, kinds=(0, 0, 1, 0, 1, 0, 0, 0), widths=(1000, 2500), tied=True)
MOVED = {"optimizer": 0.5, "parameters": 0.25}
SHAPES = {
    "alone": [{"layers": 8, "data": 8, "zero": 3, "offload": {"activations": 0.5}}],
    "alike": [{"layers": 2, "data": 2, "checkpointed": index} for index in (1, 0, 2, 1)],
    "sharded": [{"layers": 2, "data": 2, "zero": zero} for zero in (0, 2, 3, 3)],
    "uneven": [{"layers": layers, "data": data} for layers, data in ((3, 4), (3, 2), (1, 1), (1, 1))],
    "moved": [
        {"layers": 2, "data": 2, "zero": zero, "offload": offload}
        for zero, offload in ((1, {}), (3, MOVED), (2, {"gradients": 1.0}), (0, {"activations": 1.0}))
    ],
}
PIPELINES = {
    "alike": [{"layers": 2, "data": 2, "checkpointed": index} for index in (1, 0, 2, 1)],
    "sharded": [{"layers": 2, "data": 2, "zero": zero} for zero in (0, 2, 2, 3)],
    "uneven": [{"layers": layers, "data": data} for layers, data in ((3, 4), (2, 1), (1, 1), (2, 2))],
    "moved": [{"layers": 2, "data": 2, "zero": 1, "offload": {"optimizer": ratio}} for ratio in (0.0, 0.5, 1.0, 0.0)],
}
CHUNKS = [{"layers": 2, "data": 4, "zero": 3}] * 4


def model_of(kind, **overheads):
    """Eight devices on two nodes, between which everything takes longer."""
    made = profile()
    across = tuple(dataclasses.replace(item, num_nodes=2, bytes_per_second=1e7) for item in made.collectives)
    machine = dataclasses.replace(
        made,
        collectives=(*made.collectives, *across),
        host_to_device_bytes_per_second=1e8,
        device_to_host_bytes_per_second=2e8,
        overheads=StepOverheads(**overheads),
    )
    return StageCostModel(NETWORK, machine, cluster(8, nodes=2, kind=kind))


def plans():
    """Pipelines with several numbers of microbatches, under every schedule and in two layouts."""
    for shape in SHAPES.values():
        for rows, microbatches in ((4, 4), (8, 8), (4, 1)):
            for per_node in (None, 4):
                plan = pipeline(*shape, rows=rows, microbatches=microbatches, per_node=per_node)
                yield from (dataclasses.replace(plan, schedule=name) for name in ("1f1b", "gpipe", "zb-h1"))
    for microbatches in (4, 8):
        yield pipeline(*CHUNKS, rows=4, microbatches=microbatches, groups=2, schedule="interleaved-1f1b")


@pytest.mark.parametrize("overheads", [{}, {"action_seconds": 1e-4, "deferred_operator_seconds": 1e-5}])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_terms_of_stages_are_those_of_each_in_its_place(kind, overheads):
    model = model_of(kind, **overheads)
    every = list(plans())
    for plan, own in zip(every, terms_of_plans(model, every), strict=True):
        for placed, term in zip(placed_slots_of(plan, model.cluster), own, strict=True):
            wanted = terms_of(model.seconds(*placed))
            assert list(term) == list(wanted)
            assert term == pytest.approx(wanted, rel=1e-12, abs=0.0)


def test_stages_of_several_plans_are_asked_about_together(monkeypatch):
    model, asked = model_of("cuda"), []
    real = StageCostModel.seconds_of
    monkeypatch.setattr(
        StageCostModel,
        "seconds_of",
        lambda self, items: asked.extend(len(candidates) for _, candidates in items) or real(self, items),
    )
    plan = pipeline(*SHAPES["alike"], rows=4)
    terms_of_plans(model, [plan, dataclasses.replace(plan, schedule="gpipe"), pipeline(*SHAPES["alike"], per_node=4)])
    # Where stages lie counts only for what they exchange with others, and their place in the pipeline for nothing.
    assert asked == [12]
    assert terms_of_plans(model, []) == []


def test_terms_together_are_seconds_of_stages():
    model = model_of("cuda")
    plan = pipeline(*SHAPES["moved"], rows=4)
    (terms,) = terms_of_plans(model, [plan])
    for found, placed in zip(terms, placed_slots_of(plan, model.cluster), strict=True):
        assert found == pytest.approx(terms_of(model.seconds(*placed)), rel=1e-12)


def test_predictions_of_several_plans_are_those_of_each():
    some = list(plans())[::5]
    for plan, found in zip(some, predictions(model_of("cuda"), some), strict=True):
        wanted = predict_with(model_of("cuda"), plan)
        assert found.step_seconds == pytest.approx(wanted.step_seconds, rel=1e-12)
        for stage, other in zip(found.stages, wanted.stages, strict=True):
            assert stage.peak_bytes == other.peak_bytes
            assert dict(stage.breakdown) == pytest.approx(dict(other.breakdown), rel=1e-12)
            assert dict(stage.spent) == pytest.approx(dict(other.spent), rel=1e-9, abs=1e-12 * found.step_seconds)
            assert dict(stage.needs) == pytest.approx(dict(other.needs))


def test_on_unlike_devices_stages_cost_what_they_do_where_they_are():
    parts = (cluster(4), cluster(4, kind="cpu", memory=2 * 10**9))
    fast, slow = profile(), profile(flops_per_second=5e9)
    model = MixedCostModel(spec(8), (fast, slow), MixedCluster(parts=parts))
    plan = pipeline(*[{"layers": 2, "data": 2}] * 4, rows=4)
    (terms,) = terms_of_plans(model, [plan])
    for placed, term in zip(placed_slots_of(plan, model.cluster), terms, strict=True):
        assert term == terms_of(model.seconds(*placed))
    assert seconds_with(model, plan) == predict_with(model, plan).step_seconds


def machine_of(plan, kind="cuda"):
    machine = dataclasses.replace(profile(), host_to_device_bytes_per_second=1e8, device_to_host_bytes_per_second=2e8)
    return StageCostModel(NETWORK, machine, cluster(plan.world_size, nodes=2, kind=kind))


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("name", PIPELINES)
def test_stages_together_take_as_long_as_each(name, kind):
    plan = pipeline(*PIPELINES[name], rows=4)
    model = machine_of(plan, kind)
    stages = placed_slots_of(plan, model.cluster)
    for found, stage in zip(seconds_of_stages(model, stages), stages, strict=True):
        wanted = model.seconds(*stage)
        for term in StageSeconds.__slots__:
            assert getattr(found, term) == pytest.approx(getattr(wanted, term), rel=1e-12), term


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("name", PIPELINES)
def test_stages_together_need_as_much_as_each(name, schedule):
    plan = pipeline(*PIPELINES[name], rows=4, schedule="1f1b" if name in ("sharded", "moved") else schedule)
    model = machine_of(plan)
    stages = slots_of(plan)
    for found, (slot, candidates) in zip(needs_of_stages(model.memory, stages), stages, strict=True):
        wanted = model.memory(slot).needs(slot, candidates)
        assert need_terms(found) == need_terms(wanted)


def test_host_memory_of_stages_together_is_that_of_each():
    shapes = [{"layers": 2, "data": 2, "zero": 1, "offload": {"optimizer": r, "activations": r}} for r in (1, 0.5, 0)]
    plan = pipeline(*shapes, {"layers": 2, "data": 2}, rows=4)
    model = machine_of(plan)
    stages = slots_of(plan)
    for found, (slot, candidates) in zip(needs_of_stages(model.memory, stages), stages, strict=True):
        memory = model.memory(slot)
        (wanted,) = breakdown(memory, slot, candidates)
        peak_K, host_K = found.peaks(moments_of(slot)), found.host_bytes(moments_of(slot))
        assert (round(peak_K[0]), round(host_K[0])) == (wanted.peak_bytes, wanted.host_bytes)
        assert (wanted.host_bytes > 0) == (candidates.offload is not None)


def test_places_of_one_kind_are_asked_about_once(monkeypatch):
    plan = pipeline(*PIPELINES["alike"], rows=4)
    model = StageCostModel(NETWORK, profile(), cluster(8))
    asked = []
    real = StageCostModel.seconds_of
    monkeypatch.setattr(
        StageCostModel,
        "seconds_of",
        lambda self, items: asked.extend(len(candidates) for _, candidates in items) or real(self, items),
    )
    seconds_of_stages(model, slots_of(plan))
    assert asked == [4]


def test_several_candidates_each_stay_with_their_stage():
    plan = pipeline(*PIPELINES["alike"], rows=4)
    model = machine_of(plan)
    stages = [(slot, items.take(np.zeros(index + 1, dtype=int))) for index, (slot, items) in enumerate(slots_of(plan))]
    assert [len(found.forward_K) for found in seconds_of_stages(model, stages)] == [1, 2, 3, 4]
    assert [len(found.saved_K) for found in needs_of_stages(model.memory, stages)] == [1, 2, 3, 4]


def moving_items():
    """Slots of several sizes and degrees on two nodes, each with candidates that move different things."""
    items = []
    for data, tensor, microbatches in ((1, 1, 4), (2, 1, 4), (4, 1, 1), (2, 2, 4), (8, 1, 4)):
        for index in (0, 1):
            slot = StageSlot(
                stage_index=index,
                num_stages=2,
                num_microbatches=microbatches,
                data_parallel_degree=data,
                rows=2,
                batch_rows=2,
                tensor_parallel_degree=tensor,
            )
            zero_K = np.array([0, 1, 2, 3, 3])
            ratios = OffloadCandidates(
                parameters_K=np.array([0.0, 0.5, 0.0, 1.0, 0.0]),
                gradients_K=np.array([0.0, 0.0, 1.0, 0.5, 0.0]),
                optimizer_K=np.array([0.0, 1.0, 0.5, 1.0, 0.0]),
                activations_K=np.array([0.0, 0.0, 0.0, 0.5, 1.0]),
                checkpoints_K=np.array([0.0, 0.0, 0.5, 0.5, 0.5]),
            )
            some = StageCandidates(
                start_K=np.full(5, 4 * index),
                end_K=np.full(5, 4 + 4 * index),
                checkpointed_K=np.arange(5),
                zero_stage_K=zero_K,
                offload=ratios,
            )
            items += [(slot, some), (slot, dataclasses.replace(some, offload=None))]
    return items


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_what_several_places_move_is_asked_about_at_once(kind):
    machine = dataclasses.replace(profile(), host_to_device_bytes_per_second=1e8, device_to_host_bytes_per_second=2e8)
    farther = (dataclasses.replace(item, num_nodes=2, latency_seconds=2e-4) for item in machine.collectives)
    machine = dataclasses.replace(machine, collectives=(*machine.collectives, *farther))
    model = StageCostModel(with_splits(NETWORK, (2, False)), machine, cluster(8, nodes=2, kind=kind))
    items = moving_items()
    together = model.seconds_of(items)
    assert len(together) == len(items)
    for (slot, candidates), found in zip(items, together, strict=True):
        wanted = model.seconds(slot, candidates)
        for term in set(StageSeconds.__slots__) - set(EXCHANGED):
            assert getattr(found, term) == pytest.approx(getattr(wanted, term), rel=1e-12, abs=1e-18), term
    assert len({round(float(found.copies_K[3]), 9) for found in together}) > 4
    assert model.seconds_of([]) == ()
