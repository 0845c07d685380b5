from dataclasses import replace

import pytest

from lightning_mist.errors import PlanError
from lightning_mist.plan import plan_of
from lightning_mist.plan.changes import (
    OFFLOADS,
    RECOMPUTATION,
    SAVINGS,
    TECHNIQUES,
    ZERO,
    Ground,
    burdens,
    even_lengths,
    every_stage,
    microbatch_counts,
    places,
    with_lengths,
    with_microbatches,
)
from lightning_mist.plan.search_space import OFFLOADED
from lightning_mist.tuner import SearchSpace
from tests.tuner.plans import pipeline

BY_NAME = {technique.name: technique for technique in TECHNIQUES}
GROUND = Ground(cuts_batches=True, search=SearchSpace())
PLAIN = pipeline({"layers": 3}, {"layers": 3}, microbatches=2, rows=1)
EVERYTHING = pipeline(
    {"layers": 2, "data": 2, "tensor": 2, "sequence": True, "zero": 3, "checkpointed": 1},
    {"layers": 5, "data": 4, "zero": 1, "checkpointed": 5, "offload": dict.fromkeys(["optimizer", "activations"], 0.5)},
    microbatches=8,
    rows=4,
)


def test_a_plan_is_credited_with_nothing_that_it_does_not_use():
    assert [name for name, item in BY_NAME.items() if item.use(PLAIN)] == ["pipeline stages"]
    alone = pipeline({"layers": 6, "data": 2}, microbatches=1, rows=1)
    assert not [name for name, item in BY_NAME.items() if item.use(alone)]


def test_it_is_said_how_much_of_each_technique_is_used_and_where():
    assert {name: item.use(EVERYTHING) for name, item in BY_NAME.items() if item.use(EVERYTHING)} == {
        "pipeline stages": "2 stages",
        "uneven stages": "2 to 5 layers per stage",
        "more microbatches": "8 where 4 would do",
        "tensor parallelism": "2 devices share every layer on stage 0",
        "sequence parallelism": "on stage 0",
        "ZeRO-3": "on stage 0",
        "ZeRO-2 or more": "on stage 0",
        "ZeRO-1 or more": "on every stage",
        "activation checkpointing": "1 of 2 layers on stage 0; 5 of 5 layers on stage 1",
        "offload of optimizer state": "50% on stage 1",
        "offload of activations": "50% on stage 1",
    }


@pytest.mark.parametrize("name", [name for name, item in BY_NAME.items() if item.use(EVERYTHING)])
def test_what_is_switched_off_is_used_no_more_and_the_batch_stays(name):
    technique = BY_NAME[name]
    off = technique.off(EVERYTHING, GROUND)
    assert not technique.use(off)
    assert off.global_batch_size == EVERYTHING.global_batch_size
    assert off.world_size == EVERYTHING.world_size
    assert off.predicted is None


@pytest.mark.parametrize(
    "name", ["sequence parallelism", "activation checkpointing", "ZeRO-3", "offload of activations"]
)
def test_all_else_stays_as_it_is(name):
    off = BY_NAME[name].off(EVERYTHING, GROUND)
    same = ("layers", "devices", "microbatch_size")
    for stage, before in zip(off.stages, EVERYTHING.stages, strict=True):
        assert all(getattr(stage, item) == getattr(before, item) for item in same)
    others = [item for item in TECHNIQUES if item.name != name and not item.name.startswith("ZeRO")]
    assert [item.use(off) for item in others] == [item.use(EVERYTHING) for item in others]


def test_without_zero_3_the_level_below_remains():
    levels = [
        [int(stage.zero_stage) for stage in BY_NAME[f"ZeRO-{name}"].off(EVERYTHING, GROUND).stages]
        for name in ("3", "2 or more", "1 or more")
    ]
    assert levels == [[2, 1], [1, 1], [0, 0]]


def test_one_stage_takes_the_most_of_what_any_stage_does():
    off = BY_NAME["pipeline stages"].off(EVERYTHING, GROUND)
    (stage,) = off.stages
    assert stage.layers == (0, 7)
    assert stage.mesh.tensor_parallel_degree == 2
    assert stage.data_parallel_degree == 4
    assert int(stage.zero_stage) == 3
    assert stage.checkpointing.layers == 6
    assert stage.offload.optimizer == 0.5
    assert stage.microbatch_size == 2  # as the most before


