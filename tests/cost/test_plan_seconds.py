"""What is kept of stages is what asking about each of them gives."""

import dataclasses

import pytest

from lightning_mist.cost import MixedCostModel, StageCostModel, predict_with, predictions, seconds_with
from lightning_mist.cost.inputs.candidates import placed_slots_of
from lightning_mist.cost.plan_clock import terms_of
from lightning_mist.cost.plan_seconds import seconds_of_terms, terms_of_plans
from lightning_mist.hardware import MixedCluster, StepOverheads
from tests.specs import cluster, profile, spec
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
    # What the first half leaves behind the second half finds.
    found = terms_of_plans(model, every[::2]), terms_of_plans(model, every[1::2])
    for some, terms in zip((every[::2], every[1::2]), found, strict=True):
        for plan, own in zip(some, terms, strict=True):
            for placed, term in zip(placed_slots_of(plan, model.cluster), own, strict=True):
                wanted = terms_of(model.seconds(*placed))
                assert list(term) == list(wanted)
                assert term == pytest.approx(wanted, rel=1e-12, abs=0.0)


def test_a_stage_that_recurs_is_asked_about_once(monkeypatch):
    model, asked = model_of("cuda"), []
    real = StageCostModel.seconds_of
    monkeypatch.setattr(
        StageCostModel,
        "seconds_of",
        lambda self, items: asked.extend(len(candidates) for _, candidates in items) or real(self, items),
    )
    plan = pipeline(*SHAPES["alike"], rows=4)
    terms_of_plans(model, [plan, dataclasses.replace(plan, schedule="zb-h1"), pipeline(*SHAPES["alike"], per_node=4)])
    # Two are alike but for where they lie.
    assert sum(asked) == 4
    terms_of_plans(model, [dataclasses.replace(plan, schedule="gpipe")])
    assert sum(asked) == 4


def test_terms_together_are_seconds_of_stages():
    model = model_of("cuda")
    plan = pipeline(*SHAPES["moved"], rows=4)
    seconds = seconds_of_terms(terms_of_plans(model, [plan])[0])
    for index, placed in enumerate(placed_slots_of(plan, model.cluster)):
        wanted = model.seconds(*placed)
        assert seconds.steady_K[index] == pytest.approx(wanted.steady_K[0], rel=1e-12)
        assert seconds.boundary_K[index] == pytest.approx(wanted.boundary_K[0], rel=1e-12)


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