@pytest.mark.parametrize(
    ("first", "second", "joined"),
    [
        (({"activations": 0.5}, 2), ({"activations": 1.0, "checkpoints": 0.25}, 2), (1.0, 0.5)),
        (({"activations": 0.5}, 0), ({"checkpoints": 0.25}, 2), (0.5, 0.25)),
        (({"activations": 0.5}, 0), ({"activations": 1.0, "checkpoints": 0.25}, 0), (1.0, 1.0)),
    ],
)
def test_one_stage_moves_as_many_inputs_of_recomputed_layers_as_any_that_recomputes(first, second, joined):
    stages = [{"layers": 3, "offload": ratios, "checkpointed": layers} for ratios, layers in (first, second)]
    (stage,) = BY_NAME["pipeline stages"].off(pipeline(*stages, microbatches=2, rows=1), GROUND).stages
    assert (stage.offload.activations, stage.offload.of("checkpoints")) == joined


def test_whole_layers_have_microbatches_that_are_no_larger():
    off = BY_NAME["tensor parallelism"].off(EVERYTHING, GROUND)
    assert [stage.data_parallel_degree for stage in off.stages] == [4, 4]
    assert max(stage.microbatch_size for stage in off.stages) <= 2


def test_devices_stay_where_they_are():
    plan = pipeline({"layers": 3, "tensor": 4}, {"layers": 3, "tensor": 4}, microbatches=8, rows=4)
    off = BY_NAME["tensor parallelism"].off(plan, GROUND)
    assert [stage.devices for stage in off.stages] == [stage.devices for stage in plan.stages]
    assert BY_NAME["pipeline stages"].off(plan, GROUND).stages[0].devices == tuple(range(8))


def test_chunks_become_one_stage_again():
    chunks = [{"layers": 1, "checkpointed": at % 2} for at in range(6)]
    plan = pipeline(*chunks, groups=2, schedule="interleaved-1f1b", microbatches=4, rows=2)
    off = BY_NAME["interleaved-1f1b"].off(plan, GROUND)
    assert off.bounds == ((0, 3), (3, 6))
    assert off.schedule == "1f1b"
    assert [stage.checkpointing.layers for stage in off.stages] == [0, 3]
    assert not BY_NAME["interleaved-1f1b"].use(off)
    assert BY_NAME["interleaved-1f1b"].use(plan) == "6 stages"


def test_chunks_stay_where_only_their_layers_are_made_whole():
    chunks = [{"layers": 1, "tensor": 2} for _ in range(4)]
    plan = pipeline(*chunks, groups=2, schedule="interleaved-1f1b", microbatches=4, rows=2)
    off = BY_NAME["tensor parallelism"].off(plan, GROUND)
    assert off.num_stages == 4
    assert off.num_groups == 2
    assert off.num_microbatches % 2 == 0
    assert {stage.data_parallel_degree for stage in off.stages} == {2}


def test_what_cannot_be_arranged_says_so():
    odd = pipeline({"layers": 3, "data": 2, "tensor": 2}, {"layers": 3, "data": 2}, microbatches=3, rows=1)
    with pytest.raises(PlanError, match="no number of microbatches cuts every device's batch"):
        BY_NAME["tensor parallelism"].off(odd, replace(GROUND, search=SearchSpace(num_microbatches=(3,))))


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("pipeline stages", "num_stages", (1,)),
        ("tensor parallelism", "tensor_parallel_degrees", (1,)),
        ("sequence parallelism", "sequence_parallel", False),
        ("ZeRO-2 or more", "zero_stages", (0, 1)),
        ("activation checkpointing", "checkpointing", False),
        ("offload of activations", "offload", ("parameters", "gradients", "optimizer")),
        ("zb-h1", "schedules", ("1f1b", "interleaved-1f1b")),
        ("more microbatches", "num_microbatches", (1, 2, 3, 4)),
        ("uneven stages", "layer_cuts", (3,)),
    ],
)
def test_the_space_without_a_technique_is_smaller_in_that_alone(name, field, value):
    space = SearchSpace(offload=OFFLOADED)
    assert BY_NAME[name].without(EVERYTHING, space) == replace(space, **{field: value})


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("pipeline stages", {"num_stages": (2, 4)}),
        ("pipeline stages", {"layer_cuts": (2,)}),
        ("uneven stages", {"layer_cuts": (2,)}),
        ("tensor parallelism", {"tensor_parallel_degrees": (2,)}),
        ("sequence parallelism", {"sequence_parallel": True}),
        ("ZeRO-3", {"zero_stages": (3,)}),
        ("zb-h1", {"schedules": ("zb-h1",)}),
        ("more microbatches", {"num_microbatches": (8,)}),
    ],
)
def test_what_is_insisted_on_cannot_be_left_out(name, limits):
    assert BY_NAME[name].without(EVERYTHING, SearchSpace(**limits)) is None


def test_recomputed_layers_are_told_by_runs_of_stages():
    stages = [{"layers": 2, "checkpointed": 2}] * 3 + [{"layers": 2, "checkpointed": 1}] * 2 + [{"layers": 2}]
    used = BY_NAME["activation checkpointing"].use(pipeline(*stages, microbatches=6))
    assert used == "2 of 2 layers on stages 0 to 2; 1 of 2 layers on stages 3 to 4"


def test_chunks_behind_the_last_layer_follow_the_rows():
    technique = BY_NAME["chunks behind the last layer"]
    plan = pipeline({"layers": 3}, {"layers": 3, "tail": 4}, microbatches=2, rows=4)
    assert technique.use(plan) == "4 chunks"
    assert not technique.use(technique.off(plan, GROUND))
    assert [with_microbatches(plan, count).stages[1].tail_chunks for count in (1, 4, 8)] == [4, 2, 1]
    assert [stage.tail_chunks for stage in BY_NAME["pipeline stages"].off(plan, GROUND).stages] == [4]
    space = SearchSpace(tail_chunks=(1, 4))
    assert technique.without(plan, space) == SearchSpace()
    assert technique.without(plan, SearchSpace(tail_chunks=(4,))) is None


def test_what_offload_also_does_is_said():
    """Moving activations leaves the update where it is."""
    said = {item.name: "layer by layer in the next forward" in item.meaning for item in TECHNIQUES}
    offloads = {name: told for name, told in said.items() if name.startswith("offload of ")}
    assert offloads.pop("offload of activations") is False
    assert offloads.pop("offload of inputs of recomputed layers") is False
    assert len(offloads) == 3
    assert all(offloads.values())
    assert sum(said.values()) == 3


def test_places_are_runs_of_stages():
    plan = pipeline(*({"layers": 1, "checkpointed": at in (0, 2, 3, 4)} for at in range(6)), microbatches=6, rows=1)
    assert places(plan, lambda stage: stage.checkpointing.layers > 0) == "stages 0, 2 to 4"
    assert places(plan, lambda stage: stage.layers[0] == 5) == "stage 5"
    assert places(plan, lambda stage: True) == "every stage"


def test_a_batch_that_is_not_cut_leaves_one_number_of_microbatches():
    whole = replace(GROUND, cuts_batches=False)
    assert microbatch_counts(PLAIN, [1, 1], whole) == (2,)
    cut = pipeline({"layers": 6, "data": 2}, microbatches=4, rows=4)
    assert microbatch_counts(cut, [2], GROUND) == (1, 2, 4)
    assert microbatch_counts(cut, [2], whole) == (1,)


def test_only_asked_numbers_of_microbatches_are_looked_at():
    asked = replace(GROUND, search=SearchSpace(num_microbatches=(2, 3)))
    assert microbatch_counts(pipeline({"layers": 6, "data": 2}, rows=4), [2], asked) == (2,)


def test_chunks_need_rounds_of_microbatches():
    plan = pipeline(*({"layers": 1} for _ in range(6)), groups=3, schedule="interleaved-1f1b", microbatches=3, rows=4)
    assert microbatch_counts(plan, [1, 1, 1], GROUND) == (3, 6, 12)


def test_other_microbatches_leave_the_batch_as_it_is():
    plan = pipeline({"layers": 3, "data": 2}, {"layers": 3}, microbatches=6, rows=4)
    changed = with_microbatches(plan, 3)
    assert changed.global_batch_size == plan.global_batch_size
    assert [stage.microbatch_size for stage in changed.stages] == [2, 4]


def test_layers_are_dealt_out_evenly_and_no_more_are_recomputed_than_there_are():
    plan = pipeline({"layers": 1}, {"layers": 6, "checkpointed": 6})
    assert even_lengths(plan) == (3, 4)
    even = with_lengths(plan, (3, 4))
    assert even.bounds == ((0, 3), (3, 7))
    assert [stage.checkpointing.layers for stage in even.stages] == [0, 4]


def test_all_stages_change():
    other = replace(PLAIN.stages[1].checkpointing, layers=2)
    wider = every_stage(PLAIN, lambda stage: replace(stage, checkpointing=other))
    assert [stage.checkpointing.layers for stage in wider.stages] == [2, 2]


def test_rows_that_are_shared_become_rows_of_their_own():
    plan = plan_of(4, world_size=4, global_batch_size=8, context_parallel_degree=2, zero_stage=3)
    technique = BY_NAME["context parallelism"]
    assert technique.use(plan) == "2 devices share every row on the only stage"
    (stage,) = technique.off(plan, GROUND).stages
    assert (stage.data_parallel_degree, stage.mesh.context_parallel_degree, int(stage.zero_stage)) == (4, 1, 3)
    assert technique.without(plan, SearchSpace()) == SearchSpace(context_parallel_degrees=())
    (stage,) = BY_NAME["ZeRO-3"].off(plan, GROUND).stages
    assert stage.mesh.context_parallel_degree == 2


def test_savings_go_a_level_down_and_up():
    stage = EVERYTHING.stages[1]
    texts = [text for saving in SAVINGS for text, _ in saving.less(stage, (0.0, 0.25, 1.0))]
    assert texts == [
        "with one layer fewer recomputed",
        "with ZeRO-0 in place of ZeRO-1",
        "with 25% of its optimizer state in host memory in place of 50%",
        "with 25% of its activations in host memory in place of 50%",
    ]
    (more,) = OFFLOADS["optimizer"].more(stage, (0.0, 1.0))
    assert more.offload.optimizer == 1.0
    assert not list(RECOMPUTATION.more(stage, ()))
    assert [int(item.zero_stage) for item in ZERO.at_least(EVERYTHING, 2).stages] == [3, 2]
    assert [item.checkpointing.layers for item in RECOMPUTATION.at_least(EVERYTHING, 3).stages] == [2, 5]
    assert [item.offload.optimizer for item in OFFLOADS["optimizer"].at_least(EVERYTHING, 0.25).stages] == [0.25, 0.5]


def test_inputs_of_recomputed_layers_are_told_where_they_have_a_ratio_of_their_own():
    technique, saving = BY_NAME["offload of inputs of recomputed layers"], OFFLOADS["checkpoints"]
    tied = pipeline({"layers": 4, "checkpointed": 2, "offload": {"activations": 0.5}}, microbatches=1, rows=1)
    assert not technique.use(tied)
    assert not list(saving.less(tied.stages[0], (0.0, 0.5)))
    assert saving.at_most(tied, 0.0).stages == tied.stages
    ratios = {"activations": 0.25, "checkpoints": 1.0}
    own = pipeline({"layers": 4, "checkpointed": 2, "offload": ratios}, microbatches=1, rows=1)
    assert technique.use(own) == "100% on the only stage"
    ((text, less),) = saving.less(own.stages[0], (0.0, 0.5, 1.0))
    assert text == "with 50% of its inputs of recomputed layers in host memory in place of 100%"
    assert (less.offload.activations, less.offload.checkpoints) == (0.25, 0.5)
    (off,) = technique.off(own, GROUND).stages
    assert (off.offload.activations, off.offload.checkpoints) == (0.25, 0.0)
    search = SearchSpace(offload=("activations", "checkpoints"))
    assert technique.without(own, search) == SearchSpace(offload=("activations",))


def test_what_nobody_is_there_to_share_with_is_no_burden():
    alone = pipeline({"layers": 4, "zero": 2}, {"layers": 4, "zero": 2})
    assert burdens(alone) == ()
    assert set(burdens(EVERYTHING)) == {
        *(f"sharded {state}" for state in ("optimizer state", "gradients", "parameters")),
        *("optimizer state in host memory", "activations in host memory", "recomputation"),
        *("tensor parallelism", "sequence parallelism"),
    }
